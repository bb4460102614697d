"""Publishers and readers whose brokers are gone: every wait ends, and says what is in doubt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import (
    ConfigurationError,
    DeliveryTimeoutError,
    UnavailableError,
)
from gazette_sdk.message import publisher as publisher_module

TIMEOUT_S = 0.5
SOON_S = 5.0
"""Far below every default time-out, and enough for a busy machine."""

NOWHERE = "http://127.0.0.1:1"

SPECS = """
name: gone/journal
replication: 1
labels: [{name: topic, value: gone}, {name: content-type, value: application/x-ndjson}]
fragment: {length: 1048576, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path, sync_etcd=False) as cluster:
        cluster.apply(SPECS)
        yield cluster


def connected(cluster: EmbeddedCluster, **options: object) -> Publisher:
    publisher = Publisher(
        mapping=mapping.modulo("topic=gone", key=str),
        transport=connect(cluster.address),
        delivery_timeout_s=TIMEOUT_S,
        **options,  # type: ignore[arg-type]
    )
    publisher.publish({"n": 0}).result(timeout=30)
    return publisher


# ------------------------------------------------------------- nobody listens


@pytest.mark.parametrize("wire", ["auto", "stream"])
@pytest.mark.parametrize(
    "chosen", [mapping.random("topic=gone"), mapping.direct("gone/journal")], ids=["label", "name"]
)
def test_a_publisher_whose_address_refuses_fails_at_once(wire, chosen):
    begun = time.monotonic()
    publisher = Publisher(mapping=chosen, transport=connect(NOWHERE, wire=wire))
    for _ in range(2):
        with pytest.raises(UnavailableError, match=NOWHERE):
            publisher.publish({"n": 1})
    publisher.close()
    assert time.monotonic() - begun < SOON_S


def test_a_coroutine_that_publishes_to_nowhere_fails_at_once():
    async def publish() -> None:
        async with Publisher(
            mapping=mapping.random("topic=gone"), transport=connect(NOWHERE)
        ) as publisher:
            await publisher.publish({"n": 1})

    begun = time.monotonic()
    with pytest.raises(UnavailableError, match=NOWHERE):
        asyncio.run(publish())
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("block", [False, True])
def test_a_reader_whose_address_refuses_fails_at_once(block):
    begun = time.monotonic()
    with (
        Reader(dict, "topic=gone", transport=connect(NOWHERE), block=block) as reader,
        pytest.raises(UnavailableError, match=NOWHERE),
    ):
        list(reader)
    assert time.monotonic() - begun < SOON_S


# ------------------------------------------------------------ the broker dies


def test_receipts_flush_and_close_end_with_the_delivery_timeout(cluster):
    publisher = connected(cluster)
    cluster.stop()
    begun = time.monotonic()
    receipt = publisher.publish({"n": 1})
    with pytest.raises(DeliveryTimeoutError, match=r"gone/journal.*delivery_timeout_s=0.5 seconds"):
        receipt.result()
    with pytest.raises(DeliveryTimeoutError):
        publisher.flush()
    publisher.publish({"n": 2})
    with pytest.raises(DeliveryTimeoutError):
        publisher.close()
    assert time.monotonic() - begun < SOON_S


def test_coroutines_end_with_the_delivery_timeout(cluster):
    async def publish() -> None:
        async with Publisher(
            mapping=mapping.modulo("topic=gone", key=str),
            transport=connect(cluster.address),
            delivery_timeout_s=TIMEOUT_S,
        ) as publisher:
            await publisher.publish({"n": 0})
            await asyncio.to_thread(cluster.stop)
            with pytest.raises(DeliveryTimeoutError):
                await publisher.publish({"n": 1})
            with pytest.raises(DeliveryTimeoutError):
                await publisher.aflush()

    asyncio.run(publish())


def test_an_exception_leaves_the_block_soon_and_says_what_is_in_doubt(cluster, monkeypatch):
    monkeypatch.setattr(publisher_module, "FAILED_TIMEOUT_S", 0.3)
    publisher = connected(cluster)
    publisher._sender.connection().appends._delivery_timeout_s = 600.0

    def leave() -> None:
        with publisher:
            cluster.stop()
            publisher.publish({"n": 1})
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        leave()
    assert time.monotonic() - begun < SOON_S
    [note] = caught.value.__notes__
    assert "in doubt are messages to gone/journal" in note


@pytest.mark.parametrize("timeout_s", [0, -1])
def test_a_delivery_timeout_is_above_zero(timeout_s):
    with pytest.raises(ConfigurationError, match="delivery_timeout_s"):
        Publisher(delivery_timeout_s=timeout_s)
