"""To which broker a call goes: a pure choice over routes and the health of connections.

The preference order is that of client section 7. Zone outranks health on purpose: with every
member of our own zone failed the call fails, and is tried again with a fresh route, rather than
paying for traffic across zones.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.target import SERVICE, Peer, Target

__all__ = [
    "Action",
    "Health",
    "Marks",
    "action_for",
    "candidates",
    "choose",
    "members_of",
    "where",
]


class Health(enum.IntEnum):
    """State of a connection, in order of preference."""

    READY = 0
    CONNECTING = 1
    IDLE = 2
    FAILED = 3


class Action(enum.Enum):
    """Action for the chosen peer."""

    USE = "use"
    WAIT = "wait until it is connected"
    FAIL = "forget the route and fail as unavailable"


def where(peer: Peer, address: str) -> str:
    """A peer in words, for messages of errors.

    Args:
        peer: the peer.
        address: the service address.
    """
    if peer == SERVICE:
        return address
    return f"broker {peer.zone}/{peer.suffix} ({peer.endpoint})"


def candidates(target: Target, *, needs_primary: bool) -> list[Peer]:
    """The peers that may serve a call, in route order; the service address when there is none.

    Members whose endpoint is empty are passed over: their key has vanished, or the other side
    never learned their address.

    Args:
        target: the route and the exact member which the caller names.
        needs_primary: only the route's primary will do.

    Raises:
        UnavailableError: an exact member is wanted whose endpoint the route does not tell.
    """
    route = target.route
    peers = _members_of(route) if route is not None else []
    if target.member is not None:
        wanted = (target.member.zone, target.member.suffix)
        for peer in peers:
            if peer.endpoint and (peer.zone, peer.suffix) == wanted:
                return [peer]
        raise UnavailableError(
            f"no endpoint is known of broker {wanted[0]}/{wanted[1]}; it may have just left"
        )
    if needs_primary and route is not None:
        peers = [peers[route.primary]] if 0 <= route.primary < len(peers) else []
    return [peer for peer in peers if peer.endpoint] or [SERVICE]


def members_of(route: pb.Route) -> list[Peer]:
    """Return the members of a route whose endpoints it tells."""
    return [peer for peer in _members_of(route) if peer.endpoint]


def _members_of(route: pb.Route) -> list[Peer]:
    if len(route.endpoints) != len(route.members):
        return []
    return [
        Peer(member.zone, member.suffix, endpoint)
        for member, endpoint in zip(route.members, route.endpoints, strict=True)
    ]


def choose(peers: Sequence[Peer], zone: str, health_of: Callable[[Peer], Health]) -> Peer:
    """The best of ``peers`` for a client in ``zone``; ties keep the earlier."""
    if len(peers) == 1:
        return peers[0]

    def rank(peer: Peer) -> tuple[bool, Health]:
        return (peer.zone != zone, health_of(peer))

    return min(peers, key=rank)


def action_for(peer: Peer, health: Health) -> Action:
    """Return the action for a peer. The service address is waited for, as it has no other."""
    if health is Health.READY:
        return Action.USE
    if health is Health.FAILED and peer != SERVICE:
        return Action.FAIL
    return Action.WAIT


class Marks:
    """Mark and sweep over connections: what one full period did not use may be closed.

    The service address is never swept, nor a peer with a call under way.
    """

    def __init__(self) -> None:
        self._used: set[Peer] = set()
        self._calls: dict[Peer, int] = {}

    def begin(self, peer: Peer) -> None:
        """A call to ``peer`` begins."""
        self._used.add(peer)
        self._calls[peer] = self._calls.get(peer, 0) + 1

    def end(self, peer: Peer) -> None:
        """A call to ``peer`` ended."""
        calls = self._calls[peer] - 1
        assert calls >= 0
        if calls:
            self._calls[peer] = calls
        else:
            del self._calls[peer]

    def sweep(self, peers: Iterable[Peer]) -> list[Peer]:
        """End a period: those of ``peers`` which it did not use."""
        unused = [
            peer
            for peer in peers
            if peer != SERVICE and peer not in self._used and peer not in self._calls
        ]
        self._used.clear()
        return unused
