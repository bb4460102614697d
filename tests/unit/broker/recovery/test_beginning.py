"""Where a replica begins its spool while recovered spools are in quarantine."""

from __future__ import annotations

import itertools

import pytest

from gazette_sdk.broker.recovery import beginning
from gazette_sdk.broker.recovery.beginning import (
    BEGINNING,
    Beginning,
    LastRouteKind,
    kind_of_route,
    may_begin,
)
from gazette_sdk.broker.recovery.states import HeadState
from gazette_sdk.protocol import broker_pb2 as pb

US, FORMER, B, C = (pb.ProcessSpec.ID(zone="a", suffix=name) for name in ("us", "former", "b", "c"))
ALL = list(itertools.product(HeadState, LastRouteKind))


def test_every_pair_has_its_row_in_the_docstring():
    assert set(BEGINNING) == set(ALL)
    assert beginning.__doc__ is not None
    lines = beginning.__doc__.splitlines()
    for (head, route), begins in BEGINNING.items():
        assert f"{head.value:6}  {route.value:30}  {begins.value}" in lines


def test_a_known_head_is_where_a_replica_begins_whatever_is_in_quarantine():
    for head, route in ALL:
        assert (BEGINNING[head, route] is Beginning.AT_HEAD) == (head is HeadState.KNOWN)
        assert not (head is HeadState.KNOWN and not may_begin(head, route))


def test_without_a_head_it_begins_only_beside_a_broker_that_has_every_acknowledged_byte():
    """Else the spools in quarantine may be the only trace of the head."""
    for route in LastRouteKind:
        assert may_begin(HeadState.ABSENT, route) == (route is LastRouteKind.OTHERS_PRESENT)


@pytest.mark.parametrize(
    ("members", "present", "kind"),
    [
        (None, [US, B], LastRouteKind.UNKNOWN),
        ([], [US, B], LastRouteKind.WITHDRAWN),
        ([US, B], [US, B], LastRouteKind.WITH_US),
        ([US, B], [US], LastRouteKind.WITH_US),
        ([FORMER, B], [US, B], LastRouteKind.WITH_US),
        ([B, C], [US, B], LastRouteKind.OTHERS_PRESENT),
        ([B, C], [B], LastRouteKind.OTHERS_PRESENT),
        ([B], [US, C], LastRouteKind.OTHERS_AWAY),
        ([B], [], LastRouteKind.OTHERS_AWAY),
    ],
)
def test_the_kind_of_a_last_route(members, present, kind):
    route = None if members is None else pb.Route(members=members, primary=-1)
    assert kind_of_route(route, [US, FORMER], present) is kind
