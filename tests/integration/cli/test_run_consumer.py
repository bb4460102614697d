"""``gazette run-consumer`` with the brokers of ``gazette dev``, whose Etcd it asks for."""

from __future__ import annotations

import contextlib
import re
import signal

import pytest

from gazette_sdk import Journals, connect
from gazette_sdk.transport import loop as sdk_loop
from support.order_totals import PROGRAM, publish, wait_for_totals
from support.tools import read_until, start_tool

GAZETTE = "gazette_sdk.cli.gazette"


@contextlib.contextmanager
def running(arguments, directory, **environ):
    """A tool as a process, which does not outlive the test."""
    process = start_tool(GAZETTE, arguments, directory, environ)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("brokers", [1, 2])
def test_an_application_counts_and_goes_on_after_a_kill(tmp_path, brokers):
    (tmp_path / "orders.py").write_text(PROGRAM)
    arguments = ["dev", "--data", "data", "--port", "0", "--brokers", str(brokers)]
    with running(arguments, tmp_path) as dev:
        text = read_until(dev, b"print(envelope.message)").decode()
        address = re.search(r"running at (http://\S+)", text)[1]
        transport = connect(address)
        try:
            journals = Journals(transport=transport)
            journals.create("orders", partitions=2)
            journals.create("totals", partitions=2)
            publish(transport, 50)
            arguments = ["run-consumer", "orders:totals", "--etcd.lease", "5s"]
            with running(arguments, tmp_path, GAZETTE_ADDRESS=address) as consumer:
                wait_for_totals(transport, 50)
                publish(transport, 200)
                consumer.kill()
                consumer.wait(60)
            with running(arguments, tmp_path, GAZETTE_ADDRESS=address) as consumer:
                publish(transport, 50)
                wait_for_totals(transport, 300)
                consumer.send_signal(signal.SIGTERM)
                assert consumer.wait(60) == 0
        finally:
            sdk_loop.run(transport.aclose(), 30)
        dev.send_signal(signal.SIGTERM)
        assert dev.wait(60) == 0


STUCK_PROGRAM = """
import threading

from gazette_sdk import shard
from gazette_sdk.shard.consumer import process

process.SHUTDOWN_TIMEOUT_S = 1.0


@shard.handler(message=dict, store=shard.JsonStore, sources="topic=orders")
def stuck(txn, order):
    print("it is stuck", flush=True)
    threading.Event().wait()
"""


def test_a_process_ends_without_a_handler_that_does_not_return(tmp_path, gazette_cluster):
    cluster = gazette_cluster(1)
    (tmp_path / "orders.py").write_text(STUCK_PROGRAM)
    Journals(transport=cluster.transport).create("orders", partitions=1, replication=1)
    publish(cluster.transport, 1)
    arguments = ["run-consumer", "orders:stuck", "--etcd.address", cluster.etcd_endpoint]
    with running(arguments, tmp_path, GAZETTE_ADDRESS=cluster.address) as consumer:
        read_until(consumer, b"it is stuck")
        consumer.send_signal(signal.SIGTERM)
        assert consumer.wait(60) == 1
        log = consumer.stderr.read().decode()
    assert log.count("level=fatal") == 1
    assert "orders.stuck/orders/part-000: the handler orders.stuck has not returned" in log
    assert "for the record of orders/part-000 at offset 0" in log
