"""Options of the commands of ``gazctl journals`` (cli section 5)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gazette_sdk.cli.shared_options import (
    FileRoot,
    LabelColumns,
    MaxTxnSize,
    OutcomeFormat,
    RemoveNothing,
    RemoveYes,
    SpecsPath,
)
from gazette_sdk.server.options import Group, Option, Seconds, Settings

__all__ = [
    "APPEND",
    "APPLY",
    "CREATE",
    "DELETE",
    "EDIT",
    "FRAGMENTS",
    "LIST",
    "PRUNE",
    "READ",
    "RESET_HEAD",
    "STORE_HEALTH",
    "SUSPEND",
    "AppendSettings",
    "CreateSettings",
    "FragmentsSettings",
    "ListSettings",
    "ReadSettings",
]

_SELECTOR = Option("Selector", "Label selector of the journals, instead of names", short="l")


class SelectionSettings(Settings):
    """Base of the options of commands that select journals."""

    selector: Annotated[str, _SELECTOR] = ""
    name: Annotated[
        tuple[str, ...], Option("Name", "Name of a journal, as an argument", in_ini=False)
    ] = ()


class ListSettings(SelectionSettings):
    """Options of ``list``."""

    format: Annotated[
        Literal["table", "wide", "yaml", "json", "proto"],
        Option("Format", "Output format; wide is a table with all columns", short="o"),
    ] = "table"
    label_columns: LabelColumns = ()
    primary: Annotated[
        bool, Option("Primary", "Show the primary in the table; <S> if suspended", short="p")
    ] = False
    replicas: Annotated[
        bool, Option("Replicas", "Show the other replicas in the table", short="r")
    ] = False
    rf: Annotated[bool, Option("RF", "Show the replication factor in the table")] = False
    stores: Annotated[bool, Option("Stores", "Show the first fragment store in the table")] = False
    heads: Annotated[
        bool,
        Option("Heads", "Show write head and size in the table; asks a broker of each journal"),
    ] = False
    unstored: Annotated[
        bool,
        Option(
            "Unstored",
            "Show what is in no store, and how many brokers have it, in the table; asks all "
            "brokers of each journal",
        ),
    ] = False
    watch: Annotated[bool, Option("Watch", "List again on every change, until interrupted")] = False


class ApplySettings(Settings):
    """Options of ``apply``."""

    specs: SpecsPath = "-"
    dry_run: Annotated[bool, Option("DryRun", "Print the request, and call no broker")] = False
    max_txn_size: MaxTxnSize = 0
    format: OutcomeFormat = "table"


class CreateSettings(Settings):
    """Options of ``create``."""

    partitions: Annotated[
        int,
        Option("Partitions", "Number of partitions; 0 for one journal named exactly NAME"),
        Field(ge=0),
    ] = 1
    replication: Annotated[
        int,
        Option("Replication", "Replicas; 0 for three, or fewer, so that one broker is spared"),
        Field(ge=0),
    ] = 0
    stores: Annotated[
        tuple[str, ...],
        Option(
            "Stores",
            "URL of the fragment store; by default that of the cluster's journals, else file:///",
            long="store",
        ),
    ] = ()
    codec: Annotated[
        str,
        Option(
            "Codec",
            "Compression of fragments: none, gzip, zstandard, snappy or "
            "gzip_offload_decompression; by default gzip",
        ),
    ] = ""
    length: Annotated[
        int, Option("Length", "Size of fragments in bytes; by default 67108864"), Field(ge=0)
    ] = 0
    labels: Annotated[
        tuple[str, ...], Option("Labels", "Label NAME=VALUE; topic=NAME by default", long="label")
    ] = ()
    content_type: Annotated[
        str | None,
        Option(
            "ContentType",
            "Content type of the messages, or empty for plain bytes; by default "
            "application/x-ndjson",
        ),
    ] = None
    format: OutcomeFormat = "table"


class DeleteSettings(Settings):
    """Options of ``delete``."""

    selector: Annotated[
        str, Option("Selector", "Label selector of the journals", short="l", in_ini=False)
    ] = ""
    yes: Annotated[bool, Option("Yes", "Do not ask for confirmation", short="y", in_ini=False)] = (
        False
    )
    format: OutcomeFormat = "table"


class EditSettings(Settings):
    """Options of ``edit``."""

    selector: Annotated[
        str, Option("Selector", "Label selector of the journals", short="l", in_ini=False)
    ]
    max_txn_size: MaxTxnSize = 0


class AppendSettings(SelectionSettings):
    """Options of ``append``."""

    input: Annotated[str, Option("Input", "File to append; - for standard input", short="i")] = "-"
    framing: Annotated[
        Literal["none", "lines", "fixed"],
        Option(
            "Framing",
            "Record of the input: all of it, a line, or a fixed header and its payload",
            short="f",
        ),
    ] = "none"
    mapping: Annotated[
        Literal["random", "modulo", "rendezvous", "direct"],
        Option("Mapping", "Choice of each record's journal; all but random need keys", short="m"),
    ] = "random"
    base64: Annotated[bool, Option("Base64", "Keys are base64 (with framing lines)")] = False


class ReadSettings(SelectionSettings):
    """Options of ``read``."""

    block: Annotated[bool, Option("Block", "Follow the journals, until interrupted", short="b")] = (
        False
    )
    tail: Annotated[bool, Option("Tail", "Begin at write heads of journals without an offset")] = (
        False
    )
    messages_max: Annotated[
        int,
        Option(
            "MaxMessages",
            "Stop after so many messages, of all journals together; 0 for no limit",
            long="max-messages",
            short="n",
        ),
        Field(ge=0),
    ] = 0
    since: Annotated[
        str,
        Option(
            "Since",
            "Begin with messages of this time, as 2026-01-31T12:00:00Z, or 2h for two hours ago, "
            "in journals without an offset",
        ),
    ] = ""
    output: Annotated[
        str, Option("OutputPath", "File to write, replaced; - for standard output", short="o")
    ] = "-"
    offsets: Annotated[
        str, Option("OffsetsPath", "JSON file with the offsets to begin at; must exist")
    ] = ""
    offsets_out: Annotated[
        str, Option("OffsetsOutPath", "JSON file to write with the offsets at the end")
    ] = ""
    file_root: FileRoot = ""
    from_time: Annotated[
        int,
        Option("MinModTime", "Skip fragments stored before this time, unix seconds", long="from"),
        Field(ge=0),
    ] = 0


class FragmentsSettings(SelectionSettings):
    """Options of ``fragments``."""

    format: Annotated[
        Literal["table", "json", "proto"], Option("Format", "Output format", short="o")
    ] = "table"
    from_time: Annotated[
        int,
        Option("FromTime", "Fragments stored at this time or later, unix seconds", long="from"),
        Field(ge=0),
    ] = 0
    to_time: Annotated[
        int,
        Option("ToTime", "Fragments stored at this time or before, unix seconds", long="to"),
        Field(ge=0),
    ] = 0
    url_ttl_s: Annotated[
        Seconds, Option("URLTTL", "Lifetime of signed URLs to show; 0s for none"), Field(ge=0)
    ] = 0.0


class PruneSettings(SelectionSettings):
    """Options of ``prune``."""

    yes: RemoveYes = False
    dry_run: RemoveNothing = False
    format: OutcomeFormat = "table"
    file_root: FileRoot = ""


class ResetHeadSettings(SelectionSettings):
    """Options of ``reset-head``."""


class SuspendSettings(SelectionSettings):
    """Options of ``suspend``."""

    force: Annotated[
        bool, Option("Force", "Suspend journals with fragments that are not stored, too", short="f")
    ] = False


class StoreHealthSettings(Settings):
    """Options of ``store-health``."""

    check_delete_prefix: Annotated[
        str | None,
        Option(
            "CheckDeletePrefix",
            "Also check that objects below this prefix can be deleted; it ends in / or is empty",
        ),
    ] = None


LIST = Group("journals.list", ListSettings)
APPLY = Group("journals.apply", ApplySettings)
CREATE = Group("journals.create", CreateSettings)
DELETE = Group("journals.delete", DeleteSettings)
EDIT = Group("journals.edit", EditSettings)
APPEND = Group("journals.append", AppendSettings)
READ = Group("journals.read", ReadSettings)
FRAGMENTS = Group("journals.fragments", FragmentsSettings)
PRUNE = Group("journals.prune", PruneSettings)
RESET_HEAD = Group("journals.reset-head", ResetHeadSettings)
SUSPEND = Group("journals.suspend", SuspendSettings)
STORE_HEALTH = Group("journals.store-health", StoreHealthSettings)
