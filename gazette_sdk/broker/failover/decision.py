"""Replacement of replicas that their primary does not reach, as a pure decision.

The primary holds every acknowledged byte. So it may continue without a replica that it does not
reach, as soon as another broker takes the place. A primary that reaches no replica, and too few
other brokers, though replicas answer in Etcd, is cut off itself: it gives its role to one of them,
which holds every acknowledged byte, too.

:class:`Links` has the times since which a broker's links to its peers have not worked. All of it is
pure.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gazette_sdk.cluster.broker_keys import BrokerAssignment
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Operation, Put

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


ZONES_MIN = 2
"""A journal with several replicas is spread over so many zones, if the cluster has them."""


class Action(enum.Enum):
    """Change of a journal."""

    NOTHING = enum.auto()
    """No replica is cut off, or no one can take its place."""
    REPLACE = enum.auto()
    """The replica leaves the journal, and a substitute takes its slot, unless there are enough."""
    HAND_OVER = enum.auto()
    """Another replica, which is synchronized, becomes the primary, and a substitute, which it may
    reach, takes our place, unless there are enough: we reach no replica, and waited for one for the
    whole bound."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member that may take a place in the journal.

    Attributes:
        zone, suffix: its id.
        load: journals that it holds, for each that it offers to hold.
        is_reached: True if the primary reaches it.
    """

    zone: str
    suffix: str
    load: float
    is_reached: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """Action, and whom it is about.

    Attributes:
        action: the action.
        peer: assignment of the replica that is replaced, or that becomes the primary.
        substitute: who takes the place; ``None`` if enough replicas remain.
    """

    action: Action
    peer: BrokerAssignment | None = None
    substitute: Candidate | None = None


_NOTHING = Decision(Action.NOTHING)


def decide(
    assignments: Sequence[BrokerAssignment],
    primary: BrokerAssignment,
    cut_off: Collection[tuple[str, str]],
    candidates: Sequence[Candidate],
    *,
    desired: int,
    unreached: Collection[tuple[str, str]] = (),
    silent: Collection[tuple[str, str]] = (),
) -> Decision:
    """Return what a primary does about one journal.

    Args:
        assignments: all of the journal.
        primary: that of the primary, which decides.
        cut_off: zone and suffix of the members that it does not reach.
        candidates: members that have room, and are not of the journal.
        desired: number of members that the journal should have.
        unreached: members that were not reached just now.
        silent: of these, those that are dead or cut off from others: they take over nothing.
    """
    peers = sorted((a for a in assignments if a is not primary), key=lambda a: a.slot)
    lost = [peer for peer in peers if (peer.zone, peer.suffix) in cut_off]
    if not lost:
        return _NOTHING
    reached = [candidate for candidate in candidates if candidate.is_reached]
    unreached_peers = [p for p in peers if p in lost or (p.zone, p.suffix) in unreached]
    needed = min(len(peers), desired - 1)
    if len(unreached_peers) == len(peers) and len(reached) < needed:
        living = [each for each in candidates if (each.zone, each.suffix) not in silent]
        # A peer that has not been synchronized with us since it joined has nothing of the journal.
        synchronized = [peer for peer in peers if peer.raw == primary.raw]
        successors = [p for p in synchronized if (p.zone, p.suffix) not in silent]
        if successors and (living or len(assignments) > desired):
            peer = min(successors, key=lambda p: (p in lost, p.slot))  # preferably heard later
            has_surplus = len(assignments) > desired
            substitute = None if has_surplus else _best(living, assignments, primary)
            return Decision(Action.HAND_OVER, peer, substitute)
    if len(assignments) > desired:
        return Decision(Action.REPLACE, lost[0])
    if reached:
        return Decision(Action.REPLACE, lost[0], _best(reached, assignments, lost[0]))
    return _NOTHING  # without a substitute no one could do better than we


def _best(
    candidates: Sequence[Candidate],
    assignments: Sequence[BrokerAssignment],
    leaving: BrokerAssignment,
) -> Candidate:
    """Return the substitute of a member: in another zone if one is missing, with the least load."""
    zones = {a.zone for a in assignments if a is not leaving}
    wants_zone = len(zones) < ZONES_MIN
    return min(candidates, key=lambda c: (wants_zone and c.zone in zones, c.load, c.suffix))


def unchanged(assignments: Sequence[BrokerAssignment]) -> list[Compare]:
    """Return comparisons that hold while a journal's assignments are as they were."""
    return [Compare.mod_revision(each.key, each.mod_revision) for each in assignments]


def replace(peer: BrokerAssignment, key: bytes | None, lease: int) -> list[Operation]:
    """Return the operations that replace a replica.

    Args:
        peer: assignment of the replica that leaves.
        key: assignment key of the substitute; ``None`` for none.
        lease: that of the substitute.
    """
    operations: list[Operation] = [Delete(peer.key)]
    if key is not None:
        operations.append(Put(key, b"", lease))
    return operations


def hand_over(
    primary: BrokerAssignment,
    peer: BrokerAssignment,
    peer_key: bytes,
    key: bytes | None,
    lease: int,
) -> list[Operation]:
    """Return the operations by which a replica becomes the primary, and a substitute joins.

    Args:
        primary: assignment of the primary, which leaves.
        peer: assignment of the replica.
        peer_key: its assignment key in slot 0.
        key: assignment key of the substitute, in the slot of the replica; ``None`` for none.
        lease: that of the substitute.
    """
    operations: list[Operation] = [
        Delete(primary.key),
        Delete(peer.key),
        Put(peer_key, peer.raw, peer.lease),
    ]
    if key is not None:
        operations.append(Put(key, b"", lease))
    return operations
