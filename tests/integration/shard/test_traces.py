"""One trace over a publisher, the handlers of two applications and a reader."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry import trace

from gazette_sdk import Journals, JsonMessage, Publisher, Reader, mapping, shard
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.testing import run_shards
from support import traced_orders
from support.traces import traced

WAIT_S = 60.0


@dataclass
class Order(JsonMessage):
    number: int


@pytest.fixture
def cluster(tmp_path):
    with EmbeddedCluster(tmp_path, sync_etcd=False) as started:
        for name in ("orders", "copies", "results"):
            Journals(transport=started.transport).create(name)
        yield started


@pytest.fixture
def exporter():
    with traced() as made:
        yield made


def copier(name, source, target, *, is_async=False, fails=lambda order: None, on_error="fail"):
    options = {
        "on_error": on_error,
        "message": Order,
        "sources": [f"{source}/part-000"],
        "name": name,
        "hot_standbys": 0,
        "store": shard.JsonStore[dict],
    }
    there = mapping.direct(f"{target}/part-000")
    if is_async:

        @shard.handler(**options)
        async def copy(txn, order):
            fails(order)
            txn.publish(Order(order.number + 1), mapping=there)
    else:

        @shard.handler(**options)
        def copy(txn, order):
            fails(order)
            txn.publish(Order(order.number + 1), mapping=there)

    return copy


def publish(cluster, tracer, count=3):
    with Publisher(mapping.direct("orders/part-000"), transport=cluster.transport) as publisher:
        for number in range(count):
            publisher.publish(Order(100 * number))
        with tracer.start_as_current_span("checkout") as span:
            publisher.publish(Order(1000)).result(timeout=WAIT_S)
    return span.get_span_context()


def results(cluster, count):
    reader = Reader(Order, name="results/part-000", transport=cluster.transport, block=True)
    with reader:
        return list(itertools.islice(reader, count))


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_message_and_what_follows_from_it_are_one_trace(cluster, exporter, is_async):
    first = copier("first", "orders", "copies", is_async=is_async)
    second = copier("second", "copies", "results", is_async=is_async)
    options = {"transport": cluster.transport, "etcd": cluster.etcd_endpoint}
    with shard.EmbeddedConsumer(first, **options) as one, shard.EmbeddedConsumer(second, **options):
        context = publish(cluster, exporter.tracer)
        found = results(cluster, 4)
        one.wait_caught_up(timeout_s=WAIT_S)
    assert [each.message.number for each in found] == [2, 102, 202, 1002]
    assert [bool(each.traceparent) for each in found] == [False, False, False, True]
    assert found[3].traceparent.split("-")[1] == f"{context.trace_id:032x}"

    spans = {span.name: span for span in exporter.get_finished_spans()}
    process_first, process_second = spans["process first"], spans["process second"]
    assert process_first.parent.span_id == context.span_id
    assert process_second.parent.span_id == process_first.context.span_id
    assert process_first.kind is process_second.kind is trace.SpanKind.CONSUMER
    assert process_first.context.trace_id == process_second.context.trace_id == context.trace_id
    transaction = spans["transaction first/orders/part-000"]
    assert process_first.links[0].context == transaction.context
    assert [event.name for event in transaction.events] == [
        step.name.lower() for step in CommitStep
    ]
    assert transaction.start_time <= process_first.start_time
    assert transaction.end_time >= process_first.end_time
    assert spans["send copies/part-000"].links[0].context == process_first.context


def test_a_failed_handler_ends_its_span_and_its_transactions_with_the_error(cluster, exporter):
    failed = []

    def fails(order):
        if order.number == 1000 and not failed:
            failed.append(order)
            raise ValueError("no such customer")

    application = copier("failing", "orders", "results", fails=fails)
    options = {"transport": cluster.transport, "etcd": cluster.etcd_endpoint}
    with shard.EmbeddedConsumer(application, **options):
        context = publish(cluster, exporter.tracer)
        assert exporter.has_transaction.wait(WAIT_S)
    spans = exporter.get_finished_spans()
    [process] = [span for span in spans if span.name == "process failing"]
    assert process.parent.span_id == context.span_id
    assert process.status.status_code is trace.StatusCode.ERROR
    assert "no such customer" in process.events[0].attributes["exception.message"]
    [transaction] = [span for span in spans if span.name.startswith("transaction")]
    assert transaction.status.status_code is trace.StatusCode.ERROR


PROGRAM = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from gazette_sdk import Publisher, connect, mapping, shard, tracing
from integration.shard.test_traces import copier, results

provider = TracerProvider()
provider.add_span_processor(
    SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.to_json(None) + "\\n"))
)
tracing.enable(provider)
address, etcd = sys.argv[1:]
application = copier("elsewhere", "orders", "results")
with shard.EmbeddedConsumer(application, transport=connect(address), etcd=etcd) as consumer:
    consumer.wait_caught_up(timeout_s=60)
"""


