"""``gazctl journals read``.

Journals are read concurrently into one output (:class:`ConcurrentReads`), which consists of whole
appends: a journal holds the output's lock to the end of the fragment it reads, which is the end of
an append.

``MessageCutter`` finds the messages in a journal's content, to count them and to leave out those of
an earlier time. :class:`Records` cuts the input of ``append`` into records and keys.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import stat
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import urlsplit

from gazette_sdk.cli.client import BROKER_CLIENT, open_broker
from gazette_sdk.cli.formats import Progress, open_progress
from gazette_sdk.cli.journals.commands import READ, ReadSettings
from gazette_sdk.cli.journals.list import (
    is_fully_suspended,
    load_offsets,
    missing_file_root,
    selection_of,
    store_offsets,
)
from gazette_sdk.cli.program import CommandFailedError, Invocation, TimedOutError
from gazette_sdk.errors import (
    CallCancelledError,
    ConfigurationError,
    FramingError,
    GazetteError,
    JournalNotFoundError,
    OffsetNotYetAvailableError,
    SuspendedError,
    ValidationError,
)
from gazette_sdk.fragment.content import FragmentReader
from gazette_sdk.fragment.listing import open_url
from gazette_sdk.framing import Cutter, FixedProtobuf, Framing, JsonLines
from gazette_sdk.message.fetcher import HEAD_LAG_MAX_S
from gazette_sdk.message.message_cutter import MessageCutter
from gazette_sdk.message.uuid import clock_of_time
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import parse_duration
from gazette_sdk.retries import pause
from gazette_sdk.server.process import StopSignal
from gazette_sdk.server.tls import file_root_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import (
    ByteReader,
    OffsetJumpError,
    RetryReader,
    begin_mod_time_of,
)
from gazette_sdk.transport.listing import WatchedList

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of the reads.

    Attributes:
        block: follow the journals.
        tail: begin at the write head of journals without an offset.
        do_not_proxy: read from the journals' own brokers, and from fragments directly.
        begin_mod_time: skip fragments stored before this unix time; 0 for none.
        since_clock: leave out messages of an earlier clock, in journals without an offset; 0 for
            none.
        messages_max: stop after so many messages; None for no limit.
        file_root: local directory of ``file://`` stores, if there is one.
    """

    block: bool = False
    tail: bool = False
    do_not_proxy: bool = False
    begin_mod_time: int = 0
    since_clock: int = 0
    messages_max: int | None = None
    file_root: Path | None = None


