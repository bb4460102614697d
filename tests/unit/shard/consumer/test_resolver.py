"""The cases of the vectors, and what becomes of shards when their assignments change."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.shard.consumer.resolver import MISSING_ID, ResolverStoppedError
from support.etcd import run
from support.shard_services import (
    Mirror,
    consumer_spec,
    process_id,
    scripted_resolver,
    shard_spec,
)
from support.vectors import group

ANYONE = Claims(-1, pb.LabelSelector(), float("inf"))
SHARD = shard_spec("shard-A", labels={"team": "red"}).SerializeToString()
LOCAL, REMOTE = consumer_spec("local"), consumer_spec("remote", "http://remote:1")


def members(*specs):
    return [
        (f"members/zone#{spec.process_spec.id.suffix}", spec.SerializeToString()) for spec in specs
    ]


class World:
    def __init__(self, *changes):
        self.mirror = Mirror()
        self.resolver, self.shards = scripted_resolver(self.mirror.keyspace, "local")
        self.mirror.change(*members(LOCAL, REMOTE), ("items/shard-A", SHARD), *changes)

    async def resolve(self, shard="shard-A", claims=ANYONE, **options):
        options.setdefault("may_proxy", True)
        async with self.resolver.resolve(shard, claims, **options) as resolution:
            return resolution

    def header(self, **changes):
        header = pb.Header(etcd=self.mirror.keyspace.header)
        for name, value in changes.items():
            setattr(header.etcd, name, value)
        return header


def scenario(test):
    def run_it():
        run(test())

    run_it.__name__ = test.__name__
    return run_it


def test_the_cases_are_those_of_the_vectors():
    resolutions, errors, transitions = group("message", "resolver")
    assert len(resolutions["cases"]) == 8
    assert len(errors["cases"]) == 5
    assert len(transitions["expect"]) == 3


@scenario
async def test_an_unknown_shard_is_not_found():
    world = World()
    resolution = await world.resolve("unknown")
    assert resolution.status == cpb.SHARD_NOT_FOUND
    assert resolution.header.process_id == process_id("local")
    assert (resolution.header.route.primary, len(resolution.header.route.members)) == (-1, 0)
    world.mirror.change(("members/zone#local", None))
    assert (await world.resolve("unknown")).header.process_id == MISSING_ID


@scenario
async def test_a_shard_outside_of_the_claims_is_not_found_and_its_route_is_hidden():
    world = World(("assign/shard-A#zone#remote#0", b""))
    blue = Claims(-1, parse_selector("team=blue"), float("inf"))
    resolution = await world.resolve(claims=blue)
    assert resolution.status == cpb.SHARD_NOT_FOUND
    assert resolution.spec is None
    assert not resolution.header.route.members
    red = Claims(-1, parse_selector("team=red,id=shard-A"), float("inf"))
    assert (await world.resolve(claims=red)).status == cpb.OK


@scenario
async def test_a_shard_without_slot_0_has_no_primary():
    world = World(("assign/shard-A#zone#remote#1", b""))
    resolution = await world.resolve()
    assert resolution.status == cpb.NO_SHARD_PRIMARY
    assert resolution.header.process_id == process_id("local")
    assert resolution.header.route.primary == -1


@scenario
async def test_another_primary_is_an_answer_only_to_those_who_may_go_there():
    world = World(("assign/shard-A#zone#local#1", b""), ("assign/shard-A#zone#remote#0", b""))
    refused = await world.resolve(may_proxy=False)
    assert refused.status == cpb.NOT_SHARD_PRIMARY
    assert refused.header.process_id == process_id("local")
    assert refused.header.route.primary == 1
    allowed = await world.resolve()
    assert allowed.status == cpb.OK
    assert allowed.header.process_id == process_id("remote")
    assert list(allowed.header.route.endpoints) == ["http://host:1234", "http://remote:1"]
    assert allowed.shard is None


@scenario
async def test_a_proxied_call_waits_for_its_revision_and_for_the_store():
    world = World(("assign/shard-A#zone#local#1", b""), ("assign/shard-A#zone#remote#0", b""))
    header = world.header(revision=world.mirror.revision + 1)
    pending = asyncio.create_task(world.resolve(may_proxy=False, proxy_header=header))
    await asyncio.sleep(0)
    world.mirror.change(
        ("assign/shard-A#zone#remote#0", None),
        ("assign/shard-A#zone#local#1", None),
        ("assign/shard-A#zone#local#0", b""),
    )
    (shard,) = world.shards
    done, _ = await asyncio.wait([pending], timeout=0.02)
    assert not done
    await shard.change(is_ready=True)
    resolution = await pending
    assert (resolution.status, resolution.shard) == (cpb.OK, shard)
    assert resolution.header.process_id == process_id("local")


@scenario
async def test_offsets_of_sources_are_awaited_and_others_ignored():
    world = World(("assign/shard-A#zone#local#0", b""))
    (shard,) = world.shards
    await shard.change(is_ready=True, read_through={"source/B": 0})
    pending = asyncio.create_task(world.resolve(read_through={"source/B": 1, "bogus": 123}))
    done, _ = await asyncio.wait([pending], timeout=0.02)
    assert not done
    await shard.change(read_through={"source/B": 1})
    assert (await pending).status == cpb.OK


@scenario
async def test_behind_the_stop_of_local_shards_only_others_resolve():
    world = World(("assign/shard-A#zone#local#0", b""))
    world.mirror.change(
        ("items/shard-B", shard_spec("shard-B").SerializeToString()),
        ("assign/shard-B#zone#remote#0", b""),
    )
    world.resolver.local.stop()
    assert (await world.resolve("shard-B")).status == cpb.OK
    with pytest.raises(ResolverStoppedError, match="does not serve shard shard-A any more"):
        await world.resolve()
    await world.resolver.local.shutdowns()
    assert world.shards[0].is_shut_down


@scenario
async def test_headers_of_others_are_refused():
    world = World()
    with pytest.raises(GazetteError, match="another Etcd cluster"):
        await world.resolve(proxy_header=world.header(cluster_id=0x12345678))
    header = world.header()
    header.process_id.CopyFrom(pb.ProcessSpec.ID(zone="wrong", suffix="ID"))
    with pytest.raises(GazetteError, match="the request is for consumer process wrong/ID"):
        await world.resolve(proxy_header=header)


@scenario
async def test_a_wait_for_a_revision_can_be_cancelled():
    world = World()
    header = world.header(revision=1 << 40)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await world.resolve(proxy_header=header)


@scenario
async def test_a_primary_that_ended_before_its_store_was_ready_is_stopped():
    world = World(("assign/shard-A#zone#local#0", b""))
    pending = asyncio.create_task(world.resolve())
    await asyncio.sleep(0)
    await world.shards[0].change(has_ended=True)
    resolution = await pending
    assert (resolution.status, resolution.shard) == (cpb.SHARD_STOPPED, None)


@scenario
async def test_a_failed_primary_resolves_while_no_offsets_are_asked_for():
    world = World(("assign/shard-A#zone#local#0", b""))
    (shard,) = world.shards
    await shard.change(is_ready=True, has_ended=True, read_through={"source/A": 5})
    assert (await world.resolve()).status == cpb.OK
    assert (await world.resolve(read_through={"source/A": 5})).status == cpb.OK
    assert (await world.resolve(read_through={"source/A": 6})).status == cpb.SHARD_STOPPED


@scenario
async def test_a_standby_is_promoted_an_unassigned_shard_ends_a_new_assignment_is_a_new_shard():
    world = World(("assign/shard-A#zone#local#1", b""))
    (first,) = world.shards
    assert not first.is_primary
    world.mirror.change(("assign/shard-A#zone#local#1", None), ("assign/shard-A#zone#local#0", b""))
    assert world.resolver.local.get("shard-A") is first
    assert first.is_primary
    # Deleted and made anew, seen together: another shard.
    world.mirror.revision += 1
    world.mirror._created.pop("assign/shard-A#zone#local#0")
    world.mirror.change(("assign/shard-A#zone#local#0", b""))
    second = world.resolver.local.get("shard-A")
    assert second is not first
    world.mirror.change(("assign/shard-A#zone#local#0", None))
    assert world.resolver.local.get("shard-A") is None
    await world.resolver.local.shutdowns()
    assert first.is_shut_down
    assert second.is_shut_down


@scenario
async def test_a_shard_is_not_torn_down_while_a_call_uses_it():
    world = World(("assign/shard-A#zone#local#0", b""))
    (shard,) = world.shards
    await shard.change(is_ready=True)
    async with world.resolver.resolve("shard-A", ANYONE, may_proxy=True):
        world.mirror.change(("assign/shard-A#zone#local#0", None))
        ending = asyncio.create_task(world.resolver.local.shutdowns())
        done, _ = await asyncio.wait([ending], timeout=0.02)
        assert not done
        assert not shard.is_shut_down
    await ending
    assert shard.is_shut_down


@scenario
async def test_the_index_lists_shards_by_source():
    world = World()
    both = shard_spec("shard-0")
    both.sources.add(journal="source/shard-A;group")
    world.mirror.change(("items/shard-0", both.SerializeToString()))
    names = [spec.id for spec in world.resolver.shards_of("source/shard-A;any")]
    assert names == ["shard-0", "shard-A"]
    world.mirror.change(("items/shard-0", None))
    assert [spec.id for spec in world.resolver.shards_of("source/shard-A")] == ["shard-A"]
    assert not world.resolver.shards_of("other")
