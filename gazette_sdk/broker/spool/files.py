"""Files of a spool: content, commit log and compressed form, and the queue of large chunks.

:class:`ChunkQueue`: large chunks are written, or hashed, by a thread while the event loop receives
the next. Writing and hashing 128 KiB takes some hundred microseconds without the interpreter: on a
second core they cost the event loop almost nothing. A small chunk is not worth the thread switch
and is written where it arrives. One thread writes for all spools of a broker, since they share a
disk; each spool's chunks keep their order. Two more threads compute the sums of fragments and
appends.

:class:`ContentFile`: committed bytes of one fragment, for readers, index and persister. The file is
open while anything references its :class:`ContentFile`: the spool that writes it, the
index, the persister, a read. Python's reference count is the count of its users, so no file is
closed (and no descriptor reused) under a reader. When the bytes are stored elsewhere the file is
*discarded*: its name is removed from the directory soon, its content with the last reference.

:class:`CommitLog`: the ends and sums of the committed content. A log is a magic line, its
:class:`Origin` (twice, so that one damaged byte cannot hide it) and one :class:`Commit` per commit.
Records are small, protected by a CRC, self-contained, and found again after a damaged one by their
marker. A log that grew past :data:`LOG_LENGTH_BYTES_MAX` is replaced by one with fewer commits:
recovery needs the last one, and earlier ones only to keep the longest beginning of damaged content.

:class:`Compression`: of the content, a batch at a time while the spool still grows. The primary
compresses committed content in the background, a megabyte at a time, so that little is left to do
when the fragment is closed. A replica, or a broker that recovered the spool, compresses all of it
for the upload.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import struct
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Final, NamedTuple, Protocol, cast

from gazette_sdk.errors import CorruptFragmentError, GazetteError
from gazette_sdk.fragment.codecs import Compressor, compressor
from gazette_sdk.fragment.stores.base import PositionedReader
from gazette_sdk.protocol import broker_pb2 as pb

_STEP_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class SpoolError(GazetteError):
    """Error of a spool's owner: a request that the spool cannot apply."""


class SpoolDiskError(SpoolError):
    """Error of a disk that refuses content or a commit. Nothing acknowledged is lost."""


class Submit(Protocol):
    """Function that runs work in the background."""

    def __call__(self, work: Callable[[], None], *, is_needed: bool) -> None:
        """Run ``work`` soon. After the end of the background it runs only if it is needed."""


