"""Time of the allocator, and moves of assignments when a broker is lost.

    python benchmarks/allocator.py [--journals 10000] [--brokers 60] [--zones 3] [--json] [--check]
    python benchmarks/allocator.py --journals 100000 --brokers 1000 --zones 10 --rounds 2

It measures a cluster of R = 3 without Etcd, as the leader sees it: the first solution, a round in
which nothing changes, the solution when one broker is lost, and when it has returned. The least
processor time of all rounds counts, because other programs slow a round down and never speed it up.
Bars of times grow with the number of journals.

Moves are compared with the least possible number: for a lost broker the assignments that it held,
for a returned one those that others hold above their fair share. Primaries are balanced as the
rounds of a leader do it, all exchanges in one. Their most at one broker is compared with an even
share and one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from unittest.mock import patch

from measure import Figure, arguments, report

from gazette_sdk.cluster.allocator import moves as balance
from gazette_sdk.cluster.allocator.loop import kept_placement
from gazette_sdk.cluster.allocator.moves import balance_primaries, converge
from gazette_sdk.cluster.allocator.solver import solve
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalAllocation, route_value
from gazette_sdk.cluster.etcd_messages import KeyValue, Put, WatchBatch, WatchEvent
from gazette_sdk.cluster.items import assignment_key, item_key, member_key
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import route_of

ROOT = "/gazette/cluster"
REPLICATION = 3
JOURNAL_LIMIT = 1024

FIRST_MS_MAX = 0.1  # for each journal
UNCHANGED_MS_MAX = 0.005
EXCHANGES_MS_MAX = 0.02
MOVES_RATIO_MAX = 1.2

EXCHANGED_MAX = 20_000
"""Greatest number of journals whose first broker leads all of them before the exchanges: of more
those take minutes."""

T = TypeVar("T")

Member = tuple[str, str]
Placement = list[list[Member]]


@dataclass(frozen=True)
class Cluster:
    """Journals and brokers of a measurement."""

    journals: Sequence[str]
    members: Sequence[Member]

    @classmethod
    def of(cls, journals: int, brokers: int, zones: int) -> Cluster:
        """Return a cluster whose brokers are spread over zones evenly."""
        return cls(
            [f"measured/part-{number:05}" for number in range(journals)],
            sorted((f"zone-{n % zones}", f"broker-{n:03}") for n in range(brokers)),
        )

    def without(self, member: Member) -> Cluster:
        """Return the cluster when a broker is lost."""
        return Cluster(self.journals, [each for each in self.members if each != member])

    def keyspace(self, placement: Placement) -> BrokerKeySpace:
        """Return the mirror of the cluster, whose journals are all synchronized."""
        keyspace = BrokerKeySpace(ROOT)
        entries = sorted(self._entries(placement))
        events = tuple(
            WatchEvent(is_delete=False, kv=KeyValue(key, value, revision, revision, 1, lease=1))
            for revision, (key, value) in enumerate(entries, 1)
        )
        keyspace.apply([WatchBatch(pb.Header.Etcd(revision=len(events)), events)])
        return keyspace

    def state(self, placement: Placement) -> State:
        """Return the allocator's view of the cluster."""
        return State(self.keyspace(placement), JournalAllocation())

    def solve(self, placement: Placement) -> Placement:
        """Return the desired placement."""
        desired = solve(self.state(placement))
        return [[self.members[member] for member in holders] for holders in desired]

    def balanced(self, placement: Placement) -> Placement:
        """Return a placement, the primary of each journal first, after its exchanges.

        An item changes its primary once in a round, so that several rounds may be needed.
        """
        if len(self.journals) > EXCHANGED_MAX:
            placement = _begun_evenly(placement)
        while (further := self._exchanged(placement)) != placement:
            placement = further
        return placement

    def _exchanged(self, placement: Placement) -> Placement:
        state = self.state(placement)
        with patch.object(balance, "EXCHANGES_MAX", len(self.journals)):
            led = [
                operation.key.decode().removeprefix(f"{ROOT}/assign/").split("#")
                for checkpoint in balance_primaries(state)
                for operation in checkpoint.operations
                if isinstance(operation, Put) and operation.key.endswith(b"#0")
            ]
        primaries = {name: (zone, suffix) for name, zone, suffix, _ in led}
        return [
            sorted(holders, key=lambda each, name=name: each != primaries.get(name, holders[0]))
            for name, holders in zip(self.journals, placement, strict=True)
        ]

    def _entries(self, placement: Placement) -> Iterator[tuple[bytes, bytes]]:
        for name in self.journals:
            spec = pb.JournalSpec(name=name, replication=REPLICATION)
            spec.fragment.length = 1 << 26
            spec.fragment.compression_codec = pb.GZIP
            spec.fragment.refresh_interval.FromSeconds(300)
            yield item_key(ROOT, name), spec.SerializeToString()
        for zone, suffix in self.members:
            broker = pb.BrokerSpec(journal_limit=JOURNAL_LIMIT)
            broker.process_spec.id.zone, broker.process_spec.id.suffix = zone, suffix
            broker.process_spec.endpoint = "http://localhost:8080"
            yield member_key(ROOT, zone, suffix), broker.SerializeToString()
        for name, holders in zip(self.journals, placement, strict=False):
            slots = sorted((*each, slot) for slot, each in enumerate(holders))
            value = route_value(route_of(slots))
            for slot, (zone, suffix) in enumerate(holders):
                yield assignment_key(ROOT, name, zone, suffix, slot), value


