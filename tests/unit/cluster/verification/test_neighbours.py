"""Connections between members: whose end is evidence, and whose is none."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.cluster import verification as neighbours_module
from gazette_sdk.cluster.verification import NEIGHBOURS_MAX, Input, Neighbours
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import ZONE, Mirror
from support.etcd import run
from support.spools import until


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(neighbours_module, "OPEN_AGAIN_S", 0.001)


class Ring:
    """Members around ``broker-c``, and connections that are scripted.

    Attributes:
        opened: endpoints to which connections were opened, in order.
        suspected: suffixes of suspected members.
    """

    def __init__(self, *suffixes: str) -> None:
        self.mirror = Mirror()
        self.mirror.put(dict(self.mirror.member(suffix) for suffix in suffixes))
        self.opened: list[str] = []
        self.suspected: asyncio.Queue[str] = asyncio.Queue()
        self._held: dict[str, asyncio.Future[Input]] = {}
        self.neighbours = Neighbours(
            self.mirror.keyspace,
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-c"),
            lambda peer, _: self.suspected.put_nowait(peer.suffix),
            hold=self._hold,
        )
        self.mirror.keyspace.observers.append(self.neighbours.observe)

    async def _hold(self, endpoint: str) -> Input:
        self.opened.append(endpoint)
        held = self._held[endpoint] = asyncio.get_running_loop().create_future()
        return await held

    async def end(self, suffix: str, how: Input) -> None:
        """End the connection to a member, and wait until it is opened again."""
        endpoint = self.mirror.keyspace.endpoint(ZONE, suffix)
        count = len(self.opened)
        self._held[endpoint].set_result(how)
        await until(lambda: len(self.opened) > count)

    @property
    def followed(self) -> set[str]:
        return {each.suffix for each in self.neighbours._tasks}


def playing(scenario):
    async def play(ring):
        running = asyncio.ensure_future(ring.neighbours.run())
        await asyncio.sleep(0.01)
        try:
            return await scenario(ring)
        finally:
            running.cancel()
            await asyncio.wait([running])
            assert not ring.neighbours._tasks

    return play


def test_each_member_follows_the_next_ones_in_the_ring():
    async def scenario():
        ring = Ring(*(f"broker-{name}" for name in "abcdef"))

        @playing
        async def play(ring):
            assert NEIGHBOURS_MAX == 3
            assert ring.followed == {"broker-d", "broker-e", "broker-f"}
            key, _ = ring.mirror.member("broker-e")
            ring.mirror.put({}, delete=[key])
            await asyncio.sleep(0.01)
            assert ring.followed == {"broker-d", "broker-f", "broker-a"}

        await play(ring)

    run(scenario())


def test_a_connection_that_worked_and_cannot_be_opened_again_is_evidence():
    async def scenario():
        @playing
        async def play(ring):
            await ring.end("broker-d", Input.REACHED)
            assert ring.suspected.empty(), "it ended in order"
            for how in (Input.REFUSED, Input.CLOSED):
                await ring.end("broker-d", how)
                assert await ring.suspected.get() == "broker-d"
            await ring.end("broker-d", Input.UNCLEAR)
            assert ring.suspected.empty(), "its lease decides"

        await play(Ring("broker-c", "broker-d"))

    run(scenario())


def test_a_member_whose_port_does_not_serve_yet_is_not_suspected():
    async def scenario():
        @playing
        async def play(ring):
            for how in (Input.REFUSED, Input.CLOSED, Input.UNCLEAR):
                await ring.end("broker-d", how)
            # The next process of its name begins anew.
            await ring.end("broker-d", Input.REACHED)
            key, value = ring.mirror.member("broker-d")
            ring.mirror.put({}, delete=[key])
            ring.mirror.put({key: value})
            await asyncio.sleep(0.01)
            await ring.end("broker-d", Input.REFUSED)
            assert ring.suspected.empty()

        await play(Ring("broker-c", "broker-d"))

    run(scenario())