class ContentFile:
    """Content of one spool.

    Args:
        path: the file.
        codec: compression codec of the fragment.
        submit: runs compression and removal in the background.
        on_discard: removes the name from the directory; called once, in the background.
        create: create the file, which must not exist; otherwise it is opened when first used.

    Raises:
        OSError: the file cannot be created.
    """

    __slots__ = (
        "__weakref__",
        "_compression",
        "_discarded",
        "_fd",
        "_lock",
        "_on_discard",
        "_submit",
        "codec",
        "path",
    )

    def __init__(
        self,
        path: Path,
        codec: int,
        submit: Submit,
        on_discard: Callable[[], None],
        *,
        create: bool = False,
    ) -> None:
        self._fd = -1
        self.path = path
        self.codec = codec
        self._submit = submit
        self._on_discard = on_discard
        self._lock = threading.Lock()
        self._discarded = False
        self._compression: Compression | None = None
        if create:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def __repr__(self) -> str:
        return f"ContentFile({str(self.path)!r})"

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def fd(self) -> int:
        """The file's descriptor, open for as long as this object lives.

        Raises:
            OSError: the file cannot be opened.
        """
        if self._fd < 0:
            with self._lock:
                if self._fd < 0:
                    self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd

    # -------------------------------------------------------------- content

    def shrink(self, length_bytes: int) -> None:
        """Free the disk space after ``length_bytes``. An error is only logged."""
        try:
            os.ftruncate(self.fd, length_bytes)
        except OSError as error:
            _log.warning("cannot free the disk space of a rollback in %s: %s", self.path, error)

    def read_at(self, position: int, length: int) -> bytes:
        """Return up to ``length`` bytes from ``position``; fewer only at the end of the file."""
        return os.pread(self.fd, length, position)

    def verify(self, length_bytes: int, digest: bytes) -> None:
        """Check that the content is as it was committed. Blocks.

        Raises:
            CorruptFragmentError: it has changed.
            OSError: it cannot be read.
        """
        length, found = self.digest(length_bytes)
        if found != digest:
            raise CorruptFragmentError(
                f"{self.path} has changed since it was committed: {length} of {length_bytes} "
                f"bytes have SHA-1 {found.hex()}, and {digest.hex()} is expected; it is "
                "not uploaded. Check the disk, and restart this broker, which then recovers the "
                "part that is good"
            )

    def digest(self, length_bytes: int) -> tuple[int, bytes]:
        """Return how many of the first ``length_bytes`` there are, and their SHA-1. Blocks.

        Raises:
            OSError: they cannot be read.
        """
        found, position = hashlib.sha1(usedforsecurity=False), 0
        while position < length_bytes:
            data = self.read_at(position, min(_STEP_BYTES, length_bytes - position))
            if not data:
                break
            found.update(data)
            position += len(data)
        return position, found.digest()

    # ---------------------------------------------------------- compression

    def compress_later(self, end: int) -> None:
        """Compress up to ``end``, a committed position, in the background."""
        if self._made_compression().add_batch(end):
            self._submit(self._compress_batch, is_needed=False)

    def stored_form(self, length_bytes: int, digest: bytes) -> tuple[BinaryIO, int]:
        """Return the content for an upload: verified, and compressed by its codec. Blocks.

        Args:
            length_bytes: of the content.
            digest: SHA-1 of the content.

        Returns:
            a seekable reader, and the length. Closing the reader closes no file.

        Raises:
            CorruptFragmentError: the content has changed since it was committed.
            OSError: it cannot be read, or the compressed form cannot be written.
        """
        if self.codec == pb.NONE:
            self.verify(length_bytes, digest)
            return FileView(self, self.fd, length_bytes).as_binary(), length_bytes
        file = self._made_compression().finish(self, length_bytes, digest)
        return FileView(file, file.fd, file.length_bytes).as_binary(), file.length_bytes

    def _made_compression(self) -> Compression:
        with self._lock:
            if self._compression is None:
                self._compression = Compression(self.codec)
            return self._compression

    def _compress_batch(self) -> None:
        """Compress one batch. The next one queues again, after those of other journals."""
        try:
            more = self._made_compression().compress_batch(self)
        except Exception:  # noqa: BLE001 - the task's outermost boundary
            _log.exception(
                "cannot compress %s while it grows; it is compressed when it is uploaded", self.path
            )
        else:
            if more:
                self._submit(self._compress_batch, is_needed=False)

    # -------------------------------------------------------------- removal

    def discard(self) -> None:
        """Remove the file's name: its bytes are stored elsewhere, or not needed any more.

        Users of this object can still read. Calling it again does nothing. The file is removed
        in the background, since removing a large one takes long.
        """
        with self._lock:
            if self._discarded:
                return
            self._discarded = True
        self._submit(self._remove, is_needed=True)

    def _remove(self) -> None:
        try:
            _ = self.fd  # opened for later readers
            self._on_discard()
            self._compression = None
        except OSError as error:
            _log.warning(
                "cannot remove %s: %s; the next start of this broker removes it", self.path, error
            )


@dataclass(frozen=True, slots=True, eq=False)
class CompletedSpool:
    """Spool that gets no more content: a closed fragment, with everything its upload needs.

    Attributes:
        fragment: span, sum and codec of the content.
        registers: the journal's registers at its end.
        first_append_time: when its first content was committed, UTC.
        file: the content.
        create_revision: Etcd revision at which the journal was created.
        primary: True if this broker was the journal's primary when it was closed.
    """

    fragment: pb.Fragment
    registers: pb.LabelSet
    first_append_time: datetime
    file: ContentFile
    create_revision: int
    primary: bool


