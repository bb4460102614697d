"""Set-up of traces, and what calls to brokers carry of them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from opentelemetry import context

from gazette_sdk import tracing
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.protocol.stream_pb2 import CallHead
from gazette_sdk.server.authorization import Call, call_of
from gazette_sdk.transport.stream.connection import Head
from gazette_sdk.transport.wire import Destination, Peer, PreparedAppend
from support.traces import traced

SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
JOURNAL = "orders/part-000"


def prepared(authorization=None):
    to = Destination(
        RPCS_BY_NAME["Append"], JOURNAL, Peer("a", "b", "c"), "http://service", authorization
    )
    return PreparedAppend(to, pb.AppendRequest(journal=JOURNAL), b"encoded")


@pytest.mark.parametrize("authorization", [None, "Bearer x"])
def test_the_head_of_an_append_has_the_context_only_if_it_carries_one(authorization):
    append, head = prepared(authorization), Head(timeout_s=1.5)
    plain = CallHead.FromString(head.encoded(append.to))
    traced = CallHead.FromString(head.encoded(append.carrying(SAMPLED).to))
    assert dict(plain.metadata) == ({} if authorization is None else {"authorization": "Bearer x"})
    assert dict(traced.metadata) == {**plain.metadata, "traceparent": SAMPLED}
    assert traced.timeout_ms == plain.timeout_ms == 1500
    assert head.encoded(append.to) == head.encoded(append.to)


def test_a_call_has_the_context_of_a_sampled_caller_only():
    def called(value):
        metadata = (("authorization", "Bearer x"), ("traceparent", value))
        return call_of(metadata, timeout_s=None, chunk_bytes=1)

    assert called(SAMPLED) == Call("Bearer x", chunk_bytes=1, traceparent=SAMPLED)
    for value in (SAMPLED[:-2] + "00", "garbage", "", SAMPLED + "\n", SAMPLED.upper()):
        assert called(value) == Call("Bearer x", chunk_bytes=1)


def test_no_context_is_carried_where_traces_are_not_enabled():
    assert tracing.caller() == tracing.current_parent() == ""
    assert tracing.served_span("append", JOURNAL, SAMPLED) is None


def test_the_current_context_is_that_of_opentelemetry_in_each_thread_and_task():
    with traced() as spans:
        now = tracing.enabled().now

        def same():
            return now() is context.get_current()

        async def in_tasks():
            with spans.tracer.start_as_current_span("task"):
                return await asyncio.create_task(coroutine())

        async def coroutine():
            return same() and tracing.is_sampled(tracing.current_parent())

        assert same()
        with spans.tracer.start_as_current_span("work"):
            assert same()
            assert contextvars.Context().run(same)
        assert asyncio.run(in_tasks())
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(same).result()


def test_a_current_context_of_another_package_is_asked_for(monkeypatch):
    monkeypatch.setattr(context, "attach", lambda _: object())
    monkeypatch.setattr(context, "detach", lambda _: None)
    assert tracing.Tracing().now is context.get_current


def test_a_replica_that_does_not_know_the_context_reads_the_rest_of_a_request():
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    [described] = [each for each in file.message_type if each.name == "ReplicateRequest"]
    fields = [each for each in described.field if each.number < 100]
    del described.field[:]
    del described.oneof_decl[:]  # of the optional field
    described.field.extend(fields)
    pool = descriptor_pool.DescriptorPool()
    for each in pb.DESCRIPTOR.dependencies:
        needed = descriptor_pb2.FileDescriptorProto()
        each.CopyToProto(needed)
        pool.Add(needed)
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("protocol.ReplicateRequest")
    others = message_factory.GetMessageClass(descriptor)
    request = pb.ReplicateRequest(
        proposal=pb.Fragment(journal=JOURNAL, begin=1, end=9), acknowledge=True
    )
    plain = request.SerializeToString()
    request.traceparent = SAMPLED
    found = others.FromString(request.SerializeToString())
    found.DiscardUnknownFields()
    assert found.SerializeToString() == plain


PROGRAM = """
import sys
from gazette_sdk import tracing
from gazette_sdk.errors import GazetteError
try:
    tracing.configure("gazette-broker", service_instance_id="local/b")
except GazetteError as error:
    sys.exit(f"{type(error).__name__}: {error}")
with tracing.enabled().tracer.start_as_current_span("work"):
    print(tracing.current_parent())
"""


def configured(**environment):
    return subprocess.run(
        [sys.executable, "-c", environment.pop("before", "") + PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_names_the_exporter_and_the_service():
    done = configured(OTEL_TRACES_EXPORTER="console")
    assert done.returncode == 0, done.stderr
    assert '"service.name": "gazette-broker"' in done.stdout
    assert '"service.instance.id": "local/b"' in done.stdout
    done = configured(OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="mine")
    assert '"service.name": "mine"' in done.stdout
    resource = "service.instance.id=one,deployment.environment=test"
    done = configured(OTEL_TRACES_EXPORTER="console", OTEL_RESOURCE_ATTRIBUTES=resource)
    assert '"service.instance.id": "one"' in done.stdout
    assert '"deployment.environment": "test"' in done.stdout


def test_without_an_exporter_contexts_are_carried_and_nothing_is_written():
    done = configured(OTEL_TRACES_EXPORTER="none")
    assert done.returncode == 0, done.stderr
    assert tracing.is_sampled(done.stdout.strip())


def test_an_exporter_that_is_not_installed_is_named_with_its_package():
    for environment in ({"OTEL_TRACES_EXPORTER": "nowhere"}, {"OTEL_TRACES_EXPORTER": " "}):
        done = configured(**environment)
        name = environment["OTEL_TRACES_EXPORTER"].strip() or "otlp"
        assert done.stderr.startswith("ConfigurationError: OTEL_TRACES_EXPORTER"), done.stderr
        assert f"pip install opentelemetry-exporter-{name}" in done.stderr


def test_a_missing_sdk_is_named_with_its_package():
    before = "import sys\nsys.modules['opentelemetry.sdk'] = None\n"
    done = configured(OTEL_TRACES_EXPORTER="console", before=before)
    assert done.stderr.startswith("MissingPackageError"), done.stderr
    assert "pip install opentelemetry-sdk" in done.stderr


def test_a_provider_that_is_set_already_is_used():
    before = (
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "trace.set_tracer_provider(TracerProvider())\n"
    )
    done = configured(OTEL_TRACES_EXPORTER="nowhere", before=before)
    assert done.returncode == 0, done.stderr
    assert tracing.is_sampled(done.stdout.strip())
