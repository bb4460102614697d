"""Spans of appends at brokers: of each wire, of replicas, and through another broker."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import pytest
from opentelemetry import trace

from gazette_sdk import Journals, JsonMessage, Publisher, connect, mapping, shard, tracing
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.stream.wire import StreamTransport
from support.traces import traced

WAIT_S = 60.0
JOURNAL = "orders/part-000"


@dataclass
class Order(JsonMessage):
    number: int


@pytest.fixture
def spans():
    with traced() as exporter:
        yield exporter


@pytest.fixture
def cluster(tmp_path):
    with EmbeddedCluster(tmp_path, sync_etcd=False) as started:
        Journals(transport=started.transport).create("orders")
        yield started


@contextmanager
def opened(transport):
    """Close a transport at the end."""
    try:
        yield transport
    finally:
        run(transport.aclose())


def named(spans, name):
    return [span for span in spans.get_finished_spans() if span.name == name]


@pytest.mark.parametrize("wire", ["stream", "grpc", "in process"])
@pytest.mark.parametrize("length", [10, 200_000], ids=["small", "large"])
def test_a_broker_has_a_span_of_an_append_for_each_wire(cluster, spans, wire, length):
    transports = {"stream": StreamTransport, "grpc": GrpcTransport}
    make = transports.get(wire)
    chosen = nullcontext(cluster.transport) if make is None else opened(make(cluster.address))
    with chosen as transport, Publisher(mapping.direct(JOURNAL), transport=transport) as publisher:
        publisher.publish({"text": "before"}).result(timeout=WAIT_S)
        with spans.tracer.start_as_current_span("checkout") as span:
            receipt = publisher.publish({"text": "a" * length})
            receipt.result(timeout=WAIT_S)
        publisher.publish({"text": "after"}).result(timeout=WAIT_S)
    [sent], [append] = named(spans, f"send {JOURNAL}"), named(spans, f"append {JOURNAL}")
    assert sent.parent.span_id == span.get_span_context().span_id
    assert append.parent.span_id == sent.context.span_id
    assert append.context.trace_id == span.get_span_context().trace_id
    assert append.kind is trace.SpanKind.SERVER
    assert append.attributes["messaging.destination.name"] == "orders"
    for name in ("messaging.gazette.offset.begin", "messaging.gazette.offset.end"):
        assert append.attributes[name] == sent.attributes[name]
    assert sent.start_time <= append.start_time <= append.end_time <= sent.end_time


def test_a_broker_takes_the_context_of_an_http_header(cluster, spans):
    with spans.tracer.start_as_current_span("checkout") as span:
        parent = tracing.current_parent()
    for header in (parent, parent[:-2] + "00", "garbage", ""):
        request = urllib.request.Request(
            f"{cluster.address}/{JOURNAL}", b"{}\n", {"traceparent": header}, method="PUT"
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            assert answer.status == 204
    [append] = named(spans, f"append {JOURNAL}")
    assert append.parent.span_id == span.get_span_context().span_id


def test_a_refused_append_ends_its_span_with_the_status(cluster, spans):
    async def requests():
        yield pb.AppendRequest(journal="no/journal")
        yield pb.AppendRequest()

    async def append(transport):
        with spans.tracer.start_as_current_span("checkout"):
            return await transport.append(requests())

    with opened(StreamTransport(cluster.address)) as transport:
        assert run(append(transport)).status == pb.JOURNAL_NOT_FOUND
    [span] = named(spans, "append no/journal")
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.status.description == "JOURNAL_NOT_FOUND"
    assert span.parent is not None


SPAN = re.compile(r"^\{$.*?^\}$", re.MULTILINE | re.DOTALL)


def recorded(cluster, context):
    """Return the spans of a trace that brokers have written to their logs."""
    texts = [broker.log.read_text() for broker in cluster.brokers]
    spans = [json.loads(found) for text in texts for found in SPAN.findall(text)]
    trace_id = f"0x{context.trace_id:032x}"
    return [span for span in spans if span["context"]["trace_id"] == trace_id]


def wait_for_replicas(cluster, context, count):
    """Return the spans of a trace once ``count`` appends are recorded, each up to its replica."""
    deadline = time.monotonic() + WAIT_S
    while True:
        spans = {each["context"]["span_id"]: each for each in recorded(cluster, context)}
        replicas = [each for each in spans.values() if each["name"] == f"replicate {JOURNAL}"]
        chains = [chain_of(each, spans) for each in replicas]
        if len(chains) == count and all(len(chain) > 1 for chain in chains):
            return chains
        assert time.monotonic() < deadline, spans
        time.sleep(0.05)  # the log of another process


def chain_of(span, spans):
    """Return the spans from a replica's to that of the broker that the client called."""
    chain = [span]
    while (parent := spans.get(chain[-1]["parent_id"])) is not None:
        chain.append(parent)
    return chain


