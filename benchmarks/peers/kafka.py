"""Kafka, by confluent-kafka (librdkafka): an idempotent producer with all acknowledgements."""

from __future__ import annotations

import threading
import time
from typing import Any

import orjson
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from peers.contender import PARTITIONS, Contender, Tail, at_rate, make, one_by_one

__all__ = ["Kafka"]

SERVERS = {"bootstrap.servers": "127.0.0.1:19092"}
PRODUCER = {**SERVERS, "acks": "all", "enable.idempotence": True}
LINGER_MS = 5
QUEUED_MESSAGES_MAX = 1_000_000
CONSUME_MESSAGES = 1000
TIMEOUT_S = 60.0


class Kafka(Contender):
    """Topic of one replica, with a consumer of committed records, the default.

    Args:
        synced: whether what is acknowledged is on the disk.
    """

    name = "Kafka"
    durability = "in the page cache of one replica (`acks=all`, the default of syncing)"

    def __init__(self, *, synced: bool = False) -> None:
        self._settings = {"flush.messages": "1"} if synced else {}
        if synced:
            self.durability = "on the disk of one replica (`acks=all`, `flush.messages=1`)"
        self._admin = AdminClient(SERVERS)
        self._topics: list[str] = []
        self._producer = Producer(
            {
                **PRODUCER,
                "linger.ms": LINGER_MS,
                "queue.buffering.max.messages": QUEUED_MESSAGES_MAX,
            }
        )
        self.publishers = {"produce": self._publish}
        self.consumers = {"consume": self._consume}

    def create(self, topic: str, partitions: int) -> None:
        """See :class:`Contender`."""
        created = self._admin.create_topics([NewTopic(topic, partitions, 1, config=self._settings)])
        created[topic].result(TIMEOUT_S)
        self._topics.append(topic)

    def _publish(self, topic: str, count: int) -> float:
        producer = self._producer
        begun = time.perf_counter()
        for i in range(count):
            content = orjson.dumps(make(i))
            while True:
                try:
                    producer.produce(topic, content, partition=i % PARTITIONS)
                    break
                except BufferError:
                    producer.poll(0.01)
            if i % 1000 == 0:
                producer.poll(0)
        producer.flush()
        return time.perf_counter() - begun

    def _consume(self, topic: str, count: int) -> float:
        """Consume from the first batch on: joining the group is not counted."""
        settings = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer = Consumer({**SERVERS, "group.id": topic, **settings})
        consumer.subscribe([topic])
        received, begun = 0, 0.0
        while received < count:
            messages = consumer.consume(CONSUME_MESSAGES, 1.0)
            begun = begun or (time.perf_counter() if messages else 0.0)
            for message in messages:
                if not message.error():
                    orjson.loads(message.value())
                    received += 1
        taken = time.perf_counter() - begun
        consumer.close()
        return taken

    def single(self, topic: str, count: int) -> list[float]:
        """See :class:`Contender`."""
        producer = Producer({**PRODUCER, "linger.ms": 0})

        def publish(message: dict[str, Any]) -> None:
            producer.produce(topic, orjson.dumps(message))
            producer.flush()

        publish(make(0))  # registers the producer
        return one_by_one(publish, count)

    def tail(self, topic: str, count: int) -> list[float]:
        """See :class:`Contender`."""
        tail = Tail()

        def follow() -> None:
            settings = {"auto.offset.reset": "earliest", "fetch.wait.max.ms": 10}
            consumer = Consumer({**SERVERS, "group.id": topic, **settings})
            consumer.subscribe([topic])
            while len(tail.taken) < count:
                message = consumer.poll(0.2)
                if message is not None and not message.error():
                    tail.note(orjson.loads(message.value()))
            consumer.close()

        producer = Producer({**PRODUCER, "linger.ms": 0})

        def publish(message: dict[str, Any]) -> None:
            producer.produce(topic, orjson.dumps(message))
            producer.poll(0)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        at_rate(publish, tail, count)
        producer.flush()
        follower.join(TIMEOUT_S)
        return tail.taken

    def close(self) -> None:
        """See :class:`Contender`."""
        for deleted in self._admin.delete_topics(self._topics).values():
            deleted.result(TIMEOUT_S)
