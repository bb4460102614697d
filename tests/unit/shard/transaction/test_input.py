"""Inputs of shards: committed messages in lists, and exact positions within each of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk import JsonMessage
from gazette_sdk.errors import (
    CallCancelledError,
    ConfigurationError,
    DeadlineExceededError,
    DecodeError,
    JournalNotFoundError,
    OversizedFrameError,
    UnavailableError,
)
from gazette_sdk.framing import Framing
from gazette_sdk.message import delivery
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.uuid import ACK_TXN
from gazette_sdk.shard.transaction.input import Input
from gazette_sdk.transport.loop import run
from support.written_messages import History, crafted, served

WAIT_S = 20.0


@dataclass
class Entry(JsonMessage):
    n: int


def on_loop(coroutine):
    return run(coroutine, WAIT_S)


async def until(source, holds):
    """Poll until a condition holds of all messages that came."""
    found = []
    while not holds(found):
        batch = source.poll()
        if batch is not None:
            found += batch
        elif not holds(found):
            await source.arrived()
    return found


async def rest_of(source):
    """Poll to the end."""
    found = []
    while True:
        batch = source.poll()
        if batch is not None:
            found += batch
        elif source.ended:
            return found
        else:
            await source.arrived()


def numbers(envelopes):
    return [envelope.message["n"] for envelope in envelopes]


def input_of(transport, checkpoint=None, sources=None, **options):
    sources = dict.fromkeys(transport.journals, 0) if sources is None else sources
    return Input(
        transport, sources, checkpoint or Checkpoint(), lambda _spec: dict, follows=False, **options
    )


# -------------------------------------------------------------------- positions


@pytest.mark.parametrize("ring_size", [1, 3, 100])
@pytest.mark.parametrize("plain_min", [1, 16])
def test_an_input_goes_on_from_a_checkpoint_behind_every_message(monkeypatch, ring_size, plain_min):
    monkeypatch.setattr(delivery, "_PLAIN_MIN", plain_min)
    history = crafted()
    expected = history.committed()
    transport = served(history)

    async def cut(count):
        source = input_of(transport, ring_size=ring_size)
        taken = []
        left = 0
        while len(taken) < count:
            batch = source.poll()
            if batch is None:
                await source.arrived()
                continue
            used = batch[: count - len(taken)]
            taken += used
            left = len(batch) - len(used)
        stored = source.checkpoint(left).to_bytes()
        await source.aclose()
        again = input_of(transport, Checkpoint.from_bytes(stored), ring_size=ring_size)
        taken += await rest_of(again)
        await again.aclose()
        return numbers(taken)

    for count in range(len(expected) + 1):
        assert on_loop(cut(count)) == expected


@st.composite
def histories(draw):
    """A journal that several producers wrote to, in and outside of transactions, with retries."""
    history = History()
    for _ in range(draw(st.integers(0, 12))):
        producer = draw(st.integers(1, 3))
        match draw(st.sampled_from(["out", "txn", "txn", "open", "retry", "none", "back"])):
            case "out":
                for _ in range(draw(st.sampled_from([1, 2, 20]))):
                    history.outside(producer)
            case "txn":
                for _ in range(draw(st.sampled_from([1, 3, 20]))):
                    history.pending(producer + 10)
                history.ack(producer + 10)
            case "open":
                for _ in range(draw(st.integers(1, 4))):
                    history.pending(producer + 10)
            case "retry":
                history.retried(producer + 10, draw(st.integers(1, 5)))
            case "none":
                history.without_uuid()
            case "back":
                history.ack(producer + 10)
    return history


CUTS = st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)), max_size=8)
"""How many lists each shard polls, and how much of the last one it leaves."""


@settings(max_examples=150)
@given(histories(), CUTS, st.sampled_from([1, 2, 7, 1000]), st.sampled_from([1, 60, 500, 1 << 17]))
def test_messages_are_handed_over_once_wherever_shards_are_cut(history, cuts, ring_size, chunk):
    """Shard after shard takes some lists, and a part of the last one, and stores a checkpoint."""
    transport = served(history, chunk_bytes=chunk)

    async def shard(checkpoint, lists, share):
        source = input_of(transport, checkpoint, ring_size=ring_size)
        found, left = [], 0
        while lists:
            batch = source.poll()
            if batch is None:
                if source.ended:
                    break
                await source.arrived()
                continue
            lists -= 1
            left = 0 if lists else round(len(batch) * share)
            for each in {len(batch), len(batch) // 2, 0, left}:
                source.checkpoint(each)  # another transaction may have ended behind any message
            found += batch[: len(batch) - left]
        stored = source.checkpoint(left).to_bytes()
        await source.aclose()
        return found, Checkpoint.from_bytes(stored)

    async def shards():
        taken, checkpoint = [], Checkpoint()
        for lists, share in cuts:
            found, checkpoint = await shard(checkpoint, lists, share)
            taken += found
        last = input_of(transport, checkpoint, ring_size=ring_size)
        taken += await rest_of(last)
        await last.aclose()
        return numbers(taken)

    assert on_loop(shards()) == history.committed()


def test_several_sources_are_read_each_in_its_order():
    one, two = History("one/journal"), History("two/journal")
    for history in (one, two):
        for _ in range(50):
            history.outside(1)
            history.pending(2)
        history.ack(2)

    async def read():
        source = input_of(served(one, two))
        found = await rest_of(source)
        passed = source.passed()
        await source.aclose()
        return found, passed

    found, passed = on_loop(read())
    for history in (one, two):
        of_journal = [each for each in found if each.journal == history.journal]
        assert numbers(of_journal) == history.committed()
        assert passed[history.journal] == len(history.content)


def test_each_journal_has_its_class_of_messages_and_names_keep_their_metadata():
    one, two = History("one/journal"), History("two/journal")
    one.outside(1)
    two.outside(1)
    specs = {}

    def message(spec):
        specs[spec.name] = spec
        return dict if spec.name.startswith("one") else Entry

    async def read():
        sources = {"one/journal;a": 0, "one/journal;b": 0, "two/journal": 0}
        source = Input(served(one, two), sources, Checkpoint(), message, follows=False)
        found = await rest_of(source)
        checkpoint = source.checkpoint()
        await source.aclose()
        return found, checkpoint

    found, checkpoint = on_loop(read())
    assert {each.journal: type(each.message) for each in found} == {
        "one/journal;a": dict,
        "one/journal;b": dict,
        "two/journal": Entry,
    }
    assert set(checkpoint.offsets) == set(specs) == {each.journal for each in found}
    assert specs["one/journal;a"].labels.labels


def test_reading_begins_at_the_least_offset_or_the_checkpoint():
    history = History()
    for _ in range(4):
        history.outside(1)
    second = history.messages[1].end

    async def read(least, stored):
        checkpoint = Checkpoint({"a/journal": stored})
        source = input_of(served(history), checkpoint, {"a/journal": least})
        assert source.passed() == {"a/journal": max(least, stored)}
        found = await rest_of(source)
        await source.aclose()
        assert checkpoint.offsets == {"a/journal": stored}
        return numbers(found)

    assert on_loop(read(0, second)) == [2, 3]
    assert on_loop(read(second, 0)) == [2, 3]
    assert on_loop(read(second, history.messages[2].end)) == [3]


# ----------------------------------------------------------------- while it follows


def test_nothing_is_waited_for_until_messages_arrive():
    history = History()
    history.outside(1)
    transport = served(history)

    async def follow():
        source = Input(transport, {"a/journal": 0}, Checkpoint(), lambda _spec: dict)
        found = await until(source, len)
        assert source.poll() is None
        arrived = asyncio.create_task(source.arrived())
        history.outside(1)
        history.pending(2)
        transport.journals["a/journal"].content[:] = history.content
        transport.signal()
        await arrived
        found += await until(source, len)
        await until(source, lambda _found: source.has_pending)
        assert source.poll() is None
        assert source.has_pending
        assert not source.ended
        assert source.passed() == {"a/journal": len(history.content)}
        source.checkpoint()
        assert not source.has_pending, "only sequences since the last checkpoint are waited for"
        history.ack(2)
        transport.journals["a/journal"].content[:] = history.content
        transport.signal()
        found += await until(source, len)
        await source.aclose()
        return numbers(found)

    assert on_loop(follow()) == [0, 1, 2]


def test_pruning_leaves_pending_sequences_alone(monkeypatch):
    monkeypatch.setattr(delivery, "_PRUNE_EVERY", 1)
    history = History()
    history.pending(2)
    for _ in range(100):
        history.outside(1)
    history.pending(3)

    async def read():
        source = input_of(served(history))
        await rest_of(source)
        pending = source.has_pending
        source.checkpoint()
        await source.aclose()
        return pending, source.has_pending

    assert on_loop(read()) == (True, False)


def test_acknowledgements_are_returned_on_demand():
    history = crafted()

    async def read():
        source = input_of(served(history), acknowledgements=True)
        found = await rest_of(source)
        await source.aclose()
        return found

    found = on_loop(read())
    assert numbers(found) == history.committed(acknowledgements=True)
    assert any(each.flags == ACK_TXN for each in found)


# ---------------------------------------------------------------------- failures


def test_a_source_that_does_not_exist_is_an_error():
    async def read():
        source = input_of(served(crafted()), sources={"a/journal": 0, "not/there": 0})
        try:
            await rest_of(source)
        finally:
            await source.aclose()

    with pytest.raises(JournalNotFoundError, match="not/there"):
        on_loop(read())


def test_a_source_that_vanishes_is_an_error():
    history = History()
    history.outside(1)
    transport = served(history)
    transport.chunk_bytes = 1 << 10

    async def follow():
        source = Input(transport, {"a/journal": 0}, Checkpoint(), lambda _spec: dict)
        await until(source, len)
        transport.delete("a/journal")
        try:
            await until(source, len)
        finally:
            await source.aclose()

    with pytest.raises(JournalNotFoundError):
        on_loop(follow())


def test_content_that_is_no_message_is_an_error_with_its_place_behind_all_before():
    history = History()
    history.outside(1)
    begin = len(history.content)
    transport = served(history)
    transport.journals["a/journal"].content += b"no JSON\n"

    async def read():
        source = input_of(transport)
        found = await until(source, len)
        try:
            await rest_of(source)
        except DecodeError as error:
            return numbers(found), error.offset, source.checkpoint().offsets
        finally:
            await source.aclose()

    assert on_loop(read()) == ([0], begin, {"a/journal": begin})


def test_an_input_without_sources_is_refused():
    async def read():
        input_of(served(crafted()), sources={})

    with pytest.raises(ConfigurationError, match="source"):
        on_loop(read())


def test_an_input_that_follows_waits_for_brokers_to_be_reached(monkeypatch, caplog):
    history = History()
    history.outside(1)
    transport = served(history)
    kinds = (UnavailableError, CallCancelledError, DeadlineExceededError)
    listing, failures = transport.list, [kind("no broker") for kind in kinds]

    async def fail_at_first(request):
        if failures:
            raise failures.pop()
        async for response in listing(request):
            yield response

    monkeypatch.setattr(transport, "list", fail_at_first)

    async def read(*, follows):
        source = Input(
            transport, {"a/journal": 0}, Checkpoint(), lambda _spec: dict, follows=follows
        )
        try:
            return numbers(await until(source, len))
        finally:
            await source.aclose()

    assert on_loop(read(follows=True)) == [0]
    assert "no broker" in caplog.text
    failures.append(UnavailableError("no broker"))
    with pytest.raises(UnavailableError):
        on_loop(read(follows=False))


def test_a_consumer_gets_a_turn_after_each_error_of_long_garbage():
    """So that dead letters are published, instead of kept in memory."""
    history = History()
    history.outside(1)
    history.content += b"garbage\n" * 2000
    history.outside(2)

    async def read():
        source, judged, most = input_of(served(history)), [], 0
        source.on_undecodable = judged.append
        found = []
        while len(found) < 2:
            before = len(judged)
            batch = source.poll()
            most = max(most, len(judged) - before)
            if batch is None:
                await source.arrived()
            else:
                found += batch
        await source.aclose()
        return most, len(judged)

    most, count = on_loop(read())
    assert (most, count) == (1, 2000)


def test_messages_that_are_too_long_are_passed_over_where_bad_ones_are(monkeypatch):
    monkeypatch.setattr(Framing, "frame_bytes_max", 100)
    history = History()
    history.pending(1)
    history.content += b'{"pad":"%b"}\n' % (b"x" * 5000)
    history.outside(2)
    history.ack(1)

    async def read(judge):
        source = input_of(served(history), ring_size=1)
        source.on_undecodable = judge
        return numbers(await rest_of(source)), source.checkpoint()

    judged = []
    found, checkpoint = on_loop(read(judged.append))
    assert found == [1, 0]
    assert checkpoint.offsets == {"a/journal": len(history.content)}
    assert [(type(error), error.offset) for error in judged] == [
        (OversizedFrameError, history.messages[0].end)
    ]
    with pytest.raises(OversizedFrameError, match=r"a/journal: offset .* more than 100 bytes"):
        on_loop(read(None))
