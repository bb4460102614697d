"""A transport in memory that takes appends from plain code, too, and fails them as a test says."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable

from gazette_sdk.errors import CallError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.direct import DirectCall
from gazette_sdk.transport.base import ANYWHERE
from support.memory_transport import MemoryTransport

__all__ = ["JOURNAL", "WAIT_S", "DirectMemoryTransport"]

WAIT_S = 10.0
JOURNAL = "a/journal"


class DirectMemoryTransport(MemoryTransport):
    """Attributes for tests:

    direct_appends: (journal, content, name of the thread) of every direct append, in order.
    direct_calls: what these returned.
    direct_faults: for the next direct appends, consumed one by one:

        - a status is answered, and nothing was written;
        - "refused" cannot be sent; "raises" meets a mistake of ours instead; "interrupted" and
          "interrupted, sent" end in an interruption, before or after it was sent;
        - "unsent" and "lost" fail after nothing or all was written; "odd" after nothing, too;
        - "broken" has failed before its caller goes on, after nothing was written;
        - "late", "late, unsent" and "late, lost" are the same, but neither written nor answered
          before ``let_end`` is set;
        - "wait interrupted" is interrupted while its answer is waited for.

    direct_takes_s: after that time each is answered. It is written at once.
    has_connection: else there is none for an append until :meth:`_Way.prepare` opens one.
    prepare_fault: what that raises.
    prepared: names of the threads which prepared.
    failures: what ways were told of.
    learned: how many routes they were told.
    has_news: whether responses tell another route.
    looked_up: how often a way was looked up.
    meanwhile: called where somebody begins to wait for an answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_direct = True
        self.direct_appends: list[tuple[str, bytes, str]] = []
        self.direct_calls: list[_Call] = []
        self.direct_faults: list[str | int | None] = []
        self.direct_takes_s = 0.0
        self.let_end = threading.Event()
        self.has_connection = True
        self.prepare_fault: Exception | None = None
        self.prepared: list[str] = []
        self.failures: list[Exception] = []
        self.learned = 0
        self.has_news = False
        self.looked_up = 0
        self.meanwhile: Callable[[], None] | None = None
        self._ways: dict[str, _Way] = {}

    async def append(self, requests, target=ANYWHERE):
        """As in memory, but not sooner than a caller can ask for its receipt."""
        await asyncio.sleep(0.001)
        return await super().append(requests, target)

    def direct(self, journal: str) -> _Way | None:
        self.looked_up += 1
        return self._ways.setdefault(journal, _Way(self, journal)) if self.has_direct else None

    def messages(self, journal: str = JOURNAL) -> list[dict[str, object]]:
        """What was published under a number of at least 0, in order, repetitions and all."""
        found = [json.loads(line) for line in self.content_of(journal).splitlines()]
        return [message for message in found if message.get("n", -1) >= 0]

    def numbers(self, journal: str = JOURNAL) -> list[object]:
        """The numbers of :meth:`messages`."""
        return [message["n"] for message in self.messages(journal)]

    def distinct(self, journal: str = JOURNAL) -> list[dict[str, object]]:
        """The messages without their repetitions, as readers see them."""
        found: dict[object, dict[str, object]] = {}
        for message in self.messages(journal):
            found.setdefault(message["UUID"], message)
        return list(found.values())


_FAILING = ("lost", "unsent", "broken")


class _Way:
    def __init__(self, memory: DirectMemoryTransport, journal: str) -> None:
        self.memory = memory
        self.journal = journal

    def append(self, content: bytes) -> DirectCall | None:
        memory = self.memory
        assert content
        if not memory.has_connection:
            return None
        fault = memory.direct_faults.pop(0) if memory.direct_faults else None
        if fault == "refused":
            raise UnavailableError("nobody listens", journal=self.journal)
        if fault == "raises":
            raise ZeroDivisionError
        if fault == "interrupted":
            raise KeyboardInterrupt
        memory.direct_appends.append((self.journal, content, threading.current_thread().name))
        call = _Call(memory, self.journal, content, fault)
        if fault == "interrupted, sent":
            raise KeyboardInterrupt
        memory.direct_calls.append(call)
        return call

    def prepare(self) -> None:
        self.memory.prepared.append(threading.current_thread().name)
        if self.memory.prepare_fault is not None:
            raise self.memory.prepare_fault
        self.memory.has_connection = True

    def failed(self, error: Exception) -> None:
        assert asyncio.get_running_loop()
        self.memory.failures.append(error)

    def check(self, response: pb.AppendResponse) -> bool:
        return self.memory.has_news

    def learn(self, response: pb.AppendResponse) -> None:
        assert asyncio.get_running_loop()
        self.memory.learned += 1


class _Call(DirectCall):
    """Attributes for tests:

    content: what it appends.
    has_ended: its end was seen, or it was given up.
    is_given_up: it was given up, or interrupted by another thread.
    looks: with what patience it was waited for.
    """

    def __init__(
        self, memory: DirectMemoryTransport, journal: str, content: bytes, fault: str | int | None
    ) -> None:
        self.content = content
        self.has_ended = fault == "broken"
        self.is_given_up = False
        self.looks: list[float | None] = []
        self._memory = memory
        self._journal = journal
        self._fault = fault
        self._is_late = isinstance(fault, str) and fault.startswith("late")
        self._answered_at = time.monotonic() + memory.direct_takes_s
        self._answer = pb.AppendResponse(status=fault if isinstance(fault, int) else pb.OK)
        if not self._is_late:
            self._write()

    @property
    def over(self) -> bool:
        return self.has_ended

    def wait(self, timeout_s: float | None) -> bool:
        self.looks.append(timeout_s)
        if self._memory.meanwhile is not None:
            self._memory.meanwhile()
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if self._fault == "wait interrupted":
                raise KeyboardInterrupt  # noqa: TRY301 - as if from outside
            while not self._look():
                left_s = 1.0 if ends_at is None else ends_at - time.monotonic()
                if left_s <= 0:
                    return False
                time.sleep(min(left_s, 0.001))
        except BaseException:
            self.give_up("its caller was interrupted")
            raise
        return True

    async def finish(self) -> None:
        try:
            while True:
                if self._look():
                    return
                await asyncio.sleep(0.001)
        except BaseException:
            self.give_up("it was given up")
            raise

    def response(self) -> pb.AppendResponse:
        assert self.over
        fault = self._fault
        if self.is_given_up or (isinstance(fault, str) and fault.endswith(_FAILING)):
            raise UnavailableError("the answer was lost")
        if fault == "odd":
            raise CallError("ended without a response", code="INTERNAL")
        return self._answer

    def interrupt(self) -> None:
        self.is_given_up = True

    def give_up(self, reason: str) -> None:
        assert reason
        if not self.has_ended:
            self.is_given_up = self.has_ended = True

    def _look(self) -> bool:
        """Whether it has ended."""
        if self.has_ended:
            return True
        if not self.is_given_up:
            if self._is_late:
                if not self._memory.let_end.is_set():
                    return False
                self._write()
            elif time.monotonic() < self._answered_at:
                return False
        self.has_ended = True
        return True

    def _write(self) -> None:
        fault = self._fault
        if isinstance(fault, int) or fault in {"unsent", "broken", "late, unsent", "odd"}:
            return
        kept = self._memory.journals[self._journal]
        self._answer.commit.begin = kept.end
        kept.content += self.content
        self._answer.commit.end = kept.end
        self._answer.total_chunks = 1
