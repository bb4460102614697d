"""Report of a run: tables for people, one JSON object for programs.

Latencies are counted in a :class:`Histogram` of logarithmic buckets. A program that waits for a
slow answer before it sends the next request measures few slow answers (coordinated omission). So
the due times are fixed in advance (:class:`Schedule`), and a latency counts from the due time. A
late message is sent at once.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gazette_sdk.cli.bench.verify import Findings
from gazette_sdk.cli.formats import write_table

_PRECISION_BITS = 8
"""Values in one bucket differ by less than one in 2 ** 7, which is below 0.8 %."""

_VALUE_BITS = 44
"""The greatest value is 2 ** 44 ns, which is five hours; greater ones count as that."""

_HALF = 1 << (_PRECISION_BITS - 1)
_VALUE_MAX = (1 << _VALUE_BITS) - 1
_BUCKETS = (_VALUE_BITS - _PRECISION_BITS + 2) * _HALF


class Histogram:
    """Histogram of integers, such as nanoseconds.

    Small values and the greatest one are exact, the others within 0.8 %. It takes about 40 KB
    for any number of values.

    Attributes:
        count: number of values.
        max: greatest value.
        total: sum of the values.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max = 0
        self.total = 0
        self._counts = [0] * _BUCKETS

    def record(self, value: int) -> None:
        """Record a value. A negative value counts as zero."""
        value = max(value, 0)
        self.count += 1
        self.total += value
        self.max = max(self.max, value)
        value = min(value, _VALUE_MAX)
        shift = max(value.bit_length() - _PRECISION_BITS, 0)
        self._counts[shift * _HALF + (value >> shift)] += 1

    @property
    def mean(self) -> float:
        """Mean of the values; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def quantiles(self, shares: Sequence[float]) -> list[int]:
        """Return quantiles: the greatest value of each quantile's bucket, or 0 without values.

        Args:
            shares: shares of all values such as 0.99, ascending.
        """
        found: list[int] = []
        seen, bucket = 0, -1
        for share in shares:
            wanted = max(1, math.ceil(share * self.count - 1e-9))
            while self.count and seen < wanted:
                bucket += 1
                seen += self._counts[bucket]
            found.append(min(_greatest(bucket), self.max) if self.count else 0)
        return found


def _greatest(bucket: int) -> int:
    """Return the greatest value of a bucket."""
    shift = max(bucket // _HALF - 1, 0)
    return ((bucket - shift * _HALF + 1) << shift) - 1


NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Fixed due times of messages.

    Attributes:
        begin_ns: due time of the first message, on the clock that all processes share
            (:func:`time.monotonic_ns`).
        rate: messages per second.
        count: number of messages.
    """

    begin_ns: int
    rate: float
    count: int

    def due_ns(self, index: int) -> int:
        """Return the due time of a message."""
        return self.begin_ns + int(index * NANOSECONDS / self.rate)

    def due_by(self, now_ns: int) -> int:
        """Return the number of messages that are due by a time."""
        if now_ns < self.begin_ns:
            return 0
        guess = int((now_ns - self.begin_ns) * self.rate / NANOSECONDS)
        # Whatever rounding did: those before are due, and the next one is not.
        while guess > 0 and self.due_ns(guess) > now_ns:
            guess -= 1
        while self.due_ns(guess + 1) <= now_ns:
            guess += 1
        return min(guess + 1, self.count)


def due_messages(
    schedule: Schedule,
    *,
    now_ns: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], object] = time.sleep,
    at_once_max: int = 1000,
) -> Iterator[range]:
    """Wait for due messages, and yield ranges of their indices.

    Args:
        schedule: the due times.
        now_ns: the clock.
        sleep: waits, in seconds.
        at_once_max: greatest length of a range.
    """
    done = 0
    while done < schedule.count:
        due = min(schedule.due_by(now_ns()), done + at_once_max)
        if due > done:
            yield range(done, due)
            done = due
        else:
            sleep(max(0, schedule.due_ns(done) - now_ns()) / NANOSECONDS)


_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}
_MILLISECOND_NS = 1e6


