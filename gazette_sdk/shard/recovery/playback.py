"""Playback: the files of a store, restored from its recovery log and kept up with it.

::

    playback = Playback(transport, hints, directory)
    task = asyncio.create_task(playback.run())
    await playback.tailing.wait()            # a hot standby stays here
    recovered = await playback.hand_off(author)

The shell of `player`: it reads logs on the event loop, and writes files on worker threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gazette_sdk.errors import (
    ClosedError,
    GazetteError,
    OffsetNotYetAvailableError,
    RecoveryError,
)
from gazette_sdk.protocol import broker_pb2
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.shard.recovery.fsm import FSM
from gazette_sdk.shard.recovery.hints import flatten
from gazette_sdk.shard.recovery.metrics import RECOVERED_BYTES
from gazette_sdk.shard.recovery.operation import AUTHOR_REGISTER, fence_of
from gazette_sdk.shard.recovery.player import Player, PlayerState, logs_of
from gazette_sdk.shard.recovery.staged_files import StagedFiles
from gazette_sdk.shard.workers import on_worker
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import OffsetJumpError, RetryReader

__all__ = ["Playback", "Recovered"]

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
        write_head: offset behind the last operation.
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
            author: number of the recorder that goes on, in [1, 2^32 - 1].

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

        Its replica may lag behind, or not know a stored fragment yet.
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
            self._recovered.exception()  # `run` raises it, too: nobody need wait for a hand-off


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
