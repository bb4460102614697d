"""Checker of a journal's promises. Pure: it gets what happened, and given the content.

A program, or a test with faults, reports to a :class:`JournalChecker` each append and each read,
while brokers are killed, stores fail, and links are cut. When nothing is appended any more, the
content that each broker and each store has is compared with that::

    checker = JournalChecker()
    checker.acknowledged("a/journal", begin=0, end=5, content=b"hello", client="writer 1")
    checker.read("a/journal", 0, b"hello", reader="reader 1")
    violations = checker.check("a/journal", [Copy("broker a", 0, b"hello")])

:mod:`~gazette_sdk.testing.journal_copies` reads the content of running brokers and stores.
"""

from __future__ import annotations

import enum
import hashlib
import mmap
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Content: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

_COMPARED_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 20
"""A reader's content is checked in ranges of this length, of which the checker keeps the sums."""

_SHOWN_MAX: Final = 10
"""Number of violations in the text of an error; further ones are counted."""


# --------------------------------------------- appends that may stand somewhere

_KEY_BYTES: Final = 32
"""Appends whose outcome is unknown are looked up by so many of their first bytes."""


@dataclass(frozen=True, slots=True)
class AppendPiece:
    """Append, by its sum.

    Attributes:
        length: in bytes.
        sha1: of its content.
        key: its first bytes, if its content is known.
        client: who appended it, in words.
    """

    length: int
    sha1: bytes
    key: bytes
    client: str


class AppendPieces:
    """Appends that may stand somewhere, each so many times, by their first bytes."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[AppendPiece]] = {}
        self._key_lengths: set[int] = set()
        self._left: Counter[tuple[int, bytes]] = Counter()

    def add(self, piece: AppendPiece, count: int) -> None:
        """Allow an append ``count`` times more."""
        if not piece.key:
            return  # it is empty, or only its sum is known
        if (piece.length, piece.sha1) not in self._left:
            self._by_key.setdefault(piece.key, []).append(piece)
            self._key_lengths.add(len(piece.key))
        self._left[piece.length, piece.sha1] += count

    def take(self, piece: AppendPiece) -> None:
        """Use one of an append."""
        self._left[piece.length, piece.sha1] -= 1

    def starting_at(
        self, content: memoryview, at: int, *, used_up: bool = False
    ) -> list[AppendPiece]:
        """Return the appends whose content begins at a place, the longest one first.

        Args:
            content: the content.
            at: the place.
            used_up: True for those, too, that may not stand there any more.
        """
        found = [
            piece
            for length in self._key_lengths
            for piece in self._by_key.get(bytes(content[at : at + length]), ())
            if at + piece.length <= len(content)
            and (used_up or self._left[piece.length, piece.sha1] > 0)
            and sha1_of(content[at : at + piece.length]) == piece.sha1
        ]
        return sorted(found, key=lambda each: each.length, reverse=True)

    def take_all(self, content: memoryview) -> bool:
        """Use appends that make up some content, without a rest.

        Returns:
            False if there are none; then nothing is used.
        """
        path: list[tuple[list[AppendPiece], AppendPiece]] = []
        choices = self.starting_at(content, 0) if content else []
        at = 0
        while at < len(content):
            while not choices:
                if not path:
                    return False
                choices, last = path.pop()
                self._left[last.length, last.sha1] += 1
                at -= last.length
            piece, *rest = choices
            self.take(piece)
            path.append((rest, piece))
            at += piece.length
            choices = self.starting_at(content, at) if at < len(content) else []
        return True


def piece_of(content: bytes, client: str) -> AppendPiece:
    """Return the piece of an append's content."""
    return AppendPiece(len(content), sha1_of(content), bytes(content[:_KEY_BYTES]), client)


def sha1_of(content: bytes | memoryview) -> bytes:
    """Return the SHA-1 sum of some content, 20 bytes."""
    return hashlib.sha1(content, usedforsecurity=False).digest()


