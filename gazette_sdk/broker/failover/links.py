"""Links of a broker to its peers: since when one has not worked. Pure."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ["FORGET_BOUNDS", "Links"]

FORGET_BOUNDS = 4
"""A failure is forgotten after so many bounds without another one."""

Peer: TypeAlias = tuple[str, str]


class _Silence(NamedTuple):
    since: float
    failed_at: float


class Links:
    """Clock of the silence of each peer that something is awaited of.

    The caller passes monotonic seconds.

    Args:
        bound_s: a link that has not worked for so long is cut.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._silent: dict[Peer, _Silence] = {}

    def failed(self, peer: Peer, now: float, *, waited_s: float, heard_at: float) -> None:
        """Note that a stream or a dial failed.

        Args:
            peer: zone and suffix.
            now: the present time.
            waited_s: how long the peer was waited for.
            heard_at: when an answer of it came last.
        """
        silence = self._current(peer, now)
        if silence is not None and heard_at <= silence.since:
            since = min(silence.since, now - waited_s)
        else:
            since = max(now - waited_s, heard_at)
        self._silent[peer] = _Silence(since, now)

    def worked(self, peer: Peer) -> None:
        """Note that the peer was reached, or is no member any more."""
        self._silent.pop(peer, None)

    def is_cut(self, peer: Peer, now: float, *, heard_at: float) -> bool:
        """Return True if the peer was silent for the whole bound, while it was waited for."""
        silence = self._current(peer, now)
        if silence is None or heard_at > silence.since:
            return False
        return now - silence.since >= self._bound_s

    def wait_s(self, peer: Peer, now: float) -> float:
        """Return the seconds until the link may be cut; 0 if it may be now, or works."""
        silence = self._current(peer, now)
        return 0.0 if silence is None else max(0.0, silence.since + self._bound_s - now)

    def _current(self, peer: Peer, now: float) -> _Silence | None:
        silence = self._silent.get(peer)
        if silence is None or now - silence.failed_at > FORGET_BOUNDS * self._bound_s:
            return None
        return silence
