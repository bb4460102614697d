"""Calls of a connection, from received bytes to written bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gazette_sdk.broker.api.fronts import stream_methods
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    PREFACE,
    Kind,
    StatusLine,
    decode_status,
    decode_text,
)
from gazette_sdk.server.metrics import CODES
from gazette_sdk.server.stream import StreamConnection
from gazette_sdk.server.stream_server import StreamServer
from support.frame_feed import FrameFeed
from support.raw_stream import append_frames, head_of, read_call
from support.scripted_journals import FileSpan, ScriptedJournals


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
        while data:
            room = memoryview(self.connection.get_buffer(len(data)))
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.connection.buffer_updated(count)
            data = data[count:]

    async def receive_soon(self, *frames: bytes) -> list[StatusLine]:
        """Receive frames, and return the statuses that were sent some turns later."""
        self.receive(*frames)
        await turns(5)
        return self.transport.statuses()

    async def end(self) -> None:
        self.connection.connection_lost(None)
        await turns(5)
        assert not self.connection.serving.tasks
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


def test_a_frame_may_take_the_time_of_the_least_append_rate():
    async def scenario(setting: Setting) -> None:
        call, content, end = append_frames("a/b", bytes(1 << 20))
        for _ in range(2):  # each frame has its own time
            setting.receive(call, content[:1000])
            for position in range(1000, 1036):
                setting.connection.tick()
                setting.receive(content[position : position + 1])
            assert await setting.receive_soon(content[1036:], end) == [StatusLine(0)]
            setting.transport.frames.clear()
        setting.receive(call, content[:1000])
        for position in range(1000, 1037):
            setting.connection.tick()
            setting.receive(content[position : position + 1])
        (goaway,) = setting.transport.frames
        assert decode_text(goaway.payload).startswith("a frame was not complete 36 s after")

    with_connection(ScriptedJournals(), scenario)


def test_a_call_that_fails_is_answered_with_its_status():
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        async def fail(*_: Any) -> pb.AppendResponse:
            raise RuntimeError("bug")

        journals.on_append = fail
        statuses = await setting.receive_soon(
            *append_frames("a/b", b"1"), *append_frames("a/b", b"2", head=head_of(timeout_ms=1000))
        )
        assert [status.code for status in statuses] == [CODES["UNKNOWN"]] * 2
        journals.on_append = journals.collect
        assert len(await setting.receive_soon(*append_frames("a/b", b"3"))) == 3

    with_connection(journals, scenario)


class Held:
    """Appends that wait until a test lets them go."""

    def __init__(self, journals: ScriptedJournals) -> None:
        self.go = asyncio.Event()
        self.ended: list[str] = []
        self.journals = journals

    async def __call__(self, requests: Any, call: Any) -> pb.AppendResponse:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            await asyncio.sleep(0)
            self.ended.append("rolled back")
            raise
        self.ended.append("done")
        return await self.journals.collect(requests, call)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_call_is_aborted_also_before_its_first_step(is_begun):
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        held = journals.on_append = Held(journals)
        setting.receive(*append_frames("a/b", b"1"))
        await turns(3 * is_begun)
        statuses = await setting.receive_soon(ABORT_FRAME)
        assert held.ended == ["cancelled", "rolled back"] * is_begun
        assert [status.code for status in statuses] == [CODES["CANCELLED"]]
        journals.on_append = journals.collect
        assert len(await setting.receive_soon(*append_frames("a/b", b"2"))) == 2

    with_connection(journals, scenario)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_lost_connection_ends_the_call_also_before_its_first_step(is_begun):
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        held = journals.on_append = Held(journals)
        setting.receive(*append_frames("a/b", b"1"))
        await turns(3 * is_begun)
        setting.connection.connection_lost(None)
        await turns(5)
        assert held.ended == ["cancelled", "rolled back"] * is_begun
        assert setting.transport.statuses() == []
        assert setting.server.active == set()

    with_connection(journals, scenario)


def test_a_call_that_waits_ends_at_its_deadline():
    journals = ScriptedJournals()

    async def scenario(setting: Setting) -> None:
        held = journals.on_append = Held(journals)
        head = head_of(timeout_ms=5)
        assert await setting.receive_soon(*append_frames("a/b", b"1", head=head)) == []
        async with asyncio.timeout(10):
            while not setting.transport.statuses():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
        assert held.ended == ["cancelled", "rolled back"]
        assert setting.transport.statuses()[0].code == CODES["DEADLINE_EXCEEDED"]

    with_connection(journals, scenario)


def test_metadata_of_local_content_leaves_with_it_by_one_write(tmp_path):
    journals = ScriptedJournals()
    (tmp_path / "spool").write_bytes(b"content")

    async def scenario(setting: Setting) -> None:
        more = asyncio.Event()
        with (tmp_path / "spool").open("rb") as file:

            async def reading(_request: Any, _call: Any) -> Any:
                yield FileSpan(file.fileno(), 0, 7, pb.ReadResponse(offset=1))
                yield pb.ReadResponse(offset=2)
                await more.wait()
                yield b"more"

            journals.on_read = reading
            writes = setting.transport.writes
            await setting.receive_soon(read_call("a/b"))
            kinds = [frame.kind for frame in setting.transport.frames]
            assert kinds == [Kind.MESSAGE, Kind.CONTENT, Kind.MESSAGE]
            assert setting.transport.writes == writes + 2
            more.set()
            await turns(5)
            assert setting.transport.statuses() == [StatusLine(0)]

    with_connection(journals, scenario)
