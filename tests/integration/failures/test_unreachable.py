"""Brokers that are not there, are something else, go away and come back; and Etcd, killed."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from contextlib import contextmanager

import pytest

from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import (
    CallError,
    ClosedError,
    GazetteError,
    LeaseLostError,
    MappingError,
    UnavailableError,
)
from gazette_sdk.message.receipt import ReceiptTimeoutError
from integration.failures.journals import TIMEOUT_S, append, read, run, spec, wait_until, within

CONNECT_TIMEOUT_S = 0.3


@contextmanager
def speaking(answer: bytes):
    """The port of a server which says this to whoever connects, and hangs up if it is HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            kept = []
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    break
                connection.sendall(answer)
                if answer.startswith(b"HTTP"):
                    connection.close()
                kept.append(connection)
            for connection in kept:
                connection.close()

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            server.join(TIMEOUT_S)


WRONG = {
    "nobody": ("", UnavailableError, "Connection refused"),
    "silence": (b"", UnavailableError, "check that a broker runs at"),
    "mail": (b"220 mail.example ESMTP\r\n", UnavailableError, "check that a broker runs at"),
    "web": (b"HTTP/1.1 400 Bad Request\r\n\r\n", UnavailableError, "check that a broker runs at"),
    "etcd": ("", CallError, "is this the address of a Gazette broker?"),
    "plain text": ("", UnavailableError, "check that a broker runs at"),
    "no host": ("", UnavailableError, "check that a broker runs at"),
}


@pytest.mark.parametrize("who", WRONG)
def test_an_address_where_no_broker_is_fails_soon_and_is_named(cluster, who):
    answer, kind, text = WRONG[who]
    with speaking(answer or b"") as fake:
        address = {
            "nobody": f"http://127.0.0.1:{reserve_port()}",
            "etcd": cluster.etcd_endpoint,
            "plain text": cluster.address.replace("http://", "https://"),
            "no host": "http://no-such-host.invalid:80",
        }.get(who, fake)
        transport = connect(address, connect_timeout_s=CONNECT_TIMEOUT_S)
        publisher = Publisher(transport=transport, mapping_timeout_s=CONNECT_TIMEOUT_S)
        uses = (
            lambda: append(transport, "a/journal", b"content"),
            lambda: list(Reader(dict, "topic=orders", transport=transport)),
            lambda: publisher.publish({"number": 1}, mapping=mapping.direct("a/journal")),
            lambda: publisher.publish({"number": 1}, mapping=mapping.random("topic=orders")),
        )
        for use, what in zip(uses, ("", "", "a/journal", "topic=orders"), strict=True):
            with within(5), pytest.raises(GazetteError) as caught:
                use()
            # Which one depends on how long the transport pauses before it dials again.
            assert isinstance(caught.value, kind | MappingError)
            assert address in str(caught.value)
            assert "\n" not in str(caught.value)
            if isinstance(caught.value, MappingError):
                assert what in str(caught.value)
                assert "check the address of the" in str(caught.value)
            else:
                assert text in str(caught.value)
        publisher.close()
        run(transport.aclose())


@pytest.fixture
def stoppable(tmp_path):
    """A cluster that can be stopped, and started again on the same port over the same data."""
    port = reserve_port()

    def start():
        return EmbeddedCluster(tmp_path, port=port, sync_etcd=False).start()

    clusters = [start()]

    class Stoppable:
        @property
        def cluster(self):
            return clusters[-1]

        def stop(self):
            clusters[-1].stop()

        def start(self):
            clusters.append(start())

    yield Stoppable()
    clusters[-1].stop()


def test_a_reader_that_blocks_continues_when_its_broker_is_back(stoppable, name):
    cluster = stoppable.cluster
    cluster.apply(spec(name))
    append(cluster.transport, name, b'{"number": 0}\n')
    transport = connect(cluster.address, connect_timeout_s=CONNECT_TIMEOUT_S)
    with Reader(dict, name=name, transport=transport, block=True) as reader:
        envelopes = iter(reader)
        assert next(envelopes).message["number"] == 0
        stoppable.stop()
        stoppable.start()
        append(stoppable.cluster.transport, name, b'{"number": 1}\n')
        with within(15):
            assert next(envelopes).message["number"] == 1
    run(transport.aclose())


def test_a_reader_that_blocks_can_be_closed_while_its_broker_is_gone(stoppable, name):
    cluster = stoppable.cluster
    cluster.apply(spec(name))
    append(cluster.transport, name, b'{"number": 0}\n')
    transport = connect(cluster.address, connect_timeout_s=CONNECT_TIMEOUT_S)
    reader = Reader(dict, name=name, transport=transport, block=True)
    envelopes = iter(reader)
    assert next(envelopes).message["number"] == 0
    stoppable.stop()
    closing = threading.Timer(0.5, reader.close)
    closing.start()
    with within(10):
        assert list(envelopes) == []
    closing.join(TIMEOUT_S)
    assert reader.offsets == {name: 14}
    run(transport.aclose())


