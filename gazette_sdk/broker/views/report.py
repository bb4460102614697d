"""Report of what needs attention in the cluster.

It is made of :class:`~gazette_sdk.broker.views.problems.Facts`: members describe themselves, one
process of each application is asked for its shards, and journals are counted in the table that
pages of journals have, in slices between which the event loop runs other tasks. A report is made at
most every two seconds while callers ask, for callers with the same token.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gazette_sdk.broker.process import Broker
from gazette_sdk.broker.views.members import ClusterMembers, Processes
from gazette_sdk.broker.views.page import Line
from gazette_sdk.broker.views.problems import (
    SHARD_LAG_S,
    ApplicationFacts,
    Facts,
    JournalsOfState,
    MemberFacts,
    problems,
)
from gazette_sdk.cluster.broker_keys import BrokerAssignment
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.protocol.rules import SHARDS_PAGE_RPC
from gazette_sdk.protocol.shard_spec import reduce_status
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.members import verify_view
from gazette_sdk.transport.loop import LoopSlices

PERIOD_S = 2.0
"""Age up to which a report is used again."""

NAMED_MAX = 8
"""Shards of one kind whose names are kept."""

LAGGING_MAX = 500
"""Shards with the greatest lags that an application is asked for."""

KEPT_MAX = 64
"""Reports that are kept, for callers with different tokens."""


class ClusterReport:
    """Report of the cluster by one of its brokers.

    Args:
        broker: the broker, which has started.
        members: the members.
    """

    def __init__(self, broker: Broker, members: ClusterMembers) -> None:
        self._broker = broker
        self._members = members
        self._journals = _CountedJournals()
        self._kept = _Kept()

    async def answer(self, _request: clpb.ReportRequest, call: Call) -> clpb.ReportResponse:
        """Return a report of the cluster.

        Raises:
            UnauthenticatedError: the token lacks LIST, or has a selector.
        """
        claims = verify_view(self._broker.authority, call.authorization)
        # Members check the token by keys of their own: what they answer is for no other token.
        return await self._kept.get(call.authorization, lambda: self._make(claims, call))

    async def _make(self, claims: Claims, call: Call) -> clpb.ReportResponse:
        processes = await self._members.processes(call)
        members, applications = await asyncio.gather(
            self._members.describe(processes, claims, call, details=True),
            self._ask_applications(processes, call),
        )
        journals = await self._count_journals()
        facts = Facts(
            now_us=time.time_ns() // 1000,
            journals=journals.states,
            members=members,
            stores=merged_stores(journals.of_store, members),
            applications=applications,
        )
        return self._response(facts, len(journals.lines))

    def _response(self, facts: Facts, journals: int) -> clpb.ReportResponse:
        brokers = facts.brokers
        response = clpb.ReportResponse(
            header=self._broker.listing.header(),
            cluster=self._broker.config.etcd_prefix,
            clock_us=facts.now_us,
            brokers=len(brokers),
            zones=sorted({each.member.id.zone for each in brokers}),
            journals=journals,
            replicas=sum(each.member.replicas for each in brokers),
            stores=facts.stores,
            applications=[each.summary for each in facts.applications],
            versions=sorted({each.member.version for each in facts.answered}),
            problems=problems(facts),
        )
        for state, of_state in facts.journals.items():
            response.states[clpb.JournalState.Name(state)] = of_state.count
        for name, combine in _COMBINED:
            values = [getattr(each.member, name) for each in brokers if each.member.HasField(name)]
            if values:
                setattr(response, name, combine(values))
        return response

    # ------------------------------------------------- brokers, journals, stores

    async def _count_journals(self) -> _CountedJournals:
        """Return the numbers of all journals, counted again when the key of one has changed."""
        lines = await self._broker.views.pages.lines()
        if self._journals.lines is lines:
            return self._journals
        facts = _CountedJournals(lines)
        slices = LoopSlices()
        for line in lines:
            await slices.rest()
            of_state = facts.states.get(line.state)
            if of_state is None:
                of_state = facts.states[line.state] = self._first_of_state(line)
            of_state.count += 1
            for url in line.item.value.fragment.stores:
                facts.of_store[url] = facts.of_store.get(url, 0) + 1
        self._journals = facts
        return facts

    def _first_of_state(self, line: Line) -> JournalsOfState:
        """Return the first journal of a state, not counted yet, with what is known of it."""
        detail = ""
        if line.state == clpb.JOURNAL_WAITING:
            absent = self._broker.absent_brokers(line.item.id)
            detail = f"it waits for {', '.join(f'{each.zone}/{each.suffix}' for each in absent)}"
        elif line.state == clpb.JOURNAL_SHORT:
            spec = line.item.value
            wanted = desired_replication(spec, self._broker.config.max_replication)
            detail = _missing(line.assignments, wanted)
        return JournalsOfState(first=line.item.id, detail=detail)

    # ---------------------------------------------------------- applications

    async def _ask_applications(
        self, processes: Processes, call: Call
    ) -> Sequence[ApplicationFacts]:
        asked = (self._application(*each, call) for each in sorted(processes.items()))
        return await asyncio.gather(*asked)

    async def _application(
        self, name: str, specs: Sequence[cpb.ConsumerSpec], call: Call
    ) -> ApplicationFacts:
        """Return what one process of an application says of its shards."""
        facts = ApplicationFacts(clpb.ReportResponse.Application(name=name, processes=len(specs)))
        if not specs:
            facts.summary.error = "it has shards, and none of its processes runs"
            return facts
        process = next((spec for spec in specs if not spec.exiting), specs[0]).process_spec
        facts.address = process.endpoint
        page = clpb.ShardsPageRequest(sort=clpb.BY_LAG_SECONDS, descending=True, limit=LAGGING_MAX)
        listed, lags = await asyncio.gather(
            self._members.ask_application("List", process, cpb.ListRequest(), call),
            self._members.ask_application(SHARDS_PAGE_RPC, process, page, call),
        )
        shards = listed.response
        if not isinstance(shards, cpb.ListResponse) or shards.status != cpb.OK:
            facts.summary.error = str(listed.error or "it cannot list its shards")
            return facts
        await add_shards(facts, shards)
        if isinstance(lags.response, clpb.ShardsPageResponse):
            add_lags(facts, lags.response)
        return facts


@dataclass(slots=True)
class _CountedJournals:
    """Numbers of the journals of a table.

    Attributes:
        lines: lines of the table.
        states: journals by state.
        of_store: number of journals of each store, by its URL.
    """

    lines: Sequence[Line] = ()
    states: dict[clpb.JournalState, JournalsOfState] = field(default_factory=dict)
    of_store: dict[str, int] = field(default_factory=dict)


_COMBINED: tuple[tuple[str, Callable[[Sequence[Any]], Any]], ...] = (
    ("unstored", sum),
    ("oldest_unstored_s", max),
    ("append_rate", sum),
    ("read_rate", sum),
)
"""Fields of a report that are made of those of members, and how."""


def _missing(assignments: Sequence[BrokerAssignment], wanted: int) -> str:
    """Return what a journal that is short of replicas lacks."""
    found = len({(each.zone, each.suffix) for each in assignments})
    if found < wanted:
        return f"it has {found} of {wanted}"
    return f"not all of its {found} are in sync"


class _KeptReport:
    """Report that is used again for a short time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.made_at = -math.inf
        self.report = clpb.ReportResponse()


