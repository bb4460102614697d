"""Random programs of publishers: committed readers see what was committed, once and in order."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk import Publisher, Reader
from gazette_sdk.errors import NotAllowedError
from gazette_sdk.message.transaction import TransactionInDoubtError
from gazette_sdk.message.uuid import ACK_TXN
from gazette_sdk.protocol import broker_pb2 as pb
from support.memory_transport import MemoryTransport

JOURNALS = ("one/journal", "two/journal", "three/journal")

FAULTS = st.lists(
    st.sampled_from(["ok", "ok", "lost", "unavailable", pb.NO_JOURNAL_PRIMARY_BROKER]), max_size=12
)


class RolledBackError(Exception):
    """What ends a block badly."""


class SaveError(Exception):
    """What a failing save raises."""


@dataclass
class Step:
    """Part of a program: messages to journals, and how they end.

    kind: ``publish``, ``batch``, or how a transaction ends: ``commit``, ``saved``, ``rollback``,
        ``save fails``, ``written later``, ``save fails, written later``.
    """

    kind: str
    sends: list[tuple[str, int]]
    is_batched: bool
    inner: list[Step] = field(default_factory=list)


_sends = st.lists(st.tuples(st.sampled_from(JOURNALS), st.integers(1, 3)), max_size=4)
_leaf = st.builds(
    Step,
    kind=st.sampled_from(["publish", "batch"]),
    sends=_sends,
    is_batched=st.just(False),
)
_transaction = st.builds(
    Step,
    kind=st.sampled_from(
        ["commit", "saved", "rollback", "save fails", "written later", "save fails, written later"]
    ),
    sends=_sends,
    is_batched=st.booleans(),
    inner=st.lists(_leaf, max_size=2),
)
_programs = st.lists(
    st.one_of(
        _leaf,
        _transaction,
        st.builds(
            Step,
            kind=st.just("commit"),
            sends=_sends,
            is_batched=st.booleans(),
            inner=st.lists(_transaction, max_size=2),
        ),
    ),
    max_size=6,
)


class Run:
    """Runs steps with one publisher, and notes what must become visible."""

    def __init__(self, publisher: Publisher, name: str) -> None:
        self.publisher = publisher
        self.name = name
        self.numbers = itertools.count()
        self.visible: dict[str, list[int]] = defaultdict(list)
        self.sequences: list[dict[str, list[int]]] = []

    def messages(self, sends):
        made = [
            {"to": journal, "by": self.name, "n": next(self.numbers)}
            for journal, count in sends
            for _ in range(count)
        ]
        noted = defaultdict(list)
        for message in made:
            noted[message["to"]].append(message["n"])
        return made, noted

    def run(self, steps):
        for step in steps:
            if step.kind in {"publish", "batch"}:
                self.plain(step)
            else:
                self.transact(step)

    def plain(self, step):
        made, noted = self.messages(step.sends)
        if step.kind == "batch":
            self.publisher.publish_batch(made)
        else:
            for message in made:
                self.publisher.publish(message)
        self.sequences.append(noted)

    def transact(self, step):
        saved = []

        def save(intents):
            saved.append(intents)
            if "save fails" in step.kind:
                raise SaveError

        made, noted = self.messages(step.sends)
        fails = step.kind == "rollback" or ("save fails" in step.kind and made)
        try:
            with self.publisher.transaction(
                save=save if "sav" in step.kind or "written" in step.kind else None
            ) as txn:
                half = len(made) // 2
                self.send(txn, made[:half], step)
                self.run(step.inner)
                self.send(txn, made[half:], step)
                _fail_if(step.kind == "rollback")
        except (RolledBackError, SaveError):
            assert fails
        else:
            assert not fails
        if "written later" in step.kind and saved:
            self.publisher.acknowledge(saved[0].to_bytes())
            self.sequences.append(noted)
        elif not fails:
            self.sequences.append(noted)

    def send(self, txn, made, step):
        if step.is_batched:
            txn.publish_batch(made)
        else:
            for message in made:
                txn.publish(message)


def _fail_if(wanted):
    if wanted:
        raise RolledBackError


def check(transport, runs):
    for journal in JOURNALS:
        found = list(Reader(dict, name=journal, transport=transport))
        assert all(envelope.flags != ACK_TXN for envelope in found)
        for run in runs:
            seen = [e.message["n"] for e in found if e.message["by"] == run.name]
            expected = [sequence[journal] for sequence in run.sequences if journal in sequence]
            assert sorted(seen) == sorted(itertools.chain(*expected))
            at = {number: index for index, number in enumerate(seen)}
            for sequence in expected:  # each in its order
                places = [at[number] for number in sequence]
                assert places == sorted(places)
    kinds = [
        e.message.get("by") for j in JOURNALS for e in Reader(dict, name=j, transport=transport)
    ]
    assert len(kinds) == sum(
        len(numbers) for run in runs for each in run.sequences for numbers in each.values()
    )


def quick(transport: MemoryTransport) -> Publisher:
    return Publisher(lambda message: message["to"], transport=transport)


@settings(max_examples=30)
@given(_programs, FAULTS)
def test_committed_readers_see_what_was_committed_once_and_in_order(program, faults):
    transport = MemoryTransport()
    for journal in JOURNALS:
        transport.create(journal)
    transport.append_faults = [fault for fault in faults if fault != "ok"][:3]
    with quick(transport) as publisher:
        run = Run(publisher, "only")
        run.run(program)
    check(transport, [run])


@settings(max_examples=8)
@given(st.lists(_programs, min_size=2, max_size=3))
def test_threads_do_not_disturb_each_others_transactions(programs):
    transport = MemoryTransport()
    for journal in JOURNALS:
        transport.create(journal)
    failures = []
    with quick(transport) as publisher:
        runs = [Run(publisher, f"thread-{index}") for index in range(len(programs))]

        def work(run, program):
            try:
                run.run(program)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=each) for each in zip(runs, programs, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not failures
    check(transport, runs)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(["ok", pb.NOT_ALLOWED]), max_size=10),
    st.lists(_sends.filter(bool), min_size=1, max_size=4),
)
def test_whatever_fails_a_transaction_is_visible_as_a_whole_or_can_be_completed(faults, programs):
    transport = MemoryTransport()
    for journal in JOURNALS:
        transport.create(journal)
    transport.append_faults = [None if fault == "ok" else fault for fault in faults]
    publisher = quick(transport)
    run = Run(publisher, "only")
    for sends in programs:
        made, noted = run.messages(sends)
        try:
            with publisher.transaction(save=lambda _: None) as txn:
                for message in made:
                    txn.publish(message)
        except TransactionInDoubtError as error:
            transport.append_faults = []
            publisher.acknowledge(error.intents).result(10)
        except NotAllowedError:
            continue
        run.sequences.append(noted)
    transport.append_faults = []
    publisher.close()
    check(transport, [run])
