"""Options of the commands of ``gazctl shards`` (cli section 8)."""

from __future__ import annotations

from typing import Annotated, Literal

from gazette_sdk.cli.shared_options import (
    FileRoot,
    LabelColumns,
    MaxTxnSize,
    OutcomeFormat,
    RemoveNothing,
    RemoveYes,
    SpecsPath,
)
from gazette_sdk.server.options import Group, Option, Settings

__all__ = [
    "APPLY",
    "EDIT",
    "GENERATE",
    "LIST",
    "PRUNE",
    "RECOVER",
    "UNASSIGN",
    "GenerateSettings",
    "ListSettings",
    "PruneSettings",
]

_SELECTOR = Option("Selector", "Label selector of the shards", short="l")


class ListSettings(Settings):
    """Options of ``list``."""

    selector: Annotated[str, _SELECTOR] = ""
    format: Annotated[
        Literal["table", "yaml", "json", "proto"], Option("Format", "Output format", short="o")
    ] = "table"
    label_columns: LabelColumns = ()
    primary: Annotated[
        bool, Option("Primary", "Show the primary and its status in the table", short="p")
    ] = False
    replicas: Annotated[
        bool, Option("Replicas", "Show the standbys and their statuses in the table", short="r")
    ] = False
    rf: Annotated[bool, Option("RF", "Show the number of processes that should hold the shard")] = (
        False
    )
    lag: Annotated[
        bool,
        Option(
            "Lag",
            "Show the bytes of each source that are not read yet; asks primaries and brokers",
        ),
    ] = False
    errors: Annotated[
        bool, Option("Errors", "Show why shards have failed in the table", short="e")
    ] = False


class ApplySettings(Settings):
    """Options of ``apply``."""

    specs: SpecsPath = "-"
    dry_run: Annotated[
        bool, Option("DryRun", "Check the specs and their journals, and print the request")
    ] = False
    max_txn_size: MaxTxnSize = 0
    format: OutcomeFormat = "table"


class EditSettings(Settings):
    """Options of ``edit``."""

    selector: Annotated[
        str, Option("Selector", "Label selector of the shards", short="l", in_ini=False)
    ] = ""
    max_txn_size: MaxTxnSize = 0


class GenerateSettings(Settings):
    """Options of ``generate``."""

    sources: Annotated[
        str,
        Option(
            "Sources",
            "Label selector of the source journals; by default what the application declares",
        ),
    ] = ""
    dry_run: Annotated[
        bool, Option("DryRun", "Only show the specs of the shards that would be created")
    ] = False
    watch: Annotated[
        bool, Option("Watch", "Go on with journals that are created later, until interrupted")
    ] = False
    format: OutcomeFormat = "table"


class PruneSettings(Settings):
    """Options of ``prune``."""

    selector: Annotated[str, _SELECTOR] = ""
    yes: RemoveYes = False
    dry_run: RemoveNothing = False
    format: OutcomeFormat = "table"
    file_root: FileRoot = ""


class RecoverSettings(Settings):
    """Options of ``recover``."""

    id: Annotated[str, Option("ID", "Id of the shard")] = ""
    directory: Annotated[
        str,
        Option(
            "Dir", "Directory for the files of its store, which is emptied", long="dir", short="d"
        ),
    ] = ""
    file_root: FileRoot = ""


class UnassignSettings(Settings):
    """Options of ``unassign``."""

    selector: Annotated[str, _SELECTOR] = ""
    failed: Annotated[bool, Option("OnlyFailed", "Only shards that have failed", long="failed")] = (
        False
    )
    dry_run: Annotated[bool, Option("DryRun", "Only show what would be unassigned")] = False


LIST = Group("shards.list", ListSettings)
APPLY = Group("shards.apply", ApplySettings)
EDIT = Group("shards.edit", EditSettings)
GENERATE = Group("shards.generate", GenerateSettings)
PRUNE = Group("shards.prune", PruneSettings)
RECOVER = Group("shards.recover", RecoverSettings)
UNASSIGN = Group("shards.unassign", UnassignSettings)
