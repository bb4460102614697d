"""Pages of journals: sorted, searched and filtered, with the numbers of all journals by state.

A page is cut from a table of all journals, which is made anew when keys of Etcd have changed: lines
of journals that are as before are kept. It is made while someone asks, in short slices of the event
loop, and the rarer the more it costs. Orders by head, rate and size need the heads of all journals:
a second table, for each token that asks.

:class:`ClusterViews` has the calls of pages, heads and events: it authorizes their callers.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from gazette_sdk.broker.listing import Listing
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.service import until_end
from gazette_sdk.broker.views.events import ClusterEvents
from gazette_sdk.broker.views.heads import HEADS_MAX, HeadOf, Heads
from gazette_sdk.cluster.broker_keys import BrokerAssignment, JournalEntry, is_consistent
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.journal_spec import desired_replication, is_suspended, may_read
from gazette_sdk.protocol.labels import Matcher, rewrite_prefix
from gazette_sdk.protocol.rules import (
    DRAIN_RPC,
    EVENTS_RPC,
    HEADS_RPC,
    JOURNALS_PAGE_RPC,
    MEMBERS_RPC,
    REPORT_RPC,
)
from gazette_sdk.server.authorization import Authorization, Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.json_gateway import BODY_BYTES_MAX, JsonStream, JsonUnary
from gazette_sdk.server.members import verify_view
from gazette_sdk.server.paging import PageCut
from gazette_sdk.transport.loop import LoopSlices

HEADS_AGE_S = 2.0
"""Age of the heads of all journals from which they are asked for again."""

AGE_MAX_S = 10.0
"""Greatest age of a table while someone asks, whatever it costs to make."""

COST_SHARE = 0.01
"""Greatest share of a processor that is spent on making tables, up to :data:`AGE_MAX_S`."""

TOKENS_MAX = 8
"""Tokens for which the heads of all journals are kept."""

SELECTIONS_MAX = 16
"""Selections of journals that are kept until keys of Etcd change."""

Row = clpb.JournalsPageResponse.Row
State = clpb.JournalState


def state_of(
    spec: pb.JournalSpec,
    assignments: Sequence[BrokerAssignment],
    *,
    is_waiting: bool,
    several_zones: bool,
    max_replication: int,
) -> clpb.JournalState:
    """Return the state of a journal.

    Args:
        spec: its spec.
        assignments: its assignments.
        is_waiting: True if appends are refused until brokers with its last bytes are back.
        several_zones: True if the cluster has brokers in several zones.
        max_replication: cap of every journal's replication.
    """
    members = {(each.zone, each.suffix) for each in assignments}
    wanted = desired_replication(spec, max_replication)
    for state, applies in (
        (clpb.JOURNAL_SUSPENDED, is_suspended(spec)),
        (clpb.JOURNAL_WAITING, is_waiting),
        (clpb.JOURNAL_UNASSIGNED, not members),
        (clpb.JOURNAL_NO_PRIMARY, all(each.slot != 0 for each in assignments)),
        (clpb.JOURNAL_SHORT, len(members) < wanted or not is_consistent(assignments)),
        (
            clpb.JOURNAL_SINGLE_ZONE,
            several_zones and wanted > 1 and len({zone for zone, _ in members}) == 1,
        ),
    ):
        if applies:
            return state
    return clpb.JOURNAL_OK


class Line:
    """Line of the table of all journals. It is replaced when its journal's keys change.

    Attributes:
        item: the journal.
        assignments: its assignments.
        state: its state.
        has_route: True if an assignment has a route: then it waits for no one.
        text: what a search finds, in lower case.
    """

    __slots__ = ("_text", "assignments", "has_route", "item", "state")

    def __init__(
        self,
        item: JournalEntry,
        assignments: Sequence[BrokerAssignment],
        state: clpb.JournalState,
    ) -> None:
        self.item = item
        self.assignments = assignments
        self.state = state
        self.has_route = any(each.value.members for each in assignments)
        self._text: str | None = None

    @property
    def text(self) -> str:  # noqa: D102 - see the class
        if self._text is None:
            spec = self.item.value
            labels = (f"{label.name}={label.value}" for label in spec.labels.labels)
            self._text = "\n".join([spec.name, *labels]).lower()
        return self._text


@dataclass(slots=True)
class _Table:
    """Table of all journals, in the order of their names.

    Attributes:
        lines: its lines.
        entries: list of the mirror of which it was made.
        revision: of the mirror.
        due_s: monotonic time from which it may be made again.
        several_zones: True if the cluster had brokers in several zones.
        selections: journals that match requests, by what was requested.
    """

    lines: list[Line] = field(default_factory=list)
    entries: object = None
    revision: int = 0
    due_s: float = 0.0
    several_zones: bool = False
    selections: OrderedDict[_Filter, _Selection] = field(default_factory=OrderedDict)


class _Filter(NamedTuple):
    """Parts of a request and of its caller's claims that select journals."""

    selector: bytes
    allowed: bytes
    search: str
    states: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Selection:
    """Journals that match a request, in the order of their names, and all by state."""

    lines: Sequence[Line]
    states: Mapping[str, int]


