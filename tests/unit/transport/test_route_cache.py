from __future__ import annotations

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.router import BROKERS_MAX, NO_ROUTE, RouteCache
from gazette_sdk.transport.wire import Peer
from support.vectors import cases

ROUTE = pb.Route(members=[pb.ProcessSpec.ID(zone="a", suffix="broker")], primary=0)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("case", cases("broker", "route_cache"))
def test_entries_follow_the_vectors(case):
    clock = Clock()
    cache = RouteCache(3, 60.0, clock)
    for step in case["steps"]:
        clock.now = step["t"]
        for journal in step.get("put", ()):
            cache.update(journal, ROUTE)
        if "invalidate" in step:
            cache.invalidate(step["invalidate"])
        if "get" in step:
            assert (cache.route(step["get"]) == ROUTE) == step["hit"]
        assert len(cache) <= 3


def test_a_route_without_members_removes_the_entry():
    cache = RouteCache()
    cache.update("a", ROUTE)
    cache.update("a", NO_ROUTE)
    assert cache.route("a") == NO_ROUTE
    assert len(cache) == 0


def test_a_cache_of_size_zero_never_remembers():
    cache = RouteCache(0)
    cache.update("a", ROUTE)
    assert cache.route("a").primary == -1


def test_an_entry_is_a_copy_of_what_was_put():
    cache = RouteCache()
    route = pb.Route()
    route.CopyFrom(ROUTE)
    cache.update("a", route)
    route.primary = -1
    assert cache.route("a") == ROUTE


def route_of(*numbers):
    return pb.Route(
        members=[pb.ProcessSpec.ID(zone="a", suffix=f"broker-{number}") for number in numbers],
        endpoints=[f"http://broker-{number}:8080" for number in numbers],
        primary=0,
    )


def peer(number):
    return Peer("a", f"broker-{number}", f"http://broker-{number}:8080")


def test_brokers_are_remembered_longer_than_their_routes_and_are_bounded():
    cache = RouteCache(2)
    cache.update("a", route_of(0, 1))
    cache.invalidate("a")
    cache.update("b", route_of(1, 2))
    assert cache.brokers == (peer(0), peer(1), peer(2))
    cache.forget_broker(peer(1))
    cache.forget_broker(peer(7))
    assert cache.brokers == (peer(0), peer(2))
    for number in range(BROKERS_MAX):
        cache.update("c", route_of(number + 10))
    assert cache.brokers == tuple(peer(number + 10) for number in range(BROKERS_MAX))


def test_a_broker_without_endpoint_is_not_remembered():
    cache = RouteCache()
    cache.update("a", ROUTE)
    assert cache.brokers == ()