class Output:
    """Output file. The journal that holds ``lock`` writes to it.

    Args:
        file: the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.lock = asyncio.Lock()
        self._file = file

    async def write(self, content: bytes) -> None:
        """Write content. The caller holds the lock."""
        await asyncio.to_thread(self._write, content)

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()

    def sync(self) -> None:
        """Force the content of a regular file to disk."""
        self._file.flush()
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            os.fsync(self._file.fileno())


@dataclass(slots=True)
class _Read:
    """Read of one journal: its reader, and the task that copies its content."""

    reader: RetryReader
    task: asyncio.Task[None]


@dataclass
class ConcurrentReads:
    """Reads of all journals of a watched listing, until all have ended.

    Attributes:
        transport: transport to the journals.
        options: options of the reads.
        output: output of their content.
        offsets: offset by journal at which a read begins, and afterwards ended.
        progress: shows the number of bytes read.
        messages: number of messages that were written, if they are counted.
    """

    transport: Transport
    options: ReadOptions
    output: Output
    offsets: dict[str, int]
    progress: Progress
    messages: int = 0
    _enough: asyncio.Event = field(default_factory=asyncio.Event)
    _reads: dict[str, _Read] = field(default_factory=dict)
    _ended: dict[str, pb.ListResponse] = field(default_factory=dict)
    _done_bytes: int = 0
    _heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    _missing_since: dict[str, float] = field(default_factory=dict)

    async def run(self, watched: WatchedList, stopped: Callable[[], Awaitable[Any]]) -> None:
        """Read until all journals have ended, enough messages are written, or ``stopped`` returns.

        Args:
            watched: the listing.
            stopped: waits for the request to stop.

        Raises:
            GazetteError: the first terminal failure of a read.
        """
        listing = await watched.first_snapshot()
        if not listing.journals:
            _log.warning("no journals were matched by the selector")
            return
        changed = asyncio.ensure_future(watched.changed())
        stop = asyncio.ensure_future(stopped())
        enough = asyncio.ensure_future(self._enough.wait())
        try:
            while True:
                self._follow(watched)
                if not self._reads:
                    return
                tasks: list[asyncio.Future[Any]] = [read.task for read in self._reads.values()]
                waits = [*tasks, changed, stop, enough]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if stop.done() or enough.done():
                    break
                if changed.done():
                    # The watch logs its failures and begins again.
                    changed.exception()
                    changed = asyncio.ensure_future(watched.changed())
                self._collect(watched)
            for read in self._reads.values():
                read.reader.cancel()
            await asyncio.wait([read.task for read in self._reads.values()])
            self._collect(watched)
        finally:
            changed.cancel()
            stop.cancel()
            enough.cancel()
            tasks = [read.task for read in self._reads.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait([*tasks, changed, stop, enough])

    def _follow(self, watched: WatchedList) -> None:
        """Begin reads of new journals, and end reads of deleted journals."""
        assert watched.snapshot is not None
        listed = {each.spec.name: each.spec for each in watched.snapshot.journals}
        for name, spec in listed.items():
            if name in self._reads or is_fully_suspended(spec):
                continue
            # A suspended or deleted journal may return, which only a later listing shows.
            ended = self._ended.get(name)
            if ended is None or (self.options.block and ended is not watched.snapshot):
                self._begin(spec)
        for name, read in self._reads.items():
            if name not in listed:
                read.reader.cancel()

    def _begin(self, spec: pb.JournalSpec) -> None:
        options, journal = self.options, spec.name
        has_offset = journal in self.offsets
        offset = self.offsets.get(journal, -1 if options.tail else 0)
        reader = RetryReader(
            self.transport,
            pb.ReadRequest(
                journal=journal,
                offset=offset,
                # A read that begins at the write head must learn its offset before it blocks:
                # otherwise the offset at which it ends would be unknown. A saved offset may be one
                # that the journal does not have.
                block=options.block and offset >= 0 and not has_offset,
                do_not_proxy=options.do_not_proxy,
                begin_mod_time=0 if options.since_clock and has_offset else options.begin_mod_time,
            ),
            new_reader=lambda request, last: ByteReader(
                self.transport,
                request,
                last_response=last,
                open_fragment=self._open_fragment,
            ),
        )
        _log.info("read started", extra={"journal": journal, "offset": offset})
        messages = None
        if options.messages_max is not None or options.since_clock:
            messages = MessageCutter(spec, offset, 0 if has_offset else options.since_clock)
        task = asyncio.create_task(self._copy(reader, messages), name=f"read of {journal}")
        self._reads[journal] = _Read(reader, task)

    def _open_fragment(self, url: str, fragment: pb.Fragment, offset: int) -> FragmentReader:
        if urlsplit(url).scheme == "file" and self.options.file_root is None:
            raise missing_file_root(
                fragment.journal, ", or read through brokers with --broker.cache.size=0"
            )
        return open_url(url, fragment, offset, file_root=self.options.file_root)

    def _collect(self, watched: WatchedList) -> None:
        """Remove the reads that ended, and raise the error of one that failed."""
        assert watched.snapshot is not None
        for journal, read in list(self._reads.items()):
            if not read.task.done():
                continue
            del self._reads[journal]
            read.task.result()
            self._ended[journal] = watched.snapshot
            _log.info("read finished", extra={"journal": journal, "offset": read.reader.offset})

    async def _copy(self, reader: RetryReader, messages: MessageCutter | None) -> None:
        """Copy a journal's content, or the messages in it, to the output until its end."""
        journal = reader.journal
        self.offsets[journal] = reader.offset
        try:
            while not self._enough.is_set():
                try:
                    content = await reader.read()
                except OffsetJumpError as jump:
                    _log.info("%s", jump, extra={"journal": journal})
                    if messages is not None:
                        messages.begin(reader.offset)
                    continue
                except OffsetNotYetAvailableError:
                    if await self._ends_at_head(reader, messages):
                        return
                    continue
                assert content is not None  # the request has no end offset
                async with self.output.lock:
                    await self._write_appends(reader, messages, content)
        except (SuspendedError, CallCancelledError):
            pass
        except JournalNotFoundError as error:
            _log.warning("%s", error)
        finally:
            if self.offsets[journal] < 0:
                del self.offsets[journal]
            await reader.aclose()

    async def _ends_at_head(self, reader: RetryReader, messages: MessageCutter | None) -> bool:
        """Return True if a read ends, whose journal has no content at its offset.

        Raises:
            CommandFailedError: it begins after the write head of the journal.
        """
        journal = reader.journal
        if journal not in self._heads and (missing := _missing(reader)):  # nothing was read yet
            now = asyncio.get_running_loop().time()
            if now - self._missing_since.setdefault(journal, now) >= HEAD_LAG_MAX_S:
                raise missing
            await pause(1)
            return False
        if reader.block or not self.options.block:
            async with self.output.lock:
                await self._write_rest(reader, messages)
            return True
        if self.offsets[journal] < 0 and messages is not None:
            messages.begin(reader.offset)
        self.offsets[journal] = reader.offset if messages is None else messages.offset
        reader.block = True
        return False

    async def _write_appends(
        self, reader: RetryReader, messages: MessageCutter | None, content: bytes
    ) -> None:
        """Write content, and the content after it up to the end of an append."""
        while not self._enough.is_set():
            await self._write(reader, messages, content)
            response = reader.response
            if response is None or reader.offset >= response.fragment.end:
                return
            try:
                more = await reader.read()
            except OffsetJumpError:
                if messages is not None:
                    messages.begin(reader.offset)
                return  # the next read continues there
            except OffsetNotYetAvailableError:
                return  # the next read raises it again
            assert more is not None
            content = more

    async def _write(
        self, reader: RetryReader, messages: MessageCutter | None, content: bytes
    ) -> None:
        """Write content, or the messages that it completes. The caller holds the output's lock."""
        offset, size = reader.offset, len(content)
        if messages is not None:
            content, count = messages.feed(content, self._count_left())
            offset = messages.offset
            self.messages += count
        if content:
            await self.output.write(content)
        self.offsets[reader.journal] = offset
        self._show_progress(reader, size)
        if self._count_left() == 0:
            self._enough.set()

    async def _write_rest(self, reader: RetryReader, messages: MessageCutter | None) -> None:
        """Write what is left at a write head. The caller holds the output's lock."""
        if self._enough.is_set():
            return
        if messages is not None and (rest := messages.finish()):
            self.messages += 1
            await self.output.write(rest)
        self.offsets[reader.journal] = reader.offset

    def _count_left(self) -> int | None:
        """Return the number of messages that may still be written; None for no limit."""
        limit = self.options.messages_max
        return None if limit is None else limit - self.messages

    def _show_progress(self, reader: RetryReader, size: int) -> None:
        self._done_bytes += size
        head = reader.response.write_head if reader.response is not None else reader.offset
        begin, _ = self._heads.get(reader.journal, (reader.offset - size, 0))
        self._heads[reader.journal] = (begin, max(head, reader.offset))
        total = sum(head - begin for begin, head in self._heads.values())
        self.progress.advance(self._done_bytes, None if self.options.block else total)


