"""Several appends of a journal in flight over the stream wire: their order, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk import errors
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import CallBegan, CallRefused, HalfClosed, Item
from gazette_sdk.transport.append import appender as appender_module
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.append.queue import IN_FLIGHT_BYTES_MAX, IN_FLIGHT_MAX
from gazette_sdk.transport.stream import blocking
from gazette_sdk.transport.stream.blocking import BlockingClient
from gazette_sdk.transport.stream.wire import StreamTransport
from support.scripted_broker import append_ok, append_status, in_loop, no_pause, route_to, until
from support.scripted_stream import HangUpError, ScriptedStream

JOURNAL = "journal/a"
WAIT_S = 20.0
A = pb.AppendRequest(journal=JOURNAL)


@contextlib.asynccontextmanager
async def served(script, **options):
    """A service whose batches have one append each, over a scripted server."""
    options = {"pause": no_pause, "batch_bytes_max": 0} | options
    async with ScriptedStream(script) as server, StreamTransport(server.address) as transport:
        service = AppendService(transport, **options)
        try:
            yield service, server
        finally:
            await service.aclose()
            assert service.pending_bytes == 0


class Gated:
    """Takes appends as they come, and answers them when it is told to."""

    def __init__(self):
        self.calls = []
        self.answers = asyncio.Semaphore(0)
        self.end = 0

    async def __call__(self, peer):
        await peer.greet()
        answering = asyncio.create_task(self._answer(peer, waiting := asyncio.Queue()))
        try:
            while True:
                began, content = await peer.whole_append()
                self.calls.append((began, content))
                waiting.put_nowait((began.call, content))
        finally:
            answering.cancel()

    async def _answer(self, peer, waiting):
        while True:
            call, content = await waiting.get()
            await self.answers.acquire()
            begin, self.end = self.end, self.end + len(content)
            peer.answer(call, append_ok(begin, self.end))

    def contents(self):
        return [content for _, content in self.calls]


@in_loop
async def test_what_queues_is_sent_behind_what_is_in_flight_and_runs_only_after_its_success():
    gated = Gated()
    async with served(gated) as (service, server):
        appends = [await service.append(A, b"%d" % i) for i in range(4)]
        await until(lambda: len(gated.calls) == 4)
        assert gated.contents() == [b"0", b"1", b"2", b"3"]
        heads = [began.head.after_success for began, _ in gated.calls]
        assert heads == [False, True, True, True]
        assert not any(append.done() for append in appends)
        gated.answers.release()
        assert (await appends[0]).commit.begin == 0
        assert not appends[1].done()
        for _ in range(3):
            gated.answers.release()
        responses = await asyncio.gather(*appends)
        assert [response.commit.begin for response in responses] == [0, 1, 2, 3]
        assert len(server.peers) == 1
        await service.append(A, b"later")
        await until(lambda: len(gated.calls) == 5)
        assert not gated.calls[4][0].head.after_success
        gated.answers.release()
        await service.flush()


@in_loop
async def test_so_many_are_in_flight_and_no_more():
    gated = Gated()
    async with served(gated, batch_bytes_max=1 << 20) as (service, _):
        for i in range(IN_FLIGHT_MAX):
            await service.append(A, b"%d" % i)
            await until(lambda i=i: len(gated.calls) == i + 1)
        queued = [await service.append(A, b"x") for _ in range(5)]
        await asyncio.sleep(0.02)
        assert len(gated.calls) == IN_FLIGHT_MAX
        gated.answers.release()
        await until(lambda: len(gated.calls) == IN_FLIGHT_MAX + 1)
        assert gated.contents()[-1] == b"xxxxx"
        for _ in range(IN_FLIGHT_MAX):
            gated.answers.release()
        await asyncio.gather(*queued)


@in_loop
async def test_much_content_in_flight_keeps_others_back():
    gated = Gated()
    async with served(gated) as (service, _):
        large = await service.append(A, bytes(IN_FLIGHT_BYTES_MAX))
        small = await service.append(A, b"x")
        await until(lambda: gated.calls)
        await asyncio.sleep(0.02)
        assert len(gated.calls) == 1
        gated.answers.release()
        await large
        gated.answers.release()
        await small


@pytest.mark.parametrize(
    "request_",
    [
        pb.AppendRequest(journal=JOURNAL, offset=1),
        pb.AppendRequest(
            journal=JOURNAL,
            union_registers=pb.LabelSet(labels=[pb.Label(name="name", value="value")]),
        ),
    ],
    ids=["offset", "registers"],
)
@in_loop
async def test_an_append_with_preconditions_is_alone_in_flight(request_):
    gated = Gated()
    async with served(gated) as (service, _):
        appends = [
            await service.append(A, b"1"),
            await service.append(request_, b"2"),
            await service.append(A, b"3"),
        ]
        for count in (1, 2, 3):
            await until(lambda count=count: len(gated.calls) == count)
            await asyncio.sleep(0.01)
            assert len(gated.calls) == count
            gated.answers.release()
        await asyncio.gather(*appends)
        assert gated.contents() == [b"1", b"2", b"3"]
        assert not any(began.head.after_success for began, _ in gated.calls)


@in_loop
async def test_a_terminal_status_fails_all_behind_it_and_they_were_not_written():
    async def script(peer):
        await peer.greet()
        calls = [await peer.whole_append() for _ in range(3)]
        response = append_status(pb.JOURNAL_NOT_FOUND)
        number = calls[0][0].call
        peer.raw(peer.calls.answer(number, response.SerializeToString(), success=False))
        for began, _ in calls[1:]:
            assert peer.calls.skips(began.call)
            peer.raw(peer.calls.skip(began.call))
        await peer.hang_up()

    async with served(script) as (service, _):
        appends = [await service.append(A, b"%d" % i) for i in range(3)]
        for append in appends:
            with pytest.raises(errors.JournalNotFoundError):
                await append
        with pytest.raises(errors.JournalNotFoundError):
            await (await service.append(A, b"late"))


@in_loop
async def test_closing_gives_up_what_is_in_flight():
    gated = Gated()
    async with served(gated) as (service, _):
        appends = [await service.append(A, b"%d" % i) for i in range(4)]
        await until(lambda: len(gated.calls) == 4)
        await service.aclose()
        for append in appends:
            with pytest.raises(errors.ClosedError):
                await append


@in_loop
async def test_closing_at_once_gives_up_what_was_never_begun():
    async with served(Gated()) as (service, _):
        append = await service.append(A, b"content")
        await service.aclose()  # before the loop had a turn
        with pytest.raises(errors.ClosedError):
            await append


@in_loop
async def test_a_recovery_waits_for_no_writer():
    arrived, held_back = asyncio.Event(), asyncio.Event()

    async def script(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        arrived.set()
        await held_back.wait()
        response = append_status(pb.NOT_JOURNAL_PRIMARY_BROKER)
        peer.raw(peer.calls.answer(began.call, response.SerializeToString(), success=False))
        began, content = await peer.whole_append()
        peer.answer(began.call, append_ok(0, len(content)))
        await peer.hang_up()

    async with served(script) as (service, _):
        first = await service.append(A, b"first")
        await arrived.wait()
        held = await service.start(A)  # and doesn't release
        held_back.set()
        await first
        held.require(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            held.release()


# --------------------------------------------------------------- failures of all kinds


class Fate(enum.Enum):
    """What a server does with an append."""

    WRITTEN = "written and answered"
    REFUSED = "refused: another broker is primary"
    UNSURE = "written, and answered with an error"
    LOST_BEFORE = "the connection is lost before it is written"
    LOST_AFTER = "the connection is lost after it was written"
    LOST_LATE = "the connection is lost, and the server goes on for a while"
    LEAVING = "GOAWAY, then written and answered"


class Journal:
    """Content of a journal behind a server to whose calls happens what is drawn.

    Args:
        fates: of the next appends; later ones are written.
        names_route: responses name the server as the primary.
    """

    def __init__(self, fates, *, names_route=False):
        self.names_route = names_route
        self.address = ""
        self.content = b""
        self.fates = deque(fates)
        self.late: deque[bytes] = deque()

    def write(self, content):
        begin = len(self.content)
        self.content += content
        route = route_to(self.address) if self.names_route else None
        return append_ok(begin, len(self.content), route)

    async def __call__(self, peer):
        await peer.greet()
        while True:
            began, content = await self._whole_append(peer)
            if self.late:
                self.write(self.late.popleft())
            if peer.calls.skips(began.call):
                peer.raw(peer.calls.skip(began.call))
                continue
            fate = self.fates.popleft() if self.fates else Fate.WRITTEN
            if fate is Fate.WRITTEN:
                peer.answer(began.call, self.write(content))
            elif fate is Fate.LEAVING:
                peer.raw(peer.calls.goaway("the server stops"))
                peer.answer(began.call, self.write(content))
            elif fate is Fate.REFUSED:
                response = append_status(pb.NOT_JOURNAL_PRIMARY_BROKER).SerializeToString()
                peer.raw(peer.calls.answer(began.call, response, success=False))
            elif fate is Fate.UNSURE:
                self.write(content)
                peer.raw(peer.calls.status(began.call, 14, "a replica is gone"))
            else:
                if fate is Fate.LOST_AFTER:
                    self.write(content)
                elif fate is Fate.LOST_LATE:
                    self.late.append(content)
                    await self._take_what_has_come(peer)
                peer.writer.transport.abort()
                return

    async def _whole_append(self, peer):
        """The next append. What crosses our GOAWAY is refused as it is its turn."""
        began, content = None, b""
        while True:
            event = await peer.event()
            if isinstance(event, CallRefused):
                peer.raw(peer.calls.status(*event))
            elif isinstance(event, CallBegan):
                began, content = event, b""
            elif isinstance(event, Item):
                content += event.payload
            elif isinstance(event, HalfClosed):
                return began, content

    async def _take_what_has_come(self, peer):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.003):
                while True:
                    self.late.append((await peer.whole_append())[1])


def first_appearances(content):
    seen = dict.fromkeys(re.findall(rb"\[(\d+)\]", content))
    return [int(number) for number in seen]


@settings(max_examples=150, deadline=None)
@given(
    fates=st.lists(st.sampled_from(Fate), max_size=24),
    sizes=st.lists(st.sampled_from([0, 0, 0, 70_000]), min_size=1, max_size=24),
    turns=st.lists(st.integers(0, 3), min_size=24, max_size=24),
)
def test_whatever_fails_content_appears_first_in_order_and_what_is_acknowledged_is_there(
    fates, sizes, turns
):
    @in_loop
    async def run():
        journal = Journal(fates)
        async with served(journal) as (service, _):
            appends = []
            for number, size in enumerate(sizes):
                content = b"[%d]" % number + b"." * size
                appends.append((content, await service.append(A, content)))
                for _ in range(turns[number]):
                    await asyncio.sleep(0)
            for content, append in appends:
                commit = (await append).commit
                assert journal.content[commit.begin : commit.end] == content
        while journal.late:
            journal.write(journal.late.popleft())
        assert first_appearances(journal.content) == list(range(len(sizes)))

    run()


STEPS = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 40_000]), st.sampled_from(["wait", "poll", "", "pause"])),
    min_size=4,
    max_size=24,
)


def test_the_same_holds_for_a_thread_that_appends_inline(monkeypatch):
    monkeypatch.setattr(appender_module, "PREPARE_S", 0.0)
    inline = note_inline_appends(monkeypatch)
    examples = []

    @settings(max_examples=60, deadline=None)
    @given(fates=st.lists(st.sampled_from([Fate.WRITTEN, *Fate]), max_size=16), steps=STEPS)
    def law(fates, steps):
        examples.append(steps)
        append_from_a_thread(Journal([Fate.WRITTEN] * 2 + fates, names_route=True), steps)

    law()
    assert len(inline) > len(examples) // 4


def note_inline_appends(monkeypatch):
    """Return a list of the inline appends that are sent from now on."""
    noted = []
    send = BlockingClient.append

    def noting(*arguments):
        call = send(*arguments)
        if call is not None:
            noted.append(call)
        return call

    monkeypatch.setattr(BlockingClient, "append", noting)
    return noted


@in_loop
async def append_from_a_thread(journal, steps, script=None):
    """Append one append for each step; check that what is acknowledged is there, and the order."""
    async with served(script or journal) as (service, server):
        journal.address = server.address
        appender = service.appender(JOURNAL)

        def use():
            appends = []
            for number, (size, step) in enumerate(steps):
                content = b"[%d]" % number + b"." * size
                append = appender.append(content)
                appends.append((content, append))
                if number < 2:  # the primary is found, and connected to
                    assert append.wait(WAIT_S)
                    for _ in range(4 * number):
                        with contextlib.suppress(errors.UnavailableError):
                            appender._route.prepare_inline()
                elif step == "wait":
                    assert append.wait(WAIT_S)
                elif step == "poll":
                    append.poll()
                elif step == "pause":
                    time.sleep(0.001)
            for content, append in appends:
                assert append.wait(WAIT_S)
                commit = append.result().commit
                assert journal.content[commit.begin : commit.end] == content

        await asyncio.to_thread(use)
    while journal.late:
        journal.write(journal.late.popleft())
    assert first_appearances(journal.content) == list(range(len(steps)))


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(1, 400), max_size=8), count=st.integers(1, 20))
def test_a_connection_that_is_cut_at_any_byte_loses_nothing(cuts, count):
    @in_loop
    async def run():
        journal = Journal([])
        cuts_left = deque(cuts)

        async def script(peer):
            if cuts_left:
                peer.reader = _Cut(peer, cuts_left.popleft())
            await journal(peer)

        async with served(script) as (service, _):
            appends = [await service.append(A, b"[%d]" % number) for number in range(count)]
            await asyncio.gather(*appends)
        assert first_appearances(journal.content) == list(range(count))

    run()


def test_the_same_holds_where_a_thread_appends_inline(monkeypatch):
    monkeypatch.setattr(appender_module, "PREPARE_S", 0.0)
    monkeypatch.setattr(blocking, "REDIAL_AFTER_S", 0.01)
    inline = note_inline_appends(monkeypatch)
    examples = []

    @settings(max_examples=60, deadline=None)
    @given(cuts=st.lists(st.integers(60, 400), max_size=8), steps=STEPS)
    def law(cuts, steps):
        examples.append(steps)
        journal = Journal([], names_route=True)
        cuts_left = deque(cuts)

        async def script(peer):
            if len(journal.content) > 5 and cuts_left:
                peer.reader = _Cut(peer, cuts_left.popleft())
            await journal(peer)

        append_from_a_thread(journal, [(0, step) for _, step in steps], script)

    law()
    assert len(inline) > len(examples) // 4


class _Cut:
    """Reads so many bytes of a connection, and then loses it."""

    def __init__(self, peer, length):
        self._peer, self._reader, self._left = peer, peer.reader, length

    async def read(self, _size):
        data = await self._reader.read(max(1, min(self._left, 50)))
        self._left -= len(data)
        if self._left <= 0:
            self._peer.writer.transport.abort()
            raise HangUpError
        return data