def test_messages_published_without_a_broker_are_sent_when_it_is_back(stoppable, name):
    cluster = stoppable.cluster
    cluster.apply(spec(name))
    transport = connect(cluster.address, connect_timeout_s=CONNECT_TIMEOUT_S)
    with Publisher(lambda _: name, transport=transport) as publisher:
        receipts = [publisher.publish({"number": 0})]
        receipts[0].result(timeout=TIMEOUT_S)
        cluster_address = cluster.address
        stoppable.stop()
        receipts += [publisher.publish({"number": number}) for number in (1, 2)]
        with within(5), pytest.raises(ReceiptTimeoutError) as caught:
            receipts[1].result(timeout=1)
        assert "still trying; the last attempt failed: " in str(caught.value)
        assert cluster_address in str(caught.value)
        with within(5), pytest.raises(ReceiptTimeoutError):
            publisher.flush(timeout=0.5)
        stoppable.start()
        for receipt in receipts:
            receipt.result(timeout=15)
    run(transport.aclose())
    with Reader(dict, name=name, transport=stoppable.cluster.transport) as reader:
        numbers = [envelope.message["number"] for envelope in reader]
    # An append whose answer was lost may stand there twice; none is missing, none overtakes.
    assert sorted(set(numbers)) == [0, 1, 2]
    assert numbers[0] == 0


def test_a_publisher_is_closed_in_time_while_its_broker_is_gone(stoppable, name):
    cluster = stoppable.cluster
    cluster.apply(spec(name))
    transport = connect(cluster.address, connect_timeout_s=CONNECT_TIMEOUT_S)
    publisher = Publisher(lambda _: name, transport=transport)
    publisher.publish({"number": 0}).result(timeout=TIMEOUT_S)
    stoppable.stop()
    receipt = publisher.publish({"number": 1})
    with within(5), pytest.raises(ReceiptTimeoutError, match="not everything was acknowledged"):
        publisher.close(timeout=0.5)
    with within(5), pytest.raises(GazetteError, match="given up"):
        receipt.result(timeout=1)
    run(transport.aclose())


@pytest.mark.parametrize("block", [False, True])
def test_a_transport_closed_under_a_reader_or_publisher_is_reported_and_stops_nothing_else(
    cluster, name, block
):
    cluster.apply(spec(name, content_type="application/x-ndjson"))
    append(cluster.transport, name, b'{"number": 0}\n')
    transport = connect(cluster.address)
    publisher = Publisher(mapping.random(f"name={name}"), transport=transport)
    publisher.publish({"number": 1}).result(timeout=TIMEOUT_S)
    reader = Reader(dict, name=name, transport=transport, block=True)
    envelopes = iter(reader)
    assert [next(envelopes).message["number"] for _ in range(2)] == [0, 1]
    run(transport.aclose())

    with within(5), pytest.raises(ClosedError, match="closed"):
        next(envelopes)
    with within(5), pytest.raises(ClosedError, match="closed"):
        publisher.publish({"number": 2}).result(timeout=TIMEOUT_S)
    with within(5), pytest.raises(ClosedError, match="closed"):
        list(Reader(dict, "topic=orders", transport=transport, block=block))
    # The event loop is free for others.
    with within(2):
        append(cluster.transport, name, b'{"number": 3}\n')
    with within(5):
        # If the message got as far as its append, flush tells of its failure once more.
        with contextlib.suppress(ClosedError):
            publisher.close()
        reader.close()


def test_a_broker_ends_within_a_lease_when_its_etcd_is_killed(tmp_path, name, warnings_of):
    lease_ttl_s = 2
    cluster = EmbeddedCluster(tmp_path, sync_etcd=False, lease_ttl_s=lease_ttl_s).start()
    try:
        cluster.apply(spec(name))
        append(cluster.transport, name, b"kept")
        broker = cluster.brokers[0].broker
        os.kill(cluster._etcd_server.pid, signal.SIGKILL)
        with within(lease_ttl_s + 3):
            with pytest.raises(GazetteError) as told:
                run(cluster.ended())
            assert "the embedded etcd ended by itself, with status -9" in str(told.value)
            assert "start the cluster again" in str(told.value)

            async def broker_ended():
                await asyncio.shield(broker.ended)

            with pytest.raises(LeaseLostError, match="lease") as lost:
                run(broker_ended())
        assert "\n" not in str(lost.value)
    finally:
        with within(25):
            cluster.stop()
    with EmbeddedCluster(tmp_path, sync_etcd=False) as cluster:
        assert read(cluster.transport, name)[0] == b"kept"
        wait_until(lambda: append(cluster.transport, name, b"!").commit.begin == 4, "it goes on")
