"""A transport in memory that takes appends from plain code, too, and fails them as a test says."""

from __future__ import annotations

import asyncio
import threading
import time

from gazette_sdk.errors import CallError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import ANYWHERE
from gazette_sdk.transport.direct import DirectCall
from support.memory_transport import MemoryTransport

__all__ = ["DirectMemoryTransport"]


class DirectMemoryTransport(MemoryTransport):
    """Attributes for tests:

    direct_appends: (journal, content, name of the thread) of every direct append, in order.
    direct_faults: for the next direct appends, consumed one by one: a status; "refused" is not
        sent, "unsent" and "lost" fail after nothing or all was written, "late" and "late, lost"
        end only once ``let_end`` is set, "raises" meets a mistake of ours.
    direct_takes_s: what each takes.
    failures: what the way was told of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_direct = True
        self.direct_appends: list[tuple[str, bytes, str]] = []
        self.direct_faults: list[str | int | None] = []
        self.direct_takes_s = 0.0
        self.let_end = threading.Event()
        self.failures: list[Exception] = []
        self.learned = 0
        self.has_news = False

    async def append(self, requests, target=ANYWHERE):
        """As in memory, but not sooner than a caller can ask for its receipt."""
        await asyncio.sleep(0.001)
        return await super().append(requests, target)

    def direct(self, journal: str) -> _Way | None:
        return _Way(self, journal) if self.has_direct else None


class _Way:
    def __init__(self, transport: DirectMemoryTransport, journal: str) -> None:
        self.transport = transport
        self.journal = journal

    def append(self, content: bytes, timeout_s: float | None = None) -> DirectCall:
        memory = self.transport
        fault = memory.direct_faults.pop(0) if memory.direct_faults else None
        if fault == "refused":
            raise UnavailableError("nobody listens", journal=self.journal)
        if fault == "raises":
            raise ZeroDivisionError
        memory.direct_appends.append((self.journal, content, threading.current_thread().name))
        return _Call(memory, self.journal, content, fault)

    def failed(self, error: Exception) -> None:
        assert asyncio.get_running_loop()
        self.transport.failures.append(error)

    def check(self, response: pb.AppendResponse) -> bool:
        return self.transport.has_news

    def learn(self, response: pb.AppendResponse) -> None:
        assert asyncio.get_running_loop()
        self.transport.learned += 1


class _Call(DirectCall):
    def __init__(self, memory, journal, content, fault) -> None:
        self.memory = memory
        self.fault = fault
        self.ended = threading.Event()
        self.is_interrupted = False
        self.answer = pb.AppendResponse(status=fault if isinstance(fault, int) else pb.OK)
        kept = memory.journals[journal]
        if fault in {"unsent", "late, unsent"} or isinstance(fault, int):
            return
        begin = kept.end
        kept.content += content
        self.answer.commit.begin = begin
        self.answer.commit.end = kept.end
        self.answer.total_chunks = 1

    @property
    def over(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        if self.memory.direct_takes_s:
            time.sleep(self.memory.direct_takes_s)
        if isinstance(self.fault, str) and self.fault.startswith("late"):
            ends_at = None if timeout_s is None else time.monotonic() + timeout_s
            while not self.memory.let_end.wait(0.001) and not self.is_interrupted:
                if ends_at is not None and time.monotonic() > ends_at:
                    return False
        self.ended.set()
        return True

    async def finish(self) -> None:
        await asyncio.to_thread(self.memory.let_end.wait, 10)
        self.ended.set()

    def response(self) -> pb.AppendResponse:
        assert self.over
        if self.is_interrupted or self.fault in {"lost", "unsent", "late, lost", "late, unsent"}:
            raise UnavailableError("the answer was lost")
        if self.fault == "odd":
            raise CallError("ended without a response", code="INTERNAL")
        return self.answer

    def interrupt(self) -> None:
        self.is_interrupted = True

    def give_up(self, reason: str) -> None:
        self.is_interrupted = True
        self.ended.set()
