"""Tables of the documentation that are made of the code, so that they stay true.

Run this file to write them into the pages anew: ``python tests/support/made_tables.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gazette_sdk.cli.capacity import CAPACITY, UNIT_COSTS
from gazette_sdk.cli.settings import (
    BENCH,
    BROKER_PROCESSES,
    CONSUMER,
    CONSUMER_BROKER,
    CONSUMER_ETCD,
    CONSUMER_PROCESSES,
)
from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.server.options import BoundOption, Group
from gazette_sdk.server.settings import BROKER, DEBUG, ETCD, LOGGING, METRICS
from support.figure_tables import (
    latency_ratios,
    latency_table,
    machine_text,
    program_table,
    rate_table,
    short_rate_table,
)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gazette_sdk"
SPARK = ROOT / "contrib" / "spark" / "gazette_spark"
OPTIONS: tuple[Group[Any], ...] = (BROKER, ETCD, LOGGING, DEBUG, METRICS)
MORE = {BROKER: [BROKER_PROCESSES], CONSUMER: [CONSUMER_PROCESSES]}
"""Further groups of a section."""
ROOMS = (
    PACKAGE / "protocol",
    PACKAGE / "framing",
    PACKAGE / "fragment",
    PACKAGE / "cluster",
    PACKAGE / "transport",
    PACKAGE / "server",
    PACKAGE / "console",
    PACKAGE / "message",
    PACKAGE / "journals",
    PACKAGE / "broker",
    PACKAGE / "shard",
    PACKAGE / "local_cluster",
    PACKAGE / "cli",
    PACKAGE / "testing",
    SPARK,
)

_BEGIN = "<!-- {what}: made by tests/support/made_tables.py -->\n"
_END = "<!-- end -->"
_SOURCE = re.compile(
    r"\s*\([^()]*\b(?:sections?|broker|cli|shard|recovery log) \d[^()]*\)|;[^;.]*\bsection \d+"
)
"""Where a docstring names the section of a format's description, which is not part of the docs."""


def tables() -> dict[Path, dict[str, Callable[[], str]]]:
    """By page: what its tables hold, and how each is made."""
    docs = ROOT / "docs"
    return {
        docs / "brokers.md": {
            f"options of [{group.title}]": lambda group=group: option_table(
                group, *MORE.get(group, ())
            )
            for group in OPTIONS
        },
        docs / "consumers.md": {
            f"options of [{group.title}] of consumers": lambda group=group: option_table(
                group, *MORE.get(group, ())
            )
            for group in (CONSUMER, CONSUMER_ETCD, CONSUMER_BROKER)
        },
        docs / "bench.md": {f"options of [{BENCH.title}]": lambda: option_table(BENCH)},
        docs / "scale.md": {
            "unit costs": unit_cost_table,
            f"options of [{CAPACITY.title}]": lambda: option_table(CAPACITY),
        },
        docs / "performance.md": {
            "machine": machine_text,
            "figures": program_table,
            "rates of published messages": lambda: rate_table("published"),
            "rates of consumed messages": lambda: rate_table("consumed"),
        },
        docs / "why.md": {"rates in short": short_rate_table},
        docs / "latency.md": {
            "machine": machine_text,
            "latencies": latency_table,
            "latencies beside others": latency_ratios,
            "many readers": lambda: program_table("tailing_readers"),
        },
        docs / "architecture.md": {
            f"modules of {room.name}": lambda room=room: module_table(room) for room in ROOMS
        },
    }


def renewed(page: Path) -> str:
    """A page's text with its tables made anew."""
    text = page.read_text(encoding="utf-8")
    for what, make in tables()[page].items():
        begin = _BEGIN.format(what=what)
        place = re.compile(re.escape(begin) + ".*?" + re.escape(_END), re.DOTALL)
        made = f"{begin}\n{make()}\n\n{_END}"
        text, count = place.subn(lambda _, made=made: made, text)
        assert count == 1, f"{page.name} has {count} places for the {what}"
    return text


# ------------------------------------------------------------------ options


def option_table(*groups: Group[Any]) -> str:
    """The options of groups as a table of Markdown."""
    lines = ["| flag | INI key | environment | default | meaning |", "|---|---|---|---|---|"]
    for bound in [each for group in groups for each in group.options]:
        description = bound.option.description.replace("|", "\\|")
        env = f"`{bound.env}`" if bound.env else ""
        choices = f" ({', '.join(bound.choices)})" if bound.choices else ""
        lines.append(
            f"| `--{bound.long}` | `{bound.option.key}` | {env} "
            f"| {_default(bound)} | {description}{choices} |"
        )
    return "\n".join(lines)


def _default(bound: BoundOption) -> str:
    if bound.kind == "duration":
        return f"`{format_duration(round(bound.default * SECOND_NS))}`"
    if bound.kind == "flag":
        return "on" if bound.default else "off"
    return f"`{bound.default}`" if bound.default not in {"", ()} else ""


# ------------------------------------------------------------------ unit costs


def unit_cost_table() -> str:
    """The unit costs of capacity estimates, with the programs that measure them."""
    lines = ["| what | cost | measured by |", "|---|---|---|"]
    for cost in UNIT_COSTS.values():
        unit = f" {cost.unit}" if cost.unit else ""
        lines.append(f"| {cost.what} | {cost.value:g}{unit} | `{cost.program}` |")
    return "\n".join(lines)


# ------------------------------------------------------------------ modules


def module_table(room: Path) -> str:
    """The modules of a room, in the order in which its docstring names them."""
    marked = re.findall(r"`([^`\n]+)`", _docstring(room / "__init__.py"))
    order = [name.rpartition(".")[2].lstrip("~") for name in marked]
    modules = {
        str(path.relative_to(room).with_suffix("")).replace("/__init__", "").replace("/", "."): path
        for path in sorted(room.rglob("*.py"))
        if path != room / "__init__.py" and not path.stem.endswith("_pb2")
    }

    def place(name: str) -> tuple[int, str]:
        parent = name.partition(".")[0]
        return (order.index(parent) if parent in order else len(order), name)

    lines = ["| module | what it is for |", "|---|---|"]
    for name in sorted(modules, key=place):
        first = _docstring(modules[name]).partition("\n\n")[0].replace("\n", " ")
        text = _SOURCE.sub("", first).replace("``", "`").replace("|", "\\|").rstrip(":")
        lines.append(f"| `{name}` | {text} |")
    return "\n".join(lines)


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    for made_page in tables():
        made_page.write_text(renewed(made_page), encoding="utf-8")
