"""Compression of a spool's content, a batch at a time while the spool still grows.

The primary compresses committed content in the background, a megabyte at a time, so that little
is left to do when the fragment is closed. A replica, or a broker that recovered the spool,
compresses all of it for the upload.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from gazette_sdk.errors import CorruptFragmentError
from gazette_sdk.fragment.codecs import Compressor, compressor

if TYPE_CHECKING:
    from gazette_sdk.broker.spool.content_file import ContentFile

__all__ = ["COMPRESSION_BATCH_BYTES", "Compression", "UnnamedFile"]

COMPRESSION_BATCH_BYTES = 1 << 20
"""Committed bytes of a batch, which becomes one member of gzip content."""

_STEP_BYTES = 256 << 10

_log = logging.getLogger(__name__)


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

    The compressed bytes are in a file without a name, which no crash leaves behind.

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
            data = content.read_at(self._position, min(_STEP_BYTES, end - self._position))
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
