"""The common case's function against the append machine: it may decline, and never differs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette_sdk.broker.append.common_case import (
    OPENING_BYTES_MAX,
    InlineAppends,
    append_now,
    is_at_rest,
)
from gazette_sdk.broker.spool.directory import Durability
from gazette_sdk.broker.spool.files import LARGE_CHUNK_BYTES
from gazette_sdk.fragment.registry import CHECK_PENDING
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import AllowAll, Authority, Claims
from gazette_sdk.server.authorization import Call
from support.append_world import CLAIMS, JOURNAL, World
from support.etcd import run
from support.vectors import label_set

LABELS = [label_set([{"name": name, "value": value}]) for name in "ab" for value in "12"]


def selector_of(labels: pb.LabelSet) -> pb.LabelSelector:
    return pb.LabelSelector(include=labels)


def request_of(world: World, kind: dict[str, Any]) -> pb.AppendRequest:
    """An opening request, whose offset is relative to the head."""
    kind = dict(kind)
    relative = kind.pop("offset", None)
    request = pb.AppendRequest(journal=JOURNAL, **kind)
    if relative is not None:
        request.offset = max(0, world.spool.fragment.end + relative)
    return request


# ------------------------------------------------------------------ generated situations

REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "offset": st.sampled_from([0, 0, 1, -1]),
        "check_registers": st.sampled_from([*map(selector_of, LABELS), pb.LabelSelector()]),
        "union_registers": st.sampled_from([*LABELS, pb.LabelSet()]),
        "subtract_registers": st.sampled_from([*LABELS, pb.LabelSet()]),
        "suspend": st.sampled_from([0, 0, *pb.AppendRequest.Suspend.values()]),
        "do_not_proxy": st.booleans(),
        "min_etcd_revision": st.sampled_from([0, 11, 40]),
        "header": st.just(pb.Header()),
    },
)
LENGTHS = st.sampled_from([1, 7, 7, 300, 3000, 0, LARGE_CHUNK_BYTES])


def _set_spec(world: World, **fields: Any) -> None:
    for name, value in fields.items():
        if name in {"length", "flush_interval", "compression_codec"}:
            part: Any = world.spec.fragment
        else:
            part = world.spec
        if name == "flush_interval":
            part.flush_interval.seconds = value
        else:
            setattr(part, name, value)
    world.resolve_anew()


def _suspend(world: World, level: int) -> None:
    world.spec.suspend.level = level
    world.spec.suspend.offset = world.spool.fragment.end
    world.resolve_anew()


def _resolve_to(world: World, status: pb.Status, is_local: bool) -> None:
    world.status, world.is_local = status, is_local
    world.resolve_anew()


def _fail_store(world: World, error: str | None) -> None:
    world.store_error = error


def _advance(world: World, seconds: float) -> None:
    world.clock_s += seconds


CHANGES: list[Callable[[World], None]] = [
    lambda world: _set_spec(world, flags=pb.JournalSpec.O_RDONLY),
    lambda world: _set_spec(world, flags=pb.JournalSpec.O_RDWR),
    lambda world: _set_spec(world, max_append_rate=1 << 24),
    lambda world: _set_spec(world, max_append_rate=0),
    lambda world: _set_spec(world, length=10),
    lambda world: _set_spec(world, length=1 << 20),
    lambda world: _set_spec(world, compression_codec=pb.GZIP),
    lambda world: _set_spec(world, flush_interval=60),
    lambda world: _advance(world, 45.0),
    lambda world: _suspend(world, pb.JournalSpec.Suspend.PARTIAL),
    lambda world: _suspend(world, pb.JournalSpec.Suspend.NONE),
    lambda world: _resolve_to(world, pb.NOT_JOURNAL_PRIMARY_BROKER, True),
    lambda world: _resolve_to(world, pb.OK, False),
    lambda world: _resolve_to(world, pb.OK, True),
    lambda world: world.change_route(),
    lambda world: world.list_fragment(0, world.spool.fragment.end),
    lambda world: world.list_fragment(0, world.spool.fragment.end + 100),
    lambda world: _fail_store(world, "no such bucket"),
    lambda world: _fail_store(world, None),
    lambda world: setattr(world.peers, "fails", True),
    lambda world: setattr(world.peers, "fails", False),
]

STEPS = st.lists(
    st.one_of(st.tuples(REQUESTS, LENGTHS), st.tuples(REQUESTS, LENGTHS), st.sampled_from(CHANGES)),
    min_size=3,
    max_size=25,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    replication=st.sampled_from([1, 1, 2, 3]),
    durability=st.sampled_from([Durability.REPLICATED] * 4 + [Durability.PERSISTED]),
)
def test_an_append_by_the_function_is_one_by_the_machine(steps, replication, durability):
    with tempfile.TemporaryDirectory() as root:
        run(compared(Path(root), steps, replication, durability))


@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_appends_after_each_change_are_those_by_the_machine(change, replication, tmp_path):
    append: tuple[dict[str, Any], int] = ({}, 7)
    steps = [append, change, append, append, ({}, 300), append, CHANGES[8], append, append]
    run(compared(tmp_path, steps, replication, Durability.REPLICATED))


async def compared(root: Path, steps: Any, replication: int, durability: Durability) -> None:
    """Take the same steps in two worlds, and compare the worlds after each append."""
    worlds = [
        World(
            root / str(is_first),
            replication=replication,
            durability=durability,
            tries_common_case=is_first,
        )
        for is_first in (True, False)
    ]
    for _ in range(2):  # the second append closes the first fragment
        await both(worlds, {}, 5)
    for step in steps:
        if callable(step):
            for world in worlds:
                step(world)
        else:
            await both(worlds, *step)
    for world in worlds:
        await world.close()


async def both(worlds: list[World], kind: dict[str, Any], length: int) -> None:
    content = b"x" * length
    found = [await world.append(request_of(world, kind), content) for world in worlds]
    for response in found:
        if isinstance(response, pb.AppendResponse):
            response.ClearField("delayed_chunks")  # depends on the time since the last append
    assert found[0] == found[1]
    assert worlds[0].state() == worlds[1].state()


# ------------------------------------------------------------------------- pulses

PULSE_MODES = [pb.AppendRequest.SUSPEND_NO_RESUME, pb.AppendRequest.SUSPEND_IF_FLUSHED]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, durability=st.sampled_from([*Durability]))
def test_a_pulse_of_a_journal_at_rest_would_do_nothing(steps, durability):
    with tempfile.TemporaryDirectory() as root:
        run(pulsed(Path(root), steps, durability))


@pytest.mark.parametrize("change", CHANGES)
def test_a_pulse_after_each_change_does_nothing_where_the_journal_is_at_rest(change, tmp_path):
    run(pulsed(tmp_path, [({}, 7), CHANGES[8], change, ({}, 7), change], Durability.REPLICATED))


async def pulsed(root: Path, steps: Any, durability: Durability) -> None:
    """Compare a world before and after the machine's pulse, wherever none is needed."""
    world = World(root, durability=durability)
    for step in [({}, 5), ({}, 5), *steps]:
        if callable(step):
            step(world)
        else:
            kind, length = step
            await world.append(request_of(world, kind), b"x" * length)
        for mode in PULSE_MODES:
            if is_at_rest(world.shared, world.replica, mode):
                before = everything_of(world)
                response = await world.append(pulse_of(mode), b"")
                assert response.status in {pb.OK, pb.SUSPENDED}
                assert everything_of(world) == before
                assert is_at_rest(world.shared, world.replica, mode)
    await world.close()


