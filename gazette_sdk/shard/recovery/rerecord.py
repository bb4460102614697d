"""Bounds of recovery: which file to record anew, and when to store hints. Pure.

A player reads the log from where each live file was created to its last write. A file that is
appended to for long, such as a write-ahead log or a manifest, makes it read all that was recorded
meanwhile, too. Recording such a file anew moves it to the end of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gazette_sdk.shard.recovery.fsm import LiveNode

__all__ = ["HintsSchedule", "LogUsage"]

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
        end: offset behind the last one.
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
            end: offset behind it.
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
            write_head: of the log, behind all that was recorded.
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