class _Kept:
    """Reports that are used again for a short time, by the tokens of those who asked."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str | None, _KeptReport] = OrderedDict()

    async def get(
        self, token: str | None, make: Callable[[], Awaitable[clpb.ReportResponse]]
    ) -> clpb.ReportResponse:
        """Return a report that was made at most :data:`PERIOD_S` ago.

        Callers with one token wait for the one that makes it.
        """
        kept = self._reports.setdefault(token, _KeptReport())
        self._reports.move_to_end(token)
        while len(self._reports) > KEPT_MAX:
            self._reports.popitem(last=False)
        async with kept.lock:
            if time.monotonic() - kept.made_at >= PERIOD_S:
                kept.report = await make()
                kept.made_at = time.monotonic()
            return kept.report


def merged_stores(
    journals_of: Mapping[str, int], members: Sequence[MemberFacts]
) -> Sequence[clpb.ReportResponse.Store]:
    """Return all stores of journals, each as the broker sees it that fails to use it for longest.

    Args:
        journals_of: number of journals of each store, by its URL.
        members: members, with the stores that they use.
    """
    stores = {
        url: clpb.ReportResponse.Store(url=url, journals=count)
        for url, count in sorted(journals_of.items())
    }
    for each in members:
        for said in each.member.stores:
            store = stores.get(said.url)
            if store is None:
                continue
            store.unstored += said.unstored
            if not said.HasField("healthy"):
                continue
            if said.healthy:
                store.healthy = store.healthy or not store.HasField("healthy")
                continue
            store.healthy = False
            if not store.since_us or said.since_us < store.since_us:
                store.since_us, store.error = said.since_us, f"{said.error} (at {each.name})"
    return list(stores.values())


async def add_shards(facts: ApplicationFacts, listing: cpb.ListResponse) -> None:
    """Add what a list of shards shows."""
    summary = facts.summary
    summary.shards = len(listing.shards)
    slices = LoopSlices()
    for shard in listing.shards:
        await slices.rest()
        status = reduce_status(shard.status)
        if status.code == cpb.ReplicaStatus.FAILED:
            summary.failed += 1
            if len(facts.failed) < NAMED_MAX:
                facts.failed[shard.spec.id] = _first_line(status.errors)
        elif shard.spec.disable:
            continue
        elif shard.route.primary < 0:
            summary.without_primary += 1
            if len(facts.without_primary) < NAMED_MAX:
                facts.without_primary.append(shard.spec.id)
        elif status.code != cpb.ReplicaStatus.PRIMARY:
            summary.recovering += 1


def _first_line(errors: Sequence[str]) -> str:
    """Return the first line of a shard's error, which may have a stack."""
    lines = errors[0].strip().splitlines() if errors else []
    return lines[0].rstrip(".") if lines else "without an error"


def add_lags(facts: ApplicationFacts, page: clpb.ShardsPageResponse) -> None:
    """Add the lags of the shards that lag most."""
    lags = [(row.id, row.lag_s) for row in page.rows if row.HasField("lag_s")]
    if lags:
        facts.summary.lag_s = max(lag_s for _, lag_s in lags)
    sizes = [row.lag_bytes for row in page.rows if row.HasField("lag_bytes")]
    if sizes:
        facts.summary.lag_bytes = sum(sizes)
    late = [each for each in lags if each[1] > SHARD_LAG_S]
    facts.lagging_count = len(late)
    facts.lagging = dict(late[:NAMED_MAX])
