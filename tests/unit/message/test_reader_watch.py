"""Committed reading of journals that come, go, and come again."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

import pytest

from gazette_sdk import Reader
from gazette_sdk.errors import ClosedError, OffsetNotYetAvailableError
from gazette_sdk.protocol import broker_pb2 as pb
from support.memory_transport import MemoryTransport
from support.written_messages import History

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

    def take(self, count: int) -> list:
        return [self.found.get(timeout=WAIT_S) for _ in range(count)]

    def close(self) -> None:
        self.reader.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def transport():
    return MemoryTransport()


def append(transport: MemoryTransport, history: History) -> None:
    """What was written to the history since it was appended last."""
    journal = transport.journals[history.journal]
    journal.content += history.content[len(journal.content) :]
    transport.signal()


def create(transport: MemoryTransport, history: History) -> None:
    transport.create(history.journal, topic="t")
    append(transport, history)


def relabel(transport: MemoryTransport, name: str, topic: str) -> None:
    """The journal stays the same, and matches the selector or does not."""
    for label in transport.journals[name].spec.labels.labels:
        if label.name == "topic":
            label.value = topic
    transport.revision += 1
    transport.signal()


def test_a_journal_that_appears_is_read_from_its_begin(transport, on_loop):
    one, two = History("t/one"), History("t/two")
    one.outside(1)
    on_loop(create, transport, one)
    taker = Background(Reader(dict, "topic=t", transport=transport, block=True, offsets="end"))
    one.outside(1)
    on_loop(append, transport, one)
    two.pending(1)
    two.ack(1)
    on_loop(create, transport, two)
    found = taker.take(1)
    while found[-1] != ("t/two", 0):
        found += taker.take(1)
    taker.close()
    assert set(taker.reader.checkpoint().offsets) == {"t/one", "t/two"}


def test_a_journal_that_is_gone_for_a_while_keeps_its_open_transactions(transport, on_loop):
    one, two = History("t/one"), History("t/two")
    one.pending(1)
    one.outside(2)
    on_loop(create, transport, one)
    taker = Background(Reader(dict, "topic=t", transport=transport, block=True))
    assert taker.take(1) == [("t/one", 1)]
    on_loop(relabel, transport, "t/one", "other")
    two.outside(1)
    on_loop(create, transport, two)
    assert taker.take(1) == [("t/two", 0)]
    one.ack(1)
    one.again(1, 2)
    on_loop(append, transport, one)
    on_loop(relabel, transport, "t/one", "t")
    assert taker.take(1) == [("t/one", 0)]
    one.outside(2)
    on_loop(append, transport, one)
    assert taker.take(1) == [("t/one", 4)]
    taker.close()


@pytest.mark.parametrize("between", [False, True], ids=["at once", "after a while"])
def test_a_journal_that_was_created_anew_is_another_one(transport, on_loop, between):
    """The same producer begins again, with clocks which were seen in the old one."""
    old, new, two = History("t/one"), History("t/one"), History("t/two")
    old.outside(1)
    old.pending(1)
    on_loop(create, transport, old)
    on_loop(create, transport, two)
    taker = Background(Reader(dict, "topic=t", transport=transport, block=True))
    assert taker.take(1) == [("t/one", 0)]
    new.outside(1)
    new.pending(1)
    new.ack(1)

    def recreate() -> None:
        transport.delete("t/one")
        create(transport, new)

    if between:
        on_loop(transport.delete, "t/one")
        two.outside(1)
        on_loop(append, transport, two)
        assert taker.take(1) == [("t/two", 0)]
        on_loop(create, transport, new)
    else:
        on_loop(recreate)
    assert taker.take(2) == [("t/one", 0), ("t/one", 1)]
    taker.close()
    assert taker.reader.checkpoint().offsets["t/one"] == len(new.content)


def test_reading_on_notices_that_a_journal_was_created_anew(transport):
    old, new = History("t/one"), History("t/one")
    for _ in range(5):
        old.outside(1)
    create(transport, old)
    reader = Reader(dict, "topic=t", transport=transport)
    assert [envelope.message["n"] for envelope in reader] == list(range(5))
    transport.delete("t/one")
    new.outside(1)
    create(transport, new)
    assert [envelope.message["n"] for envelope in reader] == [0]
    assert reader.offsets == {"t/one": len(new.content)}


def test_a_replay_of_a_blocking_reader_ends(transport, on_loop):
    one = History("t/one")
    one.pending(1)
    one.outside(2)
    on_loop(create, transport, one)
    taker = Background(Reader(dict, "topic=t", transport=transport, block=True, ring_size=1))
    assert taker.take(1) == [("t/one", 1)]
    one.ack(1)
    one.outside(2)
    on_loop(append, transport, one)
    assert taker.take(2) == [("t/one", 0), ("t/one", 3)]
    taker.close()


def test_closing_ends_a_reader_that_waits_for_a_replay(transport, on_loop):
    one = History("t/one")
    one.pending(1)
    one.outside(2)
    on_loop(create, transport, one)
    read = transport.read
    held = threading.Event()

    async def hold(request, target=None):
        if request.end_offset:
            held.set()
            await transport.until(lambda: transport.closed)
        async for item in read(request):
            yield item

    transport.read = hold
    taker = Background(Reader(dict, "topic=t", transport=transport, block=True, ring_size=1))
    assert taker.take(1) == [("t/one", 1)]
    one.ack(1)
    on_loop(append, transport, one)
    assert held.wait(WAIT_S)
    taker.close()
    assert taker.found.empty()
    state = next(s for s in taker.reader.checkpoint().producers if s.producer[-1] == 1)
    assert state.begin == 0


def test_a_replay_that_fails_says_what_was_read(transport):
    one = History("t/one")
    one.pending(1)
    one.outside(2)
    one.ack(1)
    create(transport, one)
    read = transport.read

    async def refuse(request, target=None):
        if request.end_offset:
            yield pb.ReadResponse(status=pb.NOT_ALLOWED, header=transport._header())
            return
        async for item in read(request):
            yield item

    transport.read = refuse
    reader = Reader(dict, "topic=t", transport=transport, ring_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gazette_sdk.message.fetcher.FAILING_MAX_S", 0.0)
        with pytest.raises(Exception, match="NOT_ALLOWED") as caught:
            list(reader)
    assert "read again" in caught.value.__notes__[0]


def test_a_journal_that_is_deleted_before_its_replay_ends_no_other(transport, on_loop):
    one, two = History("t/one"), History("t/two")
    one.pending(1)
    one.outside(2)
    on_loop(create, transport, one)
    on_loop(create, transport, two)
    read = transport.read

    async def vanish(request, target=None):
        if request.end_offset:
            yield pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND, header=transport._header())
            return
        async for item in read(request):
            yield item

    transport.read = vanish
    taker = Background(Reader(dict, "topic=t", transport=transport, block=True, ring_size=1))
    assert taker.take(1) == [("t/one", 1)]
    one.ack(1)
    one.outside(2)
    on_loop(append, transport, one)
    assert taker.take(1) == [("t/one", 3)]
    two.outside(1)
    on_loop(append, transport, two)
    assert taker.take(1) == [("t/two", 0)]
    taker.close()
    assert taker.reader.checkpoint().offsets == {
        "t/one": len(one.content),
        "t/two": len(two.content),
    }


def test_a_replay_that_ends_early_delivers_no_half_of_a_transaction(transport):
    one = History("t/one")
    one.pending(1)
    one.pending(1)
    one.outside(2)
    one.ack(1)
    create(transport, one)
    read = transport.read
    begin = one.messages[1].begin

    async def cut_short(request, target=None):
        if request.end_offset:
            yield pb.ReadResponse(status=pb.OK, header=transport._header())
            yield bytes(one.content[:begin])
            yield pb.ReadResponse(
                status=pb.OFFSET_NOT_YET_AVAILABLE,
                header=transport._header(),
                offset=begin,
                write_head=begin,
            )
            return
        async for item in read(request):
            yield item

    transport.read = cut_short
    reader = Reader(dict, "topic=t", transport=transport, ring_size=1)
    with pytest.raises(OffsetNotYetAvailableError, match="read again") as caught:
        list(reader)
    assert caught.value.offset == begin
