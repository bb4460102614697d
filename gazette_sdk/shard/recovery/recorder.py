"""Recorder: changes of files become numbered operations of a recovery log (recovery log 4). Pure.

=========  ===================================  ======================================  =========
state      input                                effect                                  next
=========  ===================================  ======================================  =========
RECORDING  changes                              operations, applied to the own FSM      RECORDING
RECORDING  an append is committed               bound of later segments moves to it     RECORDING
RECORDING  an append has failed for good        nothing                                 BROKEN
BROKEN     changes, a commit, or hints wanted   the failure is raised                   BROKEN
BROKEN     an append has failed for good        nothing                                 BROKEN
=========  ===================================  ======================================  =========

A worker thread records; the event loop may ask for hints at any time. A lock guards the history.

The local files have changed already when they are recorded. A change that does not fit the files
recorded so far is an error of the store, after which nothing can be recorded any more.

Recovery is bounded by recording files anew, and by storing hints (:class:`HintsSchedule`). A player
reads the log from where each live file was created to its last write. A file that is appended to
for long, such as a write-ahead log or a manifest, makes it read all that was recorded meanwhile,
too. Recording such a file anew moves it to the end of the log.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.fsm import FSM, Applied, LiveNode
from gazette_sdk.shard.recovery.hints import (
    CreateFile,
    FileChange,
    RemoveFile,
    RenameFile,
    SetProperty,
    WriteFile,
)
from gazette_sdk.shard.recovery.log import HEADER_BYTES, clean_path, fence_of, frame_operation

READ_PER_LIVE_MAX = 1.5
"""Bytes that a player may read for each live byte, before files are recorded anew."""

READ_SLACK_BYTES = 1 << 20
"""Bytes that a player may read above that: stores of a few pages are not recorded anew."""

WASTE_BYTES_MIN = 4096
"""Foreign bytes between a file's first and last operation, below which it stays as it is."""

HINTS_PERIOD_S = 300.0
"""Time after which hints are due in a log that has grown."""

HINTS_PAUSE_S = 5.0
"""Least time between two stores of hints."""

HINTS_GROWTH_BYTES = 16 << 20
"""Growth of the log, or half of the live bytes if that is more, after which hints are due."""


@dataclass(slots=True)
class Extent:
    """Part of a log between the first and the last operation of a file, by one author.

    Attributes:
        log: journal.
        begin: offset of the first operation.
        end: offset after the last one.
    """

    log: str
    begin: int
    end: int


class LogUsage:
    """Use of a log by live files, in bytes: how much a player reads, and how much of that lives.

    Args:
        live_nodes: files by fnode, as the FSM has them.
    """

    def __init__(self, live_nodes: Mapping[int, LiveNode]) -> None:
        self._live_nodes = live_nodes
        self._extents = {
            fnode: [
                Extent(each.log, each.first_offset, max(each.first_offset, each.last_offset))
                for each in node.segments
            ]
            for fnode, node in live_nodes.items()
        }

    def recorded(self, fnode: int, log: str, begin: int, end: int) -> None:
        """Note an operation of a file.

        Args:
            fnode: of the file, which may have ceased to live with this operation.
            log: journal.
            begin: offset of the operation.
            end: offset after it.
        """
        node = self._live_nodes.get(fnode)
        if node is None:
            self._extents.pop(fnode, None)
            return
        extents = self._extents.setdefault(fnode, [])
        if len(extents) == len(node.segments):
            extents[-1].end = end
        else:
            extents.append(Extent(log, begin, end))

    @property
    def bytes_live(self) -> int:
        """Content of all live files."""
        return sum(node.size_bytes for node in self._live_nodes.values())

    @property
    def bytes_read(self) -> int:
        """Bytes between first and last operations of live files; each counts once."""
        found = 0
        log, reached = "", 0
        extents = (each for extents in self._extents.values() for each in extents)
        for each in sorted(extents, key=lambda one: (one.log, one.begin)):
            if each.log != log:
                log, reached = each.log, 0
            found += max(0, each.end - max(each.begin, reached))
            reached = max(reached, each.end)
        return found

    def oldest_wasteful(self) -> int | None:
        """Return the oldest file to record anew; None while a player reads little enough."""
        if self.bytes_read <= READ_PER_LIVE_MAX * self.bytes_live + READ_SLACK_BYTES:
            return None
        for fnode in sorted(self._extents):
            spanned = sum(each.end - each.begin for each in self._extents[fnode])
            if spanned - self._live_nodes[fnode].size_bytes >= WASTE_BYTES_MIN:
                return fnode
        return None


