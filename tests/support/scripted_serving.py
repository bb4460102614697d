"""A connection of a server whose calls do what a test says, without a socket."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from gazette_sdk.errors import CallError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.protocol.stream_calls import NOT_RUN
from gazette_sdk.protocol.stream_frames import PREFACE, Kind, Method, decode_status, encode_call
from gazette_sdk.server.metrics import CODES
from gazette_sdk.server.stream import (
    Answer,
    StartedCall,
    StreamCall,
    StreamConnection,
    StreamMethod,
)
from gazette_sdk.server.stream_server import StreamServer
from support.frame_feed import FrameFeed
from support.raw_stream import append_frames, head_of

__all__ = [
    "LIMIT_S",
    "SKIPPED",
    "TURNS",
    "Setting",
    "appending",
    "applying",
    "turns",
    "with_connection",
]

LIMIT_S = 10.0
TURNS = 12
NAMES = {number: name for name, number in CODES.items()}
SKIPPED = f"ABORTED {NOT_RUN}"


class Wire:
    """Stands for a transport; keeps what is written, decoded."""

    def __init__(self, connection: StreamConnection) -> None:
        self.frames: list[Any] = []
        self.writes = 0
        self._closing = False
        self._connection = connection
        self._decoder = FrameFeed()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def write(self, data: bytes) -> None:
        self.writes += 1
        self.frames += self._decoder.feed(data)

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    def is_reading(self) -> bool:
        return True

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def setsockopt(self, *_: Any, **__: Any) -> None:
        pass

    set_write_buffer_limits = pause_reading = resume_reading = setsockopt


class Setting:
    """A connection whose appends do what a test says.

    ``p/1`` is an append of the group ``p``. It is started as soon as it may be, unless it is one
    that ``declines``; then a task serves it in its turn. It waits for its ``result``. An append
    that is ``at_once`` is answered synchronously.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.served: list[str] = []
        self.ended: list[str] = []
        self.tasks: dict[str, Any] = {}
        self.groups: defaultdict[str, object] = defaultdict(object)
        self.results: defaultdict[str, asyncio.Future[bool]] = defaultdict(asyncio.Future)
        self.declines: set[str] = set()
        self.at_once: set[str] = set()
        self.slow: set[str] = set()
        self.rolled_back = asyncio.Event()
        self.server = StreamServer()
        self.append = StreamMethod(RPCS_BY_NAME["Append"], self._serve, self._answer_now)
        self.apply = StreamMethod(RPCS_BY_NAME["Apply"], self._serve)
        self.server.add([self.append, self.apply])
        self.before = self.meters()
        self.connection = StreamConnection(self.server)
        self.wire = Wire(self.connection)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        self.receive(PREFACE)

    def _answer_now(self, call: StreamCall, group: object | None) -> Any:
        name = pb.AppendRequest.FromString(call.request).journal
        mine = self.groups[name.partition("/")[0]]
        if name in self.declines or (group is not None and group is not mine):
            return None
        if name in self.at_once:
            if group is not None:
                return None
            self.ran.append(name)
            return Answer(name.encode())
        self.ran.append(name)
        self.tasks[name] = asyncio.get_running_loop().create_task(self._result(name))
        return StartedCall(self.tasks[name], mine)

    async def _serve(self, call: StreamCall) -> Answer:
        name = pb.AppendRequest.FromString(call.request).journal
        self.tasks[name] = asyncio.current_task()
        self.ran.append(name)
        self.served.append(name)
        return await self._result(name)

    async def _result(self, name: str) -> Answer:
        try:
            return Answer(name.encode(), success=await self.results[name])
        except asyncio.CancelledError:
            if name in self.slow:
                await self.rolled_back.wait()
            raise
        finally:
            self.ended.append(name)

    def meters(self) -> tuple[int, int]:
        """Calls begun and ended so far, of both methods."""
        meters = [self.append.meters, self.apply.meters]
        ended = sum(count for each in meters for _, count in each.codes())
        return sum(each.started for each in meters), ended

    def receive(self, *frames: bytes) -> None:
        data = b"".join(frames)
        room = memoryview(self.connection.get_buffer(len(data)))
        room[: len(data)] = data
        self.connection.buffer_updated(len(data))

    def receive_all(self, data: bytes) -> None:
        """Receive data of any length, as much at a time as there is room for."""
        while data:
            room = memoryview(self.connection.get_buffer(len(data)))
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.connection.buffer_updated(count)
            data = data[count:]

    async def send(self, *names: str, **head: Any) -> None:
        """Appends that arrive together."""
        self.receive(*(frame for name in names for frame in appending(name, **head)))
        await turns(TURNS)

    async def succeed(self, *names: str, success: bool = True) -> None:
        for name in names:
            self.results[name].set_result(success)
        await turns(TURNS)

    async def fail(self, name: str, error: Exception | None = None) -> None:
        self.results[name].set_exception(error or CallError("made to fail", code="UNAVAILABLE"))
        await turns(TURNS)

    def answers(self) -> list[str]:
        """What was answered: names of calls that have a response, or their statuses."""
        found, response = [], ""
        for frame in self.wire.frames:
            if frame.kind == Kind.MESSAGE:
                response = frame.payload.decode()
            elif frame.kind == Kind.STATUS:
                status = decode_status(frame.payload)
                code = f"{NAMES[status.code]} {status.kind}".strip()
                found.append(code if status.code else response)
        return found

    def is_left(self) -> bool:
        """Whether the client was told that the server goes."""
        return any(frame.kind == Kind.GOAWAY for frame in self.wire.frames)

    async def over(self) -> None:
        """The connection is gone, and nothing of it is left."""
        self.wire.abort()
        await turns(1)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*self.connection.serving.tasks, return_exceptions=True)
        await turns(2)
        assert all(task.done() for task in self.tasks.values())
        assert not self.connection.serving.tasks
        assert self.server.active == set()
        began, ended = (now - then for now, then in zip(self.meters(), self.before, strict=True))
        assert began == ended
        await self.server.stop(0)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def appending(name: str, **head: Any) -> list[bytes]:
    return append_frames(name, b"content", head=head_of(**head) if head else b"")


def applying(name: str) -> bytes:
    """A call of a method that is never answered synchronously."""
    return encode_call(Method.APPLY, pb.AppendRequest(journal=name).SerializeToString())


def with_connection(scenario: Any) -> None:
    async def whole() -> None:
        setting = Setting()
        await scenario(setting)
        await setting.over()

    asyncio.run(whole())
