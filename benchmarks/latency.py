"""Latency of single messages with Gazette, Redis, NATS JetStream and Kafka, in one run.

    scripts/peers latency [ARG...]           install and start the other systems, and run this
    python benchmarks/latency.py [--peers]   with --peers, if their servers run already

    [--rounds 5] [--singles 2000] [--only NAME,...] [--no-synced] [--out FILE] [--json] [--check]

Two figures, each with its 50th and 99th percentile:

- **single**: plain code publishes a message and waits for its acknowledgement, then the next; from
  creating a message to its acknowledgement
- **tail**: one thread publishes 1,000 messages a second, and another thread of the process reads
  them at the end; from creating a message to its decoding

Each round runs each system's Python client in a new process, which first publishes some messages.
The servers run through all rounds. Systems take turns, in another order each round. A percentile
is taken per round, and figures are medians over rounds; the first round is not counted. Bars are
ratios to the best other system, by percentile.

No system syncs a disk for each message. Systems that can do so repeat the measurement with synced
disks ("synced"); these figures have no bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from measure import Figure, add_outputs, check, cluster, percentile, rows, table
from messages import OTHERS, OURS, Part, in_process
from peers.contender import SINGLE_MESSAGES, Round

from gazette_sdk.broker.spool.directory import Durability

KINDS = {"single": "published one by one", "tail": "read at the end, 1,000/s"}
BARS = {"single": 1.0, "tail": 0.5}
"""Ratio to the best other system; less is better."""

PERCENTS = (50, 99)
CANNOT_SYNC = {"NATS JetStream"}
"""Debian's version has no such setting."""


@dataclass
class System:
    """Figures of one system in one setting.

    Attributes:
        name: name of the system.
        synced: True if acknowledged messages are on disk.
        durability: meaning of its acknowledgements.
        rounds: results by round.
    """

    name: str
    synced: bool = False
    durability: str = ""
    rounds: list[Round] = field(default_factory=list)

    def us(self, kind: str, percent: float) -> float:
        """Return a percentile in microseconds, median over rounds; ``kind`` is one of ``KINDS``."""
        every = [each.single_s if kind == "single" else each.tail_s for each in self.rounds]
        return statistics.median(percentile(taken, percent) for taken in every) * 1e6


def systems_of(options: argparse.Namespace) -> list[System]:
    """Return the systems to measure.

    Raises:
        SystemExit: a system is unknown.
    """
    known = [OURS, *(OTHERS if options.peers else ())]
    names = options.only.split(",") if options.only else known
    if unknown := sorted(set(names).difference(known)):
        raise SystemExit(f"unknown or not measured: {', '.join(unknown)}; there is {known}")
    found = [System(name) for name in names]
    if options.synced:
        found += [System(name, synced=True) for name in names if name not in CANNOT_SYNC]
    return found


def run(systems: list[System], rounds: int, singles: int) -> None:
    """Run all rounds of all systems.

    Args:
        systems: receive the figures.
        rounds: number of counted rounds; with 0 the first round counts.
        singles: messages per figure and round.
    """
    with ExitStack() as stack:
        durabilities = {False: Durability.REPLICATED, True: Durability.PERSISTED}
        addresses = {
            synced: stack.enter_context(cluster(durability=durabilities[synced])).address
            for synced in {system.synced for system in systems}
        }
        for number in range(rounds + 1):
            turn = number % len(systems)
            for system in systems[turn:] + systems[:turn]:
                topic = f"latency-{os.getpid()}-{number}-{system.synced:d}"
                part = Part(
                    system.name, addresses[system.synced], topic, 0, singles, synced=system.synced
                )
                system.durability, found = in_process(part)
                lost = 2 * singles - len(found.single_s) - len(found.tail_s)
                if lost:
                    raise RuntimeError(f"{system.name}: {lost} messages were not seen")
                if number or not rounds:
                    system.rounds.append(found)
                print(f"round {number}: {system.name}", file=sys.stderr)


def figures(systems: Sequence[System]) -> list[Figure]:
    """Return our figures and those of the best other system, without synced disks."""
    ours = [each for each in systems if each.name == OURS and not each.synced]
    others = [each for each in systems if each.name != OURS and not each.synced]
    if not ours or not others:
        return []
    found = []
    for kind in KINDS:
        for percent in PERCENTS:
            best = min(others, key=lambda each: each.us(kind, percent))
            found.append(
                Figure(
                    f"{kind} p{percent}, {best.name} = baseline",
                    ours[0].us(kind, percent),
                    best.us(kind, percent),
                    "µs",
                    BARS[kind],
                    more_is_better=False,
                )
            )
    return found


def summary(systems: Sequence[System]) -> dict[str, Any]:
    """Return all figures for JSON."""
    latencies = [
        {"system": system.name, "synced": system.synced, "what": kind}
        | {f"p{percent}_us": round(system.us(kind, percent), 1) for percent in PERCENTS}
        | {"durability": system.durability}
        for system in systems
        for kind in KINDS
    ]
    return {"latencies": latencies, "bars": rows(figures(systems))}


def markdown(found: dict[str, Any]) -> str:
    """Return the latencies as Markdown, with the meaning of an acknowledgement."""
    lines = [
        "| latency | system | p50 | p99 | an acknowledged message is |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {KINDS[row['what']]} | {row['system']}{', synced' if row['synced'] else ''} "
        f"| {row['p50_us']:,.0f} µs | {row['p99_us']:,.0f} µs | {row['durability']} |"
        for row in sorted(
            found["latencies"], key=lambda row: (row["synced"], list(KINDS).index(row["what"]))
        )
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true", help="also the others, which run already")
    parser.add_argument("--rounds", type=int, default=5, help="counted ones; 0 counts the first")
    parser.add_argument("--singles", type=int, default=SINGLE_MESSAGES)
    parser.add_argument("--only", default="", help="names of systems, with commas between")
    parser.add_argument(
        "--no-synced",
        dest="synced",
        action="store_false",
        help="leave out what syncs the disk for each message",
    )
    parser.add_argument("--out", type=Path, help="file for JSON with every message's latency")
    add_outputs(parser)
    options = parser.parse_args()
    systems = systems_of(options)
    run(systems, options.rounds, options.singles)
    found = summary(systems)
    if options.out:
        options.out.write_text(json.dumps({**found, "systems": [asdict(each) for each in systems]}))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(markdown(found))
        if compared := figures(systems):
            print(f"\n{table(compared)}")
    check(figures(systems), options)


if __name__ == "__main__":
    main()
