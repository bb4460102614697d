"""Continuous appends and tailing reads, with a check of promises and a measure of stalls."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from crash.appends import make_content
from gazette_sdk.testing import JournalChecker

__all__ = ["Load", "Span", "StalledError"]

ATTEMPT_TIMEOUT_S = 1.0
"""A client asks another broker if one does not answer for so long."""

RETRY_PAUSE_S = 0.02
THINK_TIME_S = 0.05
"""Pause of a client between two appends."""

CONTENT_BYTES = range(100, 1500)
READ_BYTES = 1 << 16
IDLE_TIMEOUT_S = 30.0


class StalledError(AssertionError):
    """A client has no append acknowledged for too long."""


class Span(NamedTuple):
    """A span of time, by the monotonic clock."""

    begin: float
    end: float


@dataclass(frozen=True)
class Operation:
    """An append, from its first attempt to its acknowledgement."""

    span: Span
    client: str
    attempts: int


class Load:
    """Clients that append to journals and read them, within ``with``.

    A client sends an append again, under another name, until it is acknowledged: to the next
    broker if one refuses or does not answer. Its stall is the time from the first attempt.

    Args:
        addresses: URLs of all brokers.
        journals: names of the journals.
        appenders: number of appending clients of each journal.
        seed: of the contents.

    Attributes:
        checker: knows every append and every read.
    """

    def __init__(
        self, addresses: Sequence[str], journals: Sequence[str], *, appenders: int, seed: int
    ) -> None:
        self.checker = JournalChecker()
        self.appended = 0
        self._stopping = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._appenders = [
            _Appender(self, addresses, journal, number, random.Random(f"{seed} {journal} {number}"))
            for journal in journals
            for number in range(appenders)
        ]
        self._readers = [
            _Reader(self, addresses, journal, first) for first, journal in enumerate(journals)
        ]
        self._threads = [
            threading.Thread(target=each.run, name=each.name, daemon=True)
            for each in (*self._appenders, *self._readers)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._going.set()
        for thread in self._threads:
            thread.join(IDLE_TIMEOUT_S)
            assert not thread.is_alive(), f"{thread.name} does not end"

    @property
    def done(self) -> str:
        """Text about what was done so far."""
        return f"{self.appended} appends, none lost"

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until every client had an append acknowledged that began from now on.

        Raises:
            StalledError: they had none in time.
        """
        now = time.monotonic()
        for client in self._appenders:
            while client.last_began < now:
                if time.monotonic() > now + timeout_s:
                    raise StalledError(
                        f"{client.name} appends nothing for {timeout_s:g} s: {client.problem}"
                    )
                self._check_failures()
                time.sleep(0.01)

    def longest_stall(self, since: float, excused: Iterable[Span] = ()) -> Operation:
        """Return the append that took longest of those acknowledged since a time.

        Args:
            since: a time of the monotonic clock.
            excused: spans in which nobody could serve; the part of a stall in them is left out.
        """
        excused = list(excused)
        found = []
        for client in self._appenders:
            for done in list(client.operations):
                if done.span.end >= since:
                    lasts_s = _rest(done.span, excused)
                    begin = done.span.end - lasts_s
                    found.append(Operation(Span(begin, done.span.end), done.client, done.attempts))
        return max(found, key=lambda each: each.span.end - each.span.begin)

    def pause(self) -> None:
        """Let no append begin, and wait until none is in flight and readers have read all."""
        self._going.clear()
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        for client in self._appenders:
            while not client.is_idle:
                assert time.monotonic() < deadline, f"{client.name} does not pause"
                self._check_failures()
                time.sleep(0.01)
        heads = {client.journal: 0 for client in self._appenders}
        for client in self._appenders:
            heads[client.journal] = max(heads[client.journal], client.end)
        for reader in self._readers:
            while reader.offset < heads[reader.journal]:
                assert time.monotonic() < deadline + IDLE_TIMEOUT_S, (
                    f"{reader.name} is at {reader.offset} of {heads[reader.journal]}: "
                    f"{reader.problem}"
                )
                self._check_failures()
                time.sleep(0.01)

    def resume(self) -> None:
        """Let clients append again. Their earlier stalls are forgotten."""
        for client in self._appenders:
            client.operations.clear()
        self._going.set()

    def _check_failures(self) -> None:
        for each in (*self._appenders, *self._readers):
            if each.failure is not None:
                raise each.failure


