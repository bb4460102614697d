"""Traces of OpenTelemetry that follow messages from publishers to readers."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from gazette_sdk import JsonMessage, Publisher, Reader, mapping, tracing
from gazette_sdk.contexts import LOG_FIELDS
from gazette_sdk.errors import GazetteError, ValidationError
from gazette_sdk.message import sender
from gazette_sdk.message.kinds.json import spliced
from gazette_sdk.message.uuid import Clock
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.queue import PendingAppend
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram, TracedGram
from support.published import WAIT_S
from support.traces import traced

NAME = "a/journal"


@dataclass
class Order(JsonMessage):
    customer: str


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    customer: str


class Model(pydantic.BaseModel, extra="forbid"):
    customer: str


class Open(pydantic.BaseModel, extra="allow"):
    customer: str


class WithField(msgspec.Struct):
    customer: str
    UUID: str = ""


class WithParent(msgspec.Struct, forbid_unknown_fields=True):
    customer: str
    traceparent: str = ""


@pytest.fixture
def spans():
    """The spans that ended."""
    with traced() as exporter:
        yield exporter


PUBLISHED = {
    "application/x-ndjson": {"customer": "ada"},
    "application/x-protobuf-fixed": TracedGram(text="ada"),
}
"""A message of each content type."""


def text_of(span):
    return tracing.traceparent_of(span.get_span_context())


def content(transport):
    return transport.content_of(NAME)


def named(spans, name):
    return [span for span in spans.get_finished_spans() if span.name == name]


KINDS = [Order("ada"), Strict("ada"), Model(customer="ada"), Open(customer="ada")]


@pytest.mark.parametrize("message", [*KINDS, {"customer": "ada"}], ids=lambda m: type(m).__name__)
def test_a_message_carries_the_context_of_the_current_span(transport, spans, message):
    transport.create(NAME)
    with (
        Publisher(mapping.direct(NAME), transport=transport) as publisher,
        spans.tracer.start_as_current_span("work") as span,
    ):
        publisher.publish(message).result(timeout=WAIT_S)
    line = json.loads(content(transport))
    assert list(line) == ["UUID", "traceparent", "customer"]
    assert line["traceparent"] == text_of(span)
    for isolation in ("committed", "uncommitted"):
        options = {"name": NAME, "transport": transport, "isolation": isolation}
        [envelope] = Reader(type(message), **options)
        assert envelope.traceparent == text_of(span)
        expected = {"traceparent": text_of(span)} if isinstance(message, dict) else {}
        assert envelope.message == (message | expected if expected else message)


@pytest.mark.parametrize("message", [*KINDS, {"customer": "ada"}], ids=lambda m: type(m).__name__)
def test_readers_of_many_messages_find_the_sampled_ones(transport, spans, message):
    transport.create(NAME)
    with Publisher(mapping.direct(NAME), transport=transport) as publisher:
        for number in range(40):
            if number % 10 == 3:
                with spans.tracer.start_as_current_span("work"):
                    publisher.publish(message)
            else:
                publisher.publish(message)
    envelopes = list(Reader(type(message), name=NAME, transport=transport))
    found = [number for number, each in enumerate(envelopes) if each.traceparent]
    assert found == [3, 13, 23, 33]
    assert len({each.traceparent for each in envelopes}) == 5


@pytest.mark.parametrize("content_type", list(PUBLISHED))
def test_messages_are_the_same_bytes_without_a_sampled_span(monkeypatch, content_type):
    monkeypatch.setattr(sender, "new_producer_id", lambda: b"\x01acdef")
    tracer = TracerProvider(sampler=ALWAYS_OFF).get_tracer("off")

    def published():
        transport = MemoryTransport()
        transport.create(NAME, content_type=content_type)
        clock = Clock(1 << 40)
        with Publisher(mapping.direct(NAME), transport=transport, clock=clock) as publisher:
            publisher.publish(PUBLISHED[content_type])
            publisher.publish_batch([PUBLISHED[content_type]] * 3)
            with publisher.transaction() as txn:
                txn.publish(PUBLISHED[content_type])
        return content(transport)

    off = published()
    with traced() as spans:
        enabled = published()
        with tracer.start_as_current_span("unsampled"):
            unsampled = published()
        with spans.tracer.start_as_current_span("sampled"):
            sampled = published()
    assert off == enabled == unsampled
    assert off != sampled


def test_nothing_is_traced_before_it_is_enabled(transport):
    transport.create(NAME)
    span = TracerProvider().get_tracer("tests").start_as_current_span("work")
    with Publisher(mapping.direct(NAME), transport=transport) as publisher, span:
        publisher.publish({"customer": "ada"})
    assert b"traceparent" not in content(transport)
    [envelope] = Reader(dict, name=NAME, transport=transport)
    assert envelope.traceparent == ""


@pytest.mark.parametrize(
    "message",
    [
        {"customer": "ada", "traceparent": "its own"},
        WithParent("ada", "its own"),
        WithField("ada"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_context_that_a_message_has_is_kept(transport, spans, message):
    transport.create(NAME)
    with (
        Publisher(mapping.direct(NAME), transport=transport) as publisher,
        spans.tracer.start_as_current_span("work"),
    ):
        publisher.publish(message)
    line = json.loads(content(transport))
    assert line.get("traceparent", "its own") == "its own"
    assert content(transport).count(b"traceparent") <= 1
    [envelope] = Reader(type(message), name=NAME, transport=transport)
    assert envelope.traceparent == ""


def test_protobuf_messages_have_it_in_their_field(transport, spans):
    transport.create(NAME, content_type="application/x-protobuf-fixed")
    kept = TracedGram(text="kept", traceparent="its own")
    with (
        Publisher(mapping.direct(NAME), transport=transport) as publisher,
        spans.tracer.start_as_current_span("work") as span,
    ):
        for message in (TracedGram(text="a"), kept, TracedGram(text="b")):
            publisher.publish(message)
    envelopes = list(Reader(TracedGram, name=NAME, transport=transport))
    assert [each.traceparent for each in envelopes] == [text_of(span), "", text_of(span)]
    assert [each.message.text for each in envelopes] == ["a", "kept", "b"]
    assert envelopes[1].message.traceparent == "its own"


def test_protobuf_messages_without_the_field_have_none(transport, spans):
    transport.create(NAME, content_type="application/x-protobuf-fixed")
    with (
        Publisher(mapping.direct(NAME), transport=transport) as publisher,
        spans.tracer.start_as_current_span("work"),
    ):
        publisher.publish(Gram(text="a"))
    [envelope] = Reader(Gram, name=NAME, transport=transport)
    assert (envelope.message.text, envelope.traceparent) == ("a", "")


@pytest.mark.parametrize("kind", ["list", "arrow"])
def test_the_first_message_of_a_batch_carries_it(transport, spans, kind):
    transport.create(NAME)
    rows = [{"number": number} for number in range(6000)]
    batch = rows if kind == "list" else pa.Table.from_pylist(rows)
    with (
        Publisher(mapping.direct(NAME), transport=transport) as publisher,
        spans.tracer.start_as_current_span("work") as span,
    ):
        publisher.publish_batch(batch).result(timeout=WAIT_S)
    envelopes = list(Reader(dict, name=NAME, transport=transport))
    assert [each.message["number"] for each in envelopes] == list(range(6000))
    assert [each.traceparent for each in envelopes if each.traceparent] == [text_of(span)]
    assert envelopes[0].traceparent
    read = pa.Table.from_batches(
        Reader(dict, name=NAME, transport=transport).arrow(pa.schema([("number", pa.int64())]))
    )
    assert read.column("number").to_pylist() == list(range(6000))


def test_a_span_of_the_append_is_linked_to_the_contexts_of_its_messages(gated, spans):
    with Publisher(mapping.direct(NAME), transport=gated) as publisher:
        publisher.publish({"number": 0})
        contexts = []
        for number in range(3):
            with spans.tracer.start_as_current_span(f"work {number}") as span:
                contexts.append(span.get_span_context())
                publisher.publish({"number": number})
                publisher.publish({"number": number})
        assert not named(spans, f"send {NAME}")
        gated.opened()
    sent = named(spans, f"send {NAME}")
    linked = [link.context for span in sent for link in span.links]
    assert linked == contexts
    assert sent[0].kind is trace.SpanKind.CLIENT
    assert sent[0].attributes["messaging.destination.name"] == NAME
    assert sum(span.attributes["messaging.batch.message_count"] for span in sent) >= 6


def test_an_append_has_a_span_if_one_of_its_first_messages_is_sampled(spans):
    sends = tracing.SendTraces(tracing.enabled())
    with spans.tracer.start_as_current_span("work"):
        for count, is_traced in ((tracing.SAMPLED_AMONG - 1, True), (tracing.SAMPLED_AMONG, False)):
            append = PendingAppend(pb.AppendRequest(journal=NAME))
            append.count = count
            sends.note(append, sends.sampled(), lambda: UUID)
            assert bool(append.traceparent) == is_traced
            append.settle(pb.AppendResponse())
    assert len(named(spans, f"send {NAME}")) == 1


def test_a_span_of_an_append_names_topic_journal_offsets_and_a_single_message(transport, spans):
    journal = "orders/part-001"
    transport.create(journal)
    with (
        Publisher(mapping.direct(journal), transport=transport) as publisher,
        spans.tracer.start_as_current_span("work"),
    ):
        publisher.publish({"number": 0}).result(timeout=WAIT_S)
        publisher.publish_batch([{"number": 1}]).result(timeout=WAIT_S)
        publisher.publish_batch([{"number": 2}, {"number": 3}]).result(timeout=WAIT_S)
    envelopes = list(Reader(dict, name=journal, transport=transport))
    single, batch, several = (span.attributes for span in named(spans, f"send {journal}"))
    for attributes, first, last in ((single, 0, 0), (batch, 1, 1), (several, 2, 3)):
        assert attributes["messaging.destination.name"] == "orders"
        assert attributes["messaging.destination.partition.id"] == journal
        assert attributes["messaging.gazette.offset.begin"] == envelopes[first].begin
        assert attributes["messaging.gazette.offset.end"] == envelopes[last].end
    assert single["messaging.message.id"] == str(envelopes[0].uuid)
    assert batch["messaging.message.id"] == str(envelopes[1].uuid)
    assert "messaging.message.id" not in several


def test_a_context_that_is_not_sampled_is_looked_at_once(transport, spans, monkeypatch):
    transport.create(NAME)
    looked = []
    unsampled = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))
    with Publisher(mapping.direct(NAME), transport=transport) as publisher:
        look = tracing.Tracing.sampled
        monkeypatch.setattr(
            tracing.Tracing, "sampled", lambda *given: looked.append(given) or look(*given)
        )
        with trace.use_span(unsampled):
            for number in range(5):
                publisher.publish({"number": number})
            publisher.publish_batch([{"number": number} for number in range(5)])
            assert len(looked) == 1
            with spans.tracer.start_as_current_span("work", context=trace.Context()):
                publisher.publish({"number": 10})
            publisher.publish({"number": 11})
            assert len(looked) == 2
    envelopes = list(Reader(dict, name=NAME, transport=transport))
    assert [each.message["number"] for each in envelopes if each.traceparent] == [10]


class OrderOfOthers(msgspec.Struct):
    """Order as programs decode it that do not know of traces: unknown keys are ignored."""

    UUID: str
    customer: str


def test_keys_that_resemble_that_of_a_context_are_read_as_any_other(transport, spans):
    transport.create(NAME)
    messages = [{"tricepsfind": SAMPLED}, {"customer": SAMPLED}, {}] * 3
    with Publisher(mapping.direct(NAME), transport=transport) as publisher:
        publisher.publish_batch(messages)
    envelopes = list(Reader(dict, name=NAME, transport=transport))
    assert [each.message for each in envelopes] == messages
    assert not any(each.traceparent for each in envelopes)
    assert not spans.get_finished_spans()


def test_messages_with_a_context_are_read_by_decoders_that_do_not_know_it(transport, spans):
    transport.create(NAME)
    with Publisher(mapping.direct(NAME), transport=transport) as publisher:
        publisher.publish(Order("ada"))
        with spans.tracer.start_as_current_span("work"):
            publisher.publish(Order("bob"))
            publisher.publish_batch([{"customer": "cyd"}])
    lines = content(transport).splitlines()
    found = [msgspec.json.decode(line, type=OrderOfOthers) for line in lines]
    assert [each.customer for each in found] == ["ada", "bob", "cyd"]
    assert [uuid.UUID(each.UUID).version for each in found] == [1, 1, 1]
    for line in lines:
        keys = list(json.loads(line))
        assert keys in (["UUID", "customer"], ["UUID", "traceparent", "customer"])


def test_a_failed_append_ends_its_span_with_the_error(transport, spans):
    transport.create(NAME)
    publisher = Publisher(mapping.direct(NAME), transport=transport)
    with spans.tracer.start_as_current_span("work"):
        publisher.publish({"number": 0}).result(timeout=WAIT_S)
        transport.delete(NAME)
        failed = publisher.publish({"number": 1})
    with pytest.raises(GazetteError):
        failed.result(timeout=WAIT_S)
    with pytest.raises(GazetteError):
        publisher.close()
    first, second = named(spans, f"send {NAME}")
    assert first.status.is_ok or first.status.is_unset
    assert second.status.status_code is trace.StatusCode.ERROR


def test_a_message_that_is_nearly_too_long_gets_no_context(transport, spans, monkeypatch):
    from gazette_sdk.framing import JsonLines  # noqa: PLC0415

    monkeypatch.setattr(JsonLines, "frame_bytes_max", 300)
    transport.create(NAME)
    with (
        Publisher(mapping.direct(NAME), transport=transport) as publisher,
        spans.tracer.start_as_current_span("work"),
    ):
        publisher.publish({"text": "a" * 200})
        publisher.publish_batch([{"text": "a" * 200}])
        with pytest.raises(ValidationError, match="longer than"):
            publisher.publish({"text": "a" * 300})
    assert b"traceparent" not in content(transport)
    assert len(content(transport).splitlines()) == 2


def test_a_reader_continues_the_trace(transport, spans):
    transport.create(NAME)
    transport.create("next/journal")
    with Publisher(mapping.direct(NAME), transport=transport) as publisher:
        with spans.tracer.start_as_current_span("work") as work:
            publisher.publish({"number": 0}).result(timeout=WAIT_S)
        [envelope] = Reader(dict, name=NAME, transport=transport)
        with tracing.process(envelope, "billing"):
            fields = LOG_FIELDS.get()
            there = mapping.direct("next/journal")
            publisher.publish(Order("ada"), mapping=there).result(timeout=WAIT_S)
    [processed] = named(spans, "process billing")
    assert processed.parent.span_id == work.get_span_context().span_id
    assert processed.attributes["messaging.gazette.offset.end"] == envelope.end
    assert fields["trace_id"] == f"{work.get_span_context().trace_id:032x}"
    assert fields["span_id"] == f"{processed.context.span_id:016x}"
    assert "trace_id" not in LOG_FIELDS.get()
    [onward] = Reader(Order, name="next/journal", transport=transport)
    assert onward.traceparent.split("-")[1] == f"{work.get_span_context().trace_id:032x}"
    assert onward.traceparent.split("-")[2] == f"{processed.context.span_id:016x}"


def test_processing_without_a_context_begins_no_span(transport, spans):
    transport.create(NAME)
    with Publisher(mapping.direct(NAME), transport=transport) as publisher:
        publisher.publish({"number": 0})
    [envelope] = Reader(dict, name=NAME, transport=transport)
    with tracing.process(envelope, "billing"):
        assert not trace.get_current_span().get_span_context().is_valid
    assert not spans.get_finished_spans()


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "garbage",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n",
    ],
)
def test_a_context_of_others_that_is_malformed_or_not_sampled_is_none(parent):
    assert not tracing.is_sampled(parent)


SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UUID = "6ba7b810-9dad-11d1-8400-00c04fd430c8"
OBJECTS = st.lists(
    st.dictionaries(st.text(max_size=4), st.text(max_size=5), max_size=3), min_size=1, max_size=5
)


@given(OBJECTS, st.data())
def test_a_context_changes_only_the_first_object(objects, data):
    lines = [json.dumps({"UUID": UUID} | each, separators=(",", ":")).encode() for each in objects]
    whole = b"\n".join(lines) + b"\n"
    traced = spliced(whole, b'{"UUID":"', SAMPLED)
    first, *others = traced.splitlines()
    assert others == whole.splitlines()[1:]
    found = json.loads(first)
    if "traceparent" not in objects[0] and b'"traceparent":"' not in lines[0]:
        assert found.pop("traceparent") == SAMPLED
    assert found == json.loads(lines[0])
    at = data.draw(st.integers(0, len(lines) - 1))
    line = spliced(lines[at], b'{"UUID":"', SAMPLED)
    assert json.loads(line)["UUID"] == UUID


def test_foreign_messages_with_a_context_are_read_by_strict_classes():
    transport = MemoryTransport()
    transport.create(NAME)
    lines = [
        {"UUID": UUID, "traceparent": SAMPLED, "customer": "ada"},
        {"customer": "bob", "UUID": UUID, "traceparent": SAMPLED},
        {"UUID": UUID, "customer": "eve"},
    ]
    content = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    transport.write(NAME, content)
    for message_type in (Strict, Model):
        reader = Reader(message_type, name=NAME, transport=transport, isolation="uncommitted")
        found = [envelope.message.customer for envelope in reader]
        assert found == ["ada", "bob", "eve"]
