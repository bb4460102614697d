"""Player: content of recovery logs becomes changes of staged files (recovery log 6). Pure.

========  ==========================================  =============================  ========
state     input                                       effect                         next
========  ==========================================  =============================  ========
BACKFILL  operation                                   re-enact, or skip              BACKFILL
BACKFILL  head                                        nothing                        TAIL
BACKFILL  head, hints are left or nothing applied     fail                           FAILED
TAIL      operation                                   re-enact, or skip              TAIL
TAIL      head                                        nothing                        TAIL
TAIL      finish                                      the files are complete         LIVE
TAIL      hand-off                                    an operation to append         INJECTED
INJECTED  operation of another author                 re-enact, or skip              INJECTED
INJECTED  own operation is part of the history        the files are complete         LIVE
INJECTED  own operation is not                        skip; hand off once more       TAIL
INJECTED  head                                        hand off once more             TAIL
========  ==========================================  =============================  ========

LIVE and FAILED are final. Several authors may race for a log. The one whose operation follows the
history first has won: all others' operations do not continue it any more.

:class:`Playback` restores the files of a store from its recovery log and keeps up with it::

    playback = Playback(transport, hints, directory)
    task = asyncio.create_task(playback.run())
    await playback.tailing.wait()            # a hot standby stays here
    recovered = await playback.hand_off(author)

It reads logs on the event loop, and writes files on worker threads. Meanwhile files are staged
(:class:`StagedFiles`): each is named by its fnode, below ``.fnodes``. When playback ends they get
their paths.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import shutil
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias, TypeVar

from gazette_sdk.errors import ClosedError, GazetteError, OffsetNotYetAvailableError, RecoveryError
from gazette_sdk.protocol import broker_pb2
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.shard.recovery.fsm import FSM, Applied
from gazette_sdk.shard.recovery.hints import flatten
from gazette_sdk.shard.recovery.log import (
    AUTHOR_REGISTER,
    HEADER_BYTES,
    RECOVERED_BYTES,
    clean_path,
    decode_operation,
    fence_of,
    frame_operation,
)
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import OffsetJumpError, RetryReader
from gazette_sdk.user_code import on_worker

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""Greatest piece of content that is played at once."""

SKIP_BYTES_MAX = 1 << 20
"""Content between two hinted segments that is read and dropped, because a new read takes longer."""