def _rest(span: Span, excused: Iterable[Span]) -> float:
    """How much of a span is in none of the others, which do not overlap."""
    out = sum(max(0.0, min(span.end, each.end) - max(span.begin, each.begin)) for each in excused)
    return span.end - span.begin - out


class _Client:
    """A thread that calls one broker after the other."""

    def __init__(
        self, load: Load, addresses: Sequence[str], journal: str, name: str, first: int
    ) -> None:
        self.journal = journal
        self.name = name
        self.failure: BaseException | None = None
        self.problem = "no attempt yet"
        self._load = load
        self._hosts = [urlsplit(address).netloc for address in addresses]
        self._at = first % len(addresses)
        self._connection: http.client.HTTPConnection | None = None

    @property
    def is_stopping(self) -> bool:
        return self._load._stopping.is_set()

    def run(self) -> None:
        try:
            while not self.is_stopping:
                self.step()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error
        finally:
            self._drop()

    def step(self) -> None:
        raise AssertionError("a client does something")

    def _connected(self) -> http.client.HTTPConnection:
        """Raises OSError: the broker cannot be reached."""
        if self._connection is None:
            connection = http.client.HTTPConnection(
                self._hosts[self._at], timeout=ATTEMPT_TIMEOUT_S
            )
            connection.connect()
            self._connection = connection
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _go_elsewhere(self, problem: object) -> None:
        self.problem = f"{self._hosts[self._at]}: {problem!r}"
        self._drop()
        self._at = (self._at + 1) % len(self._hosts)
        time.sleep(RETRY_PAUSE_S)


class _Appender(_Client):
    """A client that appends one content after the other."""

    def __init__(
        self,
        load: Load,
        addresses: Sequence[str],
        journal: str,
        number: int,
        chance: random.Random,
    ) -> None:
        super().__init__(load, addresses, journal, f"appender {number} of {journal}", number)
        self.operations: list[Operation] = []
        self.last_began = 0.0
        self.end = 0
        self.is_idle = False
        self._chance = chance

    def step(self) -> None:
        self._wait_until_going()
        begin, attempts = time.monotonic(), 1
        while not self._attempt():
            attempts += 1
            if self.is_stopping:
                return
            if not self._load._going.is_set():
                self._wait_until_going()
                begin = time.monotonic()
        self.operations.append(Operation(Span(begin, time.monotonic()), self.name, attempts))
        self.last_began = begin
        time.sleep(THINK_TIME_S)

    def _wait_until_going(self) -> None:
        while not self._load._going.is_set():
            self.is_idle = True
            self._load._going.wait(0.1)
        self.is_idle = False

    def _attempt(self) -> bool:
        """Append a new content. False if it was not acknowledged."""
        content = make_content(self._chance, self._chance.choice(CONTENT_BYTES))
        try:
            connection = self._connected()
        except OSError as error:  # nothing was sent
            self._go_elsewhere(error)
            return False
        checker = self._load.checker
        try:
            connection.request("PUT", f"/{self.journal}", body=content)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            checker.uncertain(self.journal, content, client=self.name)
            self._go_elsewhere(error)
            return False
        if response.status != 204:
            checker.uncertain(self.journal, content, client=self.name)
            self._go_elsewhere((response.status, text[:200]))
            return False
        begin = int(response.headers["X-Commit-Begin"])
        end = int(response.headers["X-Commit-End"])
        checker.acknowledged(self.journal, begin, end, content, client=self.name)
        self.end = end
        self._load.appended += 1
        return True


class _Reader(_Client):
    """A client that follows a journal, and goes on at its offset after a failure."""

    def __init__(self, load: Load, addresses: Sequence[str], journal: str, first: int) -> None:
        super().__init__(load, addresses, journal, f"reader of {journal}", first)
        self.offset = 0

    def step(self) -> None:
        try:
            connection = self._connected()
            connection.request("GET", f"/{self.journal}?offset={self.offset}&block=true")
            response = connection.getresponse()
            if response.status != 206:
                self._go_elsewhere((response.status, response.read()[:200]))
                return
            begin = int(response.headers["Content-Range"].split()[1].split("-")[0])
            assert begin == self.offset, f"a read at {self.offset} begins at {begin}"
            while data := response.read1(READ_BYTES):
                self._load.checker.read(self.journal, self.offset, data, reader=self.name)
                self.offset += len(data)
                if self.is_stopping:
                    return
            self._go_elsewhere("the read ended")
        except (OSError, http.client.HTTPException) as error:
            self._go_elsewhere(error)
