"""Solver of the desired assignments of items to members (allocator sections 6 and 7).

It is a maximum flow: the source sends one unit per replica to each item; an item sends them to its
zones, one node for each pair of item and zone; these send one unit to each member of the zone; and
members send to the sink as many as they can hold. Goals, the lowest priority first:

1. current assignments are kept, new ones are spread evenly over zones,
2. a member holds no more than its fair share of items,
3. an item with several replicas is spread over two zones at least,
4. as many replicas as possible are placed; where slots are short, the first items get theirs.

Push/relabel is greedy in its relaxations and reaches them nearly always. Three more steps guarantee
them: replicas without a member are placed where limits allow it, moves that the goals do not need
are undone, and a complete placement is replaced only by a better one, so that a new leader moves
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gazette_sdk.cluster.allocator.moves import undo_needless_moves
from gazette_sdk.cluster.allocator.placement import (
    complete,
    current_placement,
    scaled,
    shortfall,
)
from gazette_sdk.cluster.allocator.push_relabel import SINK, SOURCE, Arc, PushRelabel
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.item_keyspace import AssignmentEntry

__all__ = ["NETWORK_ITEMS_MAX", "FlowNetwork", "solve"]

NETWORK_ITEMS_MAX = 10_000
"""Greatest number of items of one network; more need several networks: bounds time and memory."""

_ITEM_HEIGHT, _ZONE_ITEM_HEIGHT, _MEMBER_HEIGHT = 3, 2, 1


def solve(state: State) -> list[list[int]]:
    """Return the desired members of each item. Pure and deterministic.

    Args:
        state: the cluster.

    Returns:
        For each item the ascending indices of members.
    """
    current = current_placement(state)
    current_shortfall = shortfall(state, current) if current is not None else None
    if current is not None and current_shortfall == (0, 0, 0):
        return current
    desired: list[list[int]] = []
    for begin in range(0, len(state.items), NETWORK_ITEMS_MAX):
        network = FlowNetwork(state, begin, min(begin + NETWORK_ITEMS_MAX, len(state.items)))
        solver = PushRelabel(network)
        solver.solve()
        desired += network.extract(solver)
    complete(state, desired)
    undo_needless_moves(state, desired)
    if current is not None and current_shortfall is not None and current_shortfall.unplaced == 0:
        # Assignments move only for a better placement.
        return current if current_shortfall <= shortfall(state, desired) else desired
    return desired


class FlowNetwork:
    """Network of the items ``[begin, end)`` of a state, and all of its members.

    Where slots are short they are reserved in order of items.

    Nodes are numbered: source, sink, items, zone-items (by item, then zone), members.
    """

    def __init__(self, state: State, begin: int, end: int) -> None:
        self._state = state
        self._items = end - begin
        self._zones = len(state.zones)
        self._replication = state.replication[begin:end]
        self._item_slots = sum(self._replication)
        self._first_zone_item = 2 + self._items
        self._first_member = self._first_zone_item + self._items * self._zones
        self._source_arcs: list[Arc] = []
        remaining = state.member_slots
        for item, replication in enumerate(self._replication):
            slots = min(replication, remaining)
            remaining -= slots
            self._source_arcs.append((2 + item, slots, False))

        zone_index = {zone: index for index, zone in enumerate(state.zones)}
        self._zone_members: list[list[Arc]] = [[] for _ in state.zones]
        for index, member in enumerate(state.members):
            if (zone := zone_index.get(member.zone)) is not None:
                self._zone_members[zone].append((self._first_member + index, 1, False))

        # Current assignments: their number in each zone, and their members.
        self._held_zones: list[dict[int, int]] = [{} for _ in range(self._items)]
        self._held_members: dict[int, list[Arc]] = {}
        for item in range(self._items):
            self._count_current(item, state.item_assignments[begin + item], zone_index)

    def _count_current(
        self, item: int, assignments: Sequence[AssignmentEntry[Any]], zone_index: dict[str, int]
    ) -> None:
        held = self._held_zones[item]
        for assignment in assignments:
            zone = zone_index.get(assignment.zone)
            if zone is None:
                continue
            node = self._zone_item(item, zone)
            held[node] = held.get(node, 0) + 1
            member = self._state.member_index(assignment.zone, assignment.suffix)
            if member is not None:
                arcs = self._held_members.setdefault(node, [])
                arcs.append((self._first_member + member, 1, True))

    @property
    def initial_heights(self) -> Sequence[int]:
        """Heights that let flow run from the source to the sink at once."""
        return (
            [0, 0]
            + [_ITEM_HEIGHT] * self._items
            + [_ZONE_ITEM_HEIGHT] * (self._items * self._zones)
            + [_MEMBER_HEIGHT] * len(self._state.members)
        )

    def page(self, node: int, page: int, height: int) -> Sequence[Arc] | None:
        """Return a page of arcs of a node; see :class:`~.push_relabel.Network`."""
        if node >= self._first_member:
            return self._member_page(node - self._first_member, page, height)
        if node >= self._first_zone_item:
            return self._zone_item_page(node, page)
        if node != SOURCE:
            return self._item_page(node - 2, page, height)
        return self._source_arcs if page == 0 else None

    def extract(self, solver: PushRelabel) -> list[list[int]]:
        """Return for each item the members that its flow reached."""
        return [
            sorted(
                target - self._first_member
                for zone in range(self._zones)
                for target in solver.flows[self._zone_item(item, zone)]
            )
            for item in range(self._items)
        ]

    def _zone_item(self, item: int, zone: int) -> int:
        return self._first_zone_item + item * self._zones + zone

    def _item_page(self, item: int, page: int, height: int) -> Sequence[Arc] | None:
        replication = self._replication[item]
        several_zones = max(replication - 1, 1)
        if self._zones == 1 or height == 1:
            # There is only one zone, or flow would return to the source next: use a single one.
            if page > 0:
                return None
            capacity = replication
        elif page == 0:
            return [
                (node, min(count, several_zones), True)
                for node, count in self._held_zones[item].items()
            ]
        elif page == 1:
            capacity = -(-replication // self._zones)
        elif page == 2:
            capacity = several_zones
        else:
            return None
        first = self._zone_item(item, 0)
        return [(node, capacity, False) for node in range(first, first + self._zones)]

    def _zone_item_page(self, node: int, page: int) -> Sequence[Arc] | None:
        if page == 0:
            return self._held_members.get(node, ())
        if page == 1:
            return self._zone_members[(node - self._first_zone_item) % self._zones]
        return None

    def _member_page(self, member: int, page: int, height: int) -> Sequence[Arc] | None:
        if page > 0:
            return None
        state = self._state
        limit = state.effective_limit(member)
        capacity = scaled(limit, self._item_slots, state.item_slots)
        if height < -1:
            # Flow is not about to return to the source: no more than the fair share.
            capacity = scaled(capacity, state.item_slots, state.member_slots)
        return [(SINK, capacity, False)]
