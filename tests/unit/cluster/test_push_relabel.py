from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.allocator.solver import SINK, SOURCE, PushRelabel
from support.vectors import group

VECTORS = {case["source"].rpartition(":")[2]: case for case in group("allocator", "push_relabel")}


class PagedNetwork:
    """A network of given pages; an arc is ``[target, capacity]`` and perhaps ``"front"``."""

    def __init__(self, nodes, pages, heights=None):
        self._pages = {int(node): listed for node, listed in pages.items()}
        self.initial_heights = [(heights or {}).get(node, 0) for node in range(nodes)]

    def page(self, node, page, _height):
        listed = self._pages.get(node, [])
        if page >= len(listed):
            return None
        return [(target, capacity, bool(front)) for target, capacity, *front in listed[page]]

    def first_arc(self, node, _page):
        return node


def flows_of(solver):
    return sorted(
        [node, target, flow]
        for node, flows in enumerate(solver.flows)
        for target, flow in flows.items()
    )


def solved(nodes, pages):
    solver = PushRelabel(PagedNetwork(nodes, pages))
    solver.solve()
    return solver


@pytest.mark.parametrize("name", ["TestSimpleFixtureOne", "TestSimpleFixtureTwo"])
def test_simple_networks(name):
    vector = VECTORS[name]
    solver = solved(vector["nodes"], vector["arc_pages"])
    assert flows_of(solver) == sorted(vector["flows"])
    if "final_height_counts" in vector:
        assert solver.height_counts == vector["final_height_counts"]


def common_network(*, preferred):
    pages = {SOURCE: [[[node, 2] for node in (2, 3, 4, 5)]]}
    for node in (2, 3, 4, 5):
        common = [[target, 1] for target in (6, 7, 8, 9)]
        pages[node] = [[[node + 4, 1, "front"]], common] if preferred else [common]
        pages[node + 4] = [[[SINK, 2]]]
    return pages


def test_preferred_arcs_keep_their_flow():
    vector = VECTORS["TestCommonSubstructureFixture#2"]
    solver = solved(vector["nodes"], common_network(preferred=True))
    assert flows_of(solver) == sorted(vector["flows"])


def test_an_overflowing_network_takes_what_fits():
    vector = VECTORS["TestOverflowFixture#1"]
    pages = {SOURCE: [[[n, 1] for n in (2, 3, 4)]], 5: [[[SINK, 1]]]}
    pages |= {node: [[[5, 1]]] for node in (2, 3, 4)}
    assert flows_of(solved(vector["nodes"], pages)) == sorted(vector["flows"])


def test_active_nodes_come_tallest_first():
    vector = VECTORS["TestActiveTrackingOnHeight"]
    heights = {int(node): height for node, height in vector["heights"].items()}
    solver = PushRelabel(PagedNetwork(vector["nodes"], {}, heights))
    solver.add_excess(SOURCE, 1)
    for node, excess in vector["excess"].items():
        solver.add_excess(int(node), excess)
    solver.add_excess(SINK, 5)
    assert [solver._active.pop() for _ in vector["pop_order"]] == vector["pop_order"]


def max_flow(nodes, capacities):
    """The plain method: augment along shortest paths."""
    residual = dict(capacities)
    total = 0
    while True:
        came_from, queue = {SOURCE: SOURCE}, [SOURCE]
        for node in queue:
            for target in range(nodes):
                if residual.get((node, target), 0) > 0 and target not in came_from:
                    came_from[target] = node
                    queue.append(target)
        if SINK not in came_from:
            return total
        node = SINK
        while node != SOURCE:
            parent = came_from[node]
            residual[parent, node] -= 1
            residual[node, parent] = residual.get((node, parent), 0) + 1
            node = parent
        total += 1


ARCS = st.lists(
    st.tuples(st.sampled_from([0, 2, 3, 4, 5, 6, 7]), st.integers(1, 7), st.integers(0, 4)),
    max_size=24,
)


@given(ARCS)
def test_flow_is_conserved_within_capacities_and_as_large_as_can_be(arcs):
    nodes = 8
    capacities = {}
    for node, target, capacity in arcs:
        if node != target and (target, node) not in capacities:
            capacities[node, target] = capacity
    pages = {}
    for (node, target), capacity in capacities.items():
        pages.setdefault(node, [[]])[0].append([target, capacity])
    solver = solved(nodes, pages)
    for node, target, flow in flows_of(solver):
        assert 0 < flow <= capacities[node, target]
    for node in range(2, nodes):
        incoming = sum(flows.get(node, 0) for flows in solver.flows)
        assert incoming == sum(solver.flows[node].values())
    arrived = sum(flows.get(SINK, 0) for flows in solver.flows)
    assert arrived == max_flow(nodes, capacities)
