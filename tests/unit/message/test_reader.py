"""Reading: every message once, with its offsets, from many journals, to the end or without end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import queue
import signal
import threading
from contextlib import suppress

import pytest

from gazette_sdk import GazetteError, Publisher, Reader, mapping
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    FramingError,
    TornFrameError,
)
from gazette_sdk.message import fetcher
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.log_records import on_record
from support.memory_transport import MemoryTransport
from support.readers import Order, fill, line, numbers
from support.vectors import group

WAIT_S = 10.0


class Background:
    """Takes messages of a blocking reader in a thread."""

    def __init__(self, reader) -> None:
        self.reader = reader
        self.found: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        with suppress(ClosedError):
            for envelope in self.reader:
                self.found.put((envelope.journal, envelope.message["n"]))
        self.found.put(None)

    def take(self, count: int) -> list:
        return [self.found.get(timeout=WAIT_S) for _ in range(count)]

    def close(self) -> None:
        self.reader.close()
        assert self.found.get(timeout=WAIT_S) is None
        self.thread.join(WAIT_S)


# ------------------------------------------------------------------ contract


def test_the_readme_snippet_reads_what_was_published(transport, monkeypatch, capsys):
    monkeypatch.setattr("gazette_sdk.message.batch_reader.connect", lambda: transport)
    transport.create("orders/part-000", topic="orders")
    with Publisher(mapping.direct("orders/part-000"), transport=transport) as publisher:
        receipt = publisher.publish(Order("ada", 250))
    for envelope in Reader(Order, "topic=orders", block=False):
        print(envelope.journal, envelope.begin, envelope.end, envelope.message)
    shown = f"orders/part-000 0 {receipt.end} {Order('ada', 250)}\n"
    assert capsys.readouterr().out == shown
    assert transport.closed


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
def test_many_journals_are_read_each_in_its_order(chunk_bytes):
    transport = MemoryTransport(chunk_bytes=chunk_bytes)
    for index in range(20):
        fill(transport, f"t/part-{index:02d}", *range(index, 200, 20), topic="t")
    reader = Reader(dict, "topic=t", transport=transport)
    by_journal: dict = {}
    for envelope in reader:
        content = transport.content_of(envelope.journal)
        assert content[envelope.begin : envelope.end] == line(envelope.message["n"])
        by_journal.setdefault(envelope.journal, []).append(envelope.message["n"])
    assert by_journal == {f"t/part-{index:02d}": list(range(index, 200, 20)) for index in range(20)}
    assert reader.offsets == {name: len(transport.content_of(name)) for name in transport.journals}


def test_coroutines_read_in_any_loop(transport):
    fill(transport, "a/journal", *range(10))

    async def read():
        async with Reader(dict, name="a/journal", transport=transport) as reader:
            return [envelope.message["n"] async for envelope in reader]

    assert asyncio.run(read()) == list(range(10))
    assert run(read(), WAIT_S) == list(range(10))


def test_plain_iteration_on_the_sdks_own_loop_is_refused(transport):
    fill(transport, "a/journal", 1)

    async def read():
        return list(Reader(dict, name="a/journal", transport=transport))

    with pytest.raises(GazetteError, match="async for"):
        run(read(), WAIT_S)


@pytest.mark.parametrize(
    "arguments",
    [
        {"selector": "a/journal"},
        {"selector": "name=a/journal"},
        {"selector": "topic"},
        {"selector": "topic=t"},
        {"selector": "name:prefix=a/"},
        {"selector": ""},
        {"name": "a/journal"},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [False, True])
def test_journals_are_named_or_selected(transport, arguments, block):
    fill(transport, "a/journal", 1, 2, topic="t")
    reader = Reader(dict, transport=transport, block=block, **arguments)
    assert [e.message["n"] for e in itertools.islice(reader, 2)] == [1, 2]
    reader.close()


@pytest.mark.parametrize("argument", ["selector", "name"])
def test_metadata_of_a_name_is_kept(transport, argument):
    fill(transport, "a/journal", 1, 2)
    fill(transport, "b/journal", 3)
    reader = Reader(dict, transport=transport, **{argument: "a/journal;x=y"})
    assert [(e.journal, e.message["n"]) for e in reader] == [
        ("a/journal;x=y", 1),
        ("a/journal;x=y", 2),
    ]
    assert list(reader.offsets) == ["a/journal;x=y"]


@pytest.mark.parametrize("argument", ["selector", "name"])
def test_a_journal_that_is_named_is_listed_once(transport, argument, monkeypatch):
    fill(transport, "a/journal", 1, 2)
    listed, plain = [], transport.list
    monkeypatch.setattr(transport, "list", lambda request: listed.append(request) or plain(request))
    assert numbers(Reader(dict, transport=transport, **{argument: "a/journal"})) == [1, 2]
    assert len(listed) == 1


# -------------------------------------------------------------------- vectors


class Served(MemoryTransport):
    """Serves exactly the offsets and contents of a vector's case."""

    def __init__(self, served: list[dict]) -> None:
        super().__init__()
        self.create("a/journal")
        self.served = served

    async def read(self, request, target=None):
        for part in self.served:
            if part["offset"] + len(part["content_utf8"]) <= request.offset:
                continue
            for _ in range(100 if "note" in part else 0):
                yield pb.ReadResponse(status=pb.OK, offset=max(part["offset"], request.offset))
            yield pb.ReadResponse(
                status=pb.OK, header=self._header(), offset=max(part["offset"], request.offset)
            )
            yield part["content_utf8"].encode()