class HintsSchedule:
    """Schedule of hints. A player reads all that was recorded since the last ones.

    Args:
        now: monotonic seconds.
        write_head: of the log.
    """

    def __init__(self, now: float, write_head: int) -> None:
        self._stored_at = self._tried_at = now
        self._stored_head = write_head

    def is_due(self, now: float, write_head: int, bytes_live: int, *, is_idle: bool) -> bool:
        """Return True if hints should be stored.

        Args:
            now: monotonic seconds.
            write_head: of the log, after all that was recorded.
            bytes_live: content of all live files.
            is_idle: the shard has nothing to do, so that this is the last chance for long.
        """
        growth = write_head - self._stored_head
        age_s = now - self._stored_at
        if growth <= 0 or now - self._tried_at < HINTS_PAUSE_S:
            return False
        return (
            is_idle or age_s >= HINTS_PERIOD_S or growth >= max(bytes_live / 2, HINTS_GROWTH_BYTES)
        )

    def stored(self, now: float, write_head: int) -> None:
        """Note that hints were stored."""
        self._stored_at = self._tried_at = now
        self._stored_head = write_head

    def failed(self, now: float) -> None:
        """Note that hints could not be stored: they are due again after a pause."""
        self._tried_at = now


LARGE_FILE_BYTES = 8 << 20
"""New tables above this length are appended before the commit, in pieces of this length."""

_IMMUTABLE_SUFFIXES = (".sst", ".blob")
"""Files that a database ignores as long as its manifest does not name them."""