MISSING_CONTENT_S = 30.0
"""Time to wait for content that was appended before, and that the broker does not have."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recovered:
    """Result of a playback.

    Attributes:
        fsm: history, which a recorder may continue.
        log: journal whose end was played.
        write_head: offset after the last operation.
    """

    fsm: FSM
    log: str
    write_head: int


class Playback:
    """Playback of one store.

    Args:
        transport: how to reach the logs.
        hints: where to begin.
        directory: of the store. Its content is deleted, and all of it if playback fails.
        workers: threads that write files; by default those of the event loop.
        file_root: local directory which stands for the root of ``file://`` fragment URLs.

    Attributes:
        tailing: set when all content from before the playback is played.
        bytes_to_read: estimate of the content to read before ``tailing``, in bytes.
        bytes_read: content that was read.
        bytes_live: length of all files.
    """

    def __init__(
        self,
        transport: Transport,
        hints: pb.FSMHints,
        directory: Path,
        *,
        workers: Executor | None = None,
        file_root: Path | None = None,
    ) -> None:
        self.tailing = asyncio.Event()
        self.bytes_to_read = 0
        self.bytes_read = 0
        self._transport = transport
        self._appends = AppendService(transport)
        self._hints = hints
        self._files = StagedFiles(directory)
        self._workers = workers
        self._file_root = file_root
        self._player: Player | None = None
        self._reader: RetryReader | None = None
        self._is_behind = False  # content below `read_through` is waited for
        self._waited_at = ("", 0)  # log and offset where it did not come in time
        self._wanted = asyncio.Event()
        self._author = 0
        self._recovered: asyncio.Future[Recovered] = asyncio.get_running_loop().create_future()

    @property
    def bytes_live(self) -> int:
        """Length of all files."""
        if self._player is None:
            return 0
        nodes = list(self._player.fsm.live_nodes.values())  # at once: a worker may be changing them
        return sum(node.size_bytes for node in nodes)

    async def run(self) -> None:
        """Play until the files are complete, after :meth:`finish` or :meth:`hand_off`.

        Raises:
            RecoveryError: content that the hints name is missing; possible data loss.
            ValidationError: the hints are malformed.
            JournalNotFoundError: a log does not exist.
            OSError: a file cannot be written.
        """
        try:
            await self._call(self._files.begin)
            player = await self._begin()
            while not player.is_done:
                await self._step(player)
            await self._call(lambda: self._files.make_live(player.fsm))
            self._recovered.set_result(Recovered(player.fsm, player.log, player.offset))
        except BaseException as error:
            self._failed(error)
            await self._call(self._files.destroy)
            raise
        finally:
            await self._close_reader()
            await self._appends.aclose()

    async def finish(self) -> Recovered:
        """Play to the write head, and complete the files there. Nothing is appended.

        Raises:
            GazetteError: :meth:`run` has failed, or was cancelled.
        """
        self._wanted.set()
        return await asyncio.shield(self._recovered)

    async def hand_off(self, author: int) -> Recovered:
        """Play to the write head, and make ``author`` the only one who may append from there.

        Args:
            author: number of the recorder that continues, in [1, 2^32 - 1].

        Raises:
            GazetteError: :meth:`run` has failed, or was cancelled.
            ValidationError: the author is out of range.
        """
        fence_of(author)
        if self._author not in (0, author):
            raise GazetteError(f"the playback is handed off to author {self._author} already")
        self._author = author
        self._wanted.set()
        return await asyncio.shield(self._recovered)

    # ------------------------------------------------------------------ parts

    async def _begin(self) -> Player:
        """Find the logs' write heads, and check hints against them."""
        heads = {}
        for log in logs_of(self._hints):
            response = await self._appends.appender(log).append(b"")
            heads[log] = response.commit.end
        self._player = player = Player(self._hints, heads)
        self.bytes_to_read = _bytes_to_read(self._hints, heads)
        return player

    async def _step(self, player: Player) -> None:
        """Read and play a piece, or act on the write head."""
        try:
            content = await self._read(player)
        except OffsetJumpError as jump:
            if jump.offset is not None and jump.offset > player.next_offset:
                player.jumped(jump.offset)
        except OffsetNotYetAvailableError:
            if player.next_offset >= player.read_through[player.log]:
                await self._at_head(player)
            else:
                self._at_end(player)
        else:
            if content:
                self.bytes_read += len(content)
                RECOVERED_BYTES.inc(len(content))
                await self._call(lambda: self._files.apply(player.feed(content)))

    def _at_end(self, player: Player) -> None:
        """Act on a broker that has no content between the player's offset and ``read_through``.

        Its replica may lag after, or not know a stored fragment yet.
        """
        assert self._reader is not None
        response = self._reader.response
        head = response.write_head if response is not None else 0
        place = (player.log, player.next_offset)
        if self._waited_at == place and head >= player.read_through[player.log]:
            player.missing(head)
        self._is_behind = True

    async def _at_head(self, player: Player) -> None:
        player.head()
        self.tailing.set()
        if self._wanted.is_set():
            if self._author:
                await self._inject(player)
            else:
                player.finish()

    async def _inject(self, player: Player) -> None:
        fence = label_set(**{AUTHOR_REGISTER: fence_of(self._author)})
        appender = self._appends.appender(player.log)
        response = await appender.append(player.inject(self._author), union=fence)
        player.injected(response.commit.end)

    # ---------------------------------------------------------------- reading

    async def _read(self, player: Player) -> bytes:
        """Return content at the player's offset; nothing if there is none yet."""
        is_following = player.state is PlayerState.TAIL and not self._wanted.is_set()
        is_blocking = is_following or self._is_behind
        reader = self._reader
        if reader is None or reader.journal != player.log or reader.block != is_blocking:
            reader = await self._open_reader(player, is_blocking=is_blocking)
        elif not 0 <= player.next_offset - reader.offset <= SKIP_BYTES_MAX:
            await reader.seek(player.next_offset)
        if is_following:
            content = await self._read_or_wanted(reader)
        elif is_blocking:
            content = await self._read_late(player, reader)
        else:
            content = await reader.read(PIECE_BYTES) or b""
        skipped = player.next_offset - (reader.offset - len(content))
        return content[skipped:] if skipped else content

    async def _read_late(self, player: Player, reader: RetryReader) -> bytes:
        """Wait some time for content below ``read_through``."""
        self._is_behind = False
        try:
            async with asyncio.timeout(MISSING_CONTENT_S):
                return await reader.read(PIECE_BYTES) or b""
        except TimeoutError:
            self._waited_at = (player.log, player.next_offset)
            return b""

    async def _read_or_wanted(self, reader: RetryReader) -> bytes:
        """Wait for content, or for a request to end."""
        reading = asyncio.ensure_future(reader.read(PIECE_BYTES))
        wanted = asyncio.ensure_future(self._wanted.wait())
        try:
            await asyncio.wait({reading, wanted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wanted.cancel()
            reading.cancel()  # has no effect if content has come
            await asyncio.wait({reading, wanted})
        return b"" if reading.cancelled() else reading.result() or b""

    async def _open_reader(self, player: Player, *, is_blocking: bool) -> RetryReader:
        await self._close_reader()
        request = broker_pb2.ReadRequest(
            journal=player.log, offset=player.next_offset, block=is_blocking
        )
        self._reader = RetryReader(self._transport, request, file_root=self._file_root)
        return self._reader

    async def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.aclose()

    # -------------------------------------------------------------------- end

    async def _call(self, function: Callable[[], T]) -> T:
        return await on_worker(self._workers, function)

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            error = ClosedError(f"the playback of {self._hints.log} was cancelled")
        elif not isinstance(error, GazetteError):
            text = f"the playback of {self._hints.log} failed: {error}"
            cause, error = error, RecoveryError(text, journal=self._hints.log)
            error.__cause__ = cause
        if not self._recovered.done():
            self._recovered.set_exception(error)
            self._recovered.exception()  # `run` raises it, too: no one need wait for a hand-off


def _bytes_to_read(hints: pb.FSMHints, heads: dict[str, int]) -> int:
    """Return the length of all hinted segments, and of what follows the last of them."""
    segments = list(flatten(hints)[1])
    if not segments:
        return heads[hints.log]
    found = 0
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        end = segment.last_offset
        if following is None:
            end = heads[segment.log]
        elif not end:
            end = following.first_offset  # of the same log, as the end is not known
        found += max(0, end - segment.first_offset)
    return found


STAGING = ".fnodes"
"""Directory of staged files, below the store's."""

OPEN_FILES_MAX = 16
"""Files that are kept open. Stores write few files at a time."""


class StagedFiles:
    """Files of one store during playback.

    Args:
        directory: of the store. Its content is deleted.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: OrderedDict[int, int] = OrderedDict()  # descriptors by fnode, oldest use first

    def path(self, fnode: int) -> Path:
        """Return the path of a staged file."""
        return self.directory / STAGING / str(fnode)

    def begin(self) -> None:
        """Delete all content of the directory, and create what staging needs."""
        if self.directory.exists():
            for entry in self.directory.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        (self.directory / STAGING).mkdir(parents=True)

    def apply(self, changes: Iterable[NodeChange]) -> None:
        """Perform changes, in order.

        Raises:
            OSError: a file cannot be created or written.
        """
        for change in changes:
            match change:
                case WriteNode(fnode, offset, content):
                    _write(self._descriptor(fnode), content, offset)
                case CreateNode(fnode):
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    self._keep(fnode, os.open(self.path(fnode), flags, 0o644))
                case RemoveNode(fnode):
                    self._close(fnode)
                    self.path(fnode).unlink()

    def make_live(self, fsm: FSM) -> None:
        """Give all files their paths, and write properties.

        Raises:
            RecoveryError: the staged files are not those of the history, or two have one path.
            OSError: a file cannot be linked.
        """
        self.close()
        staged = {int(entry.name) for entry in (self.directory / STAGING).iterdir()}
        if staged != set(fsm.live_nodes):
            raise RecoveryError(
                f"staged files {sorted(staged)} are not the live ones {sorted(fsm.live_nodes)}"
            )
        for fnode, node in sorted(fsm.live_nodes.items()):
            for path in sorted(node.links):
                os.link(self.path(fnode), self._target(path))
            self.path(fnode).unlink()
        (self.directory / STAGING).rmdir()
        for path, content in sorted(fsm.properties.items()):
            with self._target(path).open("xb") as file:
                file.write(content.encode())

    def destroy(self) -> None:
        """Delete the directory."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Close all files."""
        for fnode in list(self._open):
            self._close(fnode)

    # ------------------------------------------------------------------ parts

    def _target(self, path: str) -> Path:
        """Return the local path of a recorded one, which cannot be outside of the directory."""
        target = self.directory / clean_path(path).lstrip("/")
        if target.relative_to(self.directory).parts[0] == STAGING:
            raise RecoveryError(f"a recorded file has the path {path}, which is reserved")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _descriptor(self, fnode: int) -> int:
        descriptor = self._open.get(fnode)
        if descriptor is None:
            descriptor = os.open(self.path(fnode), os.O_RDWR | os.O_CLOEXEC)
            self._keep(fnode, descriptor)
        else:
            self._open.move_to_end(fnode)
        return descriptor

    def _keep(self, fnode: int, descriptor: int) -> None:
        self._open[fnode] = descriptor
        if len(self._open) > OPEN_FILES_MAX:
            os.close(self._open.popitem(last=False)[1])

    def _close(self, fnode: int) -> None:
        descriptor = self._open.pop(fnode, None)
        if descriptor is not None:
            os.close(descriptor)


def _write(descriptor: int, content: bytes, offset: int) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(
            descriptor, content[written:] if written else content, offset + written
        )


OPERATION_BYTES_MAX = 16 << 20
"""A header with a greater length is no frame. Operations hold paths and small files only."""

_HEADER = struct.Struct("<4sI")
_MAGIC = b"\x66\x33\x93\x36"


class PlayerState(enum.Enum):
    """State of a player."""

    BACKFILL = "reads what the log held when playback began"
    TAIL = "has read all of it, and follows"
    INJECTED = "waits for its own hand-off operation"
    LIVE = "the files are complete"
    FAILED = "cannot play the log"


@dataclass(frozen=True, slots=True)
class CreateNode:
    """A new, empty file, known by its fnode."""

    fnode: int


@dataclass(frozen=True, slots=True)
class WriteNode:
    """Content of a file at an offset."""

    fnode: int
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RemoveNode:
    """A file without links, which ceases to exist."""

    fnode: int


NodeChange: TypeAlias = CreateNode | WriteNode | RemoveNode
"""Change of a staged file."""


def logs_of(hints: pb.FSMHints) -> list[str]:
    """Return the journals that hints name; their own log stands first."""
    logs = {hints.log: None}
    for segment in flatten(hints)[1]:
        logs[segment.log] = None
    return list(logs)


class Player:
    """Player of one store.

    Args:
        hints: where to begin.
        read_through: write head of each log that the hints name, after an append to it.

    Attributes:
        fsm: history so far.
        state: of the machine.
        log: journal to read.
        offset: offset of the next operation.
        applied: number of operations that are part of the history.
        read_through: offset that must be read before the head of a log counts.

    Raises:
        RecoveryError: hints name content after the write head.
        ValidationError: hints are malformed.
    """

    def __init__(self, hints: pb.FSMHints, read_through: Mapping[str, int]) -> None:
        self.fsm = FSM(hints)
        self.state = PlayerState.BACKFILL
        self.log = hints.log
        self.offset = 0
        self.applied = 0
        self.read_through = dict(read_through)
        self._rest = b""
        self._payload_left = 0
        self._payload_fnode = 0  # 0: the content is skipped
        self._payload_at = 0
        self._author = 0
        self._is_any_skipped = False  # an operation is no part of the history
        self._gap_at = -1  # where content is missing, until an operation continues the history
        self._failure: RecoveryError | None = None
        for segment in self.fsm.hinted_segments:
            head = self.read_through[segment.log]
            if segment.first_offset >= head or segment.last_offset > head:
                self._fail(
                    f"max write-head of {segment.log} is {head}, vs hinted {segment};"
                    " possible data loss"
                )
        self._seek_hinted()

    @property
    def next_offset(self) -> int:
        """Offset of the content to feed next."""
        return self.offset + len(self._rest)

    @property
    def is_done(self) -> bool:
        """The files are complete."""
        return self.state is PlayerState.LIVE

    # ----------------------------------------------------------------- content

    def feed(self, content: bytes) -> list[NodeChange]:
        """Play content of ``log`` at ``next_offset``. Both may be elsewhere afterwards.

        Returns:
            Changes of staged files, in order.

        Raises:
            RecoveryError: hinted operations are missing.
            DecodeError: a frame holds no operation.
        """
        self._check()
        data = self._rest + content if self._rest else content
        changes: list[NodeChange] = []
        at = 0
        while self.state is not PlayerState.LIVE:
            if self._payload_left:
                taken = self._play_payload(data, at, changes)
                at += taken
                self.offset += taken
                if self._payload_left:
                    break
            log, offset = self.log, self.offset
            if self._seek_hinted():
                at += self.offset - offset
                if self.log != log or at > len(data):
                    self._rest = b""
                    return changes
            consumed = self._play_frame(data, at, changes)
            if not consumed:
                break
            at += consumed
        self._rest = b"" if self.state is PlayerState.LIVE else data[at:]
        return changes

    def jumped(self, offset: int) -> None:
        """Continue at a greater offset, because the journal lacks the content before it.

        Raises:
            RecoveryError: hinted content is missing.
        """
        self._check()
        assert self.state is not PlayerState.LIVE
        begin = self.next_offset
        if self._payload_left:
            self._fail(
                f"offset {self.log}:{begin} jumps to {offset}, within the content of an"
                " operation; possible data loss"
            )
        if self.fsm.has_hints:
            hinted = self.fsm.hinted_segments[0]
            if hinted.log == self.log and hinted.last_offset and offset >= hinted.last_offset:
                self._fail(
                    f"offset {self.log}:{begin} jumps to {offset}, over hinted {hinted};"
                    " possible data loss"
                )
        elif self._gap_at < 0:
            self._gap_at = begin
        logger.warning("%s: content from %d to %d is missing", self.log, begin, offset)
        self._rest = b""
        self.offset = offset

    def missing(self, offset: int) -> NoReturn:
        """Fail, because the journal lacks all content up to its head.

        Raises:
            RecoveryError: always.
        """
        self._check()
        self._fail(
            f"content of {self.log} from {self.next_offset} to its head at {offset} is missing;"
            " possible data loss: restore its fragments, or append a line to the log to go on"
            " without them"
        )

    # --------------------------------------------------------- head and hand-off

    def head(self) -> None:
        """Take note that ``next_offset`` is the write head, at ``read_through`` or after it.

        Raises:
            RecoveryError: hints are left, or the log has content of which nothing was played.
        """
        self._check()
        assert self.state is not PlayerState.LIVE
        if self.fsm.has_hints:
            self._fail_unused_hints()
        if self.state is PlayerState.BACKFILL:
            if self.applied == 0 and (self._is_any_skipped or self._gap_at >= 0):
                self._fail(
                    f"{self.log} has content, but no operation of it begins a history: restore the"
                    " hints of the shard, or begin with an empty store by `gazctl shards reset`"
                )
            self.state = PlayerState.TAIL
        elif self.state is PlayerState.INJECTED:
            self.state = PlayerState.TAIL

    def finish(self) -> None:
        """Complete the files at the head, without a hand-off.

        Raises:
            RecoveryError: the log ends inside an operation.
        """
        self._check()
        assert self.state is PlayerState.TAIL, self.state
        self._check_whole()
        self.state = PlayerState.LIVE

    def inject(self, author: int) -> bytes:
        """Return the hand-off operation to append at the head, which sets the author's register.

        Args:
            author: number of the recorder that takes over.

        Raises:
            RecoveryError: the log ends inside an operation.
        """
        self._check()
        assert self.state is PlayerState.TAIL, self.state
        fence_of(author)
        self._check_whole()
        self._author = author
        self.state = PlayerState.INJECTED
        return frame_operation(
            pb.RecordedOp(
                seq_no=self.fsm.next_seq_no, checksum=self.fsm.next_checksum, author=author
            )
        )

    def injected(self, end: int) -> None:
        """Take note that the hand-off operation is committed and ends at most at ``end``."""
        self._check()
        self.read_through[self.log] = max(end, self.read_through[self.log])

    # ------------------------------------------------------------------ parts

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, message: str) -> NoReturn:
        self.state = PlayerState.FAILED
        self._failure = RecoveryError(message, journal=self.log, offset=self.offset)
        raise self._failure

    def _fail_unused_hints(self) -> NoReturn:
        self._fail(
            f"offset {self.log}:{self.offset} >= readThrough {self.read_through[self.log]}, but FSM"
            " has unused hints; possible data loss"
        )

    def _check_whole(self) -> None:
        """Check that the head is no middle of an operation, which would be incomplete for ever."""
        if self._payload_left or len(self._rest) >= HEADER_BYTES:
            self._fail(
                f"{self.log} ends at {self.next_offset} inside an operation: somebody else writes"
                " to the log"
            )

    def _seek_hinted(self) -> bool:
        """Move to the next hinted segment, or to the hints' log after the last; True if moved."""
        if not self.fsm.has_hints:
            return False  # the last segment is in the hints' log
        hinted = self.fsm.hinted_segments[0]
        if hinted.log != self.log or hinted.first_offset > self.offset:
            self.log = hinted.log
            self.offset = hinted.first_offset
            return True
        if self.offset >= self.read_through[self.log]:
            self._fail_unused_hints()
        return False

    def _play_payload(self, data: bytes, at: int, changes: list[NodeChange]) -> int:
        taken = min(self._payload_left, len(data) - at)
        if taken and self._payload_fnode:
            content = data[at : at + taken]
            changes.append(WriteNode(self._payload_fnode, self._payload_at, content))
        self._payload_at += taken
        self._payload_left -= taken
        return taken

    def _play_frame(self, data: bytes, at: int, changes: list[NodeChange]) -> int:
        """Play a frame, without the content after it, or skip bytes that are none.

        Returns:
            Number of bytes that were played or skipped; 0 if more are needed.
        """
        available = len(data) - at
        if available < HEADER_BYTES:
            return 0
        magic: bytes
        length: int
        magic, length = _HEADER.unpack_from(data, at)
        if magic != _MAGIC or length > OPERATION_BYTES_MAX:
            found = data.find(_MAGIC, at + 1)
            skipped = (found if found >= 0 else len(data) - 3) - at
            logger.warning("%s: %d bytes at offset %d are no frame", self.log, skipped, self.offset)
            self.offset += skipped
            return skipped
        size = HEADER_BYTES + length
        if available < size:
            return 0
        self._play_operation(bytes(data[at + HEADER_BYTES : at + size]), size, changes)
        return size

    def _play_operation(self, message: bytes, size: int, changes: list[NodeChange]) -> None:
        operation = decode_operation(message)
        length = operation.write.length if operation.HasField("write") else 0
        if length < 0 or operation.write.offset < 0:
            self._fail(f"a write at {self.log}:{self.offset} is malformed: {operation.write}")
        outcome = self.fsm.apply(
            operation,
            message,
            log=self.log,
            first_offset=self.offset,
            last_offset=self.offset + size + length,
        )
        if outcome is Applied.TOO_SPARSE:
            write, size = operation.write, self.fsm.live_nodes[operation.write.fnode].size_bytes
            self._fail(
                f"{self.log} has at offset {self.offset} {outcome.value}: file {write.fnode} of"
                f" {size} bytes is written at {write.offset}."
                " No store does so: restore hints of an earlier time, or give the shard a new log"
            )
        if outcome not in (Applied.APPLIED, Applied.FNODE_NOT_TRACKED):
            self._skipped(operation, outcome)
        else:
            self.applied += 1
            self._gap_at = -1
        self.offset += size
        self._payload_left = length
        self._payload_fnode = 0
        if outcome is Applied.APPLIED:
            if operation.HasField("create"):
                changes.append(CreateNode(operation.seq_no))
            elif length:
                self._payload_fnode = operation.write.fnode
                self._payload_at = operation.write.offset
            elif operation.HasField("unlink"):
                fnode = operation.unlink.fnode
                if fnode not in self.fsm.live_nodes:
                    changes.append(RemoveNode(fnode))
        if self._author and operation.author == self._author:
            is_won = outcome is Applied.APPLIED
            self.state = PlayerState.LIVE if is_won else PlayerState.TAIL

    def _skipped(self, operation: pb.RecordedOp, outcome: Applied) -> None:
        """Take note of an operation that is no part of the history."""
        self._is_any_skipped = True
        if (
            self._gap_at >= 0
            and outcome is Applied.WRONG_SEQ_NO
            and operation.seq_no > self.fsm.next_seq_no
        ):
            self._fail(
                f"content of {self.log} from {self._gap_at} to {self.offset} is missing, and with"
                f" it operation {self.fsm.next_seq_no}; possible data loss"
            )
        is_usual = outcome is Applied.NOT_HINTED_AUTHOR or (
            outcome is Applied.WRONG_SEQ_NO and operation.seq_no < self.fsm.next_seq_no
        )
        logger.log(
            logging.DEBUG if is_usual else logging.INFO,
            "%s: the operation at offset %d is no part of the history: %s",
            self.log,
            self.offset,
            outcome.value,
        )
