"""State machine of a recovery log: which operations are part of its history (recovery log 2).

A log may hold operations of several authors, of which one wins. An operation is part of the history
if its sequence number and checksum continue it and, where hints name the author, if it is by that
author. Pure.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.hints import Segment, flatten
from gazette_sdk.shard.recovery.log import crc32c

FILE_HOLES_BYTES_MAX = 256 << 20
"""Bytes of a file that may be skipped by writes after its end. Databases skip a few pages."""
HOLES_BYTES_MAX = 4 << 30
"""Bytes of all files of a store that may be skipped."""


class Applied(enum.Enum):
    """Result of applying an operation."""

    APPLIED = "applied"
    NOT_HINTED_AUTHOR = "operation's author does not match the next hinted segment"
    WRONG_SEQ_NO = "wrong sequence number"
    CHECKSUM_MISMATCH = "checksum mismatch"
    LINK_EXISTS = "link exists"
    PROPERTY_EXISTS = "property exists"
    FNODE_NOT_TRACKED = "fnode not tracked"
    """The history continues, but the file is gone later: the operation is not re-enacted."""
    EXPECTED_HINTED_FNODE = "expected the creation of a hinted fnode"
    NO_SUCH_LINK = "fnode has no such link"
    TOO_SPARSE = "a write far after the end of its file"
    """The operation continues the history, and cannot be re-enacted: files would be huge."""


@dataclass(slots=True)
class LiveNode:
    """File that has links.

    Attributes:
        links: its paths.
        segments: of all operations of the file.
        size_bytes: end of its last byte.
        hole_bytes: bytes that were skipped, when they were after the end.
    """

    links: set[str] = field(default_factory=set)
    segments: list[Segment] = field(default_factory=list)
    size_bytes: int = 0
    hole_bytes: int = 0


class FSM:
    """State machine of one history.

    Args:
        hints: log to begin with, live files and properties.

    Attributes:
        next_seq_no: sequence number of the next operation.
        next_checksum: checksum of all operations before it.
        last_log: log of the last operation.
        properties: content by path.
        live_nodes: files by fnode.
        links: fnodes by path.
        hinted_segments: segments that hints name and that are not passed yet.
        hinted_fnodes: files that hints name and that were not created yet.

    Raises:
        ValidationError: the hints name no log, or contradict themselves.
    """

    def __init__(self, hints: pb.FSMHints) -> None:
        fnodes, segments = flatten(hints)
        self.next_seq_no = 1
        self.next_checksum = 0
        self.last_log = hints.log
        self.properties = {each.path: each.content for each in hints.properties}
        self.live_nodes: dict[int, LiveNode] = {}
        self.links: dict[str, int] = {}
        self.hinted_segments: deque[Segment] = deque(segments)
        self.hinted_fnodes: deque[int] = deque(fnodes)
        self._hole_bytes = 0
        if self.hinted_segments:
            self._jump(self.hinted_segments[0])

    @property
    def has_hints(self) -> bool:
        """Hinted segments remain."""
        return bool(self.hinted_segments)

    def apply(
        self,
        operation: pb.RecordedOp,
        message: bytes,
        *,
        log: str,
        first_offset: int,
        last_offset: int,
    ) -> Applied:
        """Apply an operation.

        Args:
            operation: as recorded.
            message: its bytes, without the header, which the checksum covers.
            log: its journal.
            first_offset: of its frame, or a lower bound.
            last_offset: after its frame and content; 0 if it is not known.

        Returns:
            ``APPLIED``, or ``FNODE_NOT_TRACKED`` for one that is part of the history but not to be
            re-enacted. Any other outcome changed nothing.
        """
        outcome = self._check_sequence(operation)
        if outcome is not Applied.APPLIED:
            return outcome
        fnode, outcome = self._apply_kind(operation)
        if outcome not in (Applied.APPLIED, Applied.FNODE_NOT_TRACKED):
            return outcome
        if outcome is Applied.APPLIED and fnode:
            node = self.live_nodes[fnode]
            _extend(node, operation, log, first_offset, last_offset)
            if not node.links:
                del self.live_nodes[fnode]
                self._hole_bytes -= node.hole_bytes
        self.next_seq_no += 1
        self.next_checksum = crc32c(message, self.next_checksum)
        self.last_log = log
        hinted = self.hinted_segments
        if hinted and hinted[0].last_seq_no < self.next_seq_no:
            hinted.popleft()
            if hinted:
                self._jump(hinted[0])
        return outcome

    def hints(self, log: str) -> pb.FSMHints:
        """Return hints of the live files, for a log that now continues the history."""
        return pb.FSMHints(
            log=log,
            live_nodes=[
                pb.FnodeSegments(
                    fnode=fnode, segments=[one.to_message(log) for one in node.segments]
                )
                for fnode, node in sorted(self.live_nodes.items())
            ],
            properties=[
                pb.Property(path=path, content=content)
                for path, content in sorted(self.properties.items())
            ],
        )

    # ------------------------------------------------------------------ parts

    def _jump(self, to: Segment) -> None:
        self.next_seq_no = to.first_seq_no
        self.next_checksum = to.first_checksum

    def _check_sequence(self, operation: pb.RecordedOp) -> Applied:
        hinted = self.hinted_segments
        if hinted and operation.author != hinted[0].author:
            return Applied.NOT_HINTED_AUTHOR
        if operation.seq_no != self.next_seq_no:
            return Applied.WRONG_SEQ_NO
        if operation.checksum != self.next_checksum:
            return Applied.CHECKSUM_MISMATCH
        return Applied.APPLIED

    def _apply_kind(self, operation: pb.RecordedOp) -> tuple[int, Applied]:
        """Change links, live files and properties; return the fnode, or 0, and the outcome."""
        if operation.HasField("create"):
            return self._create(operation.seq_no, operation.create.path)
        if self.hinted_fnodes and self.hinted_fnodes[0] == operation.seq_no:
            return 0, Applied.EXPECTED_HINTED_FNODE
        if operation.HasField("write"):
            found = self._write(operation.write)
        elif operation.HasField("link"):
            found = self._link(operation.link.fnode, operation.link.path)
        elif operation.HasField("unlink"):
            found = self._unlink(operation.unlink.fnode, operation.unlink.path)
        elif operation.HasField("property"):
            found = self._set_property(operation.property)
        else:
            found = 0, Applied.APPLIED
        return found

    def _create(self, fnode: int, path: str) -> tuple[int, Applied]:
        # A file that is older than the hints, which do not name it, is gone later; the operation
        # that removes it may be skipped.
        if self.hinted_segments and (not self.hinted_fnodes or self.hinted_fnodes[0] != fnode):
            return 0, Applied.FNODE_NOT_TRACKED
        if path in self.links:
            return 0, Applied.LINK_EXISTS
        if path in self.properties:
            return 0, Applied.PROPERTY_EXISTS
        if self.hinted_fnodes:
            self.hinted_fnodes.popleft()
        self.live_nodes[fnode] = LiveNode(links={path})
        self.links[path] = fnode
        return fnode, Applied.APPLIED

    def _write(self, write: pb.RecordedOp.Write) -> tuple[int, Applied]:
        node = self.live_nodes.get(write.fnode)
        if node is None:
            return 0, Applied.FNODE_NOT_TRACKED
        if write.length:
            hole = max(0, write.offset - node.size_bytes)
            if (
                node.hole_bytes + hole > FILE_HOLES_BYTES_MAX
                or self._hole_bytes + hole > HOLES_BYTES_MAX
            ):
                return 0, Applied.TOO_SPARSE
            node.hole_bytes += hole
            self._hole_bytes += hole
            node.size_bytes = max(node.size_bytes, write.offset + write.length)
        return write.fnode, Applied.APPLIED

    def _set_property(self, changed: pb.Property) -> tuple[int, Applied]:
        if changed.path in self.links:
            return 0, Applied.LINK_EXISTS
        # Properties of hints are newer than all hinted segments, between which changes are skipped.
        if not (self.hinted_segments and changed.path in self.properties):
            self.properties[changed.path] = changed.content
        return 0, Applied.APPLIED

    def _link(self, fnode: int, path: str) -> tuple[int, Applied]:
        if path in self.links:
            return 0, Applied.LINK_EXISTS
        if path in self.properties:
            return 0, Applied.PROPERTY_EXISTS
        node = self.live_nodes.get(fnode)
        if node is None:
            return 0, Applied.FNODE_NOT_TRACKED
        node.links.add(path)
        self.links[path] = fnode
        return fnode, Applied.APPLIED

    def _unlink(self, fnode: int, path: str) -> tuple[int, Applied]:
        node = self.live_nodes.get(fnode)
        if node is None:
            return 0, Applied.FNODE_NOT_TRACKED
        if path not in node.links:
            return 0, Applied.NO_SUCH_LINK
        node.links.remove(path)
        del self.links[path]
        return fnode, Applied.APPLIED


def _extend(
    node: LiveNode, operation: pb.RecordedOp, log: str, first_offset: int, last_offset: int
) -> None:
    """Add an operation to the segments of its file."""
    if node.segments:
        last = node.segments[-1]
        if last.author == operation.author and last.log == log:
            last.last_seq_no = operation.seq_no
            last.last_offset = last_offset
            return
    node.segments.append(
        Segment(
            author=operation.author,
            first_seq_no=operation.seq_no,
            first_offset=first_offset,
            first_checksum=operation.checksum,
            last_seq_no=operation.seq_no,
            last_offset=last_offset,
            log=log,
        )
    )
