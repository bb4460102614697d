"""Checker of what a cluster promises to its clients.

It hears of every append, before it is sent and when its outcome is known, and of everything that
readers get. Content is unique: each append is one line which no other append has.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

__all__ = ["Checker", "Promise", "Violation"]


class Promise(enum.Enum):
    """Promises. Each may be left out of a run, to look for the others."""

    READABLE = "everything acknowledged is readable, unchanged, where it was acknowledged"
    OFFSETS = "an offset is never given to two appends"
    ORDER = "an append that begins after another was acknowledged lies behind it"
    ONCE = "an append is in its journal once at most, as a whole"
    CONTIGUOUS = "content is contiguous, and nothing but appends"
    COMMITTED = "readers get nothing that was not committed: what they got, stays"
    PROGRESS = "appends succeed soon after the last fault"
    FAIL_OVER = "appends go on soon after one broker dies or is cut off; a living one stays"
    STORED = "in the end the store has everything"
    MEMBER = "a broker whose lease ended before an append began does not acknowledge it"
    BALANCED = "in the end no broker leads more journals than an even share and one"
    NO_CRASH = "no task of a broker fails unexpectedly"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise."""

    promise: Promise
    text: str

    def __str__(self) -> str:
        return f"{self.promise.name}: {self.text}"


@dataclass(slots=True)
class _Append:
    content: bytes
    least_begin: int  # end of what was acknowledged before it began
    begin: int | None = None


@dataclass(slots=True)
class _Journal:
    appends: dict[bytes, _Append] = field(default_factory=dict)
    acknowledged: list[tuple[int, int, bytes]] = field(default_factory=list)  # by begin
    end: int = 0
    seen: dict[int, bytes] = field(default_factory=dict)  # what readers got, by offset


class Checker:
    """Checker of the journals of one run.

    Args:
        left_out: promises that are not checked.

    Attributes:
        violations: broken promises, in order.
    """

    def __init__(self, left_out: AbstractSet[Promise] = frozenset()) -> None:
        self.violations: list[Violation] = []
        self.acknowledged = 0
        self._left_out = left_out
        self._journals: dict[str, _Journal] = {}

    def violated(self, promise: Promise, text: str) -> None:
        """Note a broken promise."""
        if promise not in self._left_out:
            self.violations.append(Violation(promise, text))

    # -------------------------------------------------------------- appends

    def began(self, journal: str, content: bytes) -> None:
        """Note that an append is about to be sent."""
        known = self._journal(journal)
        known.appends[content] = _Append(content, known.end)

    def succeeded(self, journal: str, content: bytes, begin: int, end: int) -> None:
        """Note that an append was acknowledged."""
        known = self._journal(journal)
        append = known.appends[content]
        self.acknowledged += 1
        append.begin = begin
        where = f"{journal} [{begin}, {end}) {content[:24]!r}"
        if end - begin != len(content):
            self.violated(Promise.OFFSETS, f"{where}: it has {len(content)} bytes")
        if begin < append.least_begin:
            self.violated(
                Promise.ORDER, f"{where}: acknowledged before it began: {append.least_begin}"
            )
        insort(known.acknowledged, (begin, end, content))
        at = known.acknowledged.index((begin, end, content))
        for other_begin, other_end, other in known.acknowledged[max(0, at - 1) : at + 2]:
            if other != content and other_begin < end and begin < other_end:
                self.violated(
                    Promise.OFFSETS, f"{where} overlaps [{other_begin}, {other_end}) {other[:24]!r}"
                )
        known.end = max(known.end, end)

    # -------------------------------------------------------------- readers

    def read(self, journal: str, reader: str, offset: int, content: bytes) -> None:
        """Note what a reader got while the cluster runs."""
        del reader
        seen = self._journal(journal).seen
        before = seen.get(offset, b"")
        length = min(len(before), len(content))
        if before[:length] != content[:length]:
            self.violated(
                Promise.COMMITTED,
                f"{journal} at {offset}: a reader got {before[:24]!r}, another {content[:24]!r}",
            )
        if len(content) > len(before):
            seen[offset] = content

    def final(self, journal: str, source: str, begin: int, content: bytes) -> None:
        """Check the whole content of a journal, as it is in the end at one place.

        Args:
            journal: its name.
            source: where it was read.
            begin: offset of the first byte.
            content: up to the end.
        """
        known = self._journal(journal)
        end = begin + len(content)
        promise = Promise.STORED if source == "store" else Promise.READABLE
        for at, until, expected in known.acknowledged:
            if at < begin or until > end:
                self.violated(
                    promise,
                    f"{journal} at {source}: [{at}, {until}) {expected[:24]!r} is missing: it has "
                    f"[{begin}, {end})",
                )
                break
            if content[at - begin : until - begin] != expected:
                self.violated(
                    promise,
                    f"{journal} at {source}: [{at}, {until}) is "
                    f"{content[at - begin : until - begin][:24]!r}, expected {expected[:24]!r}",
                )
                break
        self._check_lines(journal, source, begin, content)
        for offset, got in known.seen.items():
            now = content[max(0, offset - begin) : offset - begin + len(got)]
            if offset >= begin and now != got:
                at = next(
                    (i for i, (a, b) in enumerate(zip(got, now, strict=False)) if a != b), len(now)
                )
                self.violated(
                    Promise.COMMITTED,
                    f"{journal} at {source}: a reader got {got[at : at + 24]!r} at {offset + at}, "
                    f"and it is {now[at : at + 24]!r}",
                )
                break

    def end_of(self, journal: str) -> int:
        """Return the end of what was acknowledged, or what readers got."""
        known = self._journal(journal)
        return max(known.end, *(offset + len(got) for offset, got in known.seen.items()), 0)

    def _check_lines(self, journal: str, source: str, begin: int, content: bytes) -> None:
        known = self._journal(journal)
        seen: set[bytes] = set()
        offset = begin
        for line in content.splitlines(keepends=True):
            if line not in known.appends:
                self.violated(
                    Promise.CONTIGUOUS,
                    f"{journal} at {source}: {line[:24]!r} at {offset} is no append",
                )
                return
            if line in seen:
                self.violated(Promise.ONCE, f"{journal} at {source}: {line[:24]!r} is there twice")
                return
            seen.add(line)
            offset += len(line)

    def _journal(self, name: str) -> _Journal:
        return self._journals.setdefault(name, _Journal())