@dataclass(frozen=True, slots=True)
class Throughput:
    """Messages in some time.

    Attributes:
        messages: number of messages.
        length_bytes: their length in the journals, with their UUIDs.
        seconds: elapsed time.
    """

    messages: int
    length_bytes: int
    seconds: float

    @property
    def messages_per_s(self) -> float:
        """Messages per second."""
        return self.messages / self.seconds

    @property
    def megabytes_per_s(self) -> float:
        """Megabytes (10 ** 6 bytes) of journals per second."""
        return self.length_bytes / 1e6 / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return its figures by their keys."""
        return {
            "messages": self.messages,
            "bytes": self.length_bytes,
            "seconds": round(self.seconds, 6),
            "messages_per_s": round(self.messages_per_s, 1),
            "megabytes_per_s": round(self.megabytes_per_s, 3),
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """Comparison of the messages that were read with those that were acknowledged.

    Attributes:
        findings: defects that the readers of all phases found.
        chains: by journal, the hash chain over the acknowledged messages; empty without the
            phase *read*.
    """

    findings: Findings
    chains: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return its figures by their keys."""
        return {
            "ok": self.findings.is_flawless,
            "messages": self.findings.count,
            **{
                kind: {"count": defects.count, "named": defects.named}
                for kind, defects in self.findings.by_kind.items()
            },
            "chains": self.chains,
        }


@dataclass
class Report:
    """Figures of a run. Those of phases that did not run are ``None``.

    Attributes:
        setting: parameters of the run, by key.
        publish: throughput of the phase *publish*.
        tail: throughput of the phase *tail*.
        tail_rate: due messages per second.
        latency: latencies of the phase *tail*, in nanoseconds from each due time.
        read: throughput of the phase *read*.
        verification: result of the comparison; ``None`` if no phase has read.
    """

    setting: dict[str, Any]
    publish: Throughput | None = None
    tail: Throughput | None = None
    tail_rate: float = 0.0
    latency: Histogram | None = None
    read: Throughput | None = None
    verification: Verification | None = None

    def write_json(self) -> None:
        """Write the report to standard output as one line of JSON."""
        sys.stdout.buffer.write(orjson.dumps(self.as_json()) + b"\n")
        sys.stdout.buffer.flush()

    def as_json(self) -> dict[str, Any]:
        """Return the figures by keys, which never change. Phases that did not run have none."""
        found: dict[str, Any] = dict(self.setting)
        if self.publish is not None:
            found["publish"] = self.publish.as_json()
        if self.tail is not None and self.latency is not None:
            found["tail"] = {
                **self.tail.as_json(),
                "rate": self.tail_rate,
                "latency_ms": self._latency_ms(),
            }
        if self.read is not None:
            found["read"] = self.read.as_json()
        if self.verification is not None:
            found["verification"] = self.verification.as_json()
        return found

    def _latency_ms(self) -> dict[str, float]:
        assert self.latency is not None
        values = self.latency.quantiles(list(_QUANTILES.values()))
        found = dict(zip(_QUANTILES, values, strict=True))
        found["max"] = self.latency.max
        by_name = {name: round(value / _MILLISECOND_NS, 3) for name, value in found.items()}
        return {**by_name, "mean": round(self.latency.mean / _MILLISECOND_NS, 3)}

    def write_tables(self) -> None:
        """Write the report to standard output as tables."""
        rows = [
            _row(name, figures)
            for name, figures in (
                ("publish", self.publish),
                ("tail", self.tail),
                ("catch-up read", self.read),
            )
            if figures is not None
        ]
        write_table(("phase", "messages", "seconds", "messages/s", "MB/s"), rows)
        if self.latency is not None:
            latency = self._latency_ms()
            headers = [f"{name.replace('_', '.')} ms" for name in latency]
            write_table(["tail latency", *headers], [["", *(f"{v:.2f}" for v in latency.values())]])
        findings = self.verification.findings if self.verification is not None else None
        if findings is not None and findings.is_flawless:
            sys.stdout.write(
                f"Verified {findings.count:,} messages: none was lost, duplicated, reordered "
                "or changed.\n"
            )
        sys.stdout.flush()


def _row(name: str, figures: Throughput) -> list[str]:
    return [
        name,
        f"{figures.messages:,}",
        f"{figures.seconds:,.2f}",
        f"{figures.messages_per_s:,.0f}",
        f"{figures.megabytes_per_s:,.1f}",
    ]