def _missing(reader: RetryReader) -> CommandFailedError | None:
    """Return an error if an offset is after the write head of its journal."""
    response = reader.response
    if response is None or reader.offset <= response.write_head:
        return None
    return CommandFailedError(
        f"offset {reader.offset} of --offsets is after the write head of {reader.journal}, which is"
        f" {response.write_head}: content was lost, or the offset is of an earlier journal of that"
        " name; set it to 0 in the file to read what there is"
    )


Record = tuple[bytes, bytes]
"""Key of a record, or empty bytes, and its content with its framing."""


class Records:
    """Cutter of input into records.

    Args:
        framing: ``lines`` or ``fixed``; records keep their newlines or headers.
        has_keys: a key of the same framing precedes each record.
        base64_keys: keys are base64.
    """

    def __init__(
        self, framing: Literal["lines", "fixed"], *, has_keys: bool, base64_keys: bool
    ) -> None:
        self._framing: Framing = JsonLines() if framing == "lines" else FixedProtobuf()
        self._cutter = Cutter(self._framing)
        self._has_keys = has_keys
        self._base64_keys = base64_keys
        self._key: bytes | None = None

    @property
    def has_dangling_key(self) -> bool:
        """True if the last frame was a key without a record yet."""
        return self._key is not None

    def feed(self, block: bytes) -> tuple[list[Record], GazetteError | None]:
        """Return the records that a block completes, and the error after them.

        Args:
            block: further input; empty bytes at its end.
        """
        cut = self._cutter.feed(block) if block else self._cutter.finish()
        records: list[Record] = []
        for begin, end in zip(cut.frames.begins, cut.frames.ends, strict=True):
            frame = bytes(cut.buffer[begin:end])
            if not self._has_keys:
                records.append((b"", frame))
            elif self._key is None:
                try:
                    self._key = self._key_of(frame)
                except GazetteError as error:
                    return records, error
            else:
                records.append((self._key, frame))
                self._key = None
        return records, self._explained(cut.frames.error)

    def _key_of(self, frame: bytes) -> bytes:
        if isinstance(self._framing, FixedProtobuf):
            return frame[self._framing.header_bytes :]
        key = frame.rstrip(b"\r\n")
        if not self._base64_keys:
            return key
        try:
            return base64.b64decode(key, validate=True)
        except binascii.Error as error:
            raise FramingError(f"the partition key {key!r} is not base64: {error}") from error

    def _explained(self, error: FramingError | None) -> FramingError | None:
        if error is None:
            return None
        what = "record" if self._key is not None or not self._has_keys else "partition key"
        return FramingError(f"input at byte {error.offset}: no whole {what}: {error}")