def everything_of(world: World) -> Any:
    replica = world.replica
    return (
        world.state(),
        world.spec.SerializeToString(deterministic=True),
        world.spool.first_append_s,
        replica.index.acknowledged_end,
        replica.head_is_known,
        replica.write_head.value,
        replica.pipeline.peek(),
    )


def pulse_of(mode: int) -> pb.AppendRequest:
    return pb.AppendRequest(journal=JOURNAL, do_not_proxy=True, suspend=mode)


RESTLESS: dict[str, Callable[[World], object]] = {
    "no append yet": lambda world: setattr(world.replica, "ready", None),
    "pipeline in use": lambda world: world.replica.pipeline.take_now(),
    "stores not listed": lambda world: world.replica.index.first_refresh.clear(),
    "store unhealthy": lambda world: _fail_store(world, "down"),
    "another route": lambda world: world.change_route(),
    "another spec": lambda world: _set_spec(world, flags=pb.JournalSpec.O_RDWR),
    "another codec": lambda world: (
        _set_spec(world, compression_codec=pb.GZIP),
        world.replica.ready.terms.spec.CopyFrom(world.spec),
    ),
    "not primary": lambda world: _resolve_to(world, pb.NOT_JOURNAL_PRIMARY_BROKER, True),
    "stored content that is missing here": lambda world: world.list_fragment(0, 1000),
    "lease that may have ended": lambda world: world.shared.known_lease.lost(),
    "content that no one acknowledged": lambda world: setattr(world.replica, "agreed", None),
}


