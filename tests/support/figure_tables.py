"""Tables of performance and latency, of the figures that `benchmarks/figures.py` has collected."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import latency  # noqa: E402 - the benchmarks are programs: what they import stands beside them

FIGURES = BENCHMARKS / "figures.json"
APART = ("machine", "run", "latency")
"""Parts that have tables of their own, or none."""


@cache
def figures() -> dict[str, Any]:
    """Return what was measured, by program."""
    found: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return found


def machine_text() -> str:
    """Return the machine, the version and the day of the figures, as a sentence."""
    machine = figures()["machine"]
    return (
        f"Measured on {machine['day']} at revision {machine['revision']} (version "
        f"{machine['version']}), on a virtual machine with {machine['cores']} cores of an "
        f"{machine['cpu']} processor, {machine['memory']} of memory, {machine['system']} and "
        f"Python {machine['python']}."
    )


def program_table(*programs: str) -> str:
    """Return the figures of programs: by default of all that print a list."""
    lines = [
        "| program | measurement | Gazette | reference | ratio | bar |",
        "|---|---|---|---|---|---|",
    ]
    for program in programs or [name for name in figures() if name not in APART]:
        for row in figures()[program]:
            name, _, label = row["name"].removesuffix(" = baseline").rpartition(", ")
            if not row["name"].endswith(" = baseline"):
                name, label = row["name"], ""
            reference = amount(row["baseline"], row["unit"])
            is_compared = row["bar"] is not None or bool(label) or "beside" in name
            sign = "≥" if row["more_is_better"] else "≤"
            bar = "" if row["bar"] is None else f"{sign} {row['bar']:g}{unless(row['holds'])}"
            lines.append(
                f"| `{program}` | {name} | {amount(row['ours'], row['unit'])} "
                f"| {f'{label} {reference}'.strip() if is_compared else ''} "
                f"| {format(row['ratio'], '.2f') if is_compared else ''} | {bar} |"
            )
    return "\n".join(lines)


def rate_table(kind: str) -> str:
    """Return the rates of messages that are ``published`` or ``consumed``, ours first."""
    lines = [f"| {kind} | way | messages/s | to the best other | bar |", "|---|---|---|---|---|"]
    for row in figures()["run"]["rates"]:
        if row["what"] != kind:
            continue
        is_ours = "ratio" in row
        ratio = f"{row['ratio']:.2f}" if is_ours else ""
        bar = f"≥ {row['bar']}{unless(row['holds'])}" if is_ours else ""
        rate = f"{row['messages_per_s']:,}"
        lines.append(f"| {row['system']} | `{row['way']}` | {rate} | {ratio} | {bar} |")
    return "\n".join(lines)


def short_rate_table() -> str:
    """Return rates of all systems in short, in thousands of messages a second."""
    rows = figures()["run"]["rates"]
    systems = list({row["system"]: None for row in rows})
    ours = systems[0]
    ways = {
        "published, one call per message": ("published", ("publish()",)),
        "published in batches": (
            "published",
            ("publish_batch(list)", "publish_batch(RecordBatch)"),
        ),
        "consumed as dicts": ("consumed", ("Reader(dict)",)),
    }
    lines = [f"| | {' | '.join(systems)} |", f"|{'---|' * (len(systems) + 1)}"]
    for name, (kind, of_ours) in ways.items():
        cells = []
        for system in systems:
            found = [
                row["messages_per_s"] / 1000
                for row in rows
                if (row["what"], row["system"]) == (kind, system)
                and (system != ours or row["way"] in of_ours)
            ]
            is_shown = system == ours or len(of_ours) == 1
            cells.append(f"{' to '.join(f'{rate:,.0f}' for rate in found)} k/s" if is_shown else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def latency_table() -> str:
    """Return the latencies of all systems, as the program prints them."""
    return latency.markdown(figures()["latency"])


def latency_ratios() -> str:
    """Return our latencies beside those of the best other system."""
    lines = ["| Gazette beside the best other system | ratio | bar |", "|---|---|---|"]
    for row in figures()["latency"]["bars"]:
        name, _, other = row["name"].removesuffix(" = baseline").partition(", ")
        kind, _, percent = name.partition(" ")
        lines.append(
            f"| {latency.KINDS[kind].partition(',')[0]}, {percent}, beside {other} "
            f"| {row['ratio']:.2f} | ≤ {row['bar']:g}{unless(row['holds'])} |"
        )
    return "\n".join(lines)


def amount(value: float, unit: str) -> str:
    """Return a number of three digits at least, with its unit."""
    unit = unit.removeprefix("1")
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}{unit if unit.startswith('/') else f' {unit}'}"


def unless(holds: bool) -> str:
    """Return what is said of a bar that is not met."""
    return "" if holds else ": **not met**"
