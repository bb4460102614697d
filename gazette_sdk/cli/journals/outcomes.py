"""Outcomes of changes, as tables for people and JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, TextIO, TypeAlias

import orjson

from gazette_sdk.cli.formats import NONE, write_table
from gazette_sdk.journals.changes import AppliedChange

__all__ = ["OutcomeFormat", "show_outcomes"]

OutcomeFormat: TypeAlias = Literal["table", "json"]


def show_outcomes(
    changes: Iterable[AppliedChange], form: OutcomeFormat, file: TextIO | None = None
) -> None:
    """Write outcomes of changes.

    Args:
        changes: the changes.
        form: a table, or one JSON object per line and journal.
        file: output file; by default standard output.
    """
    file = file or sys.stdout
    if form == "table":
        rows = (
            [each.name, each.outcome, str(each.spec.replication or NONE), _stores(each)]
            for each in changes
        )
        write_table(["Journal", "Outcome", "RF", "Stores"], rows, file)
    else:
        for each in changes:
            shown: dict[str, Any] = {"journal": each.name, "outcome": each.outcome}
            if each.spec.replication:  # the name alone is known of an unknown journal
                shown |= {
                    "replication": each.spec.replication,
                    "stores": list(each.spec.fragment.stores),
                }
            file.write(orjson.dumps(shown).decode() + "\n")
    file.flush()


def _stores(change: AppliedChange) -> str:
    return ", ".join(change.spec.fragment.stores) or NONE
