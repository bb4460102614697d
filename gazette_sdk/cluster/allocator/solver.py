"""Solver of the desired assignments of items to members (allocator sections 6 and 7).

It is a maximum flow: the source sends one unit per replica to each item; an item sends them to its
zones, one node for each pair of item and zone; these send one unit to each member of the zone; and
members send to the sink as many as they can hold. Goals, the lowest priority first:

1. current assignments are kept, new ones are spread evenly over zones, 2. a member holds no more
than its fair share of items, 3. an item with several replicas is spread over two zones at least, 4.
as many replicas as possible are placed; where slots are short, the first items get theirs.

Push/relabel is greedy in its relaxations and reaches them nearly always. Three more steps guarantee
them: replicas without a member are placed where limits allow it, moves that the goals do not need
are undone, and a complete placement is replaced only by a better one, so that a new leader moves
nothing.

The flow is found by push/relabel over a network whose arcs come in pages (:class:`PushRelabel`,
allocator section 7.3). A node's arcs are requested page by page while it discharges, and may differ
after each change of its height: they express preferences and constraints. The order of all steps is
fixed, so the solution is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gazette_sdk.cluster.allocator.moves import (
    complete,
    current_placement,
    scaled,
    shortfall,
    undo_needless_moves,
)
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.items import AssignmentEntry

SOURCE = 0
SINK = 1

Arc = tuple[int, int, bool]
"""Target, capacity, and True if its flow is among the last to be pushed back.

A capacity bounds all flow of the pair of nodes; a later page may name the same pair again with a
larger one.
"""

_INFINITE = 1 << 60


class Network(Protocol):
    """Network of a maximum-flow problem."""

    @property
    def initial_heights(self) -> Sequence[int]:
        """Height of each node. Node 0 is the source, node 1 the sink."""

    def page(self, node: int, page: int, height: int) -> Sequence[Arc] | None:
        """Return a page of the arcs of a node, counted from 0; ``None`` after the last page.

        Args:
            node: the node.
            page: number of the page.
            height: height of the node relative to that of the source.
        """

    def first_arc(self, node: int, page: int) -> int:
        """Return the index, modulo the length of the page, of the arc at which a node begins.

        Nodes with the same arcs begin at different ones. It stays the same for a node and a page.
        """


class PushRelabel:
    """Solver of a network; ``flows`` holds the solution afterwards.

    Attributes:
        flows: for each node its flow to each target with any.
        heights: height of each node.
        height_counts: for each height below the number of nodes, the number of nodes with it,
            without the source.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.heights = list(network.initial_heights)
        self._size = size = len(self.heights)
        self.heights[SOURCE] = size
        self._next_heights = [_INFINITE] * size
        self.excess = [0] * size
        self._pages = [0] * size
        self._indices = [0] * size
        self.flows: list[dict[int, int]] = [{} for _ in range(size)]
        # Sources of each node's flow. Ordinary flows are pushed back first, from the newest on,
        # then those marked as front from the oldest on.
        self._incoming: list[dict[int, None]] = [{} for _ in range(size)]
        self._incoming_front: list[dict[int, None]] = [{} for _ in range(size)]
        self.height_counts = [0] * size
        for node, height in enumerate(self.heights):
            if node != SOURCE and height < size:
                self.height_counts[height] += 1
        self._active = _TallestFirst(self.heights)

    def solve(self) -> None:
        """Push until all flow is at the sink, or back at the source."""
        self.add_excess(SOURCE, _INFINITE)
        while self._active:
            self._discharge(self._active.pop())

    def add_excess(self, node: int, amount: int) -> None:
        """Add flow to a node, which has to push it on."""
        if self.excess[node] == 0 and node != SINK:
            self._active.push(node)
        self.excess[node] += amount

    def _discharge(self, node: int) -> None:
        """Push all excess of a node to others, and lift it as often as needed."""
        while True:
            if self._push_forward(node) or self._push_back(node):
                return
            if node == SOURCE:
                return
            self._relabel(node)

    def _push_forward(self, node: int) -> bool:
        """Push along arcs, from the last discharge's on. Return True if no excess remains."""
        heights, excess, flows = self.heights, self.excess, self.flows[node]
        height = heights[node]
        while True:
            arcs = self._network.page(node, self._pages[node], height - self._size)
            if arcs is None:
                return False
            count = len(arcs)
            first = self._network.first_arc(node, self._pages[node])
            for index in range(self._indices[node], count):
                target, capacity, front = arcs[(index + first) % count]
                flow = flows.get(target, 0)
                if flow >= capacity:
                    continue
                if height <= heights[target]:
                    if heights[target] < self._next_heights[node]:
                        self._next_heights[node] = heights[target] + 1
                    continue
                amount = min(capacity - flow, excess[node])
                if flow == 0:
                    incoming = self._incoming_front if front else self._incoming
                    incoming[target][node] = None
                flows[target] = flow + amount
                excess[node] -= amount
                self.add_excess(target, amount)
                if excess[node] == 0:
                    self._indices[node] = index  # the arc may have capacity left
                    return True
            self._pages[node] += 1
            self._indices[node] = 0

    def _push_back(self, node: int) -> bool:
        """Push flow back to its sources. Return True if no excess remains."""
        heights, excess = self.heights, self.excess
        height = heights[node]
        ordinary, front = self._incoming[node], self._incoming_front[node]
        for incoming, sources in ((ordinary, list(reversed(ordinary))), (front, list(front))):
            for source in sources:
                if height <= heights[source]:
                    if heights[source] < self._next_heights[node]:
                        self._next_heights[node] = heights[source] + 1
                    continue
                flow = self.flows[source][node]
                amount = min(flow, excess[node])
                if amount == flow:
                    del self.flows[source][node]
                    del incoming[source]
                else:
                    self.flows[source][node] = flow - amount
                excess[node] -= amount
                self.add_excess(source, amount)
                if excess[node] == 0:
                    return True
        return False

    def _relabel(self, node: int) -> None:
        """Lift a node so that it can push again."""
        heights, counts, size = self.heights, self.height_counts, self._size
        old, new = heights[node], self._next_heights[node]
        assert new < _INFINITE, "a node with excess can at least push back"
        if 0 < old < size - 1 and new < size - 1 and counts[old] == 1:
            # No node remains at this height: the nodes above are cut off from the sink.
            if counts[new] > 0:
                self._lift_above(old)
            new = size - 1
        if old < size:
            counts[old] -= 1
        if new < size:
            counts[new] += 1
        heights[node] = new
        self._restart(node)

    def _lift_above(self, gap: int) -> None:
        """Lift all nodes above a gap to just below the source.

        Not above it: relaxations that depend on the height come before flow returns.
        """
        heights, counts, size = self.heights, self.height_counts, self._size
        for node, height in enumerate(heights):
            if gap < height < size:
                counts[height] -= 1
                heights[node] = size - 1
                self._restart(node)
        self._active.rebuild()

    def _restart(self, node: int) -> None:
        self._next_heights[node] = _INFINITE
        self._pages[node] = 0
        self._indices[node] = 0