VECTORS = group("message", "read_uncommitted")


def test_an_offset_jump_shows_in_the_first_begin():
    case = VECTORS[0]
    reader = Reader(
        dict,
        name="a/journal",
        transport=Served(case["journal_serves"]),
        offsets={"a/journal": case["request_offset"]},
        end_offsets={"a/journal": case["end_offset"]},
    )
    found = [{"begin": e.begin, "end": e.end, "str": e.message["Str"]} for e in reader]
    assert [*found, "EOF"] == case["expect"]
    assert reader.offsets == {"a/journal": case["end_offset"]}


def test_an_end_within_a_message_is_an_error_that_names_its_offset():
    case = VECTORS[1]
    reader = Reader(
        dict,
        name="a/journal",
        transport=Served(case["journal_serves"]),
        offsets={"a/journal": case["request_offset"]},
        end_offsets={"a/journal": case["end_offset"]},
    )
    with pytest.raises(TornFrameError, match="offset 1000: unexpected EOF") as caught:
        list(reader)
    assert (caught.value.journal, caught.value.offset) == ("a/journal", 1000)
    assert reader.offsets == {"a/journal": 1000}


def test_a_journal_without_content_type_is_named(transport):
    case = VECTORS[2]
    transport.create("a/journal", content_type=None)
    with pytest.raises(FramingError) as caught:
        list(Reader(dict, name="a/journal", transport=transport))
    assert case["error"] in str(caught.value)
    assert "content_type='application/x-ndjson'" in str(caught.value)
    assert caught.value.journal == "a/journal"


# -------------------------------------------------------------------- offsets


def test_reading_is_taken_up_where_it_stopped(transport):
    for name in ("t/one", "t/two"):
        fill(transport, name, *range(100), topic="t")
    first = Reader(dict, "topic=t", transport=transport)
    before = [(e.journal, e.message["n"]) for e in itertools.islice(first, 37)]
    offsets = first.offsets
    rest = [(e.journal, e.message["n"]) for e in first]
    assert sorted(before + rest) == [(name, n) for name in ("t/one", "t/two") for n in range(100)]
    again = Reader(dict, "topic=t", transport=transport, offsets=offsets)
    assert [(e.journal, e.message["n"]) for e in again] == rest


def test_iterating_again_reads_what_came_since(transport, on_loop):
    journal = fill(transport, "a/journal", 1)
    reader = Reader(dict, name="a/journal", transport=transport)
    assert numbers(reader) == [1]
    assert numbers(reader) == []
    journal.content += line(2)
    assert numbers(reader) == [2]


