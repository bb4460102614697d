"""Traces of OpenTelemetry that follow messages, with the extra ``otel``.

::

    from gazette_sdk import tracing

    tracing.enable()  # once, before publishers, readers and consumers are made

A message that is published while a sampled span is current carries the span's context, as
``traceparent`` of W3C Trace Context. A shard's handler that gets such a message runs within a span
of that trace, and what it publishes continues the trace. A program with a Reader does the same by
:func:`process`. The append of such messages carries the context of its own span to the broker, and
from there to the replicas.

=====================  ========  ===================================================================
span                   kind      time
=====================  ========  ===================================================================
``send JOURNAL``       CLIENT    an append, from its first sampled message to its acknowledgement;
                                 linked to the contexts of its sampled messages
``append JOURNAL``     SERVER    the append at a broker, until all replicas have acknowledged it;
                                 child of the span of its caller
``replicate JOURNAL``  SERVER    the append's commit at a replica; child of the span at the primary
``process NAME``       CONSUMER  a call of the handler for a message; child of the span in which
                                 the message was published, linked to the transaction's
``transaction SHARD``  INTERNAL  a shard's transaction, from its first sampled message until its
                                 output is acknowledged; its events are the steps of its commit
=====================  ========  ===================================================================

No span is begun, and no byte is written, where no span is current or its trace is not sampled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gazette_sdk.contexts import LOG_FIELDS
from gazette_sdk.errors import ConfigurationError, MissingPackageError, needs_extra

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, SpanKind, Tracer, TracerProvider
    from opentelemetry.util.types import AttributeValue

PARENT_KEY = "traceparent"
"""Key of JSON messages, name of the field of protobuf messages, and name of the metadata or HTTP
header of calls to brokers, that holds the context."""

PARENT_BYTES = 55
"""Length of the text of a context."""

ROOM_BYTES = 128
"""More than a context adds to a message: a message that is nearly too long gets none."""

SAMPLED_AMONG = 8
"""An append has a span if one of its first writes, so many, is sampled. So nearly all small appends
of sampled messages have one, and of large ones a few. A span costs as much as ten messages, and
leads to others at the brokers."""

LINKS_MAX = 128
"""Links of a span of an append; further messages add none."""

CALLER: ContextVar[str | None] = ContextVar("caller", default=None)
"""Context of the span of the append that is made in a task, for the call to the broker: empty for
none, and None for that of the current span."""

_parse = re.compile("00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})").fullmatch
_SAMPLED = 1
_ODD = frozenset("13579bdf")
"""Last digits of contexts with the flag of sampled traces."""


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


class StretchOfJournal(Protocol):
    """Part of a journal."""

    @property
    def begin(self) -> int:
        """Offset of its first byte."""

    @property
    def end(self) -> int:
        """Offset after its last byte."""


class TracedAppend(Protocol):
    """Append of messages, as far as traces need it."""

    traceparent: str
    """Context of its span, for the call to the broker; empty for none."""

    @property
    def journal(self) -> str:
        """Name of its journal."""

    @property
    def count(self) -> int:
        """Number of its messages."""

    @property
    def outcome(self) -> Any:
        """Its response, or its error, once it has ended."""

    def add_done_callback(self, callback: Any, /) -> object:
        """Call back once when it has ended, from any thread."""


def is_sampled(parent: str) -> bool:
    """Return True if a text is a context of Trace Context whose trace is sampled."""
    return parent[-1:] in _ODD and _parse(parent) is not None


def traceparent_of(context: SpanContext) -> str:
    """Return a context as of Trace Context."""
    return "00-%032x-%016x-%02x" % (  # noqa: UP031 - in two thirds of the time
        context.trace_id,
        context.span_id,
        context.trace_flags,
    )


class Tracing:
    """Traces of this process, by the API of OpenTelemetry.

    Args:
        provider: of tracers; None for the program's own.

    Attributes:
        tracer: begins the spans.
        now: returns the current context of OpenTelemetry, an object that is never changed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        with needs_extra("otel", "traces"):
            from opentelemetry import context, trace  # noqa: PLC0415 - an extra
        self._api = trace
        self.now = _current_context(context)
        self.tracer: Tracer = trace.get_tracer("gazette_sdk", tracer_provider=provider)

    def sampled(self, context: Context | None = None) -> SpanContext | None:
        """Return the context of a span; None if there is none, or it is not sampled.

        Args:
            context: has the span; None for the current context.
        """
        found = self._api.get_current_span(context).get_span_context()
        return found if found.trace_flags & _SAMPLED and found.is_valid else None

    def begin_send(self, journal: str, context: SpanContext) -> Span:
        """Begin the span of an append of messages, as a child of the current one.

        Args:
            journal: name of the journal.
            context: of the current span.
        """
        return self._begin(
            f"send {journal}",
            self._api.SpanKind.CLIENT,
            None,
            {**_of_journal(journal), **_operation("send")},
            linked=[context],
        )

    def begin_served(self, operation: str, journal: str, parent: str, begun_ns: int) -> ServedSpan:
        """Begin the span of a call that this process serves; see :func:`served_span`."""
        attributes = {**_of_journal(journal), "messaging.operation.name": operation}
        span = self._begin(
            f"{operation} {journal}",
            self._api.SpanKind.SERVER,
            self._remote(parent),
            attributes,
            begun_ns=begun_ns,
        )
        return ServedSpan(self, span)

    def begin_process(
        self, message: TracedMessage, name: str, *linked: Span, is_replayed: bool = False
    ) -> Span:
        """Begin the span of a message's processing, as a child of that of its publication.

        Args:
            message: a message whose context is sampled.
            name: of what processes it.
            linked: spans to link to.
            is_replayed: an earlier run may have processed it.
        """
        return self._begin(
            f"process {name}",
            self._api.SpanKind.CONSUMER,
            self._remote(message.traceparent),
            {
                **_of_journal(message.journal),
                **_operation("process"),
                "messaging.consumer.group.name": name,
                **offsets_of(message.begin, message.end),
                **({"gazette.replayed": True} if is_replayed else {}),
            },
            linked=[each.get_span_context() for each in linked],
        )

    def begin(self, name: str, **attributes: str) -> Span:
        """Begin a span that is no child of another one."""
        root = self._api.set_span_in_context(self._api.INVALID_SPAN)
        return self._begin(name, self._api.SpanKind.INTERNAL, root, attributes)

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
        self.refuse(span, str(error))

    def refuse(self, span: Span, status: str) -> None:
        """End a span with a status that is not OK."""
        span.set_status(self._api.StatusCode.ERROR, status)
        span.end()

    def _begin(
        self,
        name: str,
        kind: SpanKind,
        context: Context | None,
        attributes: Mapping[str, AttributeValue],
        *,
        linked: Iterable[SpanContext] = (),
        begun_ns: int = 0,
    ) -> Span:
        links = [self._api.Link(each) for each in linked]
        return self.tracer.start_span(
            name,
            context=context,
            kind=kind,
            links=links,
            attributes=attributes,
            start_time=begun_ns or None,
        )

    def _remote(self, parent: str) -> Context:
        return self._api.set_span_in_context(self._span_of(parent))

    def _span_of(self, parent: str) -> Span:
        found = _parse(parent)
        assert found is not None, "a context was checked when it was read"
        context = self._api.SpanContext(
            trace_id=int(found[1], 16),
            span_id=int(found[2], 16),
            is_remote=True,
            trace_flags=self._api.TraceFlags(int(found[3], 16)),
        )
        return self._api.NonRecordingSpan(context)