# ------------------------------------------------------------------ the checker


class Promise(enum.Enum):
    """Promise of a journal."""

    READABLE = "every acknowledged byte is readable"
    UNCHANGED = "acknowledged content is what was appended, and in one piece"
    OFFSETS_ONCE = "an offset is given to one append only"
    WHOLE_APPENDS = "a journal consists of whole appends, each in one piece"
    APPENDED_ONCE = "an append is written as often as it was sent, or less"
    REJECTED_ABSENT = "a rejected append leaves nothing"
    READ_COMMITTED = "what a reader saw is committed, and never changes"
    HEAD_ADVANCES = "a write head never goes back"
    REPLICAS_EQUAL = "brokers and stores have the same content"
    STORED = "acknowledged content gets into the store"


@dataclass(frozen=True, slots=True)
class Violation:
    """Broken promise.

    Attributes:
        promise: which.
        journal: of which journal.
        offset: first offset that is affected.
        text: what was found.
    """

    promise: Promise
    journal: str
    offset: int
    text: str

    def __str__(self) -> str:
        return (
            f"{self.journal} at offset {self.offset}: {self.text} (promise: {self.promise.value})"
        )


class JournalPromiseError(AssertionError):
    """A journal breaks promises.

    Attributes:
        violations: which ones.
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        shown = [str(each) for each in violations[:_SHOWN_MAX]]
        if len(violations) > _SHOWN_MAX:
            shown.append(f"and {len(violations) - _SHOWN_MAX} more")
        super().__init__("\n".join([f"{len(violations)} violations:", *shown]))
        self.violations = tuple(violations)


def raise_violations(violations: Sequence[Violation]) -> None:
    """Raise an error if there are violations.

    Raises:
        JournalPromiseError: there are.
    """
    if violations:
        raise JournalPromiseError(violations)


@dataclass(frozen=True, slots=True)
class Copy:
    """Content of a journal, as one broker or one store has it.

    Attributes:
        source: the broker or store, in words.
        begin: offset of its first byte.
        content: the bytes.
        complete: True if it must have all that is acknowledged, as a broker; False for a fragment
            of a store.
    """

    source: str
    begin: int
    content: Content
    complete: bool = True

    @property
    def end(self) -> int:
        """Offset after its last byte."""
        return self.begin + len(self.content)

    def between(self, begin: int, end: int) -> memoryview:
        """Return the bytes between two offsets, which lie within."""
        return memoryview(self.content)[begin - self.begin : end - self.begin]


@dataclass(frozen=True, slots=True)
class _Append:
    begin: int
    piece: AppendPiece
    copies_max: int

    @property
    def end(self) -> int:
        return self.begin + self.piece.length


@dataclass(frozen=True, slots=True)
class _Seen:
    """Range of content that a reader saw."""

    reader: str
    begin: int
    end: int
    sha1: bytes


@dataclass(slots=True)
class _Reader:
    """Range that a reader is seeing: the next content may continue it."""

    begin: int
    end: int
    sum: hashlib._Hash

    def seen(self, reader: str) -> _Seen:
        return _Seen(reader, self.begin, self.end, self.sum.digest())


@dataclass(slots=True)
class _Journal:
    """All that is known of a journal."""

    acknowledged: list[_Append] = field(default_factory=list)
    uncertain: list[tuple[AppendPiece, int]] = field(default_factory=list)
    rejected: list[AppendPiece] = field(default_factory=list)
    seen: list[_Seen] = field(default_factory=list)
    reading: dict[str, _Reader] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)


class JournalChecker:
    """Checker of what journals promise: see :class:`Promise`. Any thread may call.

    It keeps sums of the content: some hundred bytes for each append, and for each MiB that is read.

    Args:
        knows_all_appends: True if every append is reported to it. Then content that it does not
            know is a violation.
    """

    def __init__(self, *, knows_all_appends: bool = True) -> None:
        self._knows_all_appends = knows_all_appends
        self._journals: dict[str, _Journal] = {}
        self._lock = threading.Lock()

    @property
    def journals(self) -> list[str]:
        """Names of the journals that were reported."""
        with self._lock:
            return sorted(self._journals)

    def acknowledged(
        self,
        journal: str,
        begin: int,
        end: int,
        content: bytes | None = None,
        *,
        sha1: bytes = b"",
        client: str = "",
        attempts: int = 1,
    ) -> None:
        """Take note of an append that a broker acknowledged.

        Args:
            journal: its name.
            begin: first offset, as the broker answered.
            end: offset after the last byte.
            content: what was appended; or its sum:
            sha1: SHA-1 sum, 20 bytes.
            client: who appended it, for the text of violations.
            attempts: number of times it was sent; earlier attempts whose answer was lost may
                stand in the journal, too.

        Raises:
            ValueError: the lengths differ, or neither content nor a sum is given.
        """
        if content is not None and len(content) != end - begin:
            raise ValueError(f"{len(content)} bytes cannot be acknowledged at [{begin}, {end})")
        if content is None and len(sha1) != 20:
            raise ValueError("give the content, or its SHA-1 sum of 20 bytes")
        if content is None:
            piece = AppendPiece(end - begin, sha1, b"", client)
        else:
            piece = piece_of(content, client)
        with self._lock:
            self._of(journal).acknowledged.append(_Append(begin, piece, attempts))

    def uncertain(
        self, journal: str, content: bytes, *, client: str = "", attempts: int = 1
    ) -> None:
        """Take note of an append whose outcome is unknown, such as one whose answer was lost.

        It may stand in the journal, as a whole, once for each attempt, or not at all.
        """
        with self._lock:
            self._of(journal).uncertain.append((piece_of(content, client), attempts))

    def rejected(self, journal: str, content: bytes, *, client: str = "") -> None:
        """Take note of an append that was rolled back, or refused before it had an effect."""
        with self._lock:
            self._of(journal).rejected.append(piece_of(content, client))

    def read(
        self,
        journal: str,
        offset: int,
        content: bytes,
        *,
        reader: str = "",
        write_head: int | None = None,
    ) -> None:
        """Take note of content that a reader saw.

        Args:
            journal: its name.
            offset: offset of the first byte.
            content: the bytes; they may be empty.
            reader: the reader and its broker, in words. What one reader sees comes in its order.
            write_head: write head that the broker reported, if it did.
        """
        with self._lock:
            known = self._of(journal)
            if write_head is not None:
                known.heads[reader] = max(write_head, known.heads.get(reader, 0))
            if not content:
                return
            reading = known.reading.get(reader)
            if reading is None or reading.end != offset:
                if reading is not None:
                    known.seen.append(reading.seen(reader))
                reading = _Reader(offset, offset, hashlib.sha1(usedforsecurity=False))
                known.reading[reader] = reading
            reading.sum.update(content)
            reading.end += len(content)
            if reading.end - reading.begin >= _READ_BYTES:
                known.seen.append(reading.seen(reader))
                del known.reading[reader]

    def check(
        self, journal: str, copies: Iterable[Copy], *, stored: bool = False
    ) -> list[Violation]:
        """Compare a journal's content with all that is known of it.

        Nothing may be appended meanwhile: tell of appends that are in flight as uncertain.

        Args:
            journal: its name.
            copies: its content, of each broker and each store.
            stored: True if all that was acknowledged must be in a store.

        Returns:
            What is violated, by offset. Empty if all promises are kept.
        """
        copies = list(copies)
        with self._lock:
            known = self._of(journal)
            seen = known.seen + [reading.seen(name) for name, reading in known.reading.items()]
            check = _Check(
                journal,
                sorted(known.acknowledged, key=lambda each: (each.begin, each.end)),
                list(known.uncertain),
                list(known.rejected),
                seen,
                dict(known.heads),
            )
        check.compare_copies(copies)
        whole = max(
            (each for each in copies if each.complete),
            key=lambda each: (each.end, len(each.content)),
            default=Copy("no broker", 0, b""),
        )
        check.check_offsets()
        check.check_acknowledged(whole)
        if self._knows_all_appends:
            check.check_gaps(whole)
        check.check_reads(whole)
        if stored:
            check.check_stored([each for each in copies if not each.complete])
        return sorted(check.violations, key=lambda each: each.offset)

    def _of(self, journal: str) -> _Journal:
        return self._journals.setdefault(journal, _Journal())


@dataclass(slots=True)
class _Check:
    """One check of one journal: each method adds what is violated."""

    journal: str
    acknowledged: list[_Append]
    uncertain: list[tuple[AppendPiece, int]]
    rejected: list[AppendPiece]
    seen: list[_Seen]
    heads: dict[str, int]
    violations: list[Violation] = field(default_factory=list)

    def _add(self, promise: Promise, offset: int, text: str) -> None:
        self.violations.append(Violation(promise, self.journal, offset, text))

    def compare_copies(self, copies: list[Copy]) -> None:
        """Compare all copies with the longest one of a broker."""
        complete = sorted(
            (each for each in copies if each.complete), key=lambda each: each.end, reverse=True
        )
        if not complete:
            self._add(Promise.READABLE, 0, "no broker has the journal")
            return
        first, *others = complete
        for other in others:
            if other.end != first.end:
                self._add(
                    Promise.REPLICAS_EQUAL,
                    other.end,
                    f"{other.source} ends there, and {first.source} at {first.end}",
                )
        for other in (*others, *(each for each in copies if not each.complete)):
            if other.end > first.end:
                self._add(
                    Promise.REPLICAS_EQUAL,
                    first.end,
                    f"{other.source} has content up to {other.end} that no broker has",
                )
            differs_at = _first_difference(first, other)
            if differs_at is not None:
                self._add(
                    Promise.REPLICAS_EQUAL, differs_at, f"{other.source} and {first.source} differ"
                )

    def check_offsets(self) -> None:
        """Check that acknowledged appends do not overlap."""
        last: _Append | None = None
        for append in self.acknowledged:
            if append.piece.length == 0:
                continue
            if last is not None and append.begin < last.end:
                self._add(
                    Promise.OFFSETS_ONCE,
                    append.begin,
                    f"{_words(append)} and {_words(last)} were both acknowledged",
                )
            if last is None or append.end > last.end:
                last = append

    def check_acknowledged(self, whole: Copy) -> None:
        """Check that all acknowledged content is there, and unchanged."""
        for append in self.acknowledged:
            if append.piece.length == 0:
                continue
            if append.begin < whole.begin or append.end > whole.end:
                self._add(
                    Promise.READABLE,
                    append.begin,
                    f"{_words(append)} was acknowledged, and {whole.source} has "
                    f"[{whole.begin}, {whole.end}) only",
                )
            elif sha1_of(whole.between(append.begin, append.end)) != append.piece.sha1:
                self._add(
                    Promise.UNCHANGED,
                    append.begin,
                    f"{_words(append)} was acknowledged, and {whole.source} has other bytes there",
                )

    def check_gaps(self, whole: Copy) -> None:
        """Check that all else consists of whole appends whose outcome is unknown."""
        allowed, explained = AppendPieces(), AppendPieces()
        for piece, attempts in self.uncertain:
            allowed.add(piece, attempts)
            explained.add(piece, 0)
        for append in self.acknowledged:
            allowed.add(append.piece, append.copies_max - 1)
            explained.add(append.piece, 0)
        rejected = {(each.length, each.sha1) for each in self.rejected}
        for piece in self.rejected:
            explained.add(piece, 0)
        for begin, end in _gaps(self.acknowledged, whole.begin, whole.end):
            gap = whole.between(begin, end)
            if not allowed.take_all(gap):
                self._explain(begin, gap, allowed, explained, rejected)

    def _explain(
        self,
        begin: int,
        gap: memoryview,
        allowed: AppendPieces,
        explained: AppendPieces,
        rejected: Collection[tuple[int, bytes]],
    ) -> None:
        """Say what stands in a gap that does not consist of allowed appends."""
        at = 0
        while at < len(gap):
            piece = next(iter(allowed.starting_at(gap, at)), None)
            if piece is not None:
                allowed.take(piece)
            else:
                piece = next(iter(explained.starting_at(gap, at, used_up=True)), None)
                if piece is None:
                    self._add(
                        Promise.WHOLE_APPENDS,
                        begin + at,
                        f"up to {begin + len(gap)} stand bytes of no whole append: one is torn, "
                        "two are interleaved, or nobody appended them",
                    )
                    return
                words = f"an append of {piece.length} bytes{_by(piece.client)}"
                if (piece.length, piece.sha1) in rejected:
                    self._add(
                        Promise.REJECTED_ABSENT, begin + at, f"{words} was rejected, and is there"
                    )
                else:
                    self._add(Promise.APPENDED_ONCE, begin + at, f"{words} stands there once more")
            at += piece.length

    def check_reads(self, whole: Copy) -> None:
        """Check that all that readers saw is there, and unchanged."""
        for seen in self.seen:
            words = f"reader {seen.reader!r} saw [{seen.begin}, {seen.end})"
            if seen.end > whole.end:
                self._add(
                    Promise.READ_COMMITTED,
                    max(seen.begin, whole.end),
                    f"{words}, and the journal ends at {whole.end}",
                )
            elif seen.begin >= whole.begin and (
                sha1_of(whole.between(seen.begin, seen.end)) != seen.sha1
            ):
                self._add(
                    Promise.READ_COMMITTED,
                    seen.begin,
                    f"{words} with other bytes than {whole.source} has",
                )
        for reader, head in self.heads.items():
            if head > whole.end:
                self._add(
                    Promise.HEAD_ADVANCES,
                    whole.end,
                    f"reader {reader!r} was told the write head {head}, "
                    f"and the journal ends at {whole.end}",
                )

    def check_stored(self, fragments: list[Copy]) -> None:
        """Check that all acknowledged content is in a store."""
        covered: list[list[int]] = []
        for fragment in sorted(fragments, key=lambda each: each.begin):
            if covered and fragment.begin <= covered[-1][1]:
                covered[-1][1] = max(covered[-1][1], fragment.end)
            else:
                covered.append([fragment.begin, fragment.end])
        for append in self.acknowledged:
            if append.piece.length and not any(
                begin <= append.begin and append.end <= end for begin, end in covered
            ):
                self._add(
                    Promise.STORED,
                    append.begin,
                    f"{_words(append)} was acknowledged, and no store has all of it",
                )


def _gaps(appends: list[_Append], begin: int, end: int) -> Iterable[tuple[int, int]]:
    """Yield the ranges between ``begin`` and ``end`` that no append covers."""
    at = begin
    for append in appends:
        if append.begin > at:
            yield at, min(append.begin, end)
        at = max(at, append.end)
        if at >= end:
            return
    if at < end:
        yield at, end


def _first_difference(one: Copy, other: Copy) -> int | None:
    """Return the first offset at which two copies differ, of those that both have."""
    begin, end = max(one.begin, other.begin), min(one.end, other.end)
    for at in range(begin, end, _COMPARED_BYTES):
        upto = min(end, at + _COMPARED_BYTES)
        left, right = one.between(at, upto), other.between(at, upto)
        if left != right:
            pairs = zip(left, right, strict=True)
            return at + next(index for index, (a, b) in enumerate(pairs) if a != b)
    return None


def _words(append: _Append) -> str:
    return f"the append of [{append.begin}, {append.end}){_by(append.piece.client)}"


def _by(client: str) -> str:
    return f" by {client!r}" if client else ""
