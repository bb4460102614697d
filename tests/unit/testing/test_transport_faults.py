"""A transport with injected faults: what each fault does, and that a seed decides them all."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.errors import ConfigurationError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.transport_faults import (
    FaultyTransport,
    InjectedCallFault,
    TransportFaults,
)
from gazette_sdk.transport import loop
from gazette_sdk.transport.base import requests_of
from support.memory_transport import MemoryTransport

WAIT_S = 20.0
J = "a/journal"


def run(coroutine):
    return loop.run(asyncio.wait_for(coroutine, WAIT_S), WAIT_S + 5)


def memory():
    made = MemoryTransport()
    made.create(J)
    return made


def append(transport, content):
    return transport.append(requests_of(pb.AppendRequest(journal=J), [content]))


async def injected(transport):
    """Wait for a fault."""
    for _ in range(100_000):
        if transport.injected:
            return
        await asyncio.sleep(0)
    raise AssertionError("no fault was injected")


def content_of(made):
    return bytes(made.journals[J].content)


async def collect(items):
    return [item async for item in items]


def outcomes(seed):
    transport = FaultyTransport(
        memory(),
        TransportFaults(dropped_requests=0.3, dropped_answers=0.3, duplicates=0.3),
        seed=seed,
    )

    async def use():
        for number in range(40):
            with contextlib.suppress(UnavailableError):
                await append(transport, b"%d," % number)
            with contextlib.suppress(UnavailableError):
                await collect(transport.read(pb.ReadRequest(journal=J)))

    run(use())
    return list(transport.injected), content_of(transport._transport)


def test_the_same_seed_injects_the_same_faults_and_another_one_does_not():
    first = outcomes(7)
    assert first == outcomes(7)
    assert {each.fault for each in first[0]} == {
        "dropped_requests",
        "dropped_answers",
        "duplicates",
    }
    assert outcomes(8) != first


def test_without_faults_it_is_the_other_transport():
    made = memory()
    transport = FaultyTransport(made)
    assert run(append(transport, b"content")).commit.end == 7
    assert transport.loop is made.loop
    assert not transport.injected
    run(transport.aclose())
    assert made.closed


def test_a_dropped_request_has_no_effect():
    made = memory()
    transport = FaultyTransport(made, TransportFaults(dropped_requests=1.0))
    with pytest.raises(UnavailableError, match="injected: append of a/journal: dropped requests"):
        run(append(transport, b"content"))
    assert content_of(made) == b""
    assert list(transport.injected) == [InjectedCallFault("append", J, "dropped_requests")]


def test_a_dropped_answer_leaves_the_effect():
    made = memory()
    transport = FaultyTransport(made, TransportFaults(dropped_answers=1.0))
    with pytest.raises(UnavailableError, match="dropped answers"):
        run(append(transport, b"content"))
    assert content_of(made) == b"content"
    with pytest.raises(UnavailableError, match="read of a/journal: dropped answers"):
        run(collect(transport.read(pb.ReadRequest(journal=J))))


def test_a_duplicated_append_is_written_twice_and_its_second_answer_is_returned():
    made = memory()
    transport = FaultyTransport(made, TransportFaults(duplicates=1.0))
    response = run(append(transport, b"content"))
    assert (response.commit.begin, response.commit.end) == (7, 14)
    assert content_of(made) == b"contentcontent"


@pytest.mark.parametrize("direction", ["both", "requests", "answers"])
def test_a_cut_holds_calls_until_it_is_healed(direction):
    made = memory()
    transport = FaultyTransport(made)
    transport.cut(direction)

    async def use():
        call = asyncio.create_task(append(transport, b"content"))
        await injected(transport)
        assert not call.done()
        had_effect = content_of(made) == b"content"
        transport.heal()
        await call
        return had_effect

    assert run(use()) == (direction == "answers")
    assert content_of(made) == b"content"


def test_a_cut_holds_a_stream_that_is_open():
    made = memory()
    transport = FaultyTransport(made)

    async def use():
        await append(transport, b"one")
        reading = transport.read(pb.ReadRequest(journal=J, block=True))
        async with contextlib.aclosing(reading):
            while not isinstance(await anext(reading), bytes):
                pass
            transport.cut("answers")
            await append(made, b"two")
            following = asyncio.ensure_future(anext(reading))
            await injected(transport)
            assert not following.done()
            transport.heal()
            while not isinstance(item := await following, bytes):
                following = asyncio.ensure_future(anext(reading))
            assert item == b"two"

    run(use())


def test_an_unreachable_broker_fails_every_call_until_healed():
    transport = FaultyTransport(memory())
    transport.fail()
    for call in (
        lambda: append(transport, b"x"),
        lambda: transport.apply(pb.ApplyRequest()),
        lambda: collect(transport.list(pb.ListRequest())),
        lambda: transport.list_fragments(pb.FragmentsRequest(journal=J)),
    ):
        with pytest.raises(UnavailableError, match="unreachable"):
            run(call())
    transport.heal()
    run(append(transport, b"x"))


def test_delays_are_within_their_bounds(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    transport = FaultyTransport(memory(), TransportFaults(delay_s=(1.0, 2.0)))

    async def use():
        with monkeypatch.context() as patch:
            patch.setattr("gazette_sdk.testing.transport_faults.asyncio.sleep", sleep)
            await append(transport, b"x")

    run(use())
    assert [each.fault for each in transport.injected] == ["delay_s"]
    assert 1.0 <= slept[0] <= 2.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"duplicates": -1}, "duplicates=-1"),
        ({"delay_s": (2, 1)}, "least and the greatest"),
        ({"calls": ("write",)}, "no write"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ConfigurationError, match=text):
        TransportFaults(**settings)


def test_committed_readers_see_what_a_publisher_sent_once_whatever_was_dropped_or_duplicated():
    made = memory()
    transport = FaultyTransport(
        made,
        TransportFaults(0.2, 0.2, 0.2, calls=("append",)),
        seed=3,
    )
    with Publisher(mapping=mapping.direct(J), transport=transport) as publisher:
        for number in range(60):
            publisher.publish({"number": number}).result(timeout=WAIT_S)
    read = [envelope.message["number"] for envelope in Reader(dict, name=J, transport=made)]
    assert read == list(range(60))
    assert content_of(made).count(b"\n") > 60
    assert {each.fault for each in transport.injected} == {
        "dropped_requests",
        "dropped_answers",
        "duplicates",
    }