def _current_context(api: Any) -> Callable[[], Context]:
    """Return a function that returns the current context: a publisher calls it for every message.

    That of the variable which keeps the context takes a fifth of the time of ``get_current()``.
    Contexts of other packages than OpenTelemetry's own may be kept elsewhere.

    Args:
        api: the module ``opentelemetry.context``.
    """
    token = api.attach(api.get_current())
    api.detach(token)
    current: Callable[[], Context] = token.var.get if type(token) is Token else api.get_current
    return current


class _Send(NamedTuple):
    """Span of an append, ids of the spans that it is linked to, and UUID of its first message."""

    span: Span
    linked: set[int]
    uuid: str


class SendTraces:
    """Spans of the appends of a publisher. Its lock is held by those who call.

    Args:
        tracing: the traces of this process.

    Attributes:
        now: returns the current context of OpenTelemetry.
        untraced: the last context that was found to have no sampled span. While it is current,
            nothing is to be looked up.
    """

    __slots__ = ("_sends", "_tracing", "now", "untraced")

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._sends: dict[TracedAppend, _Send] = {}
        self.now = tracing.now
        self.untraced: Context | None = None

    def sampled(self) -> SpanContext | None:
        """Return the context of the current span; None if there is none, or it is not sampled."""
        context = self.now()
        if context is self.untraced:
            return None
        found = self._tracing.sampled(context)
        if found is None:
            self.untraced = context
        return found

    def note(self, append: TracedAppend, context: SpanContext, uuid: Callable[[], object]) -> None:
        """Add a context, in which messages are published, to their append's span.

        Args:
            append: the append.
            context: of the sampled span that is current.
            uuid: returns the UUID of the first of the messages.
        """
        known = self._sends.get(append)
        if known is not None:
            if context.span_id not in known.linked and len(known.linked) < LINKS_MAX:
                known.linked.add(context.span_id)
                known.span.add_link(context)
        elif append.count < SAMPLED_AMONG:
            span = self._tracing.begin_send(append.journal, context)
            self._sends[append] = _Send(span, {context.span_id}, str(uuid()))
            append.traceparent = _parent_of(span)
            append.add_done_callback(self._ended)

    def _ended(self, append: TracedAppend) -> None:
        known = self._sends.pop(append, None)
        if known is None:
            return
        span, _, uuid = known
        attributes: dict[str, AttributeValue] = {"messaging.batch.message_count": append.count}
        if append.count == 1:
            attributes["messaging.message.id"] = uuid
        outcome = append.outcome
        if isinstance(outcome, BaseException):
            span.set_attributes(attributes)
            self._tracing.fail(span, outcome)
        else:
            span.set_attributes(attributes | offsets_of(outcome.commit.begin, outcome.commit.end))
            span.end()


