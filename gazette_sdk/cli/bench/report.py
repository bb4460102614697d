"""Report of a run: tables for people, one JSON object for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gazette_sdk.cli.bench.histogram import Histogram
from gazette_sdk.cli.bench.verify import Findings
from gazette_sdk.cli.formats import write_table

__all__ = ["Report", "Throughput", "Verification"]

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
