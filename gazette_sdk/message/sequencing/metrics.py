"""What a sequencer tells of itself: counters (message section 15) and warnings, both bounded."""

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
"""So many unknown flags get a label of their own: what stands in journals is not ours to bound."""

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
    """Logs what may happen with every message, but each kind of it once in a while only.

    Args:
        log: where to.
        interval_s: seconds between two lines of one kind. The next line says how many it stands
            for.
    """

    def __init__(self, log: logging.Logger, interval_s: float = 10.0) -> None:
        self._log = log
        self._interval_s = interval_s
        self._silent: dict[str, tuple[float, int]] = {}

    def __call__(self, level: int, text: str, *args: object) -> None:
        """Log ``text``, which is the kind, filled with ``args``."""
        now = time.monotonic()
        until, untold = self._silent.get(text, (now, 0))
        if now < until:
            self._silent[text] = until, untold + 1
            return
        self._silent[text] = now + self._interval_s, 0
        if untold:
            self._log.log(level, text + " (and %d more like this)", *args, untold)
        else:
            self._log.log(level, text, *args)
