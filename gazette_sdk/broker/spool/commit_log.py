"""Commit log of a spool: the ends and sums of the committed content.

A log is a magic line, its :class:`Origin` (twice, so that one damaged byte cannot hide it) and
one :class:`Commit` per commit. Records are small, protected by a CRC, self-contained, and found
again behind a damaged one by their marker. A log that grew past :data:`LOG_LENGTH_BYTES_MAX` is
replaced by one with fewer commits: recovery needs the last one, and earlier ones only to keep the
longest beginning of damaged content.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "LOG_LENGTH_BYTES_MAX",
    "Commit",
    "CommitLog",
    "Head",
    "Origin",
    "ParsedLog",
    "decode_head",
    "encode_head",
    "parse_log",
    "write_all",
]

LOG_LENGTH_BYTES_MAX = 4 << 20
"""A longer log is thinned: that of millions of small commits must neither need as much disk space
as the content nor make a restart slow."""

_KEPT_BYTES_MAX = 1 << 20
"""Bound of the earlier commits in a thinned log."""

_LOG_MAGIC = b"gazette spool log 1\n"
_HEAD_MAGIC = b"gazette head 1\n"

_MARKER = b"\xf5\xc3"  # never part of UTF-8, so no name or label holds it
_PREFIX = struct.Struct("<2sIBI")  # marker, CRC of what follows, kind, payload's length
_START = struct.Struct("<2sI")
_CHECKED = struct.Struct("<BI")
_CHECKED_AT = 6  # where the CRC's range begins
_ORIGIN = struct.Struct("<qBqQ")
_COMMIT = struct.Struct("<qq20s")
_HEAD = struct.Struct("<qqQH")

_ORIGIN_KIND, _COMMIT_KIND, _HEAD_KIND = 1, 2, 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """Identity of a spool.

    Attributes:
        journal: the journal's name.
        begin: offset of the content file's first byte.
        codec: compression codec of its fragment.
        create_revision: Etcd revision at which the journal was created; a journal that was
            deleted and created again is another one.
        cluster_id: id of the Etcd cluster the revision is of.
    """

    journal: str
    begin: int
    codec: int
    create_revision: int
    cluster_id: int

    def encode(self) -> bytes:
        """Return the record's payload."""
        fixed = _ORIGIN.pack(self.begin, self.codec, self.create_revision, self.cluster_id)
        return fixed + self.journal.encode()

    @classmethod
    def decode(cls, payload: bytes) -> Origin:
        """Return the origin of a payload."""
        begin, codec, create_revision, cluster_id = _ORIGIN.unpack_from(payload)
        journal = payload[_ORIGIN.size :].decode()
        return cls(journal, begin, codec, create_revision, cluster_id)


class Commit(NamedTuple):
    """Record of one commit.

    Attributes:
        end: journal offset after the last committed byte.
        digest: SHA-1 of the content from the file's beginning to ``end``.
        first_append_us: when the spool got its first commit, in microseconds of Unix time.
        registers: the journal's registers, as a serialized label set.
    """

    end: int
    digest: bytes
    first_append_us: int
    registers: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """Greatest offset that this broker knows to be committed of a journal.

    Attributes:
        journal: the journal's name.
        end: the offset.
        registers: the journal's registers there, as a serialized label set.
        create_revision: of the journal, see :class:`Origin`.
        cluster_id: see :class:`Origin`.
    """

    journal: str
    end: int
    registers: bytes
    create_revision: int
    cluster_id: int


@dataclass(frozen=True, slots=True)
class ParsedLog:
    """Valid records in a log's bytes.

    Attributes:
        origin: the spool's identity; ``None`` if it is damaged or was never written.
        commits: every valid commit, in the order written.
        damaged: ranges of bytes which are no valid records. A range at the very end may only be
            a write that a crash interrupted.
    """

    origin: Origin | None
    commits: list[Commit]
    damaged: list[tuple[int, int]]


def parse_log(data: bytes) -> ParsedLog:
    """Parse a log. Damaged bytes are skipped; no bytes raise an error."""
    origin: Origin | None = None
    commits: list[Commit] = []
    damaged: list[tuple[int, int]] = []
    position = len(_LOG_MAGIC) if data.startswith(_LOG_MAGIC) else 0
    for begin, end, kind, payload in _records(data, position):
        if begin > position:
            damaged.append((position, begin))
        position = end
        if kind == _ORIGIN_KIND and origin is None:
            origin = Origin.decode(payload)
        elif kind == _COMMIT_KIND:
            fixed = _COMMIT.unpack_from(payload)
            commits.append(Commit(fixed[0], fixed[2], fixed[1], payload[_COMMIT.size :]))
    if position < len(data):
        damaged.append((position, len(data)))
    return ParsedLog(origin, commits, damaged)


