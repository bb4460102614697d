"""Authorization of the calls that show a cluster: no token shows more than it allows."""

from __future__ import annotations

import asyncio
import base64
import time
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.broker.api.fronts import AuditedCalls, GuardedJournals, guarded_methods
from gazette_sdk.broker.listing import Listing
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.views.events import ClusterEvents, EventRing
from gazette_sdk.broker.views.heads import HeadOf, Heads
from gazette_sdk.broker.views.page import ClusterViews, JournalPages
from gazette_sdk.errors import CallError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.journal_spec import may_read
from gazette_sdk.protocol.labels import matches_journal, parse_selector, rewrite_prefix
from gazette_sdk.protocol.rules import EVENTS_RPC, HEADS_RPC, JOURNALS_PAGE_RPC
from gazette_sdk.server.authorization import Authorization, Call
from gazette_sdk.server.listener import PeerLimits
from gazette_sdk.transport.loop import run
from support.brokers import Mirror, journal_spec
from support.scripted_journals import ScriptedJournals

AUTHORITY = Authority(base64.b64encode(b"the secret of a cluster").decode())
US = pb.ProcessSpec.ID(zone="zone", suffix="first")


class LocalHeads:
    """Heads of every journal: this broker holds all."""

    def head(self, journal):
        return HeadOf(
            journal=journal, head=len(journal), replicas=[clpb.HeadsResponse.Replica(member=US)]
        )


class NoMembers:
    """A cluster of this broker alone."""

    time_limit_s = 1.0

    def others(self):
        return []

    async def ask(self, _rpc, requests, _call):
        assert not list(requests)
        return []


def views_of(*specs) -> ClusterViews:
    mirror = Mirror()
    batch = [mirror.member(US.suffix, US.zone)]
    for spec in specs:
        batch.append(mirror.item(spec))
        batch.append(mirror.assignment(spec.name, US.suffix, 0, zone=US.zone))
    mirror.batch(batch)
    listing = Listing(mirror.keyspace, None, US)
    heads = Heads(mirror.keyspace, US, LocalHeads(), NoMembers(), None)
    return ClusterViews(
        Authorization(AUTHORITY),
        listing,
        JournalPages(listing, heads, max_replication=9),
        heads,
        ClusterEvents(EventRing("zone/first"), NoMembers()),
        Signal(),
    )


def call_with(capability, selector="") -> Call:
    signed = AUTHORITY.sign(capability, parse_selector(selector), 600.0, time.time())
    return Call(authorization=f"Bearer {signed}")


async def events_of(views, call):
    events = views.stream_events(clpb.EventsRequest(no_wait=True), call)
    async with aclosing(events):
        return [event async for event in events]


def selector_of(text: str) -> pb.LabelSelector:
    return rewrite_prefix(parse_selector(text))


NAMES = [f"{top}/{number}-part" for top in ("shop", "logs") for number in range(4)]
VALUES = ("red", "green", "blue")
SPECS = st.fixed_dictionaries(
    {
        name: st.tuples(
            st.sampled_from(VALUES),
            st.sampled_from([pb.JournalSpec.NOT_SPECIFIED, pb.JournalSpec.O_WRONLY]),
        )
        for name in NAMES
    }
)
SELECTORS = st.sampled_from(
    [
        "",
        "colour=red",
        "colour in (red, blue)",
        "colour!=green",
        "name=shop/1-part",
        "prefix=shop/",
        "prefix=logs/, colour=blue",
        "nothing=at-all",
    ]
)


