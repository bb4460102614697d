"""The sequencer, step by step as another one took the same messages.

Histories with rings of many sizes, replays, checkpoints, and restores in the middle of sequences;
and whole journals as other publishers wrote them.
"""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any

import pytest

from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.runs import Message
from gazette_sdk.message.sequencer import Sequencer
from gazette_sdk.message.uuid import parse_uuid
from support.sequencing import deliveries, run_of, states, with_open
from support.vectors import golden

HISTORIES = golden("consumer/messages/sequencer.json")
JOURNALS = golden("consumer/messages/journals.json")

OPEN_ARE_KEPT = {
    ("pruning by horizon", 493): {"outcome": "ackCommitRing", "dequeued": [59, 493]},
}
"""By history and offset, steps that go another way than recorded: the recorded sequencer forgot
the producer within its transaction, and lost it."""


def message(journal: str, begin: int, end: int, text: str) -> Message[Any]:
    parts = parse_uuid(uuid.UUID(text))
    producer = int.from_bytes(parts.producer, "big")
    return Message(journal, begin, end, producer, parts.clock, parts.flags, text)


def lines(journal: str, text: str) -> list[Message[Any]]:
    found, begin = [], 0
    for line in text.encode().splitlines(keepends=True):
        found.append(message(journal, begin, begin + len(line), json.loads(line)["UUID"]))
        begin += len(line)
    return found


def assert_checkpoint(
    found: Checkpoint, expected: dict[str, Any], before: Checkpoint | None = None
) -> None:
    # A journal whose first message is being delivered may be told as read from, or not at all.
    assert {name: offset for name, offset in found.offsets.items() if offset} == expected["offsets"]
    recorded = {
        (state["journal"], bytes.fromhex(state["producer"]), int(state["last_ack"]), state["begin"])
        for state in expected["producers"]
    }
    assert states(found) == with_open(recorded, before or Checkpoint())


@pytest.mark.parametrize("history", HISTORIES, ids=lambda h: f"{h['name']}, ring {h['ring']}")
def test_histories_go_as_recorded(history):
    journals = {name: lines(name, text) for name, text in history["journals"].items()}
    sequencer: Sequencer[Any] = Sequencer(history["ring"])
    taken = Checkpoint()
    for step in history["steps"]:
        if step["op"] == "checkpoint":
            before = taken if step["horizon_ns"] else None
            taken = sequencer.checkpoint(step["horizon_ns"] / 1e9)
            assert_checkpoint(taken, step["checkpoint"], before)
            assert sequencer.has_pending == step["pending_after"]
        elif step["op"] == "restore":
            restored = Checkpoint.from_bytes(taken.to_bytes())
            sequencer = Sequencer(step["ring"], checkpoint=restored)
        else:
            assert step["op"] == "read"
            step = {**step, **OPEN_ARE_KEPT.get((history["name"], step["begin"]), {})}  # noqa: PLW2901
            read = message(step["journal"], step["begin"], step["end"], step["uuid"])
            assert sequencer.queue(read) == step["outcome"]
            assert sequencer.replay == (tuple(step["replay"]) if "replay" in step else None)
            dequeued = []
            for delivered in deliveries(sequencer, journals):
                if delivered.begin == step.get("stopped_with"):
                    break
                dequeued.append(delivered.begin)
            else:
                assert sequencer.has_pending == step["pending"]
            assert dequeued == step["dequeued"]
    assert_checkpoint(sequencer.checkpoint(), history["final"])


@pytest.mark.parametrize(
    ("recorded", "ring"),
    [
        pytest.param(recorded, ring, id=f"{recorded['journal']}, {ring}")
        for recorded in JOURNALS
        for ring in recorded["sequencer"]
    ],
)
def test_journals_are_sequenced_as_recorded(recorded, ring):
    expected = recorded["sequencer"][ring]
    name = recorded["journal"]
    content = base64.b64decode(recorded["bytes_b64"])
    assert len(content) == recorded["length"]
    messages = [message(name, m["begin"], m["end"], m["uuid"]) for m in recorded["messages"]]
    sequencer: Sequencer[Any] = Sequencer(int(ring.split()[1]))
    outcomes, replays, dequeued = [], {}, {}
    for read in messages:
        outcomes.append(sequencer.queue(read))
        if sequencer.replay is not None:
            replays[str(read.begin)] = list(sequencer.replay[1:])
        begins = [delivered.begin for delivered in deliveries(sequencer, {name: messages})]
        if begins:
            dequeued[str(read.begin)] = begins
    assert outcomes == expected["outcomes"]
    assert replays == expected["replays"]
    assert dequeued == expected["dequeued"]
    assert_checkpoint(sequencer.checkpoint(), expected["final"])


@pytest.mark.parametrize(
    "recorded",
    [recorded for recorded in JOURNALS if recorded["messages"]],
    ids=lambda recorded: recorded["journal"],
)
def test_plain_parts_of_journals_deliver_what_was_recorded(recorded):
    name = recorded["journal"]
    expected = next(iter(recorded["sequencer"].values()))
    messages = [message(name, m["begin"], m["end"], m["uuid"]) for m in recorded["messages"]]
    run = run_of(messages)
    sequencer: Sequencer[Any] = Sequencer()
    delivered, at = [], 0
    while at < len(run):
        count = sequencer.plain_count(run, at)
        sequencer.commit_run(run, at, at + count)
        delivered += [read.begin for read in messages[at : at + count]]
        at += count
        if at < len(run):
            sequencer.queue(messages[at])
            delivered += [read.begin for read in deliveries(sequencer, {name: messages})]
            at += 1
    assert delivered == [begin for begins in expected["dequeued"].values() for begin in begins]
    assert_checkpoint(sequencer.checkpoint(), expected["final"])
