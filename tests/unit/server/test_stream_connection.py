"""When calls of a connection are served: in the very callback that received them, if they can."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gazette_sdk.broker.api.stream import stream_methods
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    PREFACE,
    Kind,
    StatusLine,
    decode_status,
)
from gazette_sdk.server.outcomes import CODES
from gazette_sdk.server.stream_connection import StreamConnection
from gazette_sdk.server.stream_server import StreamServer
from support.frame_feed import FrameFeed
from support.raw_stream import append_frames, head_of, read_call
from support.scripted_journals import ScriptedJournals


class Socket:
    def setsockopt(self, *_: Any) -> None:
        pass


class Transport:
    """Keeps what is written, decoded."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.writes = 0
        self.aborted = False
        self._decoder = FrameFeed()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return Socket() if name == "socket" else default

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted

    def is_reading(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        self.writes += 1
        self.frames += self._decoder.feed(data)

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def can_write_eof(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True

    def statuses(self) -> list[StatusLine]:
        return [decode_status(frame.payload) for frame in self.frames if frame.kind == Kind.STATUS]


class Setting:
    """A connection whose task waits for calls."""

    def __init__(self, journals: ScriptedJournals) -> None:
        server = StreamServer()
        server.add(stream_methods(journals))
        self.server = server
        self.transport = Transport()
        self.connection = StreamConnection(server)
        self.loop = asyncio.get_running_loop()

    async def begun(self) -> Setting:
        self.connection.connection_made(self.transport)
        self.receive(PREFACE, *append_frames("a/b", b"first"))
        await turns(3)
        assert self.transport.statuses() == [StatusLine(0)]
        self.transport.frames.clear()
        return self

    def receive(self, *frames: bytes) -> None:
        data = b"".join(frames)
        room = memoryview(self.connection.get_buffer(len(data)))
        room[: len(data)] = data
        self.connection.buffer_updated(len(data))

    async def in_callback(self, *frames: bytes) -> list[StatusLine]:
        """What was answered when the callback that received frames returned."""
        done: asyncio.Future[list[StatusLine]] = self.loop.create_future()

        def callback() -> None:
            self.receive(*frames)
            done.set_result(self.transport.statuses())

        self.loop.call_soon(callback)
        return await done

    async def end(self) -> None:
        self.connection.connection_lost(None)
        await turns(5)
        task = self.connection.serving.task
        assert task is not None
        assert task.done()
        await self.server.stop(0)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def with_connection(journals: ScriptedJournals, scenario: Any) -> None:
    async def whole() -> None:
        setting = await Setting(journals).begun()
        await scenario(setting)
        await setting.end()

    asyncio.run(whole())


def test_calls_that_need_not_wait_are_answered_at_once_and_in_order():
    async def scenario(setting: Setting) -> None:
        appends = [frame for n in range(5) for frame in append_frames("a/b", b"%d" % n)]
        assert await setting.in_callback(*appends) == [StatusLine(0)] * 5
        assert [items[1] for items in journals.appended[1:]] == [b"%d" % n for n in range(5)]
        assert setting.server.active == set()

    journals = ScriptedJournals()
    with_connection(journals, scenario)


def test_a_call_that_fails_at_once_is_answered_at_once():
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        async def fail(*_: Any) -> pb.AppendResponse:
            raise RuntimeError("bug")

        journals.on_append = fail
        statuses = await setting.in_callback(
            *append_frames("a/b", b"1"), *append_frames("a/b", b"2", head=head_of(timeout_ms=1000))
        )
        assert [status.code for status in statuses] == [CODES["UNKNOWN"]] * 2
        journals.on_append = journals.collect
        assert len(await setting.in_callback(*append_frames("a/b", b"3"))) == 3

    with_connection(journals, scenario)


def test_frames_that_a_task_hands_over_are_served_by_the_connections_own():
    async def scenario(setting: Setting) -> None:
        setting.receive(*append_frames("a/b", b"1"))
        assert not setting.transport.frames
        await turns(3)
        assert setting.transport.statuses() == [StatusLine(0)]

    with_connection(ScriptedJournals(), scenario)


class Held:
    """Appends that note in whose name they run, and wait until they are let go."""

    def __init__(self, journals: ScriptedJournals) -> None:
        self.tasks: list[Any] = []
        self.go = asyncio.Event()
        self.ended: list[str] = []
        self.journals = journals

    async def __call__(self, requests: Any, call: Any) -> pb.AppendResponse:
        self.tasks.append(asyncio.current_task())
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            await asyncio.sleep(0)
            self.ended.append("rolled back")
            raise
        self.tasks.append(asyncio.current_task())
        self.ended.append("done")
        return await self.journals.collect(requests, call)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_call_that_waits_is_gone_on_with_by_the_task(late):
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        held = journals.on_append = Held(journals)
        assert await setting.in_callback(*append_frames("a/b", b"1")) == []
        await turns(late)
        held.go.set()
        await turns(5)
        assert setting.transport.statuses() == [StatusLine(0)]
        assert held.tasks == [setting.connection.serving.task] * 2
        assert setting.server.active == set()
        assert len(await setting.in_callback(*append_frames("a/b", b"2"))) == 2

    with_connection(journals, scenario)


@pytest.mark.parametrize("late", [False, True])
def test_a_call_is_aborted_also_before_the_task_goes_on_with_it(late):
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        held = journals.on_append = Held(journals)
        if late:
            await setting.in_callback(*append_frames("a/b", b"1"))
            await turns(3)
            await setting.in_callback(ABORT_FRAME)
        else:
            done = setting.loop.create_future()

            def callback() -> None:  # both in one turn: the task did not run in between
                setting.receive(*append_frames("a/b", b"1"))
                setting.receive(ABORT_FRAME)
                done.set_result(None)

            setting.loop.call_soon(callback)
            await done
        await turns(5)
        assert held.ended == ["cancelled", "rolled back"]
        assert [status.code for status in setting.transport.statuses()] == [CODES["CANCELLED"]]
        journals.on_append = journals.collect
        assert len(await setting.in_callback(*append_frames("a/b", b"2"))) == 2

    with_connection(journals, scenario)


@pytest.mark.parametrize("late", [False, True])
def test_a_connection_lost_ends_the_call_also_before_the_task_goes_on_with_it(late):
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        held = journals.on_append = Held(journals)
        done = setting.loop.create_future()

        def callback() -> None:
            setting.receive(*append_frames("a/b", b"1"))
            if not late:
                setting.connection.connection_lost(None)
            done.set_result(None)

        setting.loop.call_soon(callback)
        await done
        if late:
            await turns(3)
            setting.connection.connection_lost(None)
        await turns(5)
        assert held.ended == ["cancelled", "rolled back"]
        assert setting.transport.statuses() == []
        assert setting.server.active == set()

    with_connection(journals, scenario)


def test_a_deadline_is_held_for_calls_that_wait():
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        held = journals.on_append = Held(journals)
        head = head_of(timeout_ms=5)
        assert await setting.in_callback(*append_frames("a/b", b"1", head=head)) == []
        async with asyncio.timeout(10):
            while not setting.transport.statuses():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
        assert held.ended == ["cancelled", "rolled back"]
        assert setting.transport.statuses()[0].code == CODES["DEADLINE_EXCEEDED"]

    with_connection(journals, scenario)


def test_metadata_of_a_read_leaves_with_its_content_by_one_write_or_before_a_wait():
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        more = asyncio.Event()

        async def reading(_request: Any, _call: Any) -> Any:
            yield pb.ReadResponse(offset=1)
            yield b"content"
            yield pb.ReadResponse(offset=2)
            await more.wait()
            yield b"more"

        journals.on_read = reading
        writes = setting.transport.writes
        await setting.in_callback(read_call("a/b"))
        kinds = [frame.kind for frame in setting.transport.frames]
        assert kinds == [Kind.MESSAGE, Kind.CONTENT, Kind.MESSAGE]
        assert setting.transport.writes == writes + 2
        more.set()
        await turns(5)
        assert setting.transport.statuses() == [StatusLine(0)]

    with_connection(journals, scenario)
