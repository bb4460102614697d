"""Walks: the modules that one message enters, counted in a warm process.

A program for each walk: ``python -m support.walks publish`` prints a JSON object with the calls of
each module, over all threads. The broker runs in a process of its own, except in the walks of
brokers, of the allocator, and of Spark, which needs none.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import FrameType

import gazette_sdk

ROOT = str(Path(gazette_sdk.__file__).parents[1]) + "/"
WAIT_S = 30.0
WARM = 30
TRIES = 20
"""Walks of one message, of which the one with the fewest modules counts: others of the process
work at the same time."""


class Profile:
    """Calls of functions of the product, counted while it is on."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.is_on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call":
            file = frame.f_code.co_filename
            if file.startswith(ROOT) and "/.venv/" not in file and "/tests/" not in file:
                self.calls[file.removeprefix(ROOT)] += 1

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Count the calls of the block; of several blocks, those of the one with the fewest."""
        before, self.calls = self.calls, collections.Counter()
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
        if before and len(before) <= len(self.calls):
            self.calls = before


PROFILE = Profile()  # before the product starts any thread

from gazette_sdk import (  # noqa: E402 - as above
    Journals,
    JsonMessage,
    Publisher,
    Reader,
    connect,
    mapping,
    shard,
)
from gazette_sdk.embedded import EmbeddedCluster  # noqa: E402 - as above
from gazette_sdk.transport.base import Transport  # noqa: E402 - as above


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


@dataclass
class Total(JsonMessage):
    customer: str
    cents: int


@shard.handler(name="walks.totals", message=Order, store=shard.RocksStore, sources="topic=orders")
def totals(txn: shard.Transaction, order: Order) -> None:
    total = int(txn.store.get(order.customer, 0)) + order.cents
    txn.store[order.customer] = total
    txn.publish(Total(order.customer, total), mapping=mapping.direct("totals/part-000"))


@contextlib.contextmanager
def other_cluster() -> Iterator[Transport]:
    """A cluster in a process of its own, with a topic ``orders`` and a topic ``totals``."""
    command = [sys.executable, "-m", "support.walks", "serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        transport = connect(server.stdout.readline().strip())
        for topic in ("orders", "totals"):
            Journals(transport=transport).create(topic, partitions=1, replication=1)
        try:
            yield transport
        finally:
            server.stdin.close()


@contextlib.contextmanager
def other_writer(transport: Transport) -> Iterator[Callable[[], None]]:
    """Yield a function that publishes an order in a process of its own.

    What a writer enters is another walk than that of who reads what it writes.
    """
    command = [sys.executable, "-m", "support.walks", "write", transport.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def publish_one() -> None:
            writer.stdin.write("\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "acknowledged\n"

        try:
            yield publish_one
        finally:
            writer.stdin.close()


def write() -> None:
    """Publish an order for each line of the standard input."""
    with publisher_of(connect(sys.argv[2])) as publisher:
        for _ in sys.stdin:
            publisher.publish(Order("ada", 1)).result(WAIT_S)
            print("acknowledged", flush=True)


def serve() -> None:
    with tempfile.TemporaryDirectory() as data, EmbeddedCluster(data, sync_etcd=False) as cluster:
        print(cluster.address, flush=True)
        sys.stdin.read()


def publisher_of(transport: Transport) -> Publisher:
    return Publisher(
        mapping=mapping.modulo("topic=orders", key=attrgetter("customer")), transport=transport
    )


def publish() -> None:
    with other_cluster() as transport, publisher_of(transport) as publisher:
        for _ in range(WARM):
            publisher.publish(Order("ada", 250)).result(timeout=WAIT_S)
            time.sleep(0.05)  # the connection of inline appends is made in the background
        for _ in range(TRIES):
            with PROFILE.on():
                publisher.publish(Order("ada", 250)).result(timeout=WAIT_S)


def await_publish() -> None:
    async def walk(transport: Transport) -> None:
        async with publisher_of(transport) as publisher:
            for _ in range(WARM):
                await publisher.publish(Order("ada", 250))
            for _ in range(TRIES):
                with PROFILE.on():
                    await publisher.publish(Order("ada", 250))

    with other_cluster() as transport:
        asyncio.run(walk(transport))


def read() -> None:
    """About a thousand messages of one journal, from its begin."""
    with other_cluster() as transport, publisher_of(transport) as publisher:
        publisher.publish_batch([Order("ada", cents) for cents in range(1000)]).result(WAIT_S)
        assert next(iter(Reader(Order, "topic=orders", transport=transport, block=False)))
        with PROFILE.on():
            assert (
                len(list(Reader(Order, "topic=orders", transport=transport, block=False))) == 1000
            )


def tail() -> None:
    with other_cluster() as transport, other_writer(transport) as publish_one:
        publish_one()
        reader = Reader(Order, "topic=orders", transport=transport, block=True, offsets="end")
        messages = iter(reader)

        def later() -> None:
            for _ in range(4 + TRIES):
                time.sleep(0.1)
                publish_one()

        thread = threading.Thread(target=later)
        thread.start()
        for _ in range(4):
            next(messages)
        for _ in range(TRIES):
            with PROFILE.on():
                next(messages)
        thread.join()


def consume() -> None:
    """One message of a shard, in a transaction of its own."""
    with (
        other_cluster() as transport,
        shard.EmbeddedConsumer(totals, transport=transport) as consumer,
        other_writer(transport) as publish_one,
    ):
        for _ in range(10):
            publish_one()
        consumer.wait_caught_up(WAIT_S)
        for _ in range(3):
            publish_one()
            time.sleep(0.3)
        for _ in range(5):
            with PROFILE.on():
                publish_one()
                time.sleep(0.3)


def spark() -> None:
    """A task that reads a range from the store, in a worker that has read before."""
    from pyspark.sql.types import LongType, StringType, StructField, StructType  # noqa: PLC0415

    from gazette_spark.source import GazetteDataSource  # noqa: PLC0415 - of this walk alone

    schema = StructType([StructField("customer", StringType()), StructField("cents", LongType())])
    with tempfile.TemporaryDirectory() as data:
        with EmbeddedCluster(data, sync_etcd=False) as cluster:
            Journals(transport=cluster.transport).create("orders", partitions=1, replication=1)
            with publisher_of(cluster.transport) as publisher:
                orders = [Order(f"c{cents}", cents) for cents in range(1000)]
                publisher.publish_batch(orders).result(WAIT_S)
        options = {"store": f"file://{data}/fragments", "journals": "orders/"}
        reader = GazetteDataSource(options).reader(schema)
        (part,) = reader.partitions()
        assert sum(batch.num_rows for batch in reader.read(part)) == 1000
        with PROFILE.on():
            assert sum(batch.num_rows for batch in reader.read(part)) == 1000


def allocate() -> None:
    """Rounds of the allocator of two brokers after a creation: modules of ``cluster``."""
    with (
        tempfile.TemporaryDirectory() as data,
        EmbeddedCluster(data, brokers=2, sync_etcd=False) as cluster,
    ):
        journals = Journals(transport=cluster.transport)
        journals.create("totals", partitions=1, replication=1)
        time.sleep(1.0)
        with PROFILE.on():
            journals.create("orders", partitions=1, replication=2)
            time.sleep(1.0)
    for module in list(PROFILE.calls):
        if not module.startswith("gazette_sdk/cluster/"):
            del PROFILE.calls[module]


def at_broker(walk: Callable[[EmbeddedCluster], None]) -> None:
    with tempfile.TemporaryDirectory() as data, EmbeddedCluster(data, sync_etcd=False) as cluster:
        Journals(transport=cluster.transport).create("orders", partitions=1, replication=1)
        with publisher_of(cluster.transport) as publisher:
            publisher.publish(Order("ada", 1)).result(WAIT_S)
        sys.setprofile(None)  # what the client enters is another walk
        for _ in range(3):
            walk(cluster)
        time.sleep(0.5)
        for _ in range(TRIES):
            with PROFILE.on():
                walk(cluster)


def append() -> None:
    """A small append by the stream wire."""
    from support.raw_stream import RawStream  # noqa: PLC0415 - of these walks alone

    opened: list[RawStream] = []

    def walk(cluster: EmbeddedCluster) -> None:
        if not opened:
            opened.append(RawStream(cluster.address))
        opened[0].append("orders/part-000", b'{"x":1}\n')

    at_broker(walk)


def deliver() -> None:
    """A small append by the stream wire, and its delivery to a reader that waits."""
    from gazette_sdk.protocol.stream_frames import Kind  # noqa: PLC0415 - as above
    from support.raw_stream import RawStream, read_call  # noqa: PLC0415

    opened: list[RawStream] = []

    def walk(cluster: EmbeddedCluster) -> None:
        if not opened:
            opened.extend(RawStream(cluster.address) for _ in range(2))
            opened[1].send(read_call("orders/part-000", -1, block=True))
            time.sleep(0.5)  # the read waits for content now
        opened[0].append("orders/part-000", b'{"x":1}\n')
        while opened[1].frame().kind != Kind.CONTENT:
            pass

    at_broker(walk)


def put() -> None:
    def walk(cluster: EmbeddedCluster) -> None:
        request = urllib.request.Request(
            f"{cluster.address}/orders/part-000", data=b'{"x":1}\n', method="PUT"
        )
        urllib.request.urlopen(request, timeout=WAIT_S).read()

    at_broker(walk)


def get() -> None:
    def walk(cluster: EmbeddedCluster) -> None:
        address = f"{cluster.address}/orders/part-000?offset=0"
        urllib.request.urlopen(address, timeout=WAIT_S).read()

    at_broker(walk)


WALKS = {
    walk.__name__: walk
    for walk in (
        *(serve, write, publish, await_publish, read, tail, consume, spark, allocate),
        *(append, deliver, put, get),
    )
}

if __name__ == "__main__":
    WALKS[sys.argv[1]]()
    if sys.argv[1] not in {"serve", "write"}:
        print(json.dumps(PROFILE.calls), flush=True)
    os._exit(0)  # without the time that closing takes