@pytest.mark.parametrize("change", RESTLESS.values(), ids=RESTLESS)
def test_a_journal_that_a_pulse_may_change_is_not_at_rest(change, tmp_path):
    async def scenario(world):
        mode = pb.AppendRequest.SUSPEND_NO_RESUME
        assert is_at_rest(world.shared, world.replica, mode)
        change(world)
        assert not is_at_rest(world.shared, world.replica, mode)

    with_world(tmp_path, scenario)


def test_a_journal_with_peers_is_never_at_rest_since_a_pulse_tests_them(tmp_path):
    async def scenario(world):
        assert not is_at_rest(world.shared, world.replica, pb.AppendRequest.SUSPEND_NO_RESUME)

    with_world(tmp_path, scenario, replication=2)


def test_a_pulse_closes_the_first_fragment_of_a_journal(tmp_path):
    async def scenario():
        world, mode = World(tmp_path / "spools"), pb.AppendRequest.SUSPEND_NO_RESUME
        await world.append(pb.AppendRequest(journal=JOURNAL), b"first")
        assert not is_at_rest(world.shared, world.replica, mode)
        await world.append(pulse_of(mode), b"")
        assert world.spool.fragment.begin == 5
        assert is_at_rest(world.shared, world.replica, mode)
        await world.close()

    run(scenario())


def test_a_pulse_flushes_at_the_journal_s_interval(tmp_path):
    async def scenario(world):
        _set_spec(world, flush_interval=60)
        await world.append(pb.AppendRequest(journal=JOURNAL), b"content")
        mode = pb.AppendRequest.SUSPEND_NO_RESUME
        assert is_at_rest(world.shared, world.replica, mode)
        _advance(world, 60.0)
        assert not is_at_rest(world.shared, world.replica, mode)
        await world.append(pulse_of(mode), b"")
        assert world.spool.fragment.begin == world.spool.fragment.end
        assert is_at_rest(world.shared, world.replica, mode)

    with_world(tmp_path, scenario)


def test_an_idle_journal_is_suspended_by_a_pulse(tmp_path):
    async def scenario(world):
        mode = pb.AppendRequest.SUSPEND_IF_FLUSHED
        assert is_at_rest(world.shared, world.replica, mode), "its content is not stored"
        world.list_fragment(0, world.spool.fragment.end)
        _advance(world, 25 * 60 * 60.0)
        assert not is_at_rest(world.shared, world.replica, mode)
        assert (await world.append(pulse_of(mode), b"")).status == pb.SUSPENDED
        assert world.spec.suspend.level == pb.JournalSpec.Suspend.PARTIAL
        assert is_at_rest(world.shared, world.replica, mode)
        assert is_at_rest(world.shared, world.replica, pb.AppendRequest.SUSPEND_NO_RESUME)

    with_world(tmp_path, scenario)


# ------------------------------------------------------------------------- by hand


def with_world(tmp_path, scenario, **options):
    async def whole():
        world = World(tmp_path / "spools", tries_common_case=True, **options)
        for content in (b"first", b"second", b"third"):
            response = await world.append(pb.AppendRequest(journal=JOURNAL), content)
            assert response.status == pb.OK
        assert world.taken == 1, "the first two find an empty spool, and close the first fragment"
        try:
            await scenario(world)
        finally:
            await world.close()

    run(whole())