async def run(invocation: Invocation) -> None:
    """Read journals to their write heads or until a signal, then save the offsets.

    Raises:
        TimedOutError: the time was up. What was read is written, and the offsets are saved.
        GazetteError: a journal that was named does not exist, or reading failed.
    """
    settings, timeout_s = invocation.settings(READ), invocation.timeout_s
    selection = selection_of(invocation, settings)
    options = _options(settings, do_not_proxy=invocation.settings(BROKER_CLIENT).cache_size > 0)
    begun = asyncio.get_running_loop().time()
    with StopSignal() as stop:
        async with (
            open_broker(invocation) as transport,
            WatchedList(transport, selection.selector) as watched,
        ):
            try:
                async with asyncio.timeout(timeout_s or None):
                    listing = await watched.first_snapshot()  # before any file is touched
            except TimeoutError:
                raise TimedOutError("journals read", timeout_s, "nothing was read") from None
            selection.check(listing)
            offsets = _offsets(settings)
            is_late = False

            async def stopped() -> None:
                nonlocal is_late
                try:
                    async with asyncio.timeout_at(begun + timeout_s if timeout_s else None):
                        await stop.wait()
                except TimeoutError:
                    is_late = True

            with _open_output(settings.output) as file:
                output = Output(file)
                with open_progress("bytes", is_shown=not file.isatty()) as progress:
                    progress.begin("Reading")
                    reads = ConcurrentReads(transport, options, output, offsets, progress)
                    await reads.run(watched, stopped)
                output.sync()
        if settings.offsets_out:
            store_offsets(Path(settings.offsets_out), offsets)
    if is_late:
        counted = f"{reads.messages} messages were read" if settings.messages_max else ""
        raise TimedOutError("journals read", timeout_s, counted)


def _options(settings: ReadSettings, *, do_not_proxy: bool) -> ReadOptions:
    """Return the options of the reads.

    Raises:
        ConfigurationError: options exclude each other, or the time is malformed.
    """
    begin_mod_time, since_clock = settings.from_time, 0
    if settings.since:
        for name, is_given in (("--tail", settings.tail), ("--from", settings.from_time)):
            if is_given:
                raise ConfigurationError(f"--since and {name} exclude each other; give one of them")
        since = time_of(settings.since, "--since")
        begin_mod_time = begin_mod_time_of(since)
        since_clock = clock_of_time(since)
    return ReadOptions(
        block=settings.block,
        tail=settings.tail,
        do_not_proxy=do_not_proxy,
        begin_mod_time=begin_mod_time,
        since_clock=since_clock,
        messages_max=settings.messages_max or None,
        file_root=file_root_of(settings.file_root),
    )


def time_of(text: str, option: str) -> datetime:
    """Return the time that the value of an option names.

    Raises:
        ConfigurationError: it is neither a duration nor a time with its zone.
    """
    try:
        return datetime.now(UTC) - timedelta(microseconds=parse_duration(text) // 1000)
    except (ValidationError, OverflowError):
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        problem = "is no time" if time is None else "has no time zone"
        raise ConfigurationError(
            f"{option}: {text!r} {problem}; write 2026-01-31T12:00:00Z, 2026-01-31T13:00:00+01:00, "
            "or 2h for two hours ago"
        )
    return time


def _offsets(settings: ReadSettings) -> dict[str, int]:
    if not settings.offsets:
        return {}
    path, out = Path(settings.offsets), settings.offsets_out
    return load_offsets(path, replaced=bool(out) and path.resolve() == Path(out).resolve())


def _open_output(path: str) -> BinaryIO:
    if path != "-":
        return Path(path).open("wb")
    return open(sys.stdout.fileno(), "wb", closefd=False)