def test_a_trace_goes_through_two_processes(cluster, exporter):
    context = publish(cluster, exporter.tracer)
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, cluster.address, cluster.etcd_endpoint],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    spans = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    [process] = [span for span in spans if span["name"] == "process elsewhere"]
    assert process["context"]["trace_id"] == f"0x{context.trace_id:032x}"
    assert process["parent_id"] == f"0x{context.span_id:016x}"
    onward = results(cluster, 4)[3]
    assert onward.traceparent.split("-")[1] == f"{context.trace_id:032x}"


def test_messages_read_again_after_a_crash_are_processed_in_spans_that_say_so(
    cluster, exporter, tmp_path, monkeypatch
):
    written = tmp_path / "spans"
    monkeypatch.setenv(traced_orders.SPANS_FILE, str(written))

    def publish_traced(number):
        with exporter.tracer.start_as_current_span("checkout") as span:
            receipt = publisher.publish(traced_orders.Order(number))
            receipt.result(timeout=WAIT_S)
        return f"0x{span.get_span_context().span_id:016x}"

    with (
        Publisher(mapping.direct("orders/part-000"), transport=cluster.transport) as publisher,
        run_shards(traced_orders.count_orders, cluster=cluster, lease_ttl_s=2) as shards,
    ):
        first = publish_traced(0)
        shards.wait_caught_up(timeout_s=WAIT_S)
        shards.crash_at(CommitStep.CONSUMED)  # of the next transaction, which is not committed
        second = publish_traced(1)
        shards.processes[0].wait_until_ended()
        shards.start(0)
        shards.wait_caught_up(timeout_s=WAIT_S)
        third = publish_traced(2)
        shards.wait_caught_up(timeout_s=WAIT_S)
        counts = dict(shards.store("orders/part-000").items())
    assert counts == {"0": 1, "1": 1, "2": 1}
    spans = [json.loads(line) for line in written.read_text().splitlines()]
    found = [
        (span["parent_id"], span["attributes"].get("gazette.replayed", False))
        for span in spans
        if span["name"].startswith("process ")
    ]
    assert found == [(first, False), (second, False), (second, True), (third, False)]


def test_messages_read_again_after_an_abort_are_processed_in_spans_that_say_so(cluster, exporter):
    def fails(order):
        if order.number == 1001:
            raise ValueError("no such customer")

    application = copier("passing", "orders", "results", fails=fails, on_error="skip")
    options = {"transport": cluster.transport, "etcd": cluster.etcd_endpoint}
    with (
        Publisher(mapping.direct("orders/part-000"), transport=cluster.transport) as publisher,
        exporter.tracer.start_as_current_span("checkout"),
    ):
        publisher.publish(Order(1000))
        publisher.publish(Order(1001)).result(timeout=WAIT_S)
    with shard.EmbeddedConsumer(application, **options) as consumer:
        consumer.wait_caught_up(timeout_s=WAIT_S)
    processed = [span for span in exporter.get_finished_spans() if span.name == "process passing"]
    found = [span.attributes.get("gazette.replayed", False) for span in processed]
    failed = [not span.status.is_ok and not span.status.is_unset for span in processed]
    assert list(zip(found, failed, strict=True)) == [(False, False), (False, True), (True, False)]
