"""Exactly once through shards that stop at random, while connections break and answers are lost."""

from __future__ import annotations

import asyncio
import random
from urllib.parse import urlsplit

import pytest

from gazette_sdk import connect
from gazette_sdk.testing.tcp_proxy import TcpProxy
from gazette_sdk.transport.loop import run
from support.chained_topic import WAIT_S, Topic, of_outputs

CUT_EVERY = 4
"""Transactions between two cuts of all connections."""


@pytest.mark.parametrize("seed", range(3))
def test_every_message_is_copied_once_though_answers_are_lost(cluster, seed):
    chance = random.Random(seed)
    topic = Topic(cluster)
    numbers = topic.fill([chance.randint(1, 40) for _ in range(24)])

    async def play(transport, proxy):
        count, stops, is_last = 0, 0, False
        shard, prior = topic.shard(transport), []
        await shard.start()
        while not is_last:
            is_last = await shard.consume(chance.randint(1, 25), numbers[-1])
            for each in prior:
                await each
            if chance.random() < 0.15:  # what was consumed is consumed again
                await shard.crash()
                shard, prior, is_last = topic.shard(transport), [], False
                await shard.start()
                stops += 1
                continue
            if chance.random() < 0.15:
                await shard.abort()
                prior, is_last = [], False
                continue
            commit, acks = await shard.start_commit()
            prior = [commit, *acks.values()]
            count += 1
            if count % CUT_EVERY == 0:
                proxy.cut("answers")
                await asyncio.sleep(chance.random() * 0.05)  # in which appends land unseen
                proxy.reset()
                proxy.heal()
        for each in prior:
            await each
        await shard.crash()
        await transport.aclose()
        return count, stops

    with TcpProxy(urlsplit(cluster.address).port) as proxy:
        # Without routes, every call goes through the proxy.
        transport = connect(proxy.address, cache_size=0)
        count, stops = run(play(transport, proxy), WAIT_S)
    assert count > 2 * CUT_EVERY
    print(f"{count} transactions, {stops} stops, {len(numbers)} messages")
    assert topic.copied() == of_outputs(numbers)
