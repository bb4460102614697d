"""Messages per second with Gazette, Redis, NATS JetStream and Kafka, on the same messages.

    scripts/peers run [ARG...]                install and start the other systems, and run this
    python benchmarks/messages.py [--peers]   with --peers, if their servers run already

    [--rounds 5] [--messages 200000] [--singles 2000] [--only NAME,...] [--ways WAY,...]
    [--out FILE] [--json]

All systems encode and decode the same dicts with orjson (see `peers/contender.py`). Each round runs
each system's Python client in a new process. The servers run through all rounds. Systems take
turns, in another order each round. Figures are medians, and the first round is not counted. Clients
are warm: before the measurement they have published and consumed messages with the measured method.
Publishing is measured until the last acknowledgement, and consuming until the last message is
decoded. Consuming begins before our Reader is created; before the first XREAD; when NATS has its
consumer; and with Kafka's first batch, because joining a group takes seconds.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measure import percentile
from peers.contender import SINGLE_MESSAGES, Contender, Round, measure

OURS = "Gazette"

OTHERS = {
    "Redis": ("peers.redis_streams", "RedisStreams"),
    "NATS JetStream": ("peers.nats_jetstream", "NatsJetStream"),
    "Kafka": ("peers.kafka", "Kafka"),
}

BARS = {
    "publish()": 1.2,
    "publish_batch(list)": 1.2,
    "publish_batch(RecordBatch)": 1.2,
    "Reader(dict)": 1.0,
    "Reader(Struct)": 2.0,
    "Reader(dataclass)": 2.0,
    "Reader.arrow": 3.0,
}
"""Ratio to the best other system."""

MARKS = {
    "publish_batch(list)": 557_000,
    "publish_batch(RecordBatch)": 557_000,
    "Reader.arrow": 449_000,
}
"""Messages per second of a compiled client."""

ROUND_TIMEOUT_S = 600.0


@dataclass
class System:
    """One system's figures.

    Attributes:
        name: of the system.
        durability: what its acknowledgements mean.
        rounds: what it did, round by round.
    """

    name: str
    durability: str = ""
    rounds: list[Round] = field(default_factory=list)

    def median(self, kind: str) -> dict[str, float]:
        """Medians of messages per second by way; ``kind`` is ``published`` or ``consumed``."""
        rates = [getattr(each, f"{kind}_per_s") for each in self.rounds]
        return {way: statistics.median(each[way] for each in rates) for way in rates[0]}

    def percentile_us(self, kind: str, percent: float) -> float | None:
        """Of the latencies of all rounds, in microseconds; ``kind`` is ``single`` or ``tail``."""
        every = [each.single_s if kind == "single" else each.tail_s for each in self.rounds]
        found = list(itertools.chain.from_iterable(every))
        return percentile(found, percent) * 1e6 if found else None


# --------------------------------------------------------------- measurement


@dataclass(frozen=True)
class Part:
    """Work of one process in one round.

    Attributes:
        name: name of the system.
        address: address of our broker.
        topic: prefix of the topics' names.
        messages: number of messages per method.
        singles: number of measured latencies.
        ways: our methods to measure; None means all.
        synced: True if acknowledged messages are on disk.
    """

    name: str
    address: str
    topic: str
    messages: int
    singles: int
    ways: list[str] | None = None
    synced: bool = False


def run(options: argparse.Namespace) -> list[System]:
    """Run all rounds of all systems."""
    names = [OURS, *(OTHERS if options.peers else ())]
    names = _chosen(options.only, names) if options.only else names
    ways = _chosen(options.ways, BARS) if options.ways else None
    systems = {name: System(name) for name in names}
    with gazette_dev() as address:
        for number in range(options.rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                part = Part(
                    name, address, f"bench-{number}", options.messages, options.singles, ways
                )
                durability, found = in_process(part)
                systems[name].durability = durability
                if number or not options.rounds:
                    systems[name].rounds.append(found)
                print(f"round {number}: {name}", file=sys.stderr)
    return list(systems.values())


def _chosen(text: str, known: Iterable[str]) -> list[str]:
    chosen = text.split(",")
    unknown = sorted(set(chosen).difference(known))
    if unknown:
        raise SystemExit(f"unknown or not measured: {', '.join(unknown)}; there is {list(known)}")
    return chosen


@contextmanager
def gazette_dev() -> Iterator[str]:
    """Run `gazette dev` over a temporary directory; yield its address."""
    with tempfile.TemporaryDirectory(prefix="gazette-bench-") as data:
        command = [sys.executable, "-m", "gazette_sdk.cli.gazette", "dev"]
        process = subprocess.Popen(
            [*command, "--data", data, "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            address = re.search(r"https?://\S+", first)
            if address is None:
                raise RuntimeError(f"`gazette dev` did not start: {first!r}")
            yield address[0]
        finally:
            process.terminate()
            process.communicate(timeout=60)


def in_process(part: Part) -> tuple[str, Round]:
    """One round of a system, in a process of its own: its durability, and what it did."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_take, args=(there, part), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(ROUND_TIMEOUT_S):
            raise TimeoutError(f"{part.name}: a round takes more than {ROUND_TIMEOUT_S:.0f} s")
        durability, found = here.recv()
        process.join(60)
    except EOFError:
        raise RuntimeError(
            f"{part.name}: a round failed, see above; does its server run? (scripts/peers start)"
        ) from None
    finally:
        process.kill()
    return durability, found


