"""NATS JetStream, by nats-py: asynchronous publishing in windows, and a pull consumer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import nats
import orjson
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from peers.contender import PARTITIONS, PILOT_INTERVAL_S, TAIL_PER_S, Contender, Tail, make

__all__ = ["NatsJetStream"]

ADDRESS = "nats://127.0.0.1:14222"
PENDING_MESSAGES_MAX = 4000
WINDOW_MESSAGES = 2000
FETCH_MESSAGES = 1000
TIMEOUT_S = 60.0


class NatsJetStream(Contender):
    """File-based stream with a subject for each partition."""

    name = "NATS JetStream"
    durability = "written to a file; synced every two minutes (the default)"

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._nats: Any = self._loop.run_until_complete(nats.connect(ADDRESS, pending_size=1 << 26))
        self._jetstream = self._nats.jetstream(publish_async_max_pending=PENDING_MESSAGES_MAX)
        self._streams: list[str] = []
        self.publishers = {"publish_async": self._publish}
        self.consumers = {"pull consumer": self._consume}

    def create(self, topic: str, partitions: int) -> None:
        """See :class:`Contender`. Partitions are subjects, which need not be created."""
        del partitions
        config = StreamConfig(name=topic, subjects=[f"{topic}.*"])
        self._loop.run_until_complete(self._jetstream.add_stream(config))
        self._streams.append(topic)

    def _publish(self, topic: str, count: int) -> float:
        subjects = [f"{topic}.{partition}" for partition in range(PARTITIONS)]

        async def publish() -> float:
            begun = time.perf_counter()
            waiting = []
            for i in range(count):
                content = orjson.dumps(make(i))
                waiting.append(
                    await self._jetstream.publish_async(subjects[i % PARTITIONS], content)
                )
                if len(waiting) >= WINDOW_MESSAGES:
                    await asyncio.gather(*waiting)
                    waiting.clear()
            await asyncio.gather(*waiting)
            return time.perf_counter() - begun

        return self._loop.run_until_complete(publish())

    def _consume(self, topic: str, count: int) -> float:
        async def consume() -> float:
            config = ConsumerConfig(ack_policy=AckPolicy.ALL)
            consumer = await self._jetstream.pull_subscribe(f"{topic}.*", "reader", config=config)
            begun = time.perf_counter()
            received = 0
            while received < count:
                messages = await consumer.fetch(FETCH_MESSAGES, timeout=5)
                for message in messages:
                    orjson.loads(message.data)
                    received += 1
                await messages[-1].ack()
            return time.perf_counter() - begun

        return self._loop.run_until_complete(consume())

    def single(self, topic: str, count: int) -> list[float]:
        """See :class:`Contender`."""

        async def publish() -> list[float]:
            taken = []
            for i in range(count):
                begun = time.perf_counter()
                await self._jetstream.publish(f"{topic}.0", orjson.dumps(make(i)))
                taken.append(time.perf_counter() - begun)
            return taken

        return self._loop.run_until_complete(publish())

    def tail(self, topic: str, count: int) -> list[float]:
        """See :class:`Contender`. Publisher and reader share the event loop, as nats-py has it."""
        subject, tail = f"{topic}.0", Tail()
        complete = asyncio.Event()

        async def note(message: Msg) -> None:
            tail.note(orjson.loads(message.data))
            if len(tail.taken) == count:
                complete.set()

        async def publish() -> None:
            await self._jetstream.subscribe(subject, cb=note, ordered_consumer=True)
            while not tail.is_following.is_set():
                await self._jetstream.publish(subject, orjson.dumps(make(0)))
                await asyncio.sleep(PILOT_INTERVAL_S)
            due = time.perf_counter()
            for i in range(count):
                message = make(i)
                message["t"] = time.perf_counter()
                await self._jetstream.publish(subject, orjson.dumps(message))
                due += 1 / TAIL_PER_S
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await complete.wait()

        self._loop.run_until_complete(asyncio.wait_for(publish(), TIMEOUT_S))
        return tail.taken

    def close(self) -> None:
        """See :class:`Contender`."""
        for stream in self._streams:
            self._loop.run_until_complete(self._jetstream.delete_stream(stream))
        self._loop.run_until_complete(self._disconnect())
        self._loop.close()

    async def _disconnect(self) -> None:
        await self._nats.close()
        # An ordered consumer leaves tasks that wait for a next message.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
