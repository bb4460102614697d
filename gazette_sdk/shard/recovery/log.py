"""Recovery log of a primary: appends of the log's current author only, and pruning.

The register ``author`` of the journal names who recovered the log last. Each append checks it. When
another process has recovered the log, no append of this one can commit any more.

A chain of checksums links the recorded operations (recovery log 1). A frame is a fixed header and a
protobuf message. The content of a write follows its frame; it is not part of the message, and the
checksum does not cover it.

A log is pruned of what no hints need (recovery log 8). A consumer labels each log with the offset
before which nothing is needed, and brokers remove that. ``gazctl shards prune`` removes more: also
unneeded fragments between others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import posixpath
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError as ProtobufDecodeError
from prometheus_client import Counter

from gazette_sdk.errors import (
    DecodeError,
    EtcdTransactionFailedError,
    FencedError,
    GazetteError,
    RegisterMismatchError,
    ValidationError,
    needs_extra,
)
from gazette_sdk.framing.base import FixedProtobuf
from gazette_sdk.journals.changes import list_named
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import NEEDED_FROM, label_set, needed_from, set_value
from gazette_sdk.protocol.recoverylog_pb2 import FSMHints, RecordedOp
from gazette_sdk.retries import Outage
from gazette_sdk.shard.recovery.hints import Segment, flatten
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import apply_journals

with needs_extra("shards", "recovery logs of shards"):
    import google_crc32c

RECOVERED_BYTES = Counter(
    "gazette_recoverylog_recovered_bytes", "Bytes of recovery logs that were played back."
)


HEADER_BYTES = FixedProtobuf.header_bytes
"""Length of the header of a frame, which the checksum does not cover."""

AUTHOR_REGISTER = "author"
"""Register of a log's journal that names the author who may append."""

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class ShardHints:
    """Hints of one shard.

    Attributes:
        shard: its id.
        log: its recovery log.
        hints: of all slots, primary and backups; None for an empty slot.
    """

    shard: str
    log: str
    hints: Sequence[FSMHints | None]


@dataclass(slots=True)
class PrunePlan:
    """Content of logs that hints need.

    All shards that may read a log must be in the plan, whichever logs are pruned.

    Attributes:
        segments: by log. Those of different hints may contradict each other.
        kept: reason why a log is not pruned at all, by log.
    """

    segments: dict[str, list[Segment]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, shards: Iterable[ShardHints]) -> PrunePlan:
        """Return the plan of all shards that may read the logs.

        Raises:
            ValidationError: hints are malformed.
        """
        plan = cls()
        for shard in shards:
            for hints in shard.hints:
                if hints is None or not hints.live_nodes:
                    plan.kept.setdefault(shard.log, f"hints of shard {shard.shard} are missing")
                if hints is not None:
                    plan.fold(hints)
        return plan

    def fold(self, hints: FSMHints) -> None:
        """Add all segments of hints. Playback reads from the last of them to the head.

        Raises:
            ValidationError: the hints are malformed.
        """
        found = list(flatten(hints)[1])
        for index, segment in enumerate(found):
            if index == len(found) - 1:
                segment.last_offset = 0
            self.segments.setdefault(segment.log, []).append(segment)

    def is_prunable(self, log: str, begin: int, end: int) -> bool:
        """Return True if no playback reads a fragment.

        Args:
            log: journal of the fragment.
            begin: offset of its first byte.
            end: offset after its last one; 0 if it is not known.
        """
        return log not in self.kept and not overlaps(begin, end, self.segments.get(log, ()))

    def needed_from(self, log: str) -> int | None:
        """Return the offset before which no playback reads a log; None where that is not known."""
        segments = self.segments.get(log)
        if log in self.kept or not segments:
            return None
        return min(segment.first_offset for segment in segments)


class LogPruning:
    """Reports of the begin of recovery logs that no recovery needs, while this process leads.

    The process that leads a consumer knows all of its shards. A log is reported once at least the
    length of a fragment is not needed.

    Args:
        transport: to the logs.
        hints: loads the hints of all shards of the consumer.
        leads: returns True if this process is to report.
        period_s: time between two reports, in seconds.
    """

    def __init__(
        self,
        transport: Transport,
        hints: Callable[[], Awaitable[Sequence[ShardHints]]],
        leads: Callable[[], bool],
        *,
        period_s: float,
    ) -> None:
        self._transport = transport
        self._hints = hints
        self._leads = leads
        self._period_s = period_s

    async def run(self) -> None:
        """Report until it is cancelled."""
        outage = Outage(_log, "pruning of recovery logs")
        while True:
            await asyncio.sleep(self._period_s)
            if not self._leads():
                continue
            try:
                await self.report()
            except GazetteError as error:
                outage.failed(error)
            else:
                outage.ended()

    async def report(self) -> None:
        """Label the logs whose begin is not needed.

        Raises:
            ValidationError: hints are malformed, so that nothing is known to be unneeded.
            GazetteError: Etcd or a broker failed.
        """
        plan = PrunePlan.of(await self._hints())
        logs = await list_named(self._transport, sorted(plan.segments.keys() - plan.kept.keys()))
        for name, journal in sorted(logs.items()):
            needed = plan.needed_from(name)
            known = needed_from(journal.spec.labels)
            if needed is None or needed - known < max(journal.spec.fragment.length, 1):
                continue
            change = pb.ApplyRequest.Change(expect_mod_revision=journal.mod_revision)
            change.upsert.CopyFrom(journal.spec)
            set_value(change.upsert.labels, NEEDED_FROM, str(needed))
            try:
                await apply_journals(self._transport, pb.ApplyRequest(changes=[change]))
            except EtcdTransactionFailedError:
                continue  # it was changed meanwhile: with the next report
            _log.info("a recovery log is not needed before offset %d: %s", needed, name)


def overlaps(begin: int, end: int, segments: Sequence[Segment]) -> bool:
    """Return True if a fragment holds operations of a segment, or if there are no segments.

    Args:
        begin: offset of the fragment's first byte.
        end: offset after its last one; 0 if it is not known.
        segments: of its log; a last offset of 0 is not known.
    """
    if not segments:
        return True
    return any(
        (segment.first_offset < end or end == 0)
        and (segment.last_offset > begin or segment.last_offset == 0)
        for segment in segments
    )