ACCEPTED = [
    {},
    {"offset": 0},
    {"do_not_proxy": True},
    {"suspend": pb.AppendRequest.SUSPEND_NO_RESUME},
    {"min_etcd_revision": 11},
    {"union_registers": LABELS[0]},
    {"subtract_registers": LABELS[1]},
    {"union_registers": LABELS[0], "subtract_registers": LABELS[1], "offset": 0},
    {"check_registers": selector_of(LABELS[0])},
]


@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize("kind", ACCEPTED, ids=[str(list(kind)) for kind in ACCEPTED])
def test_common_appends_are_accepted(kind, replication, tmp_path):
    async def scenario(world):
        begin = world.spool.fragment.end
        response = await world.append(request_of(world, kind), b"content")
        assert (response.status, response.commit.begin, response.commit.end) == (
            pb.OK,
            begin,
            begin + 7,
        )
        assert world.taken == 2

    with_world(tmp_path, scenario, replication=replication)


DECLINED = {
    "wrong offset": {"offset": 1},
    "suspended mode": {"suspend": pb.AppendRequest.SUSPEND_NOW},
    "keep": {"suspend": pb.AppendRequest.SUSPEND_KEEP},
    "proxied": {"header": pb.Header()},
    "later revision": {"min_etcd_revision": 1000},
}


@pytest.mark.parametrize("kind", DECLINED.values(), ids=DECLINED)
def test_other_requests_are_declined(kind, tmp_path):
    async def scenario(world):
        before = world.state()
        assert append_now(world.shared, request_of(world, kind), b"x", CLAIMS) is None
        assert world.state() == before

    with_world(tmp_path, scenario)


SITUATIONS: dict[str, Callable[[World], object]] = {
    "pipeline in use": lambda world: world.replica.pipeline.take_now(),
    "index not ready": lambda world: (
        _forget_head(world),
        world.replica.index.first_refresh.clear(),
    ),
    "index ahead": lambda world: world.list_fragment(0, 1000),
    "store unhealthy": lambda world: (_forget_head(world), _fail_store(world, "down")),
    "read-only": lambda world: _set_spec(world, flags=pb.JournalSpec.O_RDONLY),
    "new spec": lambda world: _set_spec(world, length=77),
    "not primary": lambda world: _resolve_to(world, pb.NOT_JOURNAL_PRIMARY_BROKER, True),
    "elsewhere": lambda world: _resolve_to(world, pb.OK, False),
    "suspended": lambda world: _suspend(world, pb.JournalSpec.Suspend.PARTIAL),
    "invalidated": lambda world: world.replica.signal.fire(),
    "no pipeline yet": lambda world: setattr(world.replica, "ready", None),
    "disk full": lambda world: setattr(world.spool, "_commit", _no_room),
}


def _forget_head(world: World) -> None:
    world.replica.head_is_known = False


