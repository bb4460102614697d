"""Transactions of real Gazette, re-enacted: messages, checkpoints, acknowledgements and times."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from gazette_sdk import shard
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.transaction.consume import MessageConsumer
from gazette_sdk.shard.transaction.failure import BadRecords
from gazette_sdk.shard.transaction.input import Input
from gazette_sdk.shard.transaction.machine import Action, Current, TransactionMachine
from gazette_sdk.shard.transaction.transaction import Transaction
from gazette_sdk.testing.handler_runs import MemoryOutput
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport
from support.vectors import golden

WAIT_S = 30.0
SCENARIOS = golden("consumer/behaviour/transactions.json")
FLAGS = {"OUTSIDE_TXN": OUTSIDE_TXN, "CONTINUE_TXN": CONTINUE_TXN, "ACK_TXN": ACK_TXN}
BY_NAME = [pytest.param(each, id=each["name"]) for each in SCENARIOS]


def transactions(trace):
    """The recorded hooks, transaction by transaction."""
    found = []
    for step in trace:
        if step.get("hook") == "begin_txn":
            found.append({"consumed": [], "begin_txn": step})
        elif step.get("hook") == "consume":
            found[-1]["consumed"].append(step)
        elif "hook" in step:  # a commit may resolve while the next transaction consumes
            owner = next(txn for txn in found if step["hook"] not in txn)
            owner[step["hook"]] = step
    return found


def consumed_of(txn):
    """Begin, end and flags of each message of a recorded transaction."""
    return [(each["begin"], each["end"], FLAGS[each["flags"]]) for each in txn["consumed"]]


def inputs(trace):
    """The recorded content of the source, in pieces as they were appended."""
    pieces = []
    for step in trace:
        if step.get("seen_in", "").startswith("gold/in/"):
            frames = b""
            for message in step["messages"]:
                written = {"UUID": message["uuid"], "Key": message["Key"], "N": message["N"]}
                written |= {name: message[name] for name in ("Do", "Ms") if name in message}
                frames += json.dumps(written, separators=(",", ":")).encode() + b"\n"
            assert len(frames) == step["length"]
            pieces.append((step["offset"], frames))
    return pieces


def outputs(trace):
    """The journal to which each key was published."""
    return {
        message["Key"]: step["seen_in"]
        for step in trace
        if step.get("seen_in", "").startswith("gold/out/")
        for message in step["messages"]
        if message["flags"] == CONTINUE_TXN
    }


class Nothing:
    """Store without state."""

    overlaps_commit = True
    is_full = False

    def begin(self):
        """Nothing."""

    def start_commit(self, checkpoint):
        return ()


class Summing(shard.Application):
    """Publishes each key where it was published, sleeps no time, and defers what was deferred."""

    message, store = dict, lambda directory: Nothing()

    def __init__(self, journals):
        super().__init__()
        self.journals = journals
        self.consumed = []

    def begin(self, txn):
        self.consumed = []

    def consume(self, txn, message):
        envelope = txn.envelope
        if message.get("Do") == "defer" and self.consumed:
            txn.defer()
        self.consumed.append((envelope.begin, envelope.end, envelope.flags))
        if envelope.flags != ACK_TXN and message.get("Do") != "silent":
            journal = self.journals[message["Key"]]
            txn.publish(message, mapping=lambda _: journal)


def checkpoint_of(recorded):
    """Offsets and producers of a recorded checkpoint."""
    offsets, producers = {}, set()
    for journal, source in recorded["sources"].items():
        offsets[journal] = source["read_through"]
        for entry in source["producers"]:
            state = entry["state"]
            producers.add(
                ProducerState(
                    journal,
                    base64.b64decode(entry["id"]),
                    state.get("last_ack", 0),
                    state.get("begin", 0),
                )
            )
    return offsets, producers


@pytest.mark.parametrize("scenario", BY_NAME)
def test_the_same_messages_give_the_same_checkpoints_and_acknowledgements(scenario):
    run(reenact(scenario), WAIT_S)


async def reenact(scenario):
    trace = scenario["trace"]
    recorded = transactions(trace)
    [name] = recorded[0]["start_commit"]["checkpoint"]["sources"]
    transport = MemoryTransport()
    journal = transport.create(name, topic="t")
    pieces = inputs(trace)
    application = Summing(outputs(trace))
    machine = TransactionMachine(min_s=0, max_s=1e9, waits_for_acks=True, overlaps_commit=True)
    spec = cpb.ShardSpec(id="shard", sources=[cpb.ShardSpec.Source(journal=name)])
    output = MemoryOutput()
    handle = shard.Shard("shard", spec, Path("/nowhere"), "gold/shard")
    consumer = MessageConsumer(
        application,
        Transaction(handle, Nothing(), output),
        output,
        machine,
        recorder=None,
        bad=BadRecords("fail"),
        on_step=lambda step: None,
    )
    source = Input(transport, {name: 0}, Checkpoint(), lambda _: dict, acknowledgements=True)
    consumer.read(source)
    try:
        for txn, following in zip(recorded, [*recorded[1:], None], strict=True):
            wanted = consumed_of(txn)
            if following is not None and wanted[-1] == consumed_of(following)[0]:
                wanted.pop()  # it was deferred
                was_deferred = True
            else:
                was_deferred = False
            while pieces and pieces[0][0] < max(end for _, end, _ in wanted):
                journal.content += pieces.pop(0)[1]
                transport.signal()
            while application.consumed != wanted or machine.current is Current.EMPTY:
                machine.available = True
                done = consumer.consume(0.0)  # at most one message
                consumer.note(done)
                if not done.more:
                    await source.arrived()
            if was_deferred:
                machine.available = True
                done = consumer.consume(0.0)
                assert done.closes
                consumer.note(done)
            checkpoint = consumer.prepare().checkpoint
            start = txn["start_commit"]["checkpoint"]
            assert (checkpoint.offsets, set(checkpoint.producers)) == checkpoint_of(start)
            assert checkpoint.ack_intents.keys() == (start.get("ack_intents") or {}).keys()
            output._open.clear()
            machine.commit_started()
            machine.committed()
            machine.acknowledged()
    finally:
        await source.aclose()


# ---------------------------------------------------------------------- times

TIMED = [
    pytest.param(each, pending, id=each["name"])
    for each, pending in zip(
        SCENARIOS,
        [(), (), (True, False, False), (True, False, True, False), (), None, None, (), ()],
        strict=True,
    )
    if pending is not None
]
"""With the transactions that end while a sequence is open. Without those scenarios in which the
recorded process looked at its timer between slow messages only."""


def seconds(text):
    return float(text.removesuffix("ms")) / 1000


@pytest.mark.parametrize(("scenario", "pending"), TIMED)
def test_transactions_start_to_commit_at_the_recorded_times(scenario, pending):
    spec, trace = scenario["spec"], scenario["trace"]
    machine = TransactionMachine(
        min_s=seconds(spec.get("min_txn_duration", "0ms")),
        max_s=seconds(spec.get("max_txn_duration", "1000ms")),
        waits_for_acks=not spec.get("disable_wait_for_ack", False),
        overlaps_commit=True,
    )
    for index, txn in enumerate(transactions(trace)):
        began, ended = txn["begin_txn"]["ms"] / 1000, txn["finalize_txn"]["ms"] / 1000
        machine.available = True
        assert machine.decide(began).action is Action.CONSUME
        machine.consumed(began)
        for consumed in txn["consumed"]:
            assert machine.decide(consumed["ms"] / 1000).action is Action.CONSUME
        machine.available = False
        machine.has_pending = index < len(pending) and pending[index]
        last = txn["consumed"][-1]["ms"] / 1000
        decision = machine.decide(last)
        if ended - last > 0.01:  # it waited: for its least time, or for an acknowledgement
            assert decision.action is Action.WAIT
            assert decision.until == pytest.approx(ended, abs=0.01)
        assert machine.decide(max(ended, decision.until or 0)).action is Action.START_COMMIT
        machine.commit_started()
        machine.committed()
        machine.acknowledged()