def _take(pipe: Connection, part: Part) -> None:
    contender = _contender(part)
    found = measure(contender, part.topic, part.messages, part.singles)
    contender.close()
    pipe.send((contender.durability, found))


def _contender(part: Part) -> Contender:
    if part.name == OURS:
        gazette = importlib.import_module("peers.gazette")
        ways = part.ways or gazette.PUBLISHERS + gazette.CONSUMERS
        ours: Contender = gazette.Gazette(part.address, ways, synced=part.synced)
        return ours
    module, class_name = OTHERS[part.name]
    try:
        made = getattr(importlib.import_module(module), class_name)
        others: Contender = made(synced=True) if part.synced else made()
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{part.name}: {error}; `scripts/peers run` installs and finds it"
        ) from error
    return others


# ------------------------------------------------------------------- figures


def summary(systems: Sequence[System]) -> dict[str, Any]:
    """Return all figures for JSON, with ratios to the best other system."""
    others = [system for system in systems if system.name != OURS]
    rows = []
    for kind in ("published", "consumed"):
        best = max((rate for each in others for rate in each.median(kind).values()), default=None)
        for system in systems:
            for way, rate in system.median(kind).items():
                row: dict[str, Any] = {"system": system.name, "what": kind, "way": way}
                row |= {"messages_per_s": round(rate)}
                if system.name == OURS and best:
                    row |= {"ratio": round(rate / best, 2), "bar": BARS[way]}
                    row |= {"holds": rate >= best * BARS[way]}
                if system.name == OURS and way in MARKS:
                    row |= {"mark": MARKS[way], "reaches_mark": rate >= MARKS[way]}
                rows.append(row)
    latencies = [
        {"system": system.name, "what": what}
        | {f"p{percent}_us": system.percentile_us(what, percent) for percent in (50, 99)}
        for what in ("single", "tail")
        for system in systems
    ]
    durability = {system.name: system.durability for system in systems}
    return {"rates": rows, "latencies": latencies, "durability": durability}


def markdown(found: dict[str, Any]) -> str:
    """Return the figures as Markdown, ratios first."""
    lines = ["| messages/s | way | ratio to the best other | bar | rate | mark |"]
    lines += ["|---|---|---|---|---|---|", *map(_rate_line, found["rates"])]
    lines += ["", "| latency | system | p50 | p99 |", "|---|---|---|---|"]
    lines += [_latency_line(row) for row in found["latencies"] if row["p50_us"] is not None]
    lines += ["", "| system | what is acknowledged is |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in found["durability"].items()]
    return "\n".join(lines)


def _rate_line(row: dict[str, Any]) -> str:
    ratio = bar = mark = ""
    if "ratio" in row:
        ratio = f"{row['ratio']:.2f}"
        bar = f"≥ {row['bar']}" + _unless(row["holds"])
    if "mark" in row:
        mark = f"≥ {row['mark']:,}" + _unless(row["reaches_mark"])
    name = f"{row['system']}: `{row['way']}`"
    return f"| {row['what']} | {name} | {ratio} | {bar} | {row['messages_per_s']:,} | {mark} |"


def _unless(holds: bool) -> str:  # noqa: FBT001 - there is nothing else it could mean
    return "" if holds else ": **not met**"


def _latency_line(row: dict[str, Any]) -> str:
    what = {"single": "published one by one", "tail": "read at the end, 1,000/s"}[row["what"]]
    return f"| {what} | {row['system']} | {row['p50_us']:,.0f} µs | {row['p99_us']:,.0f} µs |"


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true", help="also the others, which run already")
    parser.add_argument("--rounds", type=int, default=5, help="counted ones; 0 counts the first")
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--singles", type=int, default=SINGLE_MESSAGES, help="0 leaves latency out")
    parser.add_argument("--only", default="", help="names of systems, with commas between")
    parser.add_argument("--ways", default="", help="ours to measure, with commas between")
    parser.add_argument("--out", type=Path, help="file for JSON with every round's figures")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    systems = run(options)
    found = summary(systems)
    if options.out:
        rounds = {system.name: [asdict(each) for each in system.rounds] for system in systems}
        options.out.write_text(json.dumps({**found, "rounds": rounds}))
    print(json.dumps(found, indent=2) if options.json else markdown(found))


if __name__ == "__main__":
    main()
