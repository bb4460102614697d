"""Spool: the fragment of a journal that is being written (broker section 7).

Every replica of a journal has one spool. Content is written into it as it arrives and stays
uncommitted until a *proposal* names the fragment it would become: the proposal commits the content,
rolls it back, or closes the fragment and begins the next. Replicas agree by equal fragments.

A spool has a single owner at a time: the pipeline of a primary, or the Replicate call of a peer.
Small chunks go to the page cache at once, and a commit is one more small write. Large chunks are
written by one thread (`ChunkQueue`) and hashed by others while the next ones arrive; a proposal
waits for them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from gazette_sdk.broker.metrics import (
    SPOOL_COMMIT_BYTES,
    SPOOL_COMMITS,
    SPOOL_ROLLBACK_BYTES,
    SPOOL_ROLLBACKS,
)
from gazette_sdk.broker.spool.directory import JournalSpools
from gazette_sdk.broker.spool.files import (
    COMPRESSION_BATCH_BYTES,
    LARGE_CHUNK_BYTES,
    QUEUED_CHUNKS_MAX,
    ChunkQueue,
    Commit,
    CommitLog,
    CompletedSpool,
    ContentFile,
    SpoolDiskError,
    SpoolError,
    write_all,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import set_sum

DISK_RETRIES_S: Final = (0.05, 0.2, 0.75, 1.5)
"""Pauses before a failed write is tried again. After 2.5 s in all the append fails with an error
that names the disk."""


class Spool:
    """Spool of one journal.

    Args:
        storage: makes its files. The spool begins at the storage's head, if that is known.
        on_commit: called with the fragment and its file after each commit.
        on_complete: called with each fragment that is closed with content.
        compression_batch_bytes: see :data:`COMPRESSION_BATCH_BYTES`.
        now: Unix time in seconds.

    Attributes:
        journal: its name.
        fragment: the committed content. Replaced, never changed, so that it may be kept.
        registers: the journal's registers. Replaced, never changed.
    """

    def __init__(
        self,
        storage: JournalSpools,
        *,
        on_commit: Callable[[pb.Fragment, ContentFile], None],
        on_complete: Callable[[CompletedSpool], None],
        compression_batch_bytes: int = COMPRESSION_BATCH_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.journal = storage.name
        self._storage = storage
        self._on_commit = on_commit
        self._on_complete = on_complete
        self._batch_bytes = compression_batch_bytes
        self._now = now
        head = storage.head
        self.registers = pb.LabelSet.FromString(head.registers) if head else pb.LabelSet()
        self._registers_bytes = head.registers if head else b""
        self._persisted = storage.persisted

        self.fragment = _empty_fragment(self.journal, head.end if head else 0, pb.NONE)
        self._first_append_us = 0
        self._file: ContentFile | None = None
        self._fd = -1  # of the file, for as long as that is kept
        self._log: CommitLog | None = None
        self._is_synced = True  # with durability ``persisted``: what is committed is on disk
        self._is_synced_name = False
        self._syncing: asyncio.Future[None] | None = None
        self._sync_failure: SpoolDiskError | None = None
        self._batched = 0  # committed bytes that compression got
        self._length = 0  # of the committed content
        self._delta = 0  # uncommitted bytes
        self._sum: Any = hashlib.sha1(usedforsecurity=False)  # of all written bytes
        self._committed_sum: Any = self._sum.copy()
        self._next: pb.Fragment | None = None  # kept until more is written
        self._digest = b""  # of its content
        self._has_large = False  # some uncommitted bytes went to the threads
        self._writes = ChunkQueue(storage.writer)
        # For the fragment's sum and the append's; hashing cannot fail.
        self._hashes = tuple(ChunkQueue(hasher) for hasher in storage.hashers)

    @property
    def uncommitted_bytes(self) -> int:
        """Bytes written since the last commit or rollback."""
        return self._delta

    @property
    def has_queued_chunks(self) -> bool:
        """True while :meth:`flush` has to wait for threads."""
        return self._has_large and any((self._writes, *self._hashes))

    @property
    def first_append_s(self) -> float | None:
        """Unix time in seconds of the fragment's first commit; ``None`` before it."""
        return self._first_append_us / 1e6 if self._first_append_us else None

    @property
    def content_file(self) -> ContentFile | None:
        """The file of the fragment's content; ``None`` before there is any."""
        return self._file

    def next(self) -> pb.Fragment:
        """Return the fragment as it would be if all written bytes were committed.

        Call :meth:`flush` before, while :attr:`has_queued_chunks`: their sum is not known yet.
        """
        following = self._next
        if following is None:
            assert not (self._has_large and self.has_queued_chunks), "flush() waits for chunks"
            fragment = self.fragment
            following = pb.Fragment()
            following.CopyFrom(fragment)
            following.end = fragment.end + self._delta
            if self._length or self._delta:
                self._digest = self._sum.digest()
                set_sum(following.sum, self._digest)
            self._next = following
        return following

    # ------------------------------------------------------------- requests

    async def apply(self, request: pb.ReplicateRequest, *, primary: bool) -> pb.ReplicateResponse:
        """Apply content or a proposal.

        Args:
            request: a valid one.
            primary: True if this broker is the journal's primary: it compresses in the background.

        Returns:
            OK, or PROPOSAL_MISMATCH with this spool's fragment. With durability ``persisted`` all
            of the fragment is on disk when this returns OK: also what an earlier call committed,
            and was cancelled before it was on disk.

        Raises:
            SpoolError: the content does not follow the written bytes.
            SpoolDiskError: the disk refuses it, for some seconds. Committed content stays; the
                caller has to roll back the rest.
        """
        if not request.HasField("proposal"):
            await self.write(request.content, request.content_delta)
            return pb.ReplicateResponse(status=pb.OK)
        status = await self.propose(request.proposal, request.registers, primary=primary)
        if status == pb.OK:
            return pb.ReplicateResponse(status=pb.OK)
        return pb.ReplicateResponse(
            status=pb.PROPOSAL_MISMATCH, fragment=self.fragment, registers=self.registers
        )

    async def write(self, data: bytes, content_delta: int, also: Any = None) -> None:
        """Write uncommitted content after the content before it.

        A large chunk may still be queued when this returns; :meth:`flush` waits for it.

        Args:
            data: the bytes, which are not copied.
            content_delta: how many bytes were written since the last commit or rollback.
            also: another hash to update with the same bytes.

        Raises:
            SpoolError: ``content_delta`` is wrong.
            SpoolDiskError: see :meth:`apply`.
        """
        if content_delta != self._delta:
            raise SpoolError(
                f"content_delta is {content_delta}, and {self._delta} bytes of content were "
                "received: the sender lost track of its append",
                journal=self.journal,
            )
        if not data:
            return
        if self._file is None:
            try:
                self._create_file()
            except OSError as error:
                await self._retry(self._create_file, "write content", error)
        assert self._file is not None
        # It may be tried again after an error.
        write = partial(self._write_content, data, self._length + self._delta)
        self._delta += len(data)
        self._next = None
        if len(data) >= LARGE_CHUNK_BYTES or self.has_queued_chunks:
            for_fragment, for_append = self._hashes
            self._has_large = True
            self._writes.add(write)
            for_fragment.add(partial(self._sum.update, data))
            if also is not None:
                for_append.add(partial(also.update, data))
            await self._limit_queues()
            return
        try:
            write()
        except OSError as error:
            await self._retry(write, "write content", error)
        self._sum.update(data)
        if also is not None:
            also.update(data)

    async def _limit_queues(self) -> None:
        """Wait while too many chunks are queued."""
        for queue in (*self._hashes, self._writes):
            if len(queue) > QUEUED_CHUNKS_MAX:
                await queue.wait_below(QUEUED_CHUNKS_MAX // 2)
                if queue.error is not None:
                    await self.flush()

    async def flush(self) -> None:
        """Wait until all queued chunks are written and hashed.

        Raises:
            SpoolDiskError: see :meth:`apply`.
        """
        for queue in (*self._hashes, self._writes):
            await queue.wait_below(0)
        if self._writes.error is not None:
            await self._retry(self._writes.retry, "write content", self._writes.error)

    async def roll_back(self) -> None:
        """Drop the bytes written since the last commit."""
        if self._delta == 0:
            return
        for queue in (*self._hashes, self._writes):
            await queue.wait_below(0)
        self._writes.clear()
        SPOOL_ROLLBACKS.value += 1
        SPOOL_ROLLBACK_BYTES.value += self._delta
        self._sum = self._committed_sum.copy()
        self._delta = 0
        self._has_large = False
        self._next = None
        if self._file is not None:
            # This only frees disk space: the next append overwrites the bytes.
            self._file.shrink(self._length)

    def reset_to(self, earlier: pb.Fragment) -> None:
        """Make an earlier fragment the current one again, so that only its content is closed.

        Files stay as they are: if the process ends before, a restart recovers all of the content.
        """
        assert self._delta == 0, "nothing is uncommitted"
        fragment = self.fragment
        if earlier.begin == fragment.begin:
            self.fragment = earlier
        else:
            codec = fragment.compression_codec
            self.fragment = _empty_fragment(self.journal, fragment.begin, codec)

    def content_after(self, begin: int) -> CompletedSpool:
        """Copy the committed content from an offset on into a closed spool of its own. Blocks.

        Args:
            begin: the offset, in the fragment.

        Raises:
            OSError: the disk refuses it.
        """
        source, fragment = self._file, self.fragment
        assert source is not None, "there is content"
        storage, end = self._storage, fragment.end
        file, log = storage.create(begin, fragment.compression_codec)
        try:
            found, at = hashlib.sha1(usedforsecurity=False), begin
            while at < end:
                data = source.read_at(at - fragment.begin, min(end - at, LARGE_CHUNK_BYTES))
                write_all(file.fd, data, at - begin)
                found.update(data)
                at += len(data)
            digest = found.digest()
            log.append(Commit(end, digest, self._first_append_us, self._registers_bytes))
            if self._persisted:
                storage.sync(file, log.fd, is_new=True)
        except BaseException:
            file.discard()
            raise
        finally:
            log.close()
        copied = _empty_fragment(self.journal, begin, fragment.compression_codec)
        copied.end = end
        set_sum(copied.sum, digest)
        return CompletedSpool(
            copied,
            self.registers,
            datetime.fromtimestamp(self._first_append_us / 1e6, UTC),
            file,
            storage.create_revision,
            primary=True,
        )

    async def propose(
        self, proposal: pb.Fragment, registers: pb.LabelSet, *, primary: bool
    ) -> pb.Status:
        """Begin a new fragment, roll back, or commit, according to a proposal.

        Returns:
            OK, or PROPOSAL_MISMATCH. A refused proposal may still have begun a new fragment.

        Raises:
            SpoolDiskError: see :meth:`apply`.
        """
        if self._delta == 0 or proposal is not self._next:
            if await self._rolls(proposal, registers, primary=primary):
                if self._persisted:
                    await self._sync()
                    await self._sync_head()
                return pb.OK
            if self._delta == 0 or not _same(self.next(), proposal):
                return pb.PROPOSAL_MISMATCH
        try:
            self._commit(registers)
        except OSError as error:
            await self._retry(lambda: self._commit(registers), "commit an append", error)
        self._committed(primary=primary)
        if self._persisted:
            self._is_synced = False
            await self._sync()
        return pb.OK

    def append_now(self, content: bytes, registers: pb.LabelSet) -> pb.Fragment | None:
        """Write and commit small content in one step, as the primary.

        Args:
            content: all content of an append.
            registers: the journal's registers after it.

        Returns:
            the fragment that the spool has now; ``None`` if something has to be waited for, or
            fails. Nothing has changed then, and :meth:`write` and :meth:`propose` may be tried.
        """
        length = len(content)
        if self._file is None or self._delta or self._persisted or length >= LARGE_CHUNK_BYTES:
            return None
        self._sum.update(content)
        self._delta, self._next = length, None
        try:
            write_all(self._fd, content, self._length)
            self._commit(registers)
        except OSError:
            self._sum = self._committed_sum.copy()
            self._delta, self._next = 0, None
            return None
        self._committed(primary=True)
        return self.fragment

    # ----------------------------------------------------- parts of a proposal

    async def _rolls(self, proposal: pb.Fragment, registers: pb.LabelSet, *, primary: bool) -> bool:
        """Begin a new fragment or roll back. Return True if the proposal requires no more."""
        fragment = self.fragment
        keeps_registers = registers is self.registers or registers == self.registers
        is_rollback = keeps_registers and _same(fragment, proposal)
        if self.has_queued_chunks and not is_rollback:
            await self.flush()
        end = proposal.end
        if end > fragment.end + self._delta or (end == fragment.end and proposal.begin == end):
            # Nothing of the disk is awaited before: the peers have the proposal already.
            await self._roll(proposal, registers, primary=primary)
            is_rollback = registers == self.registers and _same(self.fragment, proposal)
        if is_rollback:
            await self.roll_back()
        return is_rollback

    def _begin_fragment(self, offset: int, codec: pb.CompressionCodec) -> None:
        self.fragment = _empty_fragment(self.journal, offset, codec)
        self._first_append_us = 0
        self._file, self._fd = None, -1
        self._log = None
        self._is_synced, self._is_synced_name = True, False
        self._syncing, self._sync_failure = None, None
        self._batched = 0
        self._length = 0
        self._delta = 0
        self._sum = hashlib.sha1(usedforsecurity=False)
        self._committed_sum = self._sum.copy()
        self._next = None

    def _create_file(self) -> None:
        fragment = self.fragment
        self._file, self._log = self._storage.create(fragment.begin, fragment.compression_codec)
        self._fd = self._file.fd

    def _write_content(self, data: bytes, position: int) -> None:
        # For the thread of large chunks, too. A new fragment begins only when that is done.
        write_all(self._fd, data, position)

    def _commit(self, registers: pb.LabelSet) -> None:
        """Make the written bytes part of the fragment: first in the log, or not at all."""
        log = self._log
        assert log is not None, "there is content to commit"
        first_append_us = self._first_append_us or int(self._now() * 1e6)
        registers_bytes = (
            self._registers_bytes
            if registers is self.registers or registers == self.registers
            else registers.SerializeToString(deterministic=True)
        )
        fragment = self.next()
        log.append(Commit(fragment.end, self._digest, first_append_us, registers_bytes))
        if self._first_append_us == 0:
            self._first_append_us = first_append_us
        if registers_bytes is not self._registers_bytes:
            self._registers_bytes = registers_bytes
            self.registers = _copy(registers)
        self.fragment = fragment

    def _committed(self, *, primary: bool) -> None:
        fragment, file = self.fragment, self._file
        assert file is not None, "content was committed"
        SPOOL_COMMITS.value += 1
        SPOOL_COMMIT_BYTES.value += self._delta
        self._length += self._delta
        self._delta = 0
        self._has_large = False
        self._committed_sum = self._sum.copy()
        if primary and fragment.compression_codec != pb.NONE:
            length = self._length
            if length - self._batched >= self._batch_bytes:
                self._batched = length
                file.compress_later(length)
        self._on_commit(fragment, file)

    async def _roll(self, proposal: pb.Fragment, registers: pb.LabelSet, *, primary: bool) -> None:
        await self.roll_back()
        fragment, file, closing_registers = self.fragment, self._file, self.registers
        if proposal.end > fragment.end and registers != self.registers:
            self.registers = _copy(registers)
            self._registers_bytes = registers.SerializeToString(deterministic=True)
        # The head file is written before the log, which also has the head, may be removed.
        self._storage.note_head(proposal.end, self._registers_bytes)
        first_append_s = self.first_append_s
        if self._log is not None:
            self._log.close()
        self._begin_fragment(proposal.end, proposal.compression_codec)
        if file is None:
            return
        if fragment.end == fragment.begin:
            file.discard()  # all of its content was rolled back
            return
        assert first_append_s is not None, "content was committed"
        self._on_complete(
            CompletedSpool(
                fragment,
                closing_registers,
                datetime.fromtimestamp(first_append_s, UTC),
                file,
                self._storage.create_revision,
                primary=primary,
            )
        )

    # ------------------------------------------------------------- the disk

    async def _sync(self) -> None:
        """Force committed content to disk, if it is not there.

        A failed attempt is not repeated: the kernel may have dropped the pages meanwhile, and a
        second attempt would succeed without them. So an attempt continues if the call is cancelled,
        and the next call learns its result first.
        """
        if self._is_synced:
            return
        if self._sync_failure is not None:
            raise self._sync_failure
        if self._syncing is not None:
            await self._await_sync(self._syncing)
        assert self._file is not None
        assert self._log is not None
        file, log_fd, is_new = self._file, self._log.fd, not self._is_synced_name
        self._syncing = asyncio.ensure_future(
            asyncio.to_thread(self._storage.sync, file, log_fd, is_new=is_new)
        )
        # After a cancelled call and a roll no one awaits it.
        self._syncing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await self._await_sync(self._syncing)
        self._is_synced = True

    async def _await_sync(self, syncing: asyncio.Future[None]) -> None:
        try:
            await asyncio.shield(syncing)
        except OSError as error:
            self._sync_failure = self._storage.disk_error("force an append to disk", error)
            raise self._sync_failure from error
        self._syncing, self._is_synced_name = None, True

    async def _sync_head(self) -> None:
        """Force the head to disk, if it is not there: no log has one that came from a peer."""
        if self._storage.head_is_written:
            return
        try:
            await asyncio.to_thread(self._storage.write_head)
        except OSError as error:
            raise self._storage.disk_error("force the head to disk", error) from error

    async def _retry(self, work: Callable[[], None], doing: str, error: OSError) -> None:
        for pause_s in DISK_RETRIES_S:
            await asyncio.sleep(pause_s)
            try:
                work()
            except OSError as again:
                error = again
            else:
                return
        raise self._storage.disk_error(doing, error) from error


def _empty_fragment(journal: str, offset: int, codec: pb.CompressionCodec) -> pb.Fragment:
    return pb.Fragment(
        journal=journal,
        begin=offset,
        end=offset,
        sum=pb.SHA1Sum(),
        compression_codec=codec,
    )


def _same(a: pb.Fragment, b: pb.Fragment) -> bool:
    """Return True if fragments are equal in every field; an absent sum is a sum of zeros."""
    return a is b or (
        a.end == b.end
        and a.begin == b.begin
        and a.compression_codec == b.compression_codec
        and _sum_key(a.sum) == _sum_key(b.sum)
        and a.journal == b.journal
        and a.path_postfix == b.path_postfix
        and a.backing_store == b.backing_store
        and a.mod_time == b.mod_time
    )


def _sum_key(content_sum: pb.SHA1Sum) -> tuple[int, int, int]:
    return content_sum.part1, content_sum.part2, content_sum.part3


def _copy(registers: pb.LabelSet) -> pb.LabelSet:
    copy = pb.LabelSet()
    copy.CopyFrom(registers)
    return copy
