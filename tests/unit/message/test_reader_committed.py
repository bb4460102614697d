"""Committed reading: what is acknowledged, once, whatever was written, read again or resumed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from gazette_sdk import JsonMessage, Reader
from gazette_sdk.errors import ClosedError, ConfigurationError
from gazette_sdk.message import delivery, fetcher
from gazette_sdk.message import fetcher as content_queue
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.fetcher import Fetcher
from gazette_sdk.message.uuid import ACK_TXN
from support.readers import interruptible
from support.written_messages import TICK, History, crafted, served

WAIT_S = 10.0


def numbers(reader) -> list[int]:
    return [envelope.message["n"] for envelope in reader]


def by_journal(envelopes) -> dict[str, list[int]]:
    found = defaultdict(list)
    for envelope in envelopes:
        found[envelope.journal].append(envelope.message["n"])
    return found


def test_committed_messages_come_once_and_in_one_go():
    history = crafted()
    transport = served(history)
    assert numbers(Reader(dict, name="a/journal", transport=transport)) == [0, 3, 7, 2, 5, 13, 15]
    assert history.committed() == [0, 3, 7, 2, 5, 13, 15]


def test_uncommitted_readers_see_everything():
    history = crafted()
    reader = Reader(dict, name="a/journal", transport=served(history), isolation="uncommitted")
    assert numbers(reader) == [message.item for message in history.messages]


@pytest.mark.parametrize("ring_size", [1, 2, 100])
def test_acknowledgements_are_delivered_on_demand(ring_size):
    history = crafted()
    reader = Reader(
        dict,
        name="a/journal",
        transport=served(history),
        acknowledgements=True,
        ring_size=ring_size,
    )
    envelopes = list(reader)
    assert [e.message["n"] for e in envelopes] == history.committed(acknowledgements=True)
    assert sum(envelope.flags == ACK_TXN for envelope in envelopes) == 3


def test_envelopes_of_a_replay_stand_where_they_were_written():
    history = crafted()
    transport = served(history)
    for ring_size in (1, 100):
        for envelope in Reader(dict, name="a/journal", transport=transport, ring_size=ring_size):
            content = transport.content_of("a/journal")[envelope.begin : envelope.end]
            assert b'"n":%d}\n' % envelope.message["n"] in content


@pytest.mark.parametrize("ring_size", [1, 3, 100])
@pytest.mark.parametrize("plain_min", [1, 16])
def test_a_reader_resumes_from_a_checkpoint_at_every_position(monkeypatch, ring_size, plain_min):
    monkeypatch.setattr(delivery, "_PLAIN_MIN", plain_min)
    history = crafted()
    expected = history.committed()
    transport = served(history)
    for count in range(len(expected) + 1):
        reader = Reader(dict, name="a/journal", transport=transport, ring_size=ring_size)
        taken = [envelope.message["n"] for envelope in islice(reader, count)]
        stored = reader.checkpoint().to_bytes()
        offsets = reader.offsets
        reader.close()
        for checkpoint in (stored, Checkpoint.from_bytes(stored)):
            rest = Reader(
                dict,
                name="a/journal",
                transport=transport,
                checkpoint=checkpoint,
                ring_size=ring_size,
            )
            assert taken + numbers(rest) == expected
        repeated = numbers(Reader(dict, name="a/journal", transport=transport, offsets=offsets))
        assert set(expected[count:]) <= set(repeated)


def test_a_checkpoint_within_a_plain_transaction_goes_on_in_its_middle():
    history = History()
    for _ in range(10):
        for _ in range(7):
            history.pending(1)
        history.ack(1)
    transport = served(history)
    expected = history.committed()
    for count in range(len(expected) + 1):
        reader = Reader(dict, name="a/journal", transport=transport)
        taken = [envelope.message["n"] for envelope in islice(reader, count)]
        checkpoint = reader.checkpoint()
        if count:
            assert reader.offsets["a/journal"] <= history.messages[expected[count - 1] + 1].end
        reader.close()
        rest = Reader(dict, name="a/journal", transport=transport, checkpoint=checkpoint)
        assert taken + numbers(rest) == expected


def test_offsets_stay_before_open_transactions():
    history = History()
    history.outside(1)
    history.pending(2)
    history.outside(1)
    transport = served(history)
    reader = Reader(dict, name="a/journal", transport=transport)
    assert numbers(reader) == [0, 2]
    assert reader.offsets == {"a/journal": history.messages[1].begin}
    assert reader.checkpoint().offsets == {"a/journal": len(history.content)}
    history.ack(2)
    transport.journals["a/journal"].content[:] = history.content
    assert numbers(reader) == [1]
    assert reader.offsets == {"a/journal": len(history.content)}


def test_an_empty_replay_is_not_read():
    """A checkpoint behind the last message of a transaction: only its end is left."""
    history = History()
    history.pending(1)
    history.ack(1)
    transport = served(history)
    reader = Reader(dict, name="a/journal", transport=transport, acknowledgements=True)
    taken = [envelope.message["n"] for envelope in islice(reader, 1)]
    reads = []
    read = transport.read

    def counted(request, target=None):
        reads.append((request.offset, request.end_offset))
        return read(request)

    transport.read = counted
    rest = Reader(
        dict,
        name="a/journal",
        transport=transport,
        acknowledgements=True,
        checkpoint=reader.checkpoint(),
    )
    assert taken + numbers(rest) == [0, 1]
    assert [end for begin, end in reads if begin >= 0] == [0]  # the other asks for the head
    reader.close()


def test_names_with_metadata_are_sequenced_by_themselves():
    history = crafted()
    transport = served(history)
    reader = Reader(dict, name="a/journal;one", transport=transport, ring_size=1)
    taken = numbers(islice(reader, 3))
    checkpoint = reader.checkpoint()
    assert {state.journal for state in checkpoint.producers} == {"a/journal;one"}
    assert set(checkpoint.offsets) == {"a/journal;one"}
    resumed = Reader(dict, name="a/journal;one", transport=transport, checkpoint=checkpoint)
    assert taken + numbers(resumed) == history.committed()
    other = Reader(dict, name="a/journal;two", transport=transport, checkpoint=checkpoint)
    assert numbers(other) == history.committed()
    reader.close()


def test_end_offsets_end_committed_reading_with_what_is_open_left_out():
    history = History()
    history.pending(1)
    history.outside(2)
    history.ack(1)
    for end, expected in ((1, []), (2, [1]), (3, [1, 0])):
        reader = Reader(
            dict,
            name="a/journal",
            transport=served(history),
            end_offsets={"a/journal": history.messages[end - 1].end},
        )
        assert numbers(reader) == expected


def test_uncommitted_readers_have_no_checkpoint():
    reader = Reader(dict, name="a/journal", transport=served(crafted()), isolation="uncommitted")
    with pytest.raises(ConfigurationError, match=r"reader\.offsets"):
        reader.checkpoint()


def test_plain_and_asynchronous_iteration_take_turns():
    history = crafted()
    expected = history.committed()
    transport = served(history)
    reader = Reader(dict, name="a/journal", transport=transport, ring_size=1)

    async def one() -> list[int]:
        async for envelope in reader:
            return [envelope.message["n"]]
        return []

    found = []
    while True:
        taken = numbers(islice(reader, 1)) + asyncio.run(one())
        if not taken:
            break
        found += taken
    assert found == expected


def test_an_interrupt_at_work_on_a_message_leaves_no_checkpoint(monkeypatch):
    history = crafted()
    reader = Reader(dict, name="a/journal", transport=served(history))
    interrupt = interruptible(monkeypatch, reader._batches._delivery._sequencer)
    assert len(numbers(islice(reader, 2))) == 2
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        numbers(reader)
    with pytest.raises(ClosedError, match="with a checkpoint that was taken before"):
        reader.checkpoint()
    with pytest.raises(ClosedError, match="interrupted"):
        numbers(reader)
    reader.close()


def test_what_is_kept_of_open_transactions_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.reader.RING_BYTES_MAX", 500)
    history = History()
    for _ in range(100):
        history.pending(1)
    history.ack(1)
    reader = Reader(dict, name="a/journal", transport=served(history, chunk_bytes=300))
    monkeypatch.setattr(delivery, "_PLAIN_MIN", 10**9)
    assert numbers(reader) == list(range(100))


def test_what_was_sequenced_is_counted_at_the_end():
    labels = {"journal": "a/counted", "flag": "OUTSIDE_TXN", "outcome": "outsideCommit"}
    history = History("a/counted")
    for _ in range(3):
        history.outside(1)
    assert numbers(Reader(dict, name="a/counted", transport=served(history))) == [0, 1, 2]
    assert REGISTRY.get_sample_value("gazette_sequencer_queued_total", labels) == 3


def test_closing_between_two_batches_ends_iteration_and_is_no_error():
    reader = Reader(dict, name="a/journal", transport=served(crafted()))
    envelopes = iter(reader)
    next(envelopes)
    reader.close()
    assert len(list(envelopes)) < len(crafted().committed())
    with pytest.raises(ClosedError, match="the reader is closed"):
        iter(reader)


def test_a_transaction_whose_replay_is_broken_off_is_not_passed_over_in_silence(monkeypatch):
    async def broken_off(_fetcher, queue, *_where):
        queue.put(content_queue.Finished())

    monkeypatch.setattr(Fetcher, "_run_replay", broken_off)
    transport = served(crafted())
    with Reader(dict, name="a/journal", transport=transport, ring_size=1) as reader:
        for _ in range(2):
            with pytest.raises(ClosedError, match="broken off"):
                numbers(reader)


# ------------------------------------------------------------------------ laws


@st.composite
def histories(draw, *, sane: bool) -> list[History]:
    """Several producers write to several journals; some of it is written twice, or rolled back.

    A sane producer retries only what it wrote last, and its clock does not run backwards.
    """
    seeded = random.Random(draw(st.integers(0, 2**32)))
    found = [History(f"t/part-{index}") for index in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(0, 120))):
        history = seeded.choice(found)
        producer = seeded.randrange(4)
        kind = seeded.choices(
            ["outside", "pending", "ack", "retry", "again", "rollback", "late", "none", "group"],
            [4, 8, 4, 2, 0 if sane else 2, 1, 0 if sane else 1, 1, 3],
        )[0]
        if kind == "outside":
            history.outside(4 + producer)
        elif kind == "pending":
            history.pending(producer)
        elif kind == "ack":
            history.ack(producer)
        elif kind == "retry":
            history.retried(producer, seeded.randrange(1, 6))
        elif kind == "again" and history.messages:
            begin = seeded.randrange(len(history.messages))
            history.again(begin, begin + seeded.randrange(1, 6))
        elif kind == "rollback":
            acked = [
                message.clock // TICK
                for message in history.messages
                if message.flags == ACK_TXN and message.producer % 256 == producer
            ]
            if acked:
                history.ack(producer, at=max(acked))
        elif kind == "late" and history.clocks.get(producer, 0) > TICK:
            history.pending(producer, at=history.clocks[producer] // TICK - 1)
        elif kind == "none":
            history.without_uuid()
        elif kind == "group":
            for _ in range(seeded.randrange(1, 5)):
                history.pending(producer)
            history.ack(producer)
    return found


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    """Producers of these histories do what is logged as an error, again and again."""
    logger = logging.getLogger("gazette_sdk.message")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


CUTS = {
    "chunk_bytes": st.sampled_from([1, 17, 64, 333, 5000, 1 << 20]),
    "ring_size": st.sampled_from([1, 2, 5, 1000]),
    "plain_min": st.sampled_from([1, 3, 16]),
}


def assert_delivered(written, chunk_bytes, ring_size, plain_min) -> None:
    transport = served(*written, chunk_bytes=chunk_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetcher, "AHEAD_BYTES_MAX", 2 * chunk_bytes)
        patch.setattr(delivery, "_PLAIN_MIN", plain_min)
        reader = Reader(dict, "topic=t", transport=transport, ring_size=ring_size)
        found = by_journal(reader)
    assert found == {h.journal: h.committed() for h in written if h.committed()}
    assert reader.checkpoint().offsets == {h.journal: len(h.content) for h in written}


@settings(max_examples=40, deadline=None)
@given(written=histories(sane=True), **CUTS)
def test_readers_deliver_what_a_sequencer_does(written, chunk_bytes, ring_size, plain_min):
    assert_delivered(written, chunk_bytes, ring_size, plain_min)


@settings(max_examples=40, deadline=None)
@given(written=histories(sane=False), **{**CUTS, "ring_size": st.just(1000)})
def test_readers_deliver_what_a_sequencer_does_of_anything(
    written, chunk_bytes, ring_size, plain_min
):
    """What a clock that runs backwards leads to depends on what is still in memory: all is."""
    assert_delivered(written, chunk_bytes, ring_size, plain_min)


@settings(max_examples=30, deadline=None)
@given(written=histories(sane=True), stops=st.lists(st.integers(0, 25), max_size=5), **CUTS)
def test_whoever_stops_and_resumes_delivers_each_message_once(
    written, stops, chunk_bytes, ring_size, plain_min
):
    transport = served(*written, chunk_bytes=chunk_bytes)
    found = defaultdict(list)
    checkpoint = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetcher, "AHEAD_BYTES_MAX", 2 * chunk_bytes)
        patch.setattr(delivery, "_PLAIN_MIN", plain_min)
        for count in [*stops, 10**9]:
            reader = Reader(
                dict, "topic=t", transport=transport, checkpoint=checkpoint, ring_size=ring_size
            )
            for envelope in islice(reader, count):
                found[envelope.journal].append(envelope.message["n"])
            checkpoint = reader.checkpoint().to_bytes()
            reader.close()
    assert found == {h.journal: h.committed() for h in written if h.committed()}


@dataclass
class Fitting(JsonMessage):
    """A message whose class refuses some numbers."""

    n: int
    refused: ClassVar[frozenset[int]] = frozenset()

    def __post_init__(self):
        if self.n in self.refused:
            raise ValueError(f"{self.n} does not fit")


@settings(max_examples=40, deadline=None)
@given(
    written=histories(sane=True),
    stops=st.lists(st.integers(0, 25), max_size=3),
    every=st.integers(1, 5),
    **CUTS,
)
def test_messages_that_do_not_fit_are_judged_where_others_would_be_delivered(
    *, written, stops, every, chunk_bytes, ring_size, plain_min
):
    """Once, and never if they are rolled back; acknowledgements fit."""
    transport = served(*written, chunk_bytes=chunk_bytes)
    acks = {m.item for h in written for m in h.messages if m.flags == ACK_TXN}
    numbers_at = {(h.journal, m.begin): m.item for h in written for m in h.messages}
    found = defaultdict(list)
    checkpoint = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetcher, "AHEAD_BYTES_MAX", 2 * chunk_bytes)
        patch.setattr(delivery, "_PLAIN_MIN", plain_min)
        patch.setattr(Fitting, "refused", frozenset(range(0, 10**4, every)) - acks)
        for count in [*stops, 10**9]:
            reader = Reader(
                Fitting,
                "topic=t",
                transport=transport,
                checkpoint=checkpoint,
                ring_size=ring_size,
                on_error=lambda error: found[error.journal].append(
                    numbers_at[error.journal, error.offset]
                ),
            )
            for envelope in islice(reader, count):
                assert envelope.message.n not in Fitting.refused
                found[envelope.journal].append(envelope.message.n)
            checkpoint = reader.checkpoint().to_bytes()
            reader.close()
    assert found == {h.journal: h.committed() for h in written if h.committed()}
