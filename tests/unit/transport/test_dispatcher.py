from __future__ import annotations

from types import SimpleNamespace

import pytest

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.transport.router import RouteCache, Router, candidates, choose
from gazette_sdk.transport.wire import SERVICE, Action, Health, Marks, Peer, Target, action_for
from support.vectors import group

MEMBERS = ("remote/primary", "local/replica", "local/other-replica")
PEERS = {"default": SERVICE} | {name: Peer(*name.split("/"), f"http://{name}") for name in MEMBERS}
ROUTE = pb.Route(
    members=[pb.ProcessSpec.ID(zone=p.zone, suffix=p.suffix) for p in list(PEERS.values())[1:]],
    endpoints=[p.endpoint for p in list(PEERS.values())[1:]],
    primary=0,
)
HEALTH = {"ready": Health.READY, "failed": Health.FAILED}


class Dispatching:
    """What the vector's steps do, over the pure functions and a table of states."""

    def __init__(self):
        self.health: dict[Peer, Health] = {}

    def health_of(self, peer):
        return self.health.get(peer, Health.IDLE)

    def pick(self, target, *, needs_primary=False):
        peer = choose(candidates(target, needs_primary=needs_primary), "local", self.health_of)
        was_open = peer in self.health
        self.health.setdefault(peer, Health.IDLE)
        return peer, action_for(peer, self.health_of(peer)), not was_open


def target_of(step):
    if "member" in step:
        zone, suffix = step["member"].split("/")
        return Target(ROUTE, pb.ProcessSpec.ID(zone=zone, suffix=suffix))
    if step.get("route") == "empty":
        return Target(pb.Route(primary=-1))
    return Target(ROUTE)


def test_picks_follow_the_vectors():
    dispatching = Dispatching()
    steps = group("broker", "dispatcher_pick")["cases"][0]["steps"]
    for step in steps:
        for name, state in step.get("set", {}).items():
            dispatching.health[PEERS[name]] = HEALTH[state]
        if "expect" not in step:
            continue
        peer, action, dialed = dispatching.pick(
            target_of(step), needs_primary=step.get("require_primary", False)
        )
        expect = step["expect"]
        if expect.startswith("fail"):
            assert action is Action.FAIL, step
        elif "dial" in expect:
            wanted = "default" if "default" in expect else step.get("member")
            wanted = wanted or expect.split()[1].rstrip(",")
            assert (peer, action, dialed) == (PEERS[wanted], Action.WAIT, True), step
        else:
            assert (peer, action, dialed) == (PEERS[expect], Action.USE, False), step


def test_sweeps_follow_the_vectors():
    marks, opened = Marks(), set()
    for step in group("broker", "dispatcher_pick")["cases"][1]["steps"]:
        for name in step.get("dial", []) + step.get("use", []):
            if step.get("expect") == "re-dialed":
                assert PEERS[name] not in opened
            opened.add(PEERS[name])
            marks.begin(PEERS[name])
            marks.end(PEERS[name])
        if "sweep" in step:
            swept = marks.sweep(sorted(opened, key=str))
            assert swept == [PEERS[name] for name in step["sweep"]]
            opened -= set(swept)


def test_a_peer_with_a_call_under_way_is_not_swept():
    marks, peer = Marks(), PEERS["local/replica"]
    marks.begin(peer)
    assert marks.sweep([peer]) == []
    assert marks.sweep([peer]) == []
    marks.end(peer)
    assert marks.sweep([peer]) == [peer]


def test_the_service_address_is_never_swept():
    assert Marks().sweep([SERVICE]) == []


def test_members_without_an_endpoint_are_passed_over():
    route = pb.Route()
    route.CopyFrom(ROUTE)
    route.endpoints[1] = ""
    assert [p.suffix for p in candidates(Target(route), needs_primary=False)] == [
        "primary",
        "other-replica",
    ]
    route.endpoints[0] = ""
    assert candidates(Target(route), needs_primary=True) == [SERVICE]


def test_a_route_without_endpoints_leads_to_the_service_address():
    route = pb.Route(members=ROUTE.members, primary=0)
    assert candidates(Target(route), needs_primary=False) == [SERVICE]
    assert candidates(Target(pb.Route(primary=-1)), needs_primary=True) == [SERVICE]


def test_an_exact_member_of_unknown_endpoint_is_unavailable():
    with pytest.raises(UnavailableError, match="remote/other"):
        candidates(
            Target(ROUTE, pb.ProcessSpec.ID(zone="remote", suffix="other")), needs_primary=False
        )


def test_a_failed_service_address_is_waited_for():
    assert action_for(SERVICE, Health.FAILED) is Action.WAIT


def router_over(route):
    cache = RouteCache()
    cache.update("a/journal", route)
    wire = SimpleNamespace(health=lambda _: Health.IDLE, unavailable=lambda _: None)
    return Router("http://service", wire, cache, zone="local", authorizer=None, requires_tls=False)


def author(value):
    labels = pb.LabelSet(labels=[pb.Label(name="author", value=value)])
    return pb.AppendRequest(journal="a/journal", check_registers=pb.LabelSelector(include=labels))


def test_the_last_append_of_a_journal_is_kept_with_its_route():
    router = router_over(ROUTE)
    first = router.prepare_append(author("one"))
    assert router.prepare_append(author("one")) == first
    other = router.prepare_append(author("two"))
    assert other.encoded == author("two").SerializeToString()
    assert other.to.peer == first.to.peer == PEERS["remote/primary"]


def test_a_broker_that_stands_in_for_the_service_is_not_kept():
    route = pb.Route()
    route.CopyFrom(ROUTE)
    route.primary = -1
    router = router_over(route)
    to = router.destination(RPCS_BY_NAME["Append"], "other", Target(), author("one"))
    router.unavailable(to._replace(peer=SERVICE), UnavailableError("it has died"))
    assert router.prepare_append(author("one")).to.peer == PEERS["local/replica"]
    router.routes.forget_broker(PEERS["local/replica"])
    assert router.prepare_append(author("one")).to.peer == PEERS["local/other-replica"]
