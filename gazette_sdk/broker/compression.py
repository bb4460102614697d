"""Compression of a spool's content, a batch at a time while the spool still grows.

The primary compresses what is committed as soon as a megabyte of it has come together, in the
background, so that little is left to do when the fragment is closed. Who does not compress so
(a replica, a broker that recovered the spool) does all of it when it comes to upload.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from gazette_sdk.errors import CorruptFragmentError
from gazette_sdk.fragment.codecs import Compressor, compressor

__all__ = ["COMPRESSION_BATCH_BYTES", "Compression"]

COMPRESSION_BATCH_BYTES = 1 << 20
"""Committed bytes which make it worth to compress them: a batch, and a member of gzip content."""

_STEP_BYTES = 256 << 10

_log = logging.getLogger(__name__)


class _Content(Protocol):
    path: Path

    def read_at(self, position: int, length: int) -> bytes: ...


class Compression:
    """The compressed form of one content file. Methods block, and may be called in any thread.

    Args:
        content: the file to compress.
        codec: a compression codec other than NONE.

    The compressed bytes stand in a file without a name: a crash leaves nothing of it behind.
    """

    def __init__(self, content: _Content, codec: int) -> None:
        self._content = content
        self._codec = codec
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._compressor: Compressor | None = None
        self._sum = hashlib.sha1(usedforsecurity=False)
        self._position = 0
        self._finished = False

    def through(self, end: int) -> None:
        """Compress up to ``end``, a committed position in the file, and end a batch there.

        Raises:
            OSError: the content cannot be read, or the result not be written. Whatever comes next
                starts again from the beginning of the file.
        """
        with self._lock:
            if not self._finished:
                self._through(end)

    def finish(self, length_bytes: int, digest: bytes) -> tuple[BinaryIO, int]:
        """Compress all of the content, and verify it.

        Args:
            length_bytes: of the content.
            digest: SHA-1 which the content must have.

        Returns:
            the file of compressed bytes, which stays this object's, and its length.

        Raises:
            OSError: see :meth:`through`.
            CorruptFragmentError: the content is not what it was when it was committed.
        """
        with self._lock:
            if not self._finished:
                self._through(length_bytes)
                assert self._compressor is not None
                if self._sum.digest() != digest:
                    found = self._sum.hexdigest()
                    self._restart()
                    raise CorruptFragmentError(
                        f"{self._content.path} has changed since it was committed: its SHA-1 is "
                        f"{found}, and was {digest.hex()}; it is not uploaded. Check the disk, "
                        "and restart this broker, which then recovers the part that is good"
                    )
                self._compressor.close()
                self._finished = True
            assert self._file is not None
            self._file.flush()
            return self._file, self._file.seek(0, 2)

    def _through(self, end: int) -> None:
        try:
            self._compress(end)
        except OSError as error:
            self._restart()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Spools go when they are uploaded, and that needs them compressed: a full disk must
            # not keep itself full.
            _log.warning(
                "no room to compress %s beside it; using %s", self._content.path,
                tempfile.gettempdir(),
            )  # fmt: skip
            try:
                self._compress(end, directory=None)
            except OSError:
                self._restart()
                raise

    def _compress(self, end: int, directory: Path | str | None = "") -> None:
        if self._compressor is None:
            beside = self._content.path.parent if directory == "" else directory
            self._file = cast("BinaryIO", tempfile.TemporaryFile(dir=beside))  # noqa: SIM115
            self._compressor = compressor(self._codec, self._file)
        while self._position < end:
            data = self._content.read_at(self._position, min(_STEP_BYTES, end - self._position))
            if not data:
                raise OSError(errno.EIO, f"{self._content.path} ends before its committed content")
            self._sum.update(data)
            self._compressor.write(data)
            self._position += len(data)
        self._compressor.end_batch()

    def _restart(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._compressor = None
        self._sum = hashlib.sha1(usedforsecurity=False)
        self._position = 0