def test_one_trace_goes_through_publisher_broker_replica_and_handler(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    arguments = ("--broker.tracing", "on")
    handled = []

    store = shard.JsonStore[dict]

    @shard.handler(message=Order, sources=[JOURNAL], name="billing", hot_standbys=0, store=store)
    def billing(txn, order):
        handled.append(order.number)

    logs = tmp_path / "logs"
    logs.mkdir()
    with (
        LocalCluster(
            tmp_path / "data", brokers=2, sync_etcd=False, logs=logs, arguments=arguments
        ) as cluster,
        traced() as spans,
        ExitStack() as stack,
    ):
        transport = stack.enter_context(opened(connect(cluster.address)))
        Journals(transport=transport).create("orders", replication=2)
        cluster.wait_until_ready()
        with (
            Publisher(mapping.direct(JOURNAL), transport=transport) as publisher,
            shard.EmbeddedConsumer(
                billing, transport=transport, etcd=cluster.etcd_endpoint
            ) as consumer,
        ):
            for number in range(3):
                publisher.publish(Order(number)).result(timeout=WAIT_S)
            with spans.tracer.start_as_current_span("checkout") as span:
                publisher.publish(Order(3)).result(timeout=WAIT_S)
            publisher.publish(Order(4)).result(timeout=WAIT_S)
            consumer.wait_caught_up(timeout_s=WAIT_S)
        [chain] = wait_for_replicas(cluster, span.get_span_context(), 1)
        # An append through a broker that is not the primary has a span at both.
        with spans.tracer.start_as_current_span("proxied") as proxied:
            for number, broker in enumerate(cluster.brokers):
                through_it = StreamTransport(broker.address, cache_size=0)
                with (
                    opened(through_it),
                    Publisher(mapping.direct(JOURNAL), transport=through_it) as publisher,
                ):
                    publisher.publish(Order(number)).result(timeout=WAIT_S)
        chains = wait_for_replicas(cluster, proxied.get_span_context(), 2)
    [process] = named(spans, "process billing")
    sent, *others = named(spans, f"send {JOURNAL}")
    context = span.get_span_context()
    assert process.context.trace_id == sent.context.trace_id == context.trace_id
    assert process.parent.span_id == sent.parent.span_id == context.span_id
    assert chain[-1]["parent_id"] == f"0x{sent.context.span_id:016x}"
    assert {each["name"] for each in chain[1:]} == {f"append {JOURNAL}"}
    resources = [each["resource"]["attributes"] for each in chain]
    assert {each["service.instance.id"] for each in resources} == {
        "local/broker-0",
        "local/broker-1",
    }
    assert {each["service.name"] for each in resources} == {"gazette-broker"}
    for each in chain:
        for name in ("messaging.gazette.offset.begin", "messaging.gazette.offset.end"):
            assert each["attributes"][name] == sent.attributes[name]
    assert handled[:5] == [0, 1, 2, 3, 4]
    assert {each[-1]["parent_id"] for each in chains} == {
        f"0x{each.context.span_id:016x}" for each in others
    }
    assert max(map(len, chains)) > 2
