"""Beginning of a replica's own spool while recovered spools are in quarantine, as a table; pure.

Decisions about spools in quarantine need answers of other brokers and of the stores, so a store
that fails delays them for as long as it fails. Appends must not wait for that where the journal's
head does not depend on these spools:

======  ==============================  =============================
head    last route of the journal       the replica begins its spool
======  ==============================  =============================
known   unknown                         at the head
known   withdrawn                       at the head
known   with this broker                at the head
known   of others, who are away         at the head
known   of others, one of them present  at the head
absent  unknown                         when all spools are decided
absent  withdrawn                       when all spools are decided
absent  with this broker                when all spools are decided
absent  of others, who are away         when all spools are decided
absent  of others, one of them present  at 0, like a new member
======  ==============================  =============================

A known head is never less than what was acknowledged while this broker was a member, and it would
be forgotten if others had continued the journal. The members of the last route, and nobody else,
are known to have every acknowledged byte. If one of them is present, then it takes part in every
synchronization of this replica, which rolls to its head as a new member does. In all other cases
the spools in quarantine may be the only trace of the head.

The table says only where a replica begins. The spools stay in quarantine until they are decided.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from gazette_sdk.broker.recovery.states import HeadState
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["BEGINNING", "Beginning", "LastRouteKind", "kind_of_route", "may_begin"]


class LastRouteKind(enum.Enum):
    """Relation of this broker to a journal's last route."""

    UNKNOWN = "unknown"
    WITHDRAWN = "withdrawn"
    WITH_US = "with this broker"
    OTHERS_AWAY = "of others, who are away"
    OTHERS_PRESENT = "of others, one of them present"


class Beginning(enum.Enum):
    """Time and offset at which a replica begins its spool."""

    AT_HEAD = "at the head"
    AT_ZERO = "at 0, like a new member"
    WHEN_DECIDED = "when all spools are decided"


BEGINNING: Mapping[tuple[HeadState, LastRouteKind], Beginning] = {
    (HeadState.KNOWN, LastRouteKind.UNKNOWN): Beginning.AT_HEAD,
    (HeadState.KNOWN, LastRouteKind.WITHDRAWN): Beginning.AT_HEAD,
    (HeadState.KNOWN, LastRouteKind.WITH_US): Beginning.AT_HEAD,
    (HeadState.KNOWN, LastRouteKind.OTHERS_AWAY): Beginning.AT_HEAD,
    (HeadState.KNOWN, LastRouteKind.OTHERS_PRESENT): Beginning.AT_HEAD,
    (HeadState.ABSENT, LastRouteKind.UNKNOWN): Beginning.WHEN_DECIDED,
    (HeadState.ABSENT, LastRouteKind.WITHDRAWN): Beginning.WHEN_DECIDED,
    (HeadState.ABSENT, LastRouteKind.WITH_US): Beginning.WHEN_DECIDED,
    (HeadState.ABSENT, LastRouteKind.OTHERS_AWAY): Beginning.WHEN_DECIDED,
    (HeadState.ABSENT, LastRouteKind.OTHERS_PRESENT): Beginning.AT_ZERO,
}
"""(head, last route) → beginning of a replica whose journal has spools in quarantine."""


def may_begin(head: HeadState, route: LastRouteKind) -> bool:
    """Return True if a replica begins its spool before the spools in quarantine are decided."""
    return BEGINNING[head, route] is not Beginning.WHEN_DECIDED


def kind_of_route(
    route: pb.Route | None,
    ours: Iterable[pb.ProcessSpec.ID],
    present: Iterable[pb.ProcessSpec.ID],
) -> LastRouteKind:
    """Return the relation of this broker to a journal's last route.

    Args:
        route: the last route; ``None`` if it is not known, without members if it was withdrawn.
        ours: this broker, and the one that used its spool directory before.
        present: brokers which the journal is assigned to.
    """
    if route is None:
        return LastRouteKind.UNKNOWN
    if not route.members:
        return LastRouteKind.WITHDRAWN
    if any(member in route.members for member in ours):
        return LastRouteKind.WITH_US
    if any(member in route.members for member in present):
        return LastRouteKind.OTHERS_PRESENT
    return LastRouteKind.OTHERS_AWAY
