"""Maximum flow by push/relabel, over a network whose arcs come in pages (allocator section 7.3).

A node's arcs are requested page by page while it discharges, and may differ after each change of
its height: they express preferences and constraints. The order of all steps is fixed, so the
solution is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["SINK", "SOURCE", "Arc", "Network", "PushRelabel"]

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
        """Return a page of the arcs of a node, counted from 0; ``None`` behind the last page.

        Args:
            node: the node.
            page: number of the page.
            height: height of the node relative to that of the source.
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
            for index in range(self._indices[node], count):
                # Nodes with the same arcs begin at different arcs.
                target, capacity, front = arcs[(index + node) % count]
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
