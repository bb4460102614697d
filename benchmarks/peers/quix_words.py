"""Words counted by quixstreams: exactly once, state in RocksDB with a changelog topic, Kafka.

    python quix_words.py WORDS

A program of an environment of its own, which has quixstreams and not this project. It publishes the
words of a file, one a line, to a topic of one partition; then it counts them as a new consumer
group, and prints the seconds from the first message to the last one, without its commit. Settings
are quixstreams' own, but for the guarantee and a queue that is not the limit.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from quixstreams import Application, State

SERVERS = "127.0.0.1:19092"
TIMEOUT_S = 120.0


def publish(topic: str, words: list[str]) -> None:
    """Publish words to a new topic of one partition; a word is the key of its message."""
    admin = AdminClient({"bootstrap.servers": SERVERS})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(TIMEOUT_S)
    producer = Producer(
        {"bootstrap.servers": SERVERS, "acks": "all", "queue.buffering.max.messages": 1_000_000}
    )
    for word in words:
        while True:
            try:
                producer.produce(topic, key=word, value=f'{{"word":"{word}"}}')
                break
            except BufferError:
                producer.poll(0.01)
    assert not producer.flush(TIMEOUT_S), "messages were not acknowledged"


def count(topic: str, messages: int, directory: str) -> float:
    """Return the seconds that counting takes."""
    application = Application(
        broker_address=SERVERS,
        consumer_group=topic,
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        state_dir=directory,
        loglevel="ERROR",
    )
    times: list[float] = []

    def count_word(_value: object, state: State) -> None:
        if not times:
            times.append(time.perf_counter())
        state.set("count", (state.get("count") or 0) + 1)

    frame = application.dataframe(application.topic(topic, value_deserializer="json"))
    frame.update(count_word, stateful=True)
    application.run(count=messages, timeout=TIMEOUT_S)
    return time.perf_counter() - times[0]


def main() -> None:
    """Publish, count, and print the seconds."""
    words = Path(sys.argv[1]).read_text().split()
    topic = f"words-{uuid.uuid4().hex}"
    publish(topic, words)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    with tempfile.TemporaryDirectory() as directory:
        print(count(topic, len(words), directory))


if __name__ == "__main__":
    main()
