"""Progress lines in the log, while a shard recovers."""

from __future__ import annotations

import asyncio
import logging
import time

from gazette_sdk.shard.recovery.playback import Playback

__all__ = ["RecoveryProgress"]

PERIOD_S = 5.0
"""Time between two lines. A recovery that takes less has one line, at its end."""

_log = logging.getLogger(__name__)


class RecoveryProgress:
    """Progress of one shard's recovery.

    Args:
        shard: its id.
        playback: of its log.
    """

    def __init__(self, shard: str, playback: Playback) -> None:
        self._shard = shard
        self._playback = playback
        self._began = time.monotonic()

    async def run(self) -> None:
        """Log progress until the log is played to its write head."""
        waiting = asyncio.ensure_future(self._playback.tailing.wait())
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=PERIOD_S)
                if not waiting.done():
                    _log.info("recovering", extra=self._figures())
        finally:
            waiting.cancel()
        _log.info("recovered", extra=self._figures())

    def _figures(self) -> dict[str, object]:
        """Return what was read and what is left."""
        playback = self._playback
        taken_s = time.monotonic() - self._began
        left_bytes = max(0, playback.bytes_to_read - playback.bytes_read)
        rate = playback.bytes_read / taken_s if taken_s else 0.0
        figures: dict[str, object] = {
            "shard": self._shard,
            "bytes_to_read": playback.bytes_to_read,
            "bytes_read": playback.bytes_read,
            "bytes_live": playback.bytes_live,
            "seconds": round(taken_s, 1),
        }
        if left_bytes and rate:
            figures["seconds_left"] = round(left_bytes / rate, 1)
        return figures