class ServedSpan:
    """Span of a call that this process serves. One of its methods ends it.

    Args:
        tracing: the traces of this process.
        span: the span.

    Attributes:
        traceparent: its context, for further calls; empty if it is not sampled.
    """

    __slots__ = ("_span", "_tracing", "traceparent")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self.traceparent = _parent_of(span)

    def end(self, fragment: StretchOfJournal) -> None:
        """End it with the stretch of the journal that the call is about."""
        self._span.set_attributes(offsets_of(fragment.begin, fragment.end))
        self._span.end()

    def refuse(self, status: str) -> None:
        """End it with a status that is not OK."""
        self._tracing.refuse(self._span, status)

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        self._tracing.fail(self._span, error)


def _parent_of(span: Span) -> str:
    """Return the context of a span, for a call; empty if it is not sampled."""
    context = span.get_span_context()
    return traceparent_of(context) if context.trace_flags & _SAMPLED else ""


_partition = re.compile("(.+)/part-[0-9]+").fullmatch
"""A journal of a topic that :meth:`~gazette_sdk.Journals.create` has made."""


def _of_journal(journal: str) -> dict[str, str]:
    of_topic = _partition(journal)
    return {
        "messaging.system": "gazette",
        "messaging.destination.name": journal if of_topic is None else of_topic[1],
        "messaging.destination.partition.id": journal,
    }


def _operation(name: str) -> dict[str, str]:
    return {"messaging.operation.name": name, "messaging.operation.type": name}


def offsets_of(begin: int, end: int) -> dict[str, int]:
    """Return the attributes of a stretch of a journal."""
    return {"messaging.gazette.offset.begin": begin, "messaging.gazette.offset.end": end}


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


def configure(service: str, **resource: str) -> None:
    """Set OpenTelemetry up as its environment variables say, and enable traces.

    ``OTEL_TRACES_EXPORTER`` names the exporters, by default ``otlp``; their packages read further
    variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``. A tracer provider that is set already, as
    by ``opentelemetry-instrument``, is used as it is.

    Args:
        service: ``service.name`` of the spans, unless ``OTEL_SERVICE_NAME`` or
            ``OTEL_RESOURCE_ATTRIBUTES`` has one.
        resource: further attributes of the process; dots of their names are written as ``_``.

    Raises:
        MissingPackageError: OpenTelemetry's API or SDK is not installed.
        ConfigurationError: an exporter is not installed.
    """
    with needs_extra("otel", "traces"):
        from opentelemetry import trace  # noqa: PLC0415 - an extra
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        enable()
        return
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "traces are recorded by OpenTelemetry's SDK, which is not installed; run"
            " `pip install opentelemetry-sdk`, and install an exporter, such as"
            " `opentelemetry-exporter-otlp`"
        ) from error
    exporters = [found.load()() for found in _exporters()]
    given = OTELResourceDetector().detect().attributes
    described = {
        "service.name": service,
        **{name.replace("_", "."): value for name, value in resource.items()},
    }
    attributes = {name: value for name, value in described.items() if name not in given}
    provider = TracerProvider(resource=Resource.create(attributes))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    enable()


_EXPORTERS = "opentelemetry_traces_exporter"
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def _exporters() -> list[EntryPoint]:
    """Return the exporters that the environment names.

    Raises:
        ConfigurationError: one is not installed.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - it takes long

    found = []
    names = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    for name in map(str.strip, names.split(",")):
        if name == "none":
            continue
        wanted = [name]
        if name == "otlp":
            wanted = [_OTLP[protocol]] if protocol in _OTLP else list(_OTLP.values())
        installed = [each for want in wanted for each in entry_points(group=_EXPORTERS, name=want)]
        if not installed:
            remedy = f"run `pip install opentelemetry-exporter-{name}`"
            raise ConfigurationError(
                f"OTEL_TRACES_EXPORTER: there is no exporter {name!r}; {remedy}, or set the"
                " variable to console or none"
            )
        found.append(installed[0])
    return found


def disable() -> None:
    """Leave traces to those that were made before; for tests."""
    global _enabled  # noqa: PLW0603 - as above
    _enabled = None


def enabled() -> Tracing | None:
    """Return the traces of this process; None if they are not enabled."""
    return _enabled


def current_parent() -> str:
    """Return the context of the current span; empty if none is, or it is not sampled."""
    context = None if _enabled is None else _enabled.sampled()
    return "" if context is None else traceparent_of(context)


def caller() -> str:
    """Return the context that an append of this task is to carry; empty for none."""
    given = CALLER.get()
    return current_parent() if given is None else given


def served_span(operation: str, journal: str, parent: str, begun_ns: int = 0) -> ServedSpan | None:
    """Begin the span of a call that this process serves; None if traces are not enabled.

    Args:
        operation: ``append`` or ``replicate``.
        journal: name of the journal.
        parent: context of the caller's span, which is sampled.
        begun_ns: time of its begin, in nanoseconds since 1970; 0 for now.
    """
    if _enabled is None:
        return None
    return _enabled.begin_served(operation, journal, parent, begun_ns)


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