def _begun_evenly(placement: Placement) -> Placement:
    """Return a placement whose primaries are the members that lead least so far."""
    led: Counter[Member] = Counter()
    found = []
    for holders in placement:
        primary = min(holders, key=led.__getitem__)
        led[primary] += 1
        found.append(sorted(holders, key=lambda each, primary=primary: each != primary))
    return found


def added(before: Placement, after: Placement) -> int:
    """Return how many assignments of a placement are new."""
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def least_ms(rounds: int, work: Callable[[], T]) -> float:
    """Return the least processor time of some calls, in milliseconds."""
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times) * 1000


def figures(journals: int, brokers: int, zones: int, rounds: int) -> list[Figure]:
    """Measure a cluster.

    Args:
        journals: number of its journals.
        brokers: number of its brokers.
        zones: number of their zones.
        rounds: number of measurements of each time.
    """
    cluster = Cluster.of(journals, brokers, zones)
    empty = cluster.state([])
    placement = cluster.solve([])
    first_ms = least_ms(rounds, lambda: solve(empty))
    uneven, desired = cluster.keyspace(placement), solve(empty)
    exchanges_ms = least_ms(
        rounds, lambda: list(balance_primaries(State(uneven, JournalAllocation())))
    )
    balanced = cluster.balanced(placement)
    keyspace = cluster.keyspace(balanced)
    most = max(loads([holders[:1] for holders in balanced]).values())

    def unchanged() -> None:
        state = State(keyspace, JournalAllocation())
        if kept_placement(state, desired) is not None:
            raise AssertionError("the placement is the desired one")
        if list(converge(state, desired)) or list(balance_primaries(state)):
            raise AssertionError("a round without changes writes nothing")

    unchanged_ms = least_ms(max(rounds, 3), unchanged)

    worst, held, degraded = 0, 1, placement
    lost_ms = 0.0
    for lost in (cluster.members[0], cluster.members[brokers // 2], cluster.members[-1]):
        smaller = cluster.without(lost)
        left = [[each for each in holders if each != lost] for holders in placement]
        after = smaller.solve(left)
        needed = sum(len(holders) for holders in placement) - sum(len(h) for h in left)
        if added(left, after) / needed >= worst / held:
            worst, held, degraded = added(left, after), needed, after
            lost_ms = least_ms(rounds, partial(solve, smaller.state(left)))
    returned = cluster.solve(degraded)
    share = -(-journals * REPLICATION // brokers)
    above = sum(max(0, count - share) for count in loads(degraded).values())
    return [
        _time("first solution", first_ms, FIRST_MS_MAX * journals),
        _time("round without changes", unchanged_ms, UNCHANGED_MS_MAX * journals),
        _time("round of exchanges of primaries", exchanges_ms, EXCHANGES_MS_MAX * journals),
        _time("solution for a lost broker", lost_ms, FIRST_MS_MAX * journals),
        _moves("moves for a lost broker, what it held = baseline", worst, held),
        _moves(
            "moves when it is back, what is above fair shares = baseline",
            added(degraded, returned),
            above,
        ),
        Figure(
            "most primaries of a broker, an even share and one = baseline",
            most,
            -(-journals // brokers) + 1,
            "journals",
            1.0,
            more_is_better=False,
        ),
    ]


def _time(name: str, found_ms: float, most_ms: float) -> Figure:
    return Figure(name, found_ms, most_ms, "ms", 1.0, more_is_better=False)


def _moves(name: str, found: int, least: int) -> Figure:
    return Figure(name, found, least, "assignments", MOVES_RATIO_MAX, more_is_better=False)


def loads(placement: Placement) -> dict[Member, int]:
    """Return the number of assignments of each broker."""
    counts: dict[Member, int] = {}
    for holders in placement:
        for member in holders:
            counts[member] = counts.get(member, 0) + 1
    return counts


def main() -> None:
    """Run the program."""
    options = arguments(__doc__ or "", journals=10_000, brokers=60, zones=3)
    found = figures(options.journals, options.brokers, options.zones, options.rounds)
    report(found, options)


if __name__ == "__main__":
    main()
