"""A broker that requires tokens, while unknown clients send half frames and garbage for 3 s."""

from __future__ import annotations

import asyncio
import multiprocessing

import hostile

from gazette_sdk.transport.connect import connect

CONNECTIONS = 50
ATTACK_S = 3.0
GROWTH_MIB_MAX = 60.0
DESCRIPTORS_MAX = 5
"""Connections of the client, which come and go."""

STREAM_ATTACKS = {
    name: hostile.ATTACKS[name]
    for name in hostile.ATTACKS
    if name.startswith("half of") or name in {"calls without a token", "pings", "garbage frames"}
}


def attack(address, seconds):
    hostile.ATTACKS = STREAM_ATTACKS
    hostile.attack(address, CONNECTIONS, seconds)


def test_unknown_clients_hold_no_memory_and_no_descriptors_and_appends_go_on():
    async def scenario(broker):
        transport = connect(broker.address, auth_keys=hostile.KEYS)
        try:
            await hostile.create_journal(transport)
            await hostile.append_rate(transport, 0.5)
            idle_mib, idle_descriptors = broker.resident_mib, broker.descriptors
            context = multiprocessing.get_context("spawn")
            attackers = context.Process(target=attack, args=(broker.address, ATTACK_S))
            attackers.start()
            rates, connections = [], []
            while attackers.is_alive():
                rates.append(await hostile.append_rate(transport, 0.5))
                connections.append(broker.descriptors - idle_descriptors)
                assert broker.resident_mib < idle_mib + GROWTH_MIB_MAX
            assert attackers.exitcode == 0
            assert max(connections) > CONNECTIONS / 4
            assert min(rates) > 0
            async with asyncio.timeout(5):
                while broker.descriptors > idle_descriptors + DESCRIPTORS_MAX:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            await transport.aclose()

    with hostile.broker() as broker:
        asyncio.run(scenario(broker))
