"""Traces of OpenTelemetry that follow messages, with the extra ``otel``.

::

    from gazette_sdk import tracing

    tracing.enable()  # once, before publishers, readers and consumers are made

A message that is published while a sampled span is current carries the span's context, as
``traceparent`` of W3C Trace Context. A shard's handler that gets such a message runs within a span
of that trace, and what it publishes continues the trace. A program with a Reader does the same by
:func:`process`.

=====================  ========  ===================================================================
span                   kind      time
=====================  ========  ===================================================================
``send JOURNAL``       CLIENT    an append, from its first sampled message to its acknowledgement;
                                 linked to the contexts of its sampled messages
``process NAME``       CONSUMER  a call of the handler for a message; child of the span in which
                                 the message was published, linked to the transaction's
``transaction SHARD``  INTERNAL  a shard's transaction, from its first sampled message until its
                                 output is acknowledged; its events are the steps of its commit
=====================  ========  ===================================================================

No span is begun, and no byte is written, where no span is current or its trace is not sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from gazette_sdk.contexts import LOG_FIELDS
from gazette_sdk.errors import needs_extra

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider

PARENT_KEY = "traceparent"
"""Key of JSON messages, and name of the field of protobuf messages, that holds the context."""

PARENT_BYTES = 55
"""Length of the text of a context."""

ROOM_BYTES = 128
"""More than a context adds to a message: a message that is nearly too long gets none."""

LINKS_MAX = 128
"""Links of a span of an append; further messages add none."""

_parse = re.compile("00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})").fullmatch
_SAMPLED = 1


class TracedMessage(Protocol):
    """Envelope of a message, as far as traces need it."""

    @property
    def journal(self) -> str:
        """Name of its journal."""

    @property
    def begin(self) -> int:
        """Offset of its first byte."""

    @property
    def end(self) -> int:
        """Offset after its last byte."""

    @property
    def traceparent(self) -> str:
        """Context in which it was published; empty for none."""


class TracedAppend(Protocol):
    """Append of messages, as far as traces need it."""

    @property
    def journal(self) -> str:
        """Name of its journal."""

    @property
    def count(self) -> int:
        """Number of its messages."""

    def exception(self) -> BaseException | None:
        """Return its error; None if it was acknowledged."""

    def add_done_callback(self, callback: Any, /) -> object:
        """Call back once when it has ended, from any thread."""


def is_sampled(parent: str) -> bool:
    """Return True if a text is a context of Trace Context whose trace is sampled."""
    found = _parse(parent)
    return found is not None and bool(int(found[3], 16) & _SAMPLED)


def traceparent_of(context: SpanContext) -> str:
    """Return a context as of Trace Context."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class Tracing:
    """Traces of this process, by the API of OpenTelemetry.

    Args:
        provider: of tracers; None for the program's own.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        with needs_extra("otel", "traces"):
            from opentelemetry import trace  # noqa: PLC0415 - an extra
        self._api = trace
        self.tracer: Tracer = trace.get_tracer("gazette_sdk", tracer_provider=provider)

    def current(self) -> SpanContext | None:
        """Return the context of the current span; None if there is none, or it is not sampled."""
        context = self._api.get_current_span().get_span_context()
        return context if context.trace_flags & _SAMPLED and context.is_valid else None

    def begin_process(self, message: TracedMessage, name: str, *linked: Span) -> Span:
        """Begin the span of a message's processing, as a child of that of its publication.

        Args:
            message: a message whose context is sampled.
            name: of what processes it.
            linked: spans to link to.
        """
        trace = self._api
        return self.tracer.start_span(
            f"process {name}",
            context=self._context_of(message.traceparent),
            kind=trace.SpanKind.CONSUMER,
            links=[trace.Link(each.get_span_context()) for each in linked],
            attributes={
                **_of_journal(message.journal),
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.consumer.group.name": name,
                "messaging.gazette.offset.begin": message.begin,
                "messaging.gazette.offset.end": message.end,
            },
        )

    def begin(self, name: str, **attributes: str) -> Span:
        """Begin a span that is no child of another one."""
        root = self._api.set_span_in_context(self._api.INVALID_SPAN)
        return self.tracer.start_span(name, context=root, attributes=attributes)

    @contextmanager
    def current_while(self, span: Span) -> Iterator[None]:
        """Make a span current in a block, and end it with the block.

        Log records of the block have its ``trace_id`` and ``span_id``.
        """
        context = span.get_span_context()
        ids = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        with self._api.use_span(span, end_on_exit=True):
            token = LOG_FIELDS.set({**LOG_FIELDS.get(), **ids})
            try:
                yield
            finally:
                LOG_FIELDS.reset(token)

    def fail(self, span: Span, error: BaseException) -> None:
        """End a span with an error."""
        span.record_exception(error)
        span.set_status(self._api.StatusCode.ERROR, str(error))
        span.end()

    def _context_of(self, parent: str) -> Context | None:
        found = _parse(parent)
        assert found is not None, "a context was checked when it was read"
        context = self._api.SpanContext(
            trace_id=int(found[1], 16),
            span_id=int(found[2], 16),
            is_remote=True,
            trace_flags=self._api.TraceFlags(int(found[3], 16)),
        )
        return self._api.set_span_in_context(self._api.NonRecordingSpan(context))


class SendTraces:
    """Spans of the appends of a publisher.

    Args:
        tracing: the traces of this process.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._spans: dict[TracedAppend, tuple[Span, set[int]]] = {}

    def current(self) -> SpanContext | None:
        """Return the context of the current span; None if there is none, or it is not sampled."""
        return self._tracing.current()

    def note(self, append: TracedAppend, context: SpanContext) -> None:
        """Add a context, in which messages are published, to their append's span.

        The publisher's lock is held.
        """
        known = self._spans.get(append)
        if known is None:
            self._spans[append] = self._begun(append, context)
            append.add_done_callback(self._ended)
        else:
            span, linked = known
            if context.span_id not in linked and len(linked) < LINKS_MAX:
                linked.add(context.span_id)
                span.add_link(context)

    def _begun(self, append: TracedAppend, context: SpanContext) -> tuple[Span, set[int]]:
        api = self._tracing._api  # noqa: SLF001 - of this module
        span = self._tracing.tracer.start_span(
            f"send {append.journal}",
            kind=api.SpanKind.CLIENT,
            links=[api.Link(context)],
            attributes={
                **_of_journal(append.journal),
                "messaging.operation.name": "send",
                "messaging.operation.type": "send",
            },
        )
        return span, {context.span_id}

    def _ended(self, append: TracedAppend) -> None:
        known = self._spans.pop(append, None)
        if known is None:
            return
        span, _ = known
        span.set_attribute("messaging.batch.message_count", append.count)
        error = append.exception()
        if error is not None:
            self._tracing.fail(span, error)
        else:
            span.end()