def _no_room(_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize("change", SITUATIONS.values(), ids=SITUATIONS)
def test_a_journal_that_is_not_ready_is_declined(change, replication, tmp_path):
    async def scenario(world):
        change(world)
        before = world.state()
        request = pb.AppendRequest(journal=JOURNAL)
        assert append_now(world.shared, request, b"content", CLAIMS) is None
        assert world.state() == before
        vars(world.spool).pop("_commit", None)

    with_world(tmp_path, scenario, replication=replication)


@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize("error", ["down", CHECK_PENDING])
def test_a_known_head_needs_no_listing_and_no_store_that_others_stand_in_for(
    error, replication, tmp_path
):
    async def scenario(world):
        assert world.replica.head_is_known
        world.replica.index.first_refresh.clear()
        _fail_store(world, error)
        request = pb.AppendRequest(journal=JOURNAL)
        started = append_now(world.shared, request, b"content", CLAIMS)
        assert (started is not None) == (replication > 1 or error == CHECK_PENDING)
        if started is not None:
            await started.acknowledged()
        response = await world.append(request, b"more")
        assert response.status == (pb.OK if started is not None else pb.FRAGMENT_STORE_UNHEALTHY)
        # Whether it can be suspended depends on what is stored.
        request = pb.AppendRequest(journal=JOURNAL, suspend=pb.AppendRequest.SUSPEND_IF_FLUSHED)
        assert (await world.append(request, b"")).status == pb.FRAGMENT_STORE_UNHEALTHY

    with_world(tmp_path, scenario, replication=replication)


@pytest.mark.parametrize("content", [b"", bytes(LARGE_CHUNK_BYTES)])
def test_content_that_is_not_small_is_declined(content, tmp_path):
    async def scenario(world):
        request = pb.AppendRequest(journal=JOURNAL)
        assert append_now(world.shared, request, content, CLAIMS) is None

    with_world(tmp_path, scenario)


def test_durable_appends_are_declined_since_the_disk_is_waited_for(tmp_path):
    async def scenario():
        world = World(tmp_path / "spools", durability=Durability.PERSISTED, tries_common_case=True)
        for _ in range(4):
            assert (await world.append(pb.AppendRequest(journal=JOURNAL), b"x")).status == pb.OK
        assert world.taken == 0
        await world.close()

    run(scenario())


def test_an_append_that_peers_acknowledge_is_declined_if_its_token_may_expire(tmp_path):
    async def scenario(world):
        soon = Claims(CLAIMS.capability, CLAIMS.selector, world.clock_s + 5)
        later = Claims(CLAIMS.capability, CLAIMS.selector, world.clock_s + 60)
        request = pb.AppendRequest(journal=JOURNAL)
        assert append_now(world.shared, request, b"x", soon) is None
        started = append_now(world.shared, request, b"x", later)
        assert started is not None
        await started.acknowledged()

    with_world(tmp_path, scenario, replication=2)


def test_appends_are_started_behind_others_of_the_same_pipeline_only(tmp_path):
    async def scenario(world):
        request = pb.AppendRequest(journal=JOURNAL)
        first = append_now(world.shared, request, b"1", CLAIMS)
        assert first is not None
        assert append_now(world.shared, request, b"2", CLAIMS, earlier=object()) is None
        second = append_now(world.shared, request, b"2", CLAIMS, earlier=first.pipeline)
        assert second is not None
        world.peers.fails = True
        for started in (first, second):
            with pytest.raises(Exception, match="fails"):
                await started.acknowledged()
        assert append_now(world.shared, request, b"3", CLAIMS) is None, "the pipeline is broken"
        world.peers.fails = False
        response = await world.append(request, b"3")
        assert response.status == pb.OK
        await asyncio.sleep(0)

    with_world(tmp_path, scenario, replication=3)


BAD_OPENINGS = {
    "no request": b"\xff",
    "invalid": pb.AppendRequest(journal="/bad").SerializeToString(),
    "long": pb.AppendRequest(journal=JOURNAL, offset=1).SerializeToString()
    + pb.AppendRequest(union_registers=LABELS[0]).SerializeToString() * OPENING_BYTES_MAX,
}


@pytest.mark.parametrize("opening", BAD_OPENINGS.values(), ids=BAD_OPENINGS)
def test_an_opening_that_is_malformed_or_long_is_declined(opening, tmp_path):
    async def scenario(world):
        appends = InlineAppends(world.shared, AllowAll())
        good = pb.AppendRequest(journal=JOURNAL).SerializeToString()
        before = world.state()
        for _ in range(2):
            assert appends.append_now(opening, b"x", Call(), None) is None
            assert world.state() == before
        assert appends.append_now(good, b"x", Call(), None) is not None

    with_world(tmp_path, scenario)


def test_an_opening_that_was_seen_before_is_authorized_again(tmp_path):
    async def scenario(world):
        good = pb.AppendRequest(journal=JOURNAL).SerializeToString()
        allowed = InlineAppends(world.shared, AllowAll())
        assert allowed.append_now(good, b"x", Call(), None) is not None
        guarded = InlineAppends(world.shared, Authority("c2VjcmV0"))
        before = world.state()
        assert guarded.append_now(good, b"x", Call(), None) is None
        assert world.state() == before

    with_world(tmp_path, scenario)
