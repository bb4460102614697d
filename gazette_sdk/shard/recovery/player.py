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
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from gazette_sdk.errors import RecoveryError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.fsm import FSM, Outcome
from gazette_sdk.shard.recovery.hints import flatten
from gazette_sdk.shard.recovery.operation import (
    HEADER_BYTES,
    decode_operation,
    fence_of,
    frame_operation,
)

__all__ = [
    "CreateNode",
    "NodeChange",
    "Player",
    "PlayerState",
    "RemoveNode",
    "WriteNode",
    "logs_of",
]

logger = logging.getLogger(__name__)

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
        RecoveryError: hints name content behind the write head.
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
        """Take note that ``next_offset`` is the write head, at ``read_through`` or behind it.

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
                    " hints of the shard, or delete the log to begin with an empty store"
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
        """Move to the next hinted segment, or to the hints' log behind the last; True if moved."""
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
        """Play a frame, without the content behind it, or skip bytes that are none.

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
        if outcome is Outcome.TOO_SPARSE:
            write, size = operation.write, self.fsm.live_nodes[operation.write.fnode].size_bytes
            self._fail(
                f"{self.log} has at offset {self.offset} {outcome.value}: file {write.fnode} of"
                f" {size} bytes is written at {write.offset}."
                " No store does so: restore hints of an earlier time, or give the shard a new log"
            )
        if outcome not in (Outcome.APPLIED, Outcome.FNODE_NOT_TRACKED):
            self._skipped(operation, outcome)
        else:
            self.applied += 1
            self._gap_at = -1
        self.offset += size
        self._payload_left = length
        self._payload_fnode = 0
        if outcome is Outcome.APPLIED:
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
            is_won = outcome is Outcome.APPLIED
            self.state = PlayerState.LIVE if is_won else PlayerState.TAIL

    def _skipped(self, operation: pb.RecordedOp, outcome: Outcome) -> None:
        """Take note of an operation that is no part of the history."""
        self._is_any_skipped = True
        if (
            self._gap_at >= 0
            and outcome is Outcome.WRONG_SEQ_NO
            and operation.seq_no > self.fsm.next_seq_no
        ):
            self._fail(
                f"content of {self.log} from {self._gap_at} to {self.offset} is missing, and with"
                f" it operation {self.fsm.next_seq_no}; possible data loss"
            )
        is_usual = outcome is Outcome.NOT_HINTED_AUTHOR or (
            outcome is Outcome.WRONG_SEQ_NO and operation.seq_no < self.fsm.next_seq_no
        )
        logger.log(
            logging.DEBUG if is_usual else logging.INFO,
            "%s: the operation at offset %d is no part of the history: %s",
            self.log,
            self.offset,
            outcome.value,
        )
