"""The batch reader: what is ready, in turns, and what it remembers of producers."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk import Reader
from gazette_sdk.errors import ClosedError, GazetteError
from gazette_sdk.framing import framing_for
from gazette_sdk.message import batch_reader, delivery, fetcher
from gazette_sdk.message.batch_reader import BatchReader, JournalDecoder
from gazette_sdk.message.delivery import CommittedDelivery
from gazette_sdk.message.fetcher import Opened, plan_of
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.sequencer import Sequencer
from gazette_sdk.message.uuid import clock_of_unix_ns
from support.memory_transport import MemoryTransport
from support.written_messages import History, frame

DAY_NS = 24 * 3600 * 10**9


def batches_over(transport: MemoryTransport) -> BatchReader:
    def decoder(opened: Opened) -> JournalDecoder:
        framing = framing_for(opened.content_type)
        kind = kind_of(dict, framing.form)
        return JournalDecoder(opened.journal, framing, kind, opened.offset, sequenced=True)

    plan = plan_of(None, "a/journal", block=False, offsets=None, end_offsets=None)
    return BatchReader(plan, transport, decoder, CommittedDelivery(Sequencer(100)))


def numbers(batch) -> list[int]:
    return [envelope.message["n"] for envelope in batch]


@pytest.fixture
def history(transport) -> History:
    written = History()
    for _ in range(40):
        written.outside(1)
    written.pending(2)
    written.pending(3)
    written.ack(2)
    written.outside(1)
    written.ack(3)
    transport.create("a/journal").content += written.content
    return written


def test_batches_are_taken_in_turns_by_plain_code_and_coroutines(transport, history):
    batches = batches_over(transport)
    found = []
    while (batch := batches.next_batch()) is not None:
        found += numbers(batch)
        if (batch := asyncio.run(batches.next_batch_async())) is None:
            break
        found += numbers(batch)
    assert found == history.committed()


def test_plain_messages_come_as_a_sequence_and_what_is_at_hand_without_waiting(transport, history):
    batches = batches_over(transport)
    assert batches.ready_batch() is None
    plain = batches.next_batch()
    assert isinstance(plain, list)
    assert numbers(plain) == list(range(40))
    assert batches.checkpoint(len(plain)).offsets == {"a/journal": 0}
    assert batches.checkpoint(1).offsets == {"a/journal": history.messages[38].end}
    assert batches.offsets() == {"a/journal": history.messages[39].end}
    found = []
    while (batch := batches.ready_batch()) is not None:
        found += numbers(batch)
    assert found == history.committed()[40:]
    assert batches.next_batch() is None
    batches.close()
    with pytest.raises(ClosedError, match=r"checkpoint=reader\.checkpoint"):
        batches.next_batch()


def test_a_consumer_which_was_interrupted_leaves_no_checkpoint(transport, history):
    batches = batches_over(transport)
    assert batches.next_batch() is not None
    batches.interrupt()
    with pytest.raises(ClosedError, match="that was taken before"):
        batches.checkpoint()
    with pytest.raises(ClosedError, match="that was taken before"):
        batches.next_batch()
    batches.close()


def test_producers_that_are_silent_too_long_are_forgotten_without_being_asked(
    transport, monkeypatch
):
    monkeypatch.setattr(delivery, "_PRUNE_EVERY", 4)
    begun = clock_of_unix_ns(10**18)
    late = clock_of_unix_ns(10**18 + DAY_NS + 10**9)
    journal = transport.create("a/journal")
    journal.content += b"".join(frame(n, n, begun) for n in range(1, 9))
    journal.content += frame(9, 9, late)
    reader = Reader(dict, name="a/journal", transport=transport)
    assert numbers(reader) == list(range(1, 10))
    journal.content += b"".join(frame(n, 9, late + 160 * n) for n in range(10, 15))
    assert numbers(reader) == list(range(10, 15))
    (state,) = reader.checkpoint(horizon_s=0).producers
    assert state.producer[-1] == 9


def running_loop(_transport, *, blocks):
    return asyncio.get_running_loop()


def test_a_coroutine_reads_on_its_own_loop_where_that_is_chosen(transport, history, monkeypatch):
    monkeypatch.setattr(
        batch_reader, "reading_loop", lambda _, *, blocks: asyncio.get_running_loop()
    )

    async def read(reader: Reader) -> list[int]:
        found = []
        async with reader:
            async for envelope in reader:
                found.append(envelope.message["n"])
                with pytest.raises(GazetteError, match="async for"):
                    next(iter(reader))
        return found

    reader = Reader(dict, name="a/journal", transport=transport, ring_size=1)
    assert asyncio.run(read(reader)) == history.committed()


def test_a_reader_fails_when_the_loop_on_which_it_fetches_is_closed(
    transport, history, monkeypatch
):
    monkeypatch.setattr(
        batch_reader, "reading_loop", lambda _, *, blocks: asyncio.get_running_loop()
    )
    monkeypatch.setattr(fetcher, "AHEAD_BYTES_MAX", 1)
    transport.chunk_bytes = 300
    batches = batches_over(transport)

    async def read() -> list[int]:
        return numbers(await batches.next_batch_async())

    found = asyncio.run(read())
    assert found
    with pytest.raises(ClosedError, match="event loop that fetched was closed"):
        found.extend(n for batch in iter(batches.next_batch, None) for n in numbers(batch))
    assert found == history.committed()[: len(found)]
    assert len(found) < 40
    batches.close()
