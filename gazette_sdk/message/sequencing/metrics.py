"""Counters (message section 15) and warnings of a sequencer, both bounded."""

from __future__ import annotations

import logging
import time

from prometheus_client import Counter

from gazette_sdk.message.flags import flags_text
from gazette_sdk.protocol.names import strip_meta

__all__ = ["RareLog", "count_queued", "count_replayed"]

_QUEUED = Counter(
    "gazette_sequencer_queued",
    "Messages sequenced, by their flags and by what became of them.",
    ["journal", "flag", "outcome"],
)
_REPLAYED = Counter(
    "gazette_sequencer_replay", "Messages read again to deliver a sequence.", ["journal"]
)

_UNKNOWN_FLAGS_MAX = 16
"""Limit of unknown flags with a label of their own: journals may hold any flags."""

_unknown_flags: set[int] = set()


def count_queued(journal: str, flags: int, outcome: str, count: int) -> None:
    """Count messages that were sequenced."""
    label = flags_text(flags)
    if label.startswith("Flags("):
        if len(_unknown_flags) < _UNKNOWN_FLAGS_MAX:
            _unknown_flags.add(flags)
        if flags not in _unknown_flags:
            label = "Flags(other)"
    _QUEUED.labels(strip_meta(journal), label, outcome).inc(count)


def count_replayed(journal: str, count: int) -> None:
    """Count messages that were read again."""
    _REPLAYED.labels(strip_meta(journal)).inc(count)


class RareLog:
    """Rate-limited log of conditions that every message may have.

    Args:
        log: the logger.
        interval_s: seconds between two lines of one kind. The next line has the number of those
            that were left out.
    """

    def __init__(self, log: logging.Logger, interval_s: float = 10.0) -> None:
        self._log = log
        self._interval_s = interval_s
        self._silent: dict[str, tuple[float, int]] = {}

    def __call__(self, level: int, text: str, *args: object) -> None:
        """Log a line of the kind ``text``, filled with ``args``."""
        now = time.monotonic()
        until, left_out = self._silent.get(text, (now, 0))
        if now < until:
            self._silent[text] = until, left_out + 1
            return
        self._silent[text] = now + self._interval_s, 0
        if left_out:
            self._log.log(level, text + " (and %d more like this)", *args, left_out)
        else:
            self._log.log(level, text, *args)