def _of_journal(journal: str) -> dict[str, str]:
    return {
        "messaging.system": "gazette",
        "messaging.destination.name": journal,
        "messaging.destination.partition.id": journal,
    }


_enabled: Tracing | None = None


def enable(provider: TracerProvider | None = None) -> None:
    """Have publishers, readers and consumers that are made from now on take part in traces.

    Args:
        provider: an OpenTelemetry TracerProvider; None for the one that the program has set.

    Raises:
        MissingPackageError: OpenTelemetry is not installed; the extra ``otel`` has it.
    """
    global _enabled  # noqa: PLW0603 - as the program's tracer provider is one
    _enabled = Tracing(provider)


def disable() -> None:
    """Leave traces to those that were made before; for tests."""
    global _enabled  # noqa: PLW0603 - as above
    _enabled = None


def enabled() -> Tracing | None:
    """Return the traces of this process; None if they are not enabled."""
    return _enabled


@contextmanager
def process(message: TracedMessage, name: str) -> Iterator[None]:
    """Continue the trace of a message in a block, within a span ``process NAME``.

    ::

        for envelope in reader:
            with tracing.process(envelope, "billing"):
                ...  # what is published here belongs to the trace

    Does nothing for a message that has no sampled context, or if traces are not enabled.

    Args:
        message: an :class:`~gazette_sdk.Envelope`.
        name: of what processes it.
    """
    tracing = _enabled
    if tracing is None or not message.traceparent:
        yield
        return
    with tracing.current_while(tracing.begin_process(message, name)):
        yield
