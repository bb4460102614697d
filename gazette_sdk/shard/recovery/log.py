"""Recovery log of a primary: appends that only the log's current author may make.

The register ``author`` of the journal names who recovered the log last. Each append checks it. When
another process has recovered the log, no append of this one can commit any more.

A chain of checksums links the recorded operations (recovery log 1). A frame is a fixed header and a
protobuf message. The content of a write follows its frame; it is not part of the message, and the
checksum does not cover it.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError as ProtobufDecodeError
from prometheus_client import Counter

from gazette_sdk.errors import (
    DecodeError,
    FencedError,
    RegisterMismatchError,
    ValidationError,
    needs_extra,
)
from gazette_sdk.framing.base import FixedProtobuf
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.recoverylog_pb2 import RecordedOp
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend

with needs_extra("shards", "recovery logs of shards"):
    import google_crc32c

RECOVERED_BYTES = Counter(
    "gazette_recoverylog_recovered_bytes", "Bytes of recovery logs that were played back."
)


HEADER_BYTES = FixedProtobuf.header_bytes
"""Length of the header of a frame, which the checksum does not cover."""

AUTHOR_REGISTER = "author"
"""Register of a log's journal that names the author who may append."""

_FENCE_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_AUTHOR_MAX = 0xFFFF_FFFF
_framing = FixedProtobuf()


def crc32c(content: bytes, before: int = 0) -> int:
    """Return the CRC-32C of content that continues content with the checksum ``before``."""
    return int(google_crc32c.extend(before, content))


def fence_of(author: int) -> str:
    """Return an author as the value of the register ``author``: in base 32, without padding.

    Raises:
        ValidationError: it is not a number of 32 bits above 0.
    """
    if not 0 < author <= _AUTHOR_MAX:
        raise ValidationError(
            f"{author} is not in [1, {_AUTHOR_MAX}]", kind="invalid_author", path="author"
        )
    digits = []
    while author:
        digits.append(_FENCE_DIGITS[author & 31])
        author >>= 5
    return "".join(reversed(digits))


def clean_path(path: str) -> str:
    """Return a path as operations have it: absolute, without ``.``, ``..`` and double slashes.

    Raises:
        ValidationError: it does not begin with a slash, or names the directory itself.
    """
    cleaned = "/" + posixpath.normpath(path).lstrip("/")
    if not path.startswith("/") or cleaned == "/":
        raise ValidationError(
            f"{path!r} is no absolute path of a file", kind="not_clean", path="path"
        )
    return cleaned


def frame_operation(operation: RecordedOp) -> bytes:
    """Return the frame of an operation. The content of a write is appended after it."""
    out = bytearray()
    _framing.encode(operation.SerializeToString(), out)
    return bytes(out)


def decode_operation(message: bytes) -> RecordedOp:
    """Return the operation of a frame without its header.

    Raises:
        DecodeError: it is no operation.
    """
    operation = RecordedOp()
    try:
        operation.ParseFromString(message)
    except ProtobufDecodeError as error:
        raise DecodeError(f"a frame holds no recorded operation: {error}") from error
    return operation


class LogAppender(Protocol):
    """Appender of the log's journal: strictly in order, sticky failures."""

    def append(
        self,
        content: bytes,
        *,
        after: Collection[AnyFuture] = (),
        check: pb.LabelSelector | None = None,
        union: pb.LabelSet | None = None,
    ) -> PendingAppend:
        """Queue an append. See :meth:`gazette_sdk.transport.append.appender.JournalAppender`."""


class RecoveryLog:
    """Log of one primary's run. On the event loop.

    Args:
        appender: of the log's journal, and of this run alone.
        log: name of the journal.
        author: number of the recorder, which has taken over the log.

    Attributes:
        failure: error after which nothing is appended any more; None while there is none.
    """

    def __init__(self, appender: LogAppender, log: str, author: int) -> None:
        fence = label_set(**{AUTHOR_REGISTER: fence_of(author)})
        self._appender = appender
        self._log = log
        self._check = pb.LabelSelector(include=fence)
        self._union = fence
        self._loop = asyncio.get_running_loop()
        self.failure: BaseException | None = None

    def append(
        self, contents: Sequence[bytes], *, after: Collection[AnyFuture] = ()
    ) -> asyncio.Future[int]:
        """Queue appends.

        Args:
            contents: of appends, in order. Without any, an empty append checks the author.
            after: futures that must succeed before the first is sent.

        Returns:
            Future of the offset after the last append, once all are committed. Its error is a
            :class:`~gazette_sdk.errors.FencedError` if another author has taken over the log.
        """
        pending: PendingAppend | None = None
        for content in contents or (b"",):
            pending = self._appender.append(content, after=after, check=self._check)
        assert pending is not None
        return self._end_of(pending)

    def take_over(
        self, opening: bytes, *, after: Collection[AnyFuture] = ()
    ) -> asyncio.Future[int]:
        """Queue the append that opens a log, and makes this recorder its author.

        Args:
            opening: of the recorder; not empty, as only then registers change.
            after: futures that must succeed before it is sent.
        """
        assert opening, "an empty append changes no registers"
        return self._end_of(self._appender.append(opening, after=after, union=self._union))

    def _end_of(self, pending: PendingAppend) -> asyncio.Future[int]:
        """Return a future of the end of an append, on the event loop."""
        found: asyncio.Future[int] = self._loop.create_future()
        pending.add_done_callback(partial(self._ended, found))
        return found

    def _ended(self, found: asyncio.Future[int], pending: PendingAppend) -> None:
        """Have the future end on the event loop. Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who waits
            self._loop.call_soon_threadsafe(self._settle, found, pending)

    def _settle(self, found: asyncio.Future[int], pending: PendingAppend) -> None:
        error = pending.exception()
        if isinstance(error, RegisterMismatchError):
            fenced = FencedError(
                f"another process has taken over {self._log}: {error}", journal=self._log
            )
            fenced.__cause__ = error
            error = fenced
        if error is not None:
            self.failure = self.failure or error
        if found.done():  # cancelled by who waited
            return
        if error is None:
            found.set_result(pending.result().commit.end)
        else:
            found.set_exception(error)
            found.exception()  # `failure` keeps it: a shard that stops need not look at each