class FileView(PositionedReader):
    """Reader of the first bytes of a file, with its own position.

    Args:
        owner: owner of the descriptor, which must not be collected before the view.
        fd: of the file.
        length_bytes: length of the view.
    """

    def __init__(self, owner: object, fd: int, length_bytes: int) -> None:
        super().__init__(length_bytes)
        self._owner = owner
        self._fd = fd

    def as_binary(self) -> BinaryIO:
        """Return itself as the type that readers of files take."""
        return cast("BinaryIO", self)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read up to the view's end."""
        wanted = min(len(buffer), self._length - self._position)
        if wanted <= 0:
            return 0
        count = os.preadv(self._fd, [memoryview(buffer)[:wanted]], self._position)
        self._position += count
        return count


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


COMPRESSION_BATCH_BYTES = 1 << 20
"""Committed bytes of a batch, which becomes one member of gzip content."""

_COMPRESSION_STEP_BYTES = 256 << 10


class UnnamedFile:
    """File without a name, open while this object is referenced.

    Args:
        directory: of the disk; ``None`` for the system's directory of temporary files.

    Attributes:
        fd: its descriptor.
        length_bytes: bytes written to it.
    """

    __slots__ = ("fd", "length_bytes")

    def __init__(self, directory: Path | None) -> None:
        self.fd = -1
        self.fd, name = tempfile.mkstemp(suffix=".new", dir=directory)
        os.unlink(name)  # noqa: PTH108 - mkstemp gives a string
        self.length_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append all of ``data``."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]
        self.length_bytes += len(data)
        return len(data)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Compression:
    """Compressed form of one content file. Methods block, and may be called in any thread.

    The compressed bytes are in a file without a name, which no crash leaves after.

    Args:
        codec: a compression codec other than NONE.
    """

    def __init__(self, codec: int) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._batches: deque[int] = deque()
        self._file: UnnamedFile | None = None
        self._compressor: Compressor | None = None
        self._sum = hashlib.sha1(usedforsecurity=False)
        self._position = 0
        self._finished = False
        self._gave_up = False

    def add_batch(self, end: int) -> bool:
        """Note that a batch ends at ``end``, a committed position of the content.

        Returns:
            True if it is the only one, and the caller has to start :meth:`compress_batch`.
        """
        self._batches.append(end)
        return len(self._batches) == 1

    def compress_batch(self, content: ContentFile) -> bool:
        """Compress the next batch that was added.

        Args:
            content: the content file, always the same one.

        Returns:
            True if there are more.

        Raises:
            OSError: the content cannot be read, or the result cannot be written. Later batches
                are not compressed then: :meth:`finish` begins anew.
        """
        with self._lock:
            if not self._batches:
                return False
            if not self._finished and not self._gave_up:
                self._gave_up = True
                self._through(content, self._batches[0])
                self._gave_up = False
            self._batches.popleft()
            return bool(self._batches)

    def finish(self, content: ContentFile, length_bytes: int, digest: bytes) -> UnnamedFile:
        """Compress all of the content, and verify it.

        Args:
            content: the content file, always the same one.
            length_bytes: of the content.
            digest: SHA-1 which the content must have.

        Returns:
            the file of compressed bytes, complete.

        Raises:
            OSError: the content cannot be read, or the result cannot be written. Another attempt
                begins anew.
            CorruptFragmentError: the content has changed since it was committed.
        """
        with self._lock:
            if not self._finished:
                if self._position > length_bytes:
                    self._restart()  # the fragment was cut since
                ends = [] if self._gave_up else [end for end in self._batches if end < length_bytes]
                for end in [*ends, length_bytes]:
                    self._through(content, end)
                self._end(content, digest)
                self._finished = True
            assert self._file is not None
            return self._file

    def _end(self, content: ContentFile, digest: bytes) -> None:
        assert self._compressor is not None
        found = self._sum.digest()
        if found != digest:
            self._restart()
            raise CorruptFragmentError(
                f"{content.path} has changed since it was committed: its SHA-1 is "
                f"{found.hex()}, and was {digest.hex()}; it is not uploaded. Check the disk, and "
                "restart this broker, which then recovers the part that is good"
            )
        try:
            self._compressor.close()
        except BaseException:
            self._restart()
            raise

    def _through(self, content: ContentFile, end: int) -> None:
        try:
            self._compress(content, end, beside=True)
        except OSError as error:
            self._restart()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # A spool is removed when it is uploaded, compressed: without another disk a full
            # disk would stay full.
            _log.warning(
                "no room to compress %s on its disk; using %s", content.path,
                tempfile.gettempdir(),
            )  # fmt: skip
            try:
                self._compress(content, end, beside=False)
            except BaseException:
                self._restart()
                raise
        except BaseException:
            self._restart()
            raise

    def _compress(self, content: ContentFile, end: int, *, beside: bool) -> None:
        if self._compressor is None:
            self._file = UnnamedFile(content.path.parent if beside else None)
            self._compressor = compressor(self._codec, cast("BinaryIO", self._file))
        while self._position < end:
            data = content.read_at(
                self._position, min(_COMPRESSION_STEP_BYTES, end - self._position)
            )
            if not data:
                raise OSError(errno.EIO, f"{content.path} ends before its committed content")
            self._sum.update(data)
            self._compressor.write(data)
            self._position += len(data)
        self._compressor.end_batch()

    def _restart(self) -> None:
        self._file = self._compressor = None
        self._sum = hashlib.sha1(usedforsecurity=False)
        self._position = 0


