"""The tables of options in the documentation, made of the options themselves.

Run this file to write them into the pages anew: ``python tests/support/option_tables.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.server.options import BoundOption, Group
from gazette_sdk.server.settings import BROKER, DEBUG, ETCD, LOGGING

PAGE = Path(__file__).parents[2] / "docs" / "brokers.md"
GROUPS: tuple[Group[Any], ...] = (BROKER, ETCD, LOGGING, DEBUG)
_PLACE = "<!-- options of [{title}]: made by tests/support/option_tables.py -->\n{table}\n<!-- end -->"


def table(group: Group[Any]) -> str:
    """A group's options as a table of Markdown."""
    lines = [
        "",
        "| flag | INI key | environment | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for bound in group.options:
        description = bound.option.description.replace("|", "\\|")
        choices = f" ({', '.join(bound.choices)})" if bound.choices else ""
        lines.append(
            f"| `--{bound.long}` | `{bound.option.key}` | `{bound.env}` "
            f"| {_default(bound)} | {description}{choices} |"
        )
    return "\n".join([*lines, ""])


def with_tables(text: str) -> str:
    """A page's text with its tables made anew."""
    for group in GROUPS:
        place = re.compile(
            re.escape(_PLACE.format(title=group.title, table="TABLE")).replace("TABLE", ".*?"),
            re.DOTALL,
        )
        made = _PLACE.format(title=group.title, table=table(group))
        text, count = place.subn(lambda _, made=made: made, text)
        assert count == 1, f"the page has {count} places for the options of [{group.title}]"
    return text


def _default(bound: BoundOption) -> str:
    if bound.kind == "duration":
        return f"`{format_duration(round(bound.default * SECOND_NS))}`"
    if bound.kind == "flag":
        return "on" if bound.default else "off"
    return f"`{bound.default}`" if bound.default not in {"", ()} else ""


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