def encode_head(head: Head) -> bytes:
    """Return the content of a head file."""
    name = head.journal.encode()
    fixed = _HEAD.pack(head.end, head.create_revision, head.cluster_id, len(name))
    return _HEAD_MAGIC + _record(_HEAD_KIND, fixed + name + head.registers)


def decode_head(data: bytes) -> Head | None:
    """Return the head of a head file's content; ``None`` if it is damaged."""
    for begin, _, kind, payload in _records(data, len(_HEAD_MAGIC)):
        if kind == _HEAD_KIND and begin == len(_HEAD_MAGIC):
            end, create_revision, cluster_id, length = _HEAD.unpack_from(payload)
            name = payload[_HEAD.size : _HEAD.size + length].decode()
            return Head(name, end, payload[_HEAD.size + length :], create_revision, cluster_id)
    return None


class CommitLog:
    """Writer of a spool's commit log.

    Args:
        path: the file, which is created.
        origin: identity of the spool.
        log_length_bytes_max: see :data:`LOG_LENGTH_BYTES_MAX`.
        synced: force a thinned log to disk before it replaces the log.

    Raises:
        OSError: the file cannot be created or written; it is removed again.
    """

    __slots__ = ("_beginning", "_end", "_fd", "_kept", "_kept_bytes", "_kept_bytes_max", "_last",
                 "_limit", "_max", "_path", "_serial", "_stride", "_synced")  # fmt: skip

    def __init__(
        self,
        path: Path,
        origin: Origin,
        *,
        log_length_bytes_max: int = LOG_LENGTH_BYTES_MAX,
        synced: bool = False,
    ) -> None:
        self._path = path
        self._synced = synced
        self._beginning = _LOG_MAGIC + 2 * _record(_ORIGIN_KIND, origin.encode())
        self._max = self._limit = log_length_bytes_max
        self._kept_bytes_max = min(_KEPT_BYTES_MAX, self._max // 4)
        self._kept: list[bytes] = []  # every stride-th record, for the thinned log
        self._kept_bytes = 0
        self._stride, self._serial = 1, 0
        self._last = b""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_all(self._fd, self._beginning, 0)
        except OSError:
            self.close()
            path.unlink()
            raise
        self._end = len(self._beginning)

    @property
    def fd(self) -> int:
        """The file's descriptor."""
        return self._fd

    @property
    def length_bytes(self) -> int:
        """Length of the log."""
        return self._end

    def append(self, commit: Commit) -> None:
        """Write one commit.

        Raises:
            OSError: it could not be written. The log is as before; the call may be repeated.
        """
        end, digest, first_append_us, registers = commit
        record = _record(_COMMIT_KIND, _COMMIT.pack(end, first_append_us, digest) + registers)
        try:
            write_all(self._fd, record, self._end)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(record)
        self._last = record
        if self._serial % self._stride == 0:
            self._keep(record)
        self._serial += 1
        if self._end > self._limit:
            self._thin()

    def close(self) -> None:
        """Close the file. Closing again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    def _keep(self, record: bytes) -> None:
        self._kept.append(record)
        self._kept_bytes += len(record)
        while self._kept_bytes > self._kept_bytes_max and len(self._kept) > 1:
            del self._kept[1::2]
            self._kept_bytes = sum(map(len, self._kept))
            self._stride *= 2

    def _thin(self) -> None:
        """Replace the log by one with fewer commits; a log that cannot be replaced grows."""
        tail = b"" if self._kept and self._kept[-1] is self._last else self._last
        content = b"".join([self._beginning, *self._kept, tail])
        thinned = self._path.with_suffix(".thin")
        try:
            fd = os.open(thinned, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, content, 0)
                if self._synced:
                    os.fdatasync(fd)
                thinned.rename(self._path)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            self._limit = self._end + self._max
            _log.warning("cannot shorten %s, which grows: %s", self._path, error)
            return
        os.close(self._fd)
        self._fd, self._end = fd, len(content)
        self._limit = self._end + self._max


def _record(kind: int, payload: bytes) -> bytes:
    checked = _CHECKED.pack(kind, len(payload)) + payload
    return _START.pack(_MARKER, zlib.crc32(checked)) + checked


def _records(data: bytes, position: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield valid records as (begin, end, kind, payload), from ``position`` on."""
    while (position := data.find(_MARKER, position)) >= 0:
        if position + _PREFIX.size > len(data):
            return
        _, crc, kind, length = _PREFIX.unpack_from(data, position)
        end = position + _PREFIX.size + length
        if end <= len(data) and zlib.crc32(data[position + _CHECKED_AT : end]) == crc:
            yield position, end, kind, data[position + _PREFIX.size : end]
            position = end
        else:
            position += 1


def write_all(fd: int, data: bytes, position: int) -> None:
    """Write ``data`` into a file, at ``position``.

    Raises:
        OSError: some or all of it was not written.
    """
    written = os.pwrite(fd, data, position)
    while written < len(data):  # a full disk writes a part, and then fails
        written += os.pwrite(fd, memoryview(data)[written:], position + written)