class _TallestFirst:
    """Binary heap of nodes.

    The order of equally tall nodes decides the result, so the order of swaps is that of the classic
    array heap; ``heapq`` has another one.
    """

    def __init__(self, heights: Sequence[int]) -> None:
        self._heights = heights
        self._nodes: list[int] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def push(self, node: int) -> None:
        """Add a node."""
        nodes, heights = self._nodes, self._heights
        nodes.append(node)
        index = len(nodes) - 1
        while index > 0:
            parent = (index - 1) // 2
            if heights[nodes[index]] <= heights[nodes[parent]]:
                break
            nodes[index], nodes[parent] = nodes[parent], nodes[index]
            index = parent

    def pop(self) -> int:
        """Remove and return the tallest node."""
        nodes = self._nodes
        last = len(nodes) - 1
        nodes[0], nodes[last] = nodes[last], nodes[0]
        self._sink(0, last)
        return nodes.pop()

    def rebuild(self) -> None:
        """Restore the order after heights changed."""
        count = len(self._nodes)
        for index in reversed(range(count // 2)):
            self._sink(index, count)

    def _sink(self, index: int, count: int) -> None:
        nodes, heights = self._nodes, self._heights
        while (child := 2 * index + 1) < count:
            right = child + 1
            if right < count and heights[nodes[right]] > heights[nodes[child]]:
                child = right
            if heights[nodes[child]] <= heights[nodes[index]]:
                return
            nodes[index], nodes[child] = nodes[child], nodes[index]
            index = child


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


TURNS_MEMBERS_MIN = 16
"""Members of a zone from which on its items take turns at them."""


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

        # Zone-items of a zone, in the order in which they first ask for its members.
        self._turns: list[dict[int, int]] = [{} for _ in state.zones]

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

    def first_arc(self, node: int, page: int) -> int:
        """Return the arc at which a node begins; see :class:`Network`.

        The zone-items of a large zone take turns at its members. Their numbers would not do: they
        differ by multiples of the number of zones, which often has a divisor in common with that of
        members. Then most members are the first of no item, and others of too many. In a small zone
        that costs little, and the placement is that of Gazette's allocator.
        """
        zone_item = node - self._first_zone_item
        if page == 0 or not 0 <= zone_item < self._first_member - self._first_zone_item:
            return node
        zone = zone_item % self._zones
        if len(self._zone_members[zone]) < TURNS_MEMBERS_MIN:
            return node
        turns = self._turns[zone]
        return turns.setdefault(node, len(turns))

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