LARGE_CHUNK_BYTES: Final = 48 << 10
"""Chunks from this size on are worth the thread switch, which costs some 20 µs."""

QUEUED_CHUNKS_MAX: Final = 16
"""Queued chunks of one spool at which its client is no longer read: 2 MiB of our own clients."""


class ChunkThread:
    """Thread that works for many queues. It starts with the first work and ends with :meth:`close`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queues: SimpleQueue[ChunkQueue | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, queue: ChunkQueue) -> None:
        """Run what a queue holds."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queues.put(queue)

    def close(self) -> None:
        """Finish what is queued, and end the thread."""
        if self._thread is not None:
            self._queues.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (queue := self._queues.get()) is not None:
            queue.run()


class ChunkQueue:
    """Work of one spool for one thread. All but :meth:`run` belong to the event loop.

    Args:
        thread: runs the work.

    Attributes:
        error: why the oldest work failed; nothing after it runs then.
    """

    def __init__(self, thread: ChunkThread) -> None:
        self.error: OSError | None = None
        self._thread = thread
        self._lock = threading.Lock()
        self._work: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Return the number of chunks queued."""
        return len(self._work)

    def add(self, work: Callable[[], None]) -> None:
        """Queue the work of one chunk. It may run again after an error."""
        with self._lock:
            self._work.append(work)
            if self._is_running or self.error is not None:
                return
            self._is_running = True
        self._thread.put(self)

    async def wait_below(self, count: int) -> None:
        """Wait until at most ``count`` chunks are queued, or one of them failed."""
        with self._lock:
            if not self._is_running or len(self._work) <= count:
                return
            self._wanted = count
            waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            with self._lock:
                self._waiter = None

    def retry(self) -> None:
        """Run what is queued in the caller's thread, after an error.

        Raises:
            OSError: it failed again.
        """
        assert not self._is_running, "the thread has stopped at the error"
        while self._work:
            self._work[0]()
            self._work.popleft()
        self.error = None

    def clear(self) -> None:
        """Remove what is queued, after an error."""
        assert not self._is_running, "the thread has stopped at the error"
        self._work.clear()
        self.error = None

    def run(self) -> None:
        """Run what is queued. The thread calls it."""
        while True:
            with self._lock:
                if self.error is not None or not self._work:
                    self._is_running = False
                    self._wake()
                    return
                work = self._work[0]
            try:
                work()
            except OSError as error:
                self.error = error
                continue
            with self._lock:
                self._work.popleft()
                if len(self._work) <= self._wanted and self._wanted:
                    self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
