"""Content file of a spool: committed bytes of one fragment, for readers, index and persister.

The file is open while anything references its :class:`ContentFile`: the spool that writes it, the
index, the persister, a read. Python's reference count is the count of its users, so no file is
closed (and no descriptor reused) under a reader. When the bytes are stored elsewhere the file is
*discarded*: its name is removed from the directory soon, its content with the last reference.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from gazette_sdk.broker.spool.compression import Compression
from gazette_sdk.errors import CorruptFragmentError, GazetteError
from gazette_sdk.fragment.stores.base import PositionedReader
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["CompletedSpool", "ContentFile", "FileView", "SpoolDiskError", "SpoolError"]

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
        """Free the disk space behind ``length_bytes``. An error is only logged."""
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
        """Compress one batch. The next one queues again, behind those of other journals."""
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