@pytest.mark.parametrize(("offsets", "expected"), [("begin", [1, 2]), (None, [1, 2]), ("end", [])])
def test_offsets_may_be_words(transport, offsets, expected):
    fill(transport, "a/journal", 1, 2)
    reader = Reader(dict, name="a/journal", transport=transport, offsets=offsets)
    assert numbers(reader) == expected
    assert reader.offsets == {"a/journal": 16}


def test_offsets_of_journals_which_are_not_there_are_kept(transport):
    fill(transport, "a/journal", 1)
    reader = Reader(
        dict, name="a/journal", transport=transport, offsets={"gone/journal": 7, "a/journal": 8}
    )
    assert numbers(reader) == []
    assert reader.offsets == {"gone/journal": 7, "a/journal": 8}


def test_end_offsets_end_each_journal(transport):
    fill(transport, "t/one", 1, 2, 3, topic="t")
    fill(transport, "t/two", 4, 5, 6, topic="t")
    reader = Reader(
        dict, "topic=t", transport=transport, block=True, end_offsets={"t/one": 16, "t/two": 0}
    )
    assert [e.message["n"] for e in itertools.islice(reader, 2)] == [1, 2]
    reader.close()


@pytest.mark.parametrize("end", [0, 16])
def test_a_blocking_reader_of_one_journal_ends_at_its_end_offset(transport, end):
    fill(transport, "a/journal", 1, 2, 3)
    options = {"transport": transport, "block": True, "end_offsets": {"a/journal": end}}
    for of in ({"name": "a/journal"}, {"selector": "a/journal"}):
        assert numbers(Reader(dict, **of, **options)) == [1, 2][: end // 8]


def test_a_blocking_reader_waits_for_what_is_before_its_end_offset(transport):
    fill(transport, "a/journal", 1)
    transport.create("b/journal")
    with Publisher(transport=transport) as publisher:
        receipt = publisher.publish({"n": 2}, mapping=mapping.direct("b/journal")).result(WAIT_S)
        ends = {"a/journal": 8 + receipt.end}
        reader = Reader(dict, "a/journal", transport=transport, block=True, end_offsets=ends)
        assert next(iter(reader)).message == {"n": 1}
        publisher.publish({"n": 2}, mapping=mapping.direct("a/journal"))
        assert numbers(reader) == [2]


@pytest.mark.parametrize("end", [-1, "16"])
def test_an_end_offset_is_an_offset(transport, end):
    with pytest.raises(ConfigurationError, match=f"end offset {end!r} of a/journal"):
        Reader(dict, name="a/journal", transport=transport, end_offsets={"a/journal": end})


# ------------------------------------------------------------------- blocking


def test_a_blocking_reader_follows_write_heads_and_new_journals(transport, on_loop):
    fill(transport, "t/one", 1, topic="t")
    taker = Background(Reader(dict, "topic=t", transport=transport, block=True))
    assert taker.take(1) == [("t/one", 1)]
    with Publisher(mapping.direct("t/one"), transport=transport) as publisher:
        publisher.publish({"n": 2})
        assert taker.take(1) == [("t/one", 2)]
    on_loop(fill, transport, "t/two", 3, topic="t")
    assert taker.take(1) == [("t/two", 3)]
    on_loop(transport.delete, "t/one")
    with Publisher(mapping.direct("t/two"), transport=transport) as publisher:
        publisher.publish({"n": 4})
        assert taker.take(1) == [("t/two", 4)]
    taker.close()
    assert set(taker.reader.offsets) == {"t/one", "t/two"}


def test_a_blocking_reader_without_journals_says_what_it_waits_for(transport, on_loop, caplog):
    warned = threading.Event()
    with on_record(fetcher.__name__, warned.set):
        taker = Background(Reader(dict, "topic=t", transport=transport, block=True))
        assert warned.wait(WAIT_S)
    on_loop(fill, transport, "t/one", 1, topic="t")
    assert taker.take(1) == [("t/one", 1)]
    on_loop(transport.delete, "t/one")
    taker.close()
    [record] = caplog.records
    assert "no journal matches topic=t; the reader waits for one" in record.getMessage()


def test_reading_from_the_end_sees_what_is_appended_and_all_of_new_journals(transport, on_loop):
    fill(transport, "t/one", 1, topic="t")
    reader = Reader(dict, "topic=t", transport=transport, block=True, offsets="end")
    taker = Background(reader)

    async def reading():
        async with asyncio.timeout(WAIT_S):
            await transport.until(lambda: transport.reads > 0)

    run(reading())
    with Publisher(mapping.direct("t/one"), transport=transport) as publisher:
        publisher.publish({"n": 2})
    assert taker.take(1) == [("t/one", 2)]
    on_loop(fill, transport, "t/two", 3, topic="t")
    assert taker.take(1) == [("t/two", 3)]
    taker.close()


def test_a_journal_that_leaves_the_selector_for_a_while_goes_on_where_it_was(transport, on_loop):
    journal = fill(transport, "t/one", 1, topic="t")
    labels = pb.LabelSet()
    labels.CopyFrom(journal.spec.labels)
    taker = Background(Reader(dict, "topic=t", transport=transport, block=True))
    assert taker.take(1) == [("t/one", 1)]

    def relabel(keep):
        transport.revision += 1
        journal.spec.labels.CopyFrom(labels)
        if not keep:
            del journal.spec.labels.labels[1]
        transport.signal()

    on_loop(relabel, keep=False)
    on_loop(fill, transport, "t/two", 2, topic="t")
    assert taker.take(1) == [("t/two", 2)]
    journal.content += line(3)
    on_loop(relabel, keep=True)
    assert taker.take(1) == [("t/one", 3)]
    taker.close()


def test_closing_ends_an_iteration_that_waits(transport):
    fill(transport, "a/journal", 1)
    taker = Background(Reader(dict, name="a/journal", transport=transport, block=True))
    taker.take(1)
    taker.close()
    with pytest.raises(ClosedError):
        next(iter(taker.reader))


def test_a_coroutine_that_waits_can_be_cancelled_and_go_on(transport, on_loop):
    journal = fill(transport, "a/journal", 1)

    async def read():
        reader = Reader(dict, name="a/journal", transport=transport, block=True)
        found = []

        async def take():
            async for envelope in reader:
                found.append(envelope.message["n"])
                if envelope.message["n"] == 2:
                    return

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(take(), 0.05)
        journal.content += line(2)
        on_loop(transport.signal)
        await asyncio.wait_for(take(), WAIT_S)
        await reader.aclose()
        return found

    assert asyncio.run(read()) == [1, 2]


def test_an_interrupt_loses_nothing(transport, on_loop):
    journal = fill(transport, "a/journal", 1)
    reader = Reader(dict, name="a/journal", transport=transport, block=True)
    found = []

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            found.extend(numbers(reader))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert reader.offsets == {"a/journal": 8}
    journal.content += line(2)
    on_loop(transport.signal)
    assert next(iter(reader)).message == {"n": 2}
    reader.close()


def test_a_reader_that_is_dropped_ends_its_reads(transport):
    fill(transport, "a/journal", 1)
    reader = Reader(dict, name="a/journal", transport=transport, block=True)
    for envelope in reader:
        assert envelope.message == {"n": 1}
        break
    task = reader._batches._fetcher._task
    del reader, envelope

    async def ended():
        gc.collect()
        _, late = await asyncio.wait([task], timeout=WAIT_S)
        assert not late

    run(ended())


def test_what_is_read_ahead_is_bounded(monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.fetcher.AHEAD_BYTES_MAX", 2000)
    transport = MemoryTransport(chunk_bytes=500)
    fill(transport, "a/journal", *range(1000))
    reader = Reader(dict, name="a/journal", transport=transport)
    iterator = iter(reader)
    assert next(iterator).message == {"n": 0}
    most = 0
    for _ in range(500):
        next(iterator)
        most = max(most, reader._batches._fetcher.queue.queued_bytes)
    assert most <= 2500
    assert len(list(iterator)) == 499


def test_a_forked_child_must_begin_its_own_reader(transport):
    fill(transport, "a/journal", 1, 2)
    reader = Reader(dict, name="a/journal", transport=transport)
    next(iter(reader))
    child = os.fork()
    if child == 0:
        try:
            next(iter(reader))
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert numbers(reader) == [2]