async def cut_page(
    cut: PageCut[Line], lines: Sequence[Line], values: Sequence[float | None]
) -> tuple[Sequence[Line], str]:
    """Return the lines of a page, and the cursor of the next one; empty if it is the last.

    Args:
        cut: cut of the page.
        lines: lines in the order of their names.
        values: the value of each by which they are sorted; empty to sort by name alone.
    """
    if not values:
        for line in _near(cut, lines):
            cut.add(None, line.item.id, line)
        return cut.rows()
    slices = LoopSlices()
    for line, value in zip(lines, values, strict=True):
        await slices.rest()
        cut.add(value, line.item.id, line)
    return cut.rows()


def _near(cut: PageCut[Line], lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines that a page by names may have: no others need to be looked at."""
    names, after = _Names(lines), cut.after
    if cut.descending:
        end = len(lines) if after is None else bisect_left(names, after.id)
        return lines[max(end - cut.kept, 0) : end]
    begin = 0 if after is None else bisect_right(names, after.id)
    return lines[begin : begin + cut.kept]


class _Names(Sequence[str]):
    """Names of lines, without a list of them."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, at: int) -> str:  # type: ignore[override]
        return self._lines[at].item.id


class JournalPages:
    """Pages of the journals of a cluster.

    Args:
        listing: has the mirror of Etcd, and the brokers that journals wait for.
        heads: heads of journals.
        max_replication: cap of every journal's replication.
        now: monotonic seconds.
    """

    def __init__(
        self,
        listing: Listing,
        heads: Heads,
        *,
        max_replication: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listing = listing
        self._keyspace = listing.keyspace
        self._heads = heads
        self._max_replication = max_replication
        self._now = now
        self._table = _Table()
        self._making = asyncio.Lock()
        self._all_heads: OrderedDict[str | None, _HeadsTable] = OrderedDict()

    async def answer(
        self, request: clpb.JournalsPageRequest, claims: Claims, call: Call
    ) -> clpb.JournalsPageResponse:
        """Return a page.

        Args:
            request: the request.
            claims: of the caller, with the capability LIST.
            call: that of the caller.

        Raises:
            CallError: the request is malformed.
        """
        cut = PageCut[Line].of(request, sorts=clpb.JournalSort.values(), by_id=clpb.BY_NAME)
        table = await self._made_table()
        selection = await self._select(table, request, claims)
        values = await self._values(table, selection.lines, request.sort, claims, call)
        lines, following = await cut_page(cut, selection.lines, values)
        response = clpb.JournalsPageResponse(
            header=self._listing.header(),
            total=len(selection.lines),
            states=selection.states,
            next=following,
            revision=table.revision,
        )
        await self._add_rows(response, lines, claims, call)
        return response

    async def lines(self) -> Sequence[Line]:
        """Return the lines of all journals; the same list while none has changed."""
        return (await self._made_table()).lines

    async def _made_table(self) -> _Table:
        """Return the table of all journals, made again if it is old."""
        async with self._making:
            table, keyspace = self._table, self._keyspace
            if table.entries is keyspace.entries or self._now() < table.due_s:
                return table
            self._table = made = await self._make_table(table)
            return made

    async def _make_table(self, before: _Table) -> _Table:
        slices, keyspace = LoopSlices(), self._keyspace
        several_zones = len({member.zone for member in keyspace.members()}) > 1
        made = _Table(
            entries=keyspace.entries, revision=keyspace.revision, several_zones=several_zones
        )
        known = {line.item.id: line for line in before.lines}
        for item in keyspace.items():
            await slices.rest()
            line = known.get(item.id)
            assignments = keyspace.assignments(item.id)
            if (
                line is None
                or line.item is not item
                or line.assignments != assignments
                or before.several_zones != several_zones
                or not line.has_route
            ):
                line = Line(item, assignments, self._state(item, assignments, several_zones))
            made.lines.append(line)
        made.due_s = self._now() + min(AGE_MAX_S, slices.taken_s / COST_SHARE)
        return made

    def _state(
        self,
        item: JournalEntry,
        assignments: Sequence[BrokerAssignment],
        several_zones: bool,  # noqa: FBT001 - of the table
    ) -> clpb.JournalState:
        return state_of(
            item.value,
            assignments,
            is_waiting=bool(self._listing.absent_brokers(item.id)),
            several_zones=several_zones,
            max_replication=self._max_replication,
        )

    async def _select(
        self, table: _Table, request: clpb.JournalsPageRequest, claims: Claims
    ) -> _Selection:
        """Return the journals that match a request and its caller's claims."""
        wanted_key = _Filter(
            request.selector.SerializeToString(),
            claims.selector.SerializeToString(),
            request.search.lower(),
            frozenset(request.states),
        )
        found = table.selections.get(wanted_key)
        if found is not None:
            table.selections.move_to_end(wanted_key)
            return found
        wanted = Matcher(rewrite_prefix(request.selector))
        allowed = Matcher(rewrite_prefix(claims.selector))
        lines: list[Line] = []
        counts, slices = dict.fromkeys(map(int, State.values()), 0), LoopSlices()
        search, states = wanted_key.search, wanted_key.states
        for line in table.lines:
            await slices.rest()
            spec = line.item.value
            if not (wanted.journal(spec) and allowed.journal(spec)):
                continue
            if search and search not in line.text:
                continue
            counts[line.state] += 1
            if not states or line.state in states:
                lines.append(line)
        named = {State.Name(state): count for state, count in counts.items() if count}
        selection = table.selections[wanted_key] = _Selection(lines, named)
        while len(table.selections) > SELECTIONS_MAX:
            table.selections.popitem(last=False)
        return selection

    # -------------------------------------------------------------- orders

    async def _values(
        self, table: _Table, lines: Sequence[Line], sort: int, claims: Claims, call: Call
    ) -> Sequence[float | None]:
        """Return the values by which lines are sorted; none to sort by name.

        Values that are unknown, or that the caller may not see, are None.
        """
        if sort == clpb.BY_NAME:
            return ()
        slices, values = LoopSlices(), list[float | None]()
        value_of = _SPEC_VALUES.get(sort)
        if value_of is None:
            heads = await self._heads_to_sort(table, lines, claims, call)
            at = _HEAD_VALUES[sort]

            def value_of(line: Line) -> float | None:
                found = heads.get(line.item.id)
                return None if found is None else found[at]

        for line in lines:
            await slices.rest()
            values.append(value_of(line))
        return values

    async def _heads_to_sort(
        self, table: _Table, lines: Sequence[Line], claims: Claims, call: Call
    ) -> Mapping[str, _HeadValues]:
        """Return heads by which lines are sorted, as far as the caller may read the journals.

        Few are asked for at once. Many are taken from a table of all journals.
        """
        if len(lines) <= HEADS_MAX:
            return await self._ask(lines, claims, call)
        heads = self._all_heads.setdefault(call.authorization, _HeadsTable())
        self._all_heads.move_to_end(call.authorization)
        while len(self._all_heads) > TOKENS_MAX:
            self._all_heads.popitem(last=False)
        async with heads.making:
            if self._now() >= heads.due_s:
                begun_s = time.thread_time()
                heads.values = await self._ask(table.lines, claims, call)
                cost_s = time.thread_time() - begun_s  # with that of other tasks: rather too rare
                age_s = max(HEADS_AGE_S, cost_s / COST_SHARE)
                heads.due_s = self._now() + min(AGE_MAX_S, age_s)
        return heads.values

    async def _ask(
        self, lines: Sequence[Line], claims: Claims, call: Call
    ) -> Mapping[str, _HeadValues]:
        """Return heads of those journals that the caller may read."""
        may_read_journal, slices, items = _Readable(claims), LoopSlices(), []
        for line in lines:
            await slices.rest()
            if may_read_journal(line.item.value):
                items.append(line.item)
        values = {}
        found = await self._heads.find(items, call, primaries_only=True)
        for name, head in found.items():
            await slices.rest()
            values[name] = _head_values(head)
        return values

    # ---------------------------------------------------------------- rows

    async def _add_rows(
        self,
        response: clpb.JournalsPageResponse,
        lines: Sequence[Line],
        claims: Claims,
        call: Call,
    ) -> None:
        """Add rows to a page, of the journals that exist now and that the caller may still see."""
        allowed = Matcher(rewrite_prefix(claims.selector))
        may_read_journal, members = _Readable(claims), _Members(response)
        slices, rows, readable = LoopSlices(), [], []
        for line in lines:
            await slices.rest()
            item = self._keyspace.item(line.item.id)
            if item is None or not allowed.journal(item.value):
                continue
            row = _row(line, item.value, members)
            rows.append(row)
            if may_read_journal(item.value):
                readable.append(item)
        heads = await self._heads.find(readable, call, primaries_only=True) if readable else {}
        for row in rows:
            head = heads.get(row.name)
            if head is not None:
                _set_head(row, head)
        response.rows.extend(rows)


_HeadValues = tuple[float | None, float | None, float | None, float | None]
"""Head, rate, size and unstored bytes of a journal, as they are sorted."""


def _head_values(head: HeadOf) -> _HeadValues:
    head_offset, rate, size, unstored = (
        float(getattr(head, name)) if head.HasField(name) else None
        for name in ("head", "rate", "size", "unstored")
    )
    return head_offset, rate, size, unstored


_HEAD_VALUES: Mapping[int, int] = {
    clpb.BY_HEAD: 0,
    clpb.BY_RATE: 1,
    clpb.BY_SIZE: 2,
    clpb.BY_UNSTORED: 3,
}

_SPEC_VALUES: Mapping[int, Callable[[Line], float | None]] = {
    clpb.BY_STATE: lambda line: line.state,
    clpb.BY_REPLICATION: lambda line: line.item.value.replication,
}


@dataclass(slots=True)
class _HeadsTable:
    """Heads of journals, as one token may see them.

    Attributes:
        values: what they are sorted by, by name.
        due_s: monotonic time from which they are asked for again.
        making: held while they are asked for.
    """

    values: Mapping[str, _HeadValues] = field(default_factory=dict)
    due_s: float = 0.0
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Readable:
    """Test of journals whose content a caller may read.

    Args:
        claims: of the caller.
    """

    def __init__(self, claims: Claims) -> None:
        self._has_capability = bool(claims.capability & Capability.READ)
        self._allowed = Matcher(rewrite_prefix(claims.selector))

    def __call__(self, spec: pb.JournalSpec) -> bool:
        return self._has_capability and may_read(spec) and self._allowed.journal(spec)


class _Members:
    """Table of the members of a page's rows.

    Args:
        response: gets the members.
    """

    def __init__(self, response: clpb.JournalsPageResponse) -> None:
        self._response = response
        self._indices: dict[tuple[str, str], int] = {}

    def index(self, zone: str, suffix: str) -> int:
        """Return the index of a member, which is added at its first use."""
        index = self._indices.setdefault((zone, suffix), len(self._indices))
        if index == len(self._response.members):
            self._response.members.add(zone=zone, suffix=suffix)
        return index


def _row(line: Line, spec: pb.JournalSpec, members: _Members) -> Row:
    row = Row(
        name=spec.name,
        replication=spec.replication,
        state=line.state,
        labels=spec.labels,
        stores=spec.fragment.stores,
    )
    for each in line.assignments:
        index = members.index(each.zone, each.suffix)
        if index not in row.members:
            row.members.append(index)
        if each.slot == 0:
            row.primary = index
    return row


def _set_head(row: Row, head: HeadOf) -> None:
    for name in ("head", "begin", "size", "unstored", "rate"):
        if head.HasField(name):
            setattr(row, name, getattr(head, name))


# --------------------------------------------------------------------- calls

HEADS_BYTES_MAX = 512 << 10
"""Greatest body that names journals whose heads are asked for: as many as one call may name."""


@dataclass(frozen=True, slots=True)
class ClusterViews:
    """Calls of a broker that show journals and events of the cluster.

    Attributes:
        authorization: verifies callers.
        listing: makes headers.
        pages: pages of journals.
        heads: heads of journals.
        events: streams of events.
        stopping: ends streams when it fires.
    """

    authorization: Authorization
    listing: Listing
    pages: JournalPages
    heads: Heads
    events: ClusterEvents
    stopping: Signal

    def methods(self) -> Iterator[Method]:
        """Return the methods, for gRPC and for the JSON gateway."""
        yield Method(JOURNALS_PAGE_RPC, self.page)
        yield Method(HEADS_RPC, self.find_heads)
        yield Method(EVENTS_RPC, self.stream_events)

    async def page(
        self, request: clpb.JournalsPageRequest, call: Call
    ) -> clpb.JournalsPageResponse:
        """Return a page of the journals that the caller may list."""
        claims = self.authorization.verify(call, Capability.LIST)
        async with self.authorization.bound(claims, call):
            return await self.pages.answer(request, claims, call)

    async def find_heads(self, request: clpb.HeadsRequest, call: Call) -> clpb.HeadsResponse:
        """Return the heads of journals that the caller may read."""
        claims = self.authorization.verify(call, Capability.READ)
        async with self.authorization.bound(claims, call):
            heads = await self.heads.answer(request, claims, call)
        return clpb.HeadsResponse(header=self.listing.header(), heads=heads)

    async def stream_events(
        self, request: clpb.EventsRequest, call: Call
    ) -> AsyncGenerator[clpb.Event]:
        """Yield the events of the cluster, to callers that may list all of its journals."""
        claims = verify_view(self.authorization.authority, call.authorization)
        timeout_s = self.authorization.remaining_s(claims)
        events = until_end(self.events.stream(request, call), timeout_s, self.stopping)
        async with aclosing(events):
            async for event in events:
                yield event


def cluster_json_methods(methods: Iterable[Method]) -> Mapping[str, JsonStream | JsonUnary]:
    """Return the calls about a cluster, of the methods that a broker serves.

    Those that change nothing may be made by GET, too.
    """
    served = {method.rpc: method.serve for method in methods}
    listed = Capability.LIST
    every = {
        "/v1/journals/page": (JOURNALS_PAGE_RPC, listed, BODY_BYTES_MAX),
        "/v1/journals/heads": (HEADS_RPC, Capability.READ, HEADS_BYTES_MAX),
        "/v1/cluster/members": (MEMBERS_RPC, listed, BODY_BYTES_MAX),
        "/v1/cluster/report": (REPORT_RPC, listed, BODY_BYTES_MAX),
    }
    calls: dict[str, JsonStream | JsonUnary] = {
        path: JsonUnary(
            capability,
            rpc.request_type,
            served[rpc],
            allows_get=True,
            body_bytes_max=body_bytes_max,
        )
        for path, (rpc, capability, body_bytes_max) in every.items()
        if rpc in served
    }
    if EVENTS_RPC in served:
        calls["/v1/cluster/events"] = JsonStream(
            listed, EVENTS_RPC.request_type, served[EVENTS_RPC], allows_get=True
        )
    if DRAIN_RPC in served:
        calls["/v1/cluster/drain"] = JsonUnary(
            Capability.APPLY, DRAIN_RPC.request_type, served[DRAIN_RPC]
        )
    return calls
