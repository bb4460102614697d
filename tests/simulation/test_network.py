"""Virtual network: order of messages, cuts, and ends of processes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from simulation.loop import Node
from simulation.network import SILENCE_S, Connection, End, Network
from simulation.test_loop import run


class Server:
    """Process that notes what it gets."""

    def __init__(self, network: Network, host: str) -> None:
        self.node = Node(host)
        self.received: list[Any] = []
        self.broken: list[str] = []
        network.listen(host, self.node, self._accept)

    def _accept(self, connection: Connection, end: End) -> None:
        del connection
        end.on_message = self.received.append
        end.on_broken = lambda error: self.broken.append(type(error).__name__)


def test_messages_arrive_in_their_order_across_a_cut() -> None:
    async def scenario() -> None:
        network = Network(random.Random(1), 0.05)
        server = Server(network, "b")
        connection = await network.dial("a", "b")
        for number in range(30):
            if number == 10:
                network.cut("a", "b")
            if number == 20:
                assert len(server.received) <= 10
                network.heal("a", "b")
            connection.send(connection.client, number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(5)
        assert server.received == list(range(30))

    run(scenario())


def test_a_cut_in_one_direction_lets_the_other_pass() -> None:
    async def scenario() -> None:
        network = Network(random.Random(1), 0.05)
        server, answers = Server(network, "b"), []
        connection = await network.dial("a", "b")
        connection.client.on_message = answers.append
        network.cut("a", "b")
        connection.send(connection.client, "request")
        connection.send(connection.server, "answer")
        await asyncio.sleep(5)
        assert (server.received, answers) == ([], ["answer"])

    run(scenario())


def test_a_long_cut_breaks_connections_at_both_ends() -> None:
    async def scenario() -> None:
        network = Network(random.Random(1), 0.05)
        server, errors = Server(network, "b"), []
        connection = await network.dial("a", "b")
        connection.client.on_broken = errors.append
        network.cut("a", "b")
        await asyncio.sleep(SILENCE_S + 1)
        assert isinstance(errors[0], ConnectionAbortedError)
        assert server.broken == ["ConnectionAbortedError"]

    run(scenario())


def test_peers_of_a_killed_process_hear_of_it_and_dials_are_refused() -> None:
    async def scenario() -> None:
        network = Network(random.Random(1), 0.05)
        server, errors = Server(network, "b"), []
        connection = await network.dial("a", "b")
        connection.client.on_broken = errors.append
        server.node.kill()
        network.killed(server.node)
        await asyncio.sleep(5)
        assert isinstance(errors[0], ConnectionResetError)
        with pytest.raises(ConnectionRefusedError):
            await network.dial("a", "b")

    run(scenario())


def test_a_dial_across_a_cut_waits_until_it_heals() -> None:
    async def scenario() -> None:
        network = Network(random.Random(1), 0.05)
        Server(network, "b")
        network.cut("b", "a")
        dialling = asyncio.create_task(network.dial("a", "b"))
        await asyncio.sleep(5)
        assert not dialling.done()
        network.heal("b", "a")
        await asyncio.sleep(5)
        assert dialling.done()

    run(scenario())