class Recorder:
    """Recorder of one primary's run.

    Args:
        fsm: history that the log continues; from playback, or of empty hints. The recorder
            applies all that it records.
        log: journal that is appended to.
        author: number of this recorder, in [1, 2^32 - 1].
        write_head: end of the log, from a completed append or read.

    Attributes:
        fsm: history with all that was recorded.
        log: journal that is appended to.
        author: number of this recorder.
        opening: content of an append that must come first, and that sets the author's register:
            where the log is another than the history's, an operation that changes nothing. Else
            empty.
    """

    def __init__(self, fsm: FSM, *, log: str, author: int, write_head: int) -> None:
        fence_of(author)
        assert not fsm.has_hints, "the history is not played to its end"
        self.fsm = fsm
        self.log = log
        self.author = author
        self._write_head = write_head  # after all that is committed
        self._position = write_head  # after all that is recorded
        self._in_flight = 0
        self._failure: Exception | None = None
        self._usage = LogUsage(fsm.live_nodes)
        self._parts: list[bytes] = []
        self._lock = threading.Lock()
        self.opening = b""
        if fsm.last_log != log:
            self._add(pb.RecordedOp())
            self.opening = self._take()
            self._in_flight = 1

    # --------------------------------------------------------------- recording

    def record(self, changes: Sequence[FileChange], *, continues: bool = False) -> list[bytes]:
        """Record changes of files.

        Args:
            changes: in order. Paths are cleaned.
            continues: True if they are appended after those of the last call, and committed with
                them.

        Returns:
            Contents of appends, to be appended in this order, each of them whole. The last one
            makes the changes part of the history; those before it hold large new files, which
            nothing refers to yet. Without changes there are none; append an empty content then,
            which checks the author. One call of :meth:`appended` belongs to each call, with those
            that continue it.

        Raises:
            GazetteError: a change does not fit the files; or :meth:`failed` was called.
        """
        with self._lock:
            self._check()
            self._in_flight += not continues
            try:
                return self._record(changes)
            except Exception as error:
                self._failure = error
                raise

    def appended(self, end: int) -> None:
        """Take note that the oldest contents in flight are committed.

        They are all those of one :meth:`record`, or the opening.

        Args:
            end: offset after them, or after later ones that were appended with them.
        """
        with self._lock:
            self._check()
            assert self._in_flight > 0, "an append is committed that was not recorded"
            self._in_flight -= 1
            self._write_head = max(self._write_head, end)
            self._position = max(self._position, end)

    def failed(self, error: Exception) -> None:
        """Take note that an append has failed for good. Every later call raises the error."""
        self._failure = self._failure or error

    # -------------------------------------------------------------------- hints

    @property
    def is_committed(self) -> bool:
        """All that was recorded is committed, so that hints may be stored."""
        return self._in_flight == 0

    @property
    def write_head(self) -> int:
        """Offset after all that was recorded; exact while all of it is committed."""
        return self._position

    def hints(self) -> pb.FSMHints:
        """Return hints of the live files.

        They must not be stored before all that was recorded is committed: a player could not find
        what they name. Ask :attr:`is_committed` first.

        Raises:
            GazetteError: something recorded is not committed yet; or :meth:`failed` was called.
        """
        with self._lock:
            self._check()
            if not self.is_committed:
                raise GazetteError(
                    f"{self.log}: hints name operations that are not committed yet: wait for them",
                    journal=self.log,
                )
            return self.fsm.hints(self.log)

    @property
    def bytes_read(self) -> int:
        """Bytes that a player of hints of this moment reads."""
        with self._lock:
            return self._usage.bytes_read

    @property
    def bytes_live(self) -> int:
        """Content of all files."""
        with self._lock:
            return self._usage.bytes_live

    def rerecord_due(self) -> str | None:
        """Return the path of the file to record anew with this commit; None if there is none.

        The store removes and creates it with its content of the commit, see `rerecord`.
        """
        with self._lock:
            fnode = self._usage.oldest_wasteful()
            return None if fnode is None else min(self.fsm.live_nodes[fnode].links)

    # ------------------------------------------------------------------ parts

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _record(self, changes: Sequence[FileChange]) -> list[bytes]:
        contents: list[bytes] = []
        early = self._early_files(changes)
        for file in early:
            path = clean_path(file.path)
            self._create(path)
            for begin in range(0, len(file.content), LARGE_FILE_BYTES):
                self._write(path, begin, file.content[begin : begin + LARGE_FILE_BYTES])
                contents.append(self._take())
        skipped = {id(file) for file in early}
        for change in changes:
            if id(change) not in skipped:
                self._record_one(change)
        if self._parts:
            contents.append(self._take())
        return contents

    def _early_files(self, changes: Sequence[FileChange]) -> list[CreateFile]:
        """Return large new tables, whose paths no other change names and no file has."""
        large = [
            change
            for change in changes
            if isinstance(change, CreateFile)
            and len(change.content) > LARGE_FILE_BYTES
            and change.path.endswith(_IMMUTABLE_SUFFIXES)
            and clean_path(change.path) not in self.fsm.links
        ]
        if not large:
            return large
        named: dict[str, int] = {}
        for change in changes:
            for path in _paths(change):
                named[path] = named.get(path, 0) + 1
        return [change for change in large if named[clean_path(change.path)] == 1]

    def _record_one(self, change: FileChange) -> None:
        match change:
            case CreateFile(path, content):
                path = clean_path(path)
                self._unlink_if_linked(path)
                self._create(path)
                if content:
                    self._write(path, 0, content)
            case WriteFile(path, offset, content):
                self._write(clean_path(path), offset, content)
            case RemoveFile(path):
                self._unlink(clean_path(path))
            case RenameFile(source, target):
                self._rename(clean_path(source), clean_path(target))
            case SetProperty(path, content):
                self._add(
                    pb.RecordedOp(property=pb.Property(path=clean_path(path), content=content))
                )

    def _create(self, path: str) -> None:
        self._add(pb.RecordedOp(create=pb.RecordedOp.Create(path=path)), self.fsm.next_seq_no)

    def _write(self, path: str, offset: int, content: bytes) -> None:
        fnode = self._fnode(path)
        if offset < 0:
            raise GazetteError(f"a write of {path} at offset {offset}", journal=self.log)
        write = pb.RecordedOp.Write(fnode=fnode, offset=offset, length=len(content))
        self._add(pb.RecordedOp(write=write), fnode, content)

    def _unlink(self, path: str) -> None:
        fnode = self._fnode(path)
        self._add(pb.RecordedOp(unlink=pb.RecordedOp.Link(fnode=fnode, path=path)), fnode)

    def _unlink_if_linked(self, path: str) -> None:
        if path in self.fsm.links:
            self._unlink(path)

    def _rename(self, source: str, target: str) -> None:
        fnode = self._fnode(source)
        if source == target:
            return
        self._unlink_if_linked(target)
        self._add(pb.RecordedOp(link=pb.RecordedOp.Link(fnode=fnode, path=target)), fnode)
        self._unlink(source)

    def _fnode(self, path: str) -> int:
        fnode = self.fsm.links.get(path)
        if fnode is None:
            raise GazetteError(
                f"{self.log}: a change of {path}, which is no recorded file: the store does not"
                " tell all changes of its files",
                journal=self.log,
            )
        return fnode

    def _add(self, operation: pb.RecordedOp, fnode: int = 0, content: bytes = b"") -> None:
        """Number an operation, apply it to the FSM, and add its frame."""
        operation.seq_no = self.fsm.next_seq_no
        operation.checksum = self.fsm.next_checksum
        operation.author = self.author
        frame = frame_operation(operation)
        outcome = self.fsm.apply(
            operation,
            frame[HEADER_BYTES:],
            log=self.log,
            first_offset=self._write_head,
            last_offset=0,
        )
        if outcome is not Applied.APPLIED:
            raise GazetteError(
                f"{self.log}: an operation does not fit the recorded files ({outcome.value}):"
                f" {operation}",
                journal=self.log,
            )
        begin = self._position
        self._position += len(frame) + len(content)
        self._parts.append(frame)
        if content:
            self._parts.append(content)
        if fnode:
            self._usage.recorded(fnode, self.log, begin, self._position)

    def _take(self) -> bytes:
        content = b"".join(self._parts)
        self._parts = []
        return content


def _paths(change: FileChange) -> tuple[str, ...]:
    """Return the paths that a change names."""
    if isinstance(change, RenameFile):
        return clean_path(change.source), clean_path(change.target)
    return (clean_path(change.path),)
