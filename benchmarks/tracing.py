"""Cost of traces: messages published and read per second, with tracing enabled and without.

The broker has a process of its own. One message of a hundred is published within a span; the
others are published within another one that is not sampled, as in a server that samples one request
of a hundred. Without tracing the program does the same, so that the cost of these spans themselves
is not counted. Spans of appends are given to an exporter that drops them.

Each kind has a publisher of its own. Readers of a journal are compared with one of the same journal
without tracing, as journals differ in the lengths of their appends. They take turns in short runs,
in another order each round, and each run is compared with the one without tracing of the same
round: the ratio is the median over the rounds. Rates are per second of processor time of this
process, which a busy machine changes least. One kind is another one without tracing: its ratio says
how far the others are to be trusted.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from measure import Figure, arguments, cluster, report
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from peers.contender import make
from peers.gazette import specs_of

from gazette_sdk import Publisher, Reader, Transport, connect, mapping, tracing

TOPIC = "traced"
EVERY = 100
"""One message of so many is sampled."""

WITHIN = 37
"""Number of the sampled one among them. The first after a flush would always begin an append."""

MESSAGES = [make(number) for number in range(1000)]

OFF, AGAIN, UNSAMPLED, SAMPLED = "off", "off, again", "enabled, not sampled", "1 % sampled"

OF_KIND = {OFF: False, AGAIN: False, UNSAMPLED: True, SAMPLED: True}
"""True for kinds with tracing."""

BARS = {AGAIN: None, UNSAMPLED: None, SAMPLED: 0.97}


class Dropping(SpanExporter):
    """Exporter that drops all spans."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
        """Drop spans."""
        return SpanExportResult.SUCCESS


def in_span(*, is_sampled: bool) -> contexts.Context:
    """Return a context within a span."""
    span = trace.SpanContext(
        int.from_bytes(os.urandom(16), "big"),
        int.from_bytes(os.urandom(8), "big"),
        is_remote=False,
        trace_flags=trace.TraceFlags(int(is_sampled)),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(span))


def publish(publisher: Publisher, spans: Sequence[contexts.Context]) -> None:
    """Publish a hundred messages for each span, one of them within it, and flush."""
    for span in spans:
        for number in range(EVERY):
            if number == WITHIN:
                token = contexts.attach(span)
                publisher.publish(MESSAGES[number])
                contexts.detach(token)
            else:
                publisher.publish(MESSAGES[number])
    publisher.flush()


def read(transport: Transport, journal: str, count: int) -> None:
    """Read all messages of a journal."""
    found = sum(1 for _ in Reader(dict, name=journal, transport=transport))
    assert found == count, f"{found} of {count} messages"


def compared(
    runs: dict[str, Callable[[], None]], count: int, rounds: int, provider: TracerProvider
) -> dict[str, tuple[float, float]]:
    """Return the median rate of each kind, and the median ratio to that without tracing."""
    rates: dict[str, list[float]] = {kind: [] for kind in runs}
    for round_number in range(rounds + 1):
        for kind, run in random.sample(list(runs.items()), len(runs)):
            set_mode(provider if OF_KIND[kind] else None)
            run()  # not counted: the switch has emptied caches of the processor
            begun = time.process_time()
            run()
            rate = count / (time.process_time() - begun)
            if round_number:
                rates[kind].append(rate)
    return {
        kind: (
            statistics.median(found),
            statistics.median(map(float.__truediv__, found, rates[OFF])),
        )
        for kind, found in rates.items()
    }


def set_mode(provider: TracerProvider | None) -> None:
    """Enable tracing, or disable it."""
    if provider is None:
        tracing.disable()
    else:
        tracing.enable(provider)


def main() -> None:
    """Measure, and print a table."""
    options = arguments(__doc__ or "", rounds=60, messages=5_000)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Dropping()))
    count = options.messages // EVERY * EVERY
    with cluster(specs_of(TOPIC, 4)) as running, ExitStack() as stack:
        transport = connect(running.address)
        contexts.attach(in_span(is_sampled=False))
        publishing: dict[str, Callable[[], None]] = {}
        reading: dict[str, Callable[[], None]] = {}
        for number, (kind, is_traced) in enumerate(OF_KIND.items()):
            journal = f"{TOPIC}/part-{number:03}"
            spans = [in_span(is_sampled=kind == SAMPLED) for _ in range(count // EVERY)]
            set_mode(provider if is_traced else None)
            publisher = Publisher(mapping.direct(journal), transport=transport)
            publishing[kind] = partial(publish, stack.enter_context(publisher), spans)
            publishing[kind]()
            reading[kind] = partial(read, transport, journal, count)
        of_plain = dict.fromkeys([OFF, AGAIN, UNSAMPLED], reading[OFF])
        of_sampled = dict.fromkeys([OFF, SAMPLED], reading[SAMPLED])
        found = {
            "Reader(dict)": compared(of_plain, count, options.rounds, provider)
            | compared(of_sampled, count, options.rounds, provider),
            "publish()": compared(publishing, count, options.rounds, provider),
        }
    provider.shutdown()
    report(
        [
            Figure(f"{name}, {kind}", rate, rate / ratio, "1/s", BARS[kind])
            for name, kinds in found.items()
            for kind, (rate, ratio) in kinds.items()
            if kind != OFF
        ],
        options,
    )


if __name__ == "__main__":
    main()
