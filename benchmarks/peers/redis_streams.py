"""Redis streams, by redis-py with hiredis: pipelined XADD, and XREAD."""

from __future__ import annotations

import threading
import time
from typing import Any

import orjson
import redis

from peers.contender import PARTITIONS, Contender, Tail, at_rate, make, one_by_one

__all__ = ["RedisStreams"]

PORT = 16379
PIPELINE_MESSAGES = 1000
READ_MESSAGES = 2000


class RedisStreams(Contender):
    """Redis stream for each partition.

    Args:
        synced: whether what is acknowledged is on the disk. It is a setting of the whole server.
    """

    name = "Redis"
    durability = "written to the append-only file within a second (`appendfsync everysec`)"

    def __init__(self, *, synced: bool = False) -> None:
        self._redis = redis.Redis(port=PORT)
        self._redis.config_set("appendfsync", "always" if synced else "everysec")
        if synced:
            self.durability = "on the disk (`appendfsync always`)"
        self.publishers = {"pipelined XADD": self._publish}
        self.consumers = {"XREAD": self._consume}

    def create(self, topic: str, partitions: int) -> None:
        """Streams are created by their first message."""

    def _publish(self, topic: str, count: int) -> float:
        streams = [f"{topic}:{partition}" for partition in range(PARTITIONS)]
        begun = time.perf_counter()
        pipeline = self._redis.pipeline(transaction=False)
        for i in range(count):
            pipeline.xadd(streams[i % PARTITIONS], {"d": orjson.dumps(make(i))})
            if i % PIPELINE_MESSAGES == PIPELINE_MESSAGES - 1:
                pipeline.execute()
        pipeline.execute()
        return time.perf_counter() - begun

    def _consume(self, topic: str, count: int) -> float:
        begun = time.perf_counter()
        received = 0
        last: dict[Any, Any] = {f"{topic}:{partition}": "0" for partition in range(PARTITIONS)}
        while received < count:
            for stream, rows in self._redis.xread(last, count=READ_MESSAGES):
                for _, fields in rows:
                    orjson.loads(fields[b"d"])
                    received += 1
                last[stream.decode()] = rows[-1][0]
        return time.perf_counter() - begun

    def single(self, topic: str, count: int) -> list[float]:
        """See :class:`Contender`."""
        return one_by_one(lambda m: self._redis.xadd(topic, {"d": orjson.dumps(m)}), count)

    def tail(self, topic: str, count: int) -> list[float]:
        """See :class:`Contender`."""
        tail = Tail()

        def follow() -> None:
            client, last = redis.Redis(port=PORT), b"0"
            while len(tail.taken) < count:
                for _, rows in client.xread({topic: last}, block=5000, count=1000):
                    for _, fields in rows:
                        tail.note(orjson.loads(fields[b"d"]))
                    last = rows[-1][0]
            client.close()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        at_rate(lambda m: self._redis.xadd(topic, {"d": orjson.dumps(m)}), tail, count)
        follower.join(60)
        return tail.taken

    def close(self) -> None:
        """See :class:`Contender`."""
        self._redis.config_set("appendfsync", "everysec")
        self._redis.flushall()
        self._redis.close()
