"""Options that commands of journals and of shards share, as annotated types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gazette_sdk.server.options import Option

__all__ = [
    "FileRoot",
    "LabelColumns",
    "MaxTxnSize",
    "OutcomeFormat",
    "RemoveNothing",
    "RemoveYes",
    "SpecsPath",
]

FileRoot = Annotated[
    str, Option("FileRoot", "Directory of the brokers' file:// stores on this machine")
]
"""Directory of fragments that the command opens itself."""

LabelColumns = Annotated[
    tuple[str, ...], Option("Labels", "Label to show as a column of the table", short="L")
]
"""Columns of a listing."""

MaxTxnSize = Annotated[
    int,
    Option("MaxTxnSize", "Greatest number of changes in one transaction; 0 for all in one"),
    Field(ge=0),
]
"""Bound of the transactions of Etcd."""

OutcomeFormat = Annotated[
    Literal["table", "json"],
    Option("Format", "Output format; json is one object per line and item", short="o"),
]
"""Format of what came of each item."""

RemoveNothing = Annotated[
    bool, Option("DryRun", "Only show what would be removed, which is the default")
]
"""The opposite of :data:`RemoveYes`."""

RemoveYes = Annotated[
    bool,
    Option(
        "Yes",
        "Remove the fragments; without it, only show what would be removed",
        short="y",
        in_ini=False,
    ),
]
"""Confirmation of a removal."""

SpecsPath = Annotated[str, Option("SpecsPath", "File of specs in YAML; - for standard input")]
"""File of specs to apply."""