@settings(max_examples=60)
@given(
    labelled=SPECS,
    allowed=SELECTORS,
    wanted=SELECTORS,
    sort=st.sampled_from(clpb.JournalSort.values()),
    descending=st.booleans(),
    limit=st.integers(1, 5),
    search=st.sampled_from(["", "shop", "colour=b", "part"]),
    skip=st.integers(0, 4),
    capability=st.sampled_from(
        [Capability.LIST, Capability.LIST | Capability.READ, Capability.ALL]
    ),
    after_all=st.booleans(),
)
def test_a_token_with_a_selector_never_sees_anything_else(
    *, labelled, allowed, wanted, sort, descending, limit, search, skip, capability, after_all
):
    """In rows, numbers and heads, whatever is asked for, with the place of a page of all, too."""
    specs = {
        name: journal_spec(name, labels={"colour": colour}, flags=flags)
        for name, (colour, flags) in labelled.items()
    }
    views, call = views_of(*specs.values()), call_with(capability, allowed)
    visible = {name for name, spec in specs.items() if matches_journal(selector_of(allowed), spec)}
    readable = {name for name in visible if may_read(specs[name])}

    async def scenario():
        request = clpb.JournalsPageRequest(
            selector=parse_selector(wanted),
            search=search,
            sort=sort,
            descending=descending,
            limit=limit,
        )
        if after_all:
            first = await views.page(request, call_with(Capability.ALL))
            request.after, request.skip = first.next, skip
        page = await views.page(request, call)
        heads = local = None
        if capability & Capability.READ:
            asked = clpb.HeadsRequest(journals=[*NAMES, "shop/none"])
            heads = await views.find_heads(asked, call)
            asked.local = True
            local = await views.find_heads(asked, call)
        return page, heads, local

    page, heads, local = run(scenario(), 20)
    selected = {
        name
        for name in visible
        if matches_journal(selector_of(wanted), specs[name])
        and (search in name or search in f"colour={labelled[name][0]}")
    }
    assert {row.name for row in page.rows} <= selected
    assert page.total == sum(page.states.values()) == len(selected)
    has_read = bool(capability & Capability.READ)
    for row in page.rows:
        assert row.HasField("head") == (has_read and row.name in readable)
    for answer in (heads, local):
        if answer is not None:
            assert [head.journal for head in answer.heads] == [n for n in NAMES if n in readable]

    if allowed:
        with pytest.raises(UnauthenticatedError, match="whole cluster"):
            run(events_of(views, call), 20)
    else:
        assert run(events_of(views, call), 20) == []


@pytest.mark.parametrize(
    ("rpc", "capability"),
    [
        (JOURNALS_PAGE_RPC, Capability.ALL & ~Capability.LIST),
        (HEADS_RPC, Capability.ALL & ~Capability.READ),
        (EVENTS_RPC, Capability.ALL & ~Capability.LIST),
    ],
)
@pytest.mark.parametrize("has_token", [True, False])
def test_each_call_needs_its_capability(rpc, capability, has_token):
    [serve] = [method.serve for method in views_of().methods() if method.rpc is rpc]
    call = call_with(capability) if has_token else Call()

    async def scenario():
        answer = serve(rpc.request_type(), call)
        if rpc.server_streams:
            async with aclosing(answer):
                await anext(answer)
        else:
            await answer

    with pytest.raises(UnauthenticatedError):
        run(scenario(), 20)


def test_a_stream_of_events_ends_when_the_broker_stops():
    views = views_of()

    async def scenario():
        events = views.stream_events(clpb.EventsRequest(), call_with(Capability.LIST))
        async with aclosing(events):
            first = asyncio.ensure_future(anext(events, None))
            await asyncio.sleep(0)
            views.stopping.fire()
            return await first

    assert run(scenario(), 20) is None


def test_calls_count_for_the_limit_of_a_peer():
    """Streams, too, for as long as they are open."""
    views = views_of()
    limits = PeerLimits(calls_max=1)
    guard = GuardedJournals(ScriptedJournals(), AUTHORITY, limits=limits, audited=AuditedCalls.OFF)
    serves = {method.rpc: method.serve for method in guarded_methods(views.methods(), guard)}
    call = replace(call_with(Capability.ALL), peer="192.0.2.1")

    async def scenario():
        async with aclosing(serves[EVENTS_RPC](clpb.EventsRequest(), call)) as events:
            waiting = asyncio.ensure_future(anext(events, None))
            await asyncio.sleep(0)
            with pytest.raises(CallError) as refused:
                await serves[JOURNALS_PAGE_RPC](clpb.JournalsPageRequest(), call)
            views.stopping.fire()
            await waiting
        await serves[JOURNALS_PAGE_RPC](clpb.JournalsPageRequest(), call)
        return refused.value.code

    assert run(scenario(), 20) == "RESOURCE_EXHAUSTED"


def test_without_a_guard_methods_are_as_they_are():
    methods = list(views_of().methods())
    assert guarded_methods(methods, None) == methods
