"""Table of the commands of ``gazctl journals``: names, help, and functions.

The options of each command are here, too (cli section 5).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from pydantic import Field

from gazette_sdk.cli.program import Command
from gazette_sdk.cli.settings import (
    DeleteYes,
    FileRoot,
    LabelColumns,
    MaxTxnSize,
    OutcomeFormat,
    RemoveNothing,
    RemoveYes,
    SpecsPath,
)
from gazette_sdk.server.options import Bytes, Group, Option, Seconds, Settings

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
    continues: Annotated[
        bool,
        Option(
            "Continue",
            "Continue after fragments which earlier journals of these names left in the store",
            long="continue",
            in_ini=False,
        ),
    ] = False
    force: Annotated[
        bool,
        Option("Force", "Create journals with more replicas than there are brokers", in_ini=False),
    ] = False
    format: OutcomeFormat = "table"


class DeleteSettings(Settings):
    """Options of ``delete``."""

    selector: Annotated[
        str, Option("Selector", "Label selector of the journals", short="l", in_ini=False)
    ] = ""
    yes: DeleteYes = False
    with_fragments: Annotated[
        bool,
        Option(
            "WithFragments",
            "Remove their fragments, too, from the stores directly, with this tool's credentials",
            in_ini=False,
        ),
    ] = False
    format: OutcomeFormat = "table"
    file_root: FileRoot = ""


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
    delivery_timeout_s: Annotated[
        Seconds,
        Option(
            "DeliveryTimeout",
            "Longest time in which brokers take no more of an append, or fail it again and again; "
            "0s for no limit",
        ),
        Field(ge=0),
    ] = 120.0


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


class MoveStoreSettings(SelectionSettings):
    """Options of ``move-store``."""

    to: Annotated[str, Option("To", "URL of the new fragment store", in_ini=False)]
    rate: Annotated[
        Bytes,
        Option("Rate", "Greatest rate of reads from stores, such as 50MB/s; 0 for no limit"),
    ] = 0.0
    keep_old: Annotated[
        bool,
        Option("KeepOld", "Stop after the copy: the old stores stay in the specs", in_ini=False),
    ] = False
    dry_run: Annotated[
        bool, Option("DryRun", "Only show what would be copied, and change nothing", in_ini=False)
    ] = False
    format: OutcomeFormat = "table"
    file_root: FileRoot = ""


class RedriveSettings(Settings):
    """Options of ``redrive``."""

    to: Annotated[
        str,
        Option("To", "Label selector of the journals that get the records", in_ini=False),
    ] = ""
    state: Annotated[
        str,
        Option("State", "File for the position in the dead letters", in_ini=False),
    ] = ""
    filter: Annotated[
        str, Option("Filter", "Only letters whose error contains this text", in_ini=False)
    ] = ""
    limit: Annotated[
        int, Option("Limit", "Greatest number of records; 0 for all", in_ini=False), Field(ge=0)
    ] = 0
    dry_run: Annotated[bool, Option("DryRun", "Only count what would be published")] = False


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
MOVE_STORE = Group("journals.move-store", MoveStoreSettings)
REDRIVE = Group("journals.redrive", RedriveSettings)
RESET_HEAD = Group("journals.reset-head", ResetHeadSettings)
SUSPEND = Group("journals.suspend", SuspendSettings)
STORE_HEALTH = Group("journals.store-health", StoreHealthSettings)


class _Names(TypedDict):
    arguments: str
    arguments_max: None
    completes: Literal["journals"]


_SELECTORS = (
    "Without names and selector, all journals. Selectors are label requirements joined by commas: "
    "a=b, a!=b, a in (x, y), a notin (x, y), a, !a. `name` and `prefix` (which ends in /) match "
    "the journal's name; a:prefix=b matches values that begin with b."
)

_NAMES: _Names = {"arguments": "[NAME...]", "arguments_max": None, "completes": "journals"}
"""Arguments of commands that select journals by names or by a selector."""

COMMANDS = (
    Command(
        "journals list",
        "List journals",
        "gazette_sdk.cli.journals.list:run",
        (LIST,),
        **_NAMES,
        details=(
            f"{_SELECTORS}\n\n"
            "`-o yaml` writes specs for `apply`, `-o json` one object, `-o proto` protobuf text. "
            "Tables have borders on a terminal, and are plain columns elsewhere. --heads and "
            "`-o wide` ask a broker of each journal for its write head, which takes a while for "
            "thousands of journals; SIZE is the length of what can be read. The column WAITS FOR "
            "is there if journals wait for brokers that are away, and alone have their last bytes."
        ),
        examples=(
            ("gazctl journals list", "all journals"),
            ("gazctl journals list orders/part-000 -o wide", "one journal, with all columns"),
            (
                "gazctl journals list -l topic=orders -L part --rf -p -r --stores",
                "journals of a topic, with a label, replication, members and stores",
            ),
            ("gazctl journals list -l prefix=orders/ -o yaml", "specs to edit and apply"),
            ("gazctl journals list --watch -o json", "a listing per line, on every change"),
        ),
    ),
    Command(
        "journals create",
        "Create the partitions of a topic",
        "gazette_sdk.cli.journals.specs:run_create",
        (CREATE,),
        details=(
            "Creates NAME/part-000, NAME/part-001 and so on, with the label topic=NAME. Partitions "
            "that exist with the given values stay as they are, so the command can be repeated, "
            "and adds partitions if --partitions is greater than before. It fails if one exists "
            "with other values.\n\n"
            "Values that are not given are defaults, or those of the topic's first partition.\n\n"
            "Journals that were deleted have left their fragments in the store: new ones of their "
            "names refuse appends, and the command fails, unless --continue is given."
        ),
        examples=(
            ("gazctl journals create rides --partitions 3", "three partitions for JSON messages"),
            (
                "gazctl journals create app/log --partitions 0 --content-type=''",
                "one journal of this name, for plain bytes",
            ),
            (
                "gazctl journals create rides --store s3://bucket/prefix/ --label region=eu",
                "with a store, and a further label",
            ),
        ),
        arguments="NAME",
        arguments_min=1,
        arguments_max=1,
    ),
    Command(
        "journals delete",
        "Delete journals",
        "gazette_sdk.cli.journals.specs:run_delete",
        (DELETE,),
        details=(
            "Asks for confirmation on a terminal. Fragments that are stored stay in their stores: "
            "a new journal of the same name continues after them, by `gazctl journals create "
            "--continue`. --with-fragments removes them. Content that brokers have not stored yet "
            "is lost. More than 128 journals are deleted in several transactions.\n\n"
            "`gazctl journals list --help` describes selectors."
        ),
        examples=(
            ("gazctl journals delete app/log", "one journal"),
            ("gazctl journals delete -l topic=rides --yes", "all of a topic, without a question"),
            ("gazctl journals delete -l topic=rides --with-fragments", "with all of their content"),
        ),
        arguments="[NAME...]",
        arguments_max=None,
    ),
    Command(
        "journals apply",
        "Create, change or delete journals by a YAML document",
        "gazette_sdk.cli.journals.specs:run_apply",
        (APPLY,),
        in_doubt="changes may have been applied; `gazctl journals list` shows them",
        details=(
            "Shows for each journal whether it was created, updated, deleted, or is unchanged: a "
            "journal that is as described already is in no transaction, whatever its revision."
            "\n\n"
            "Journals inherit the values of their directories (names that end in /). `revision` "
            "must be the journal's current revision; 0 or none creates a journal, -1 matches any. "
            "`delete: true` deletes. All changes are one transaction. With --max-txn-size they are "
            "several: those before a failed one stay applied."
        ),
        examples=(
            ("gazctl journals apply --specs journals.yaml", "apply a file"),
            (
                "gazctl journals apply --specs journals.yaml --dry-run",
                "check it, and print the request; calls no broker",
            ),
            (
                "gazctl journals apply --specs many.yaml --max-txn-size 100",
                "more changes than the 128 of one Etcd transaction",
            ),
        ),
    ),
    Command(
        "journals edit",
        "Edit specs of journals in an editor, and apply them",
        "gazette_sdk.cli.journals.specs:run_edit",
        (EDIT,),
        keeps_time=True,
        details=(
            "Runs $GAZ_EDITOR, else $EDITOR, else vi. If the saved specs cannot be applied, the "
            "editor opens again with the reason. Quit it without a change to cancel."
        ),
        examples=(
            ("gazctl journals edit -l prefix=orders/", "edit all journals of a directory"),
            (
                "EDITOR='code --wait' gazctl journals edit -l name=orders/part-000",
                "in another editor",
            ),
        ),
    ),
    Command(
        "journals append",
        "Append a file or standard input to journals",
        "gazette_sdk.cli.journals.append:run",
        (APPEND,),
        **_NAMES,
        in_doubt="some of the input, or all, may have been appended",
        details=(
            "With framing none the whole input is one atomic append to a random matching journal. "
            "Otherwise each record is atomic, and records of one journal keep their order. A "
            "record is a line (`lines`), or a header (66 33 93 36, little-endian length) with its "
            "payload (`fixed`)."
            "\n\n"
            "With mapping modulo, rendezvous or direct, a key in the same framing precedes each "
            "record. It is hashed over the matching journals; with direct it is the name of one."
        ),
        examples=(
            ("gazctl journals append app/log -i backup.log", "a file, as one append"),
            ("tail -f app.log | gazctl journals append app/log -f lines", "line by line"),
            (
                "jq -r '.id, tojson' o.json | gazctl journals append -l topic=o -f lines -m modulo",
                "JSON lines after their keys, over the partitions of a topic",
            ),
        ),
    ),
    Command(
        "journals read",
        "Read journals to a file or standard output",
        "gazette_sdk.cli.journals.read:run",
        (READ,),
        **_NAMES,
        keeps_time=True,
        details=(
            "Reads all selected journals at once: to their write heads, or with --block until "
            "Ctrl-C. Appends are written whole.\n\n"
            "-n and --since are about messages as they are written, acknowledgements and "
            "duplicates included: those of the journal's content type, or lines if it has none. "
            "--since leaves out fragments stored before, then messages whose UUID is of an earlier "
            "time. Messages without UUID, or in protobuf, are left out by fragment only.\n\n"
            "With one file for --offsets and --offsets-out, each run begins where the last one "
            "ended. The file is replaced atomically; the old one is kept as .previous."
        ),
        examples=(
            ("gazctl journals read app/log", "a whole journal"),
            ("gazctl journals read -l topic=orders --since 2h -n 10", "ten messages"),
            ("gazctl journals read -l topic=orders --tail --block", "only new content"),
            (
                "gazctl journals read app/log --tail --block -n 1 --timeout 30s",
                "wait for a message; exit status 124 if there is none",
            ),
            (
                "gazctl journals read -l topic=o --offsets o.json --offsets-out o.json -o new",
                "content since the last run; begin with `echo '{}' > o.json`",
            ),
        ),
    ),
    Command(
        "journals fragments",
        "List fragments of journals",
        "gazette_sdk.cli.journals.fragments:run_fragments",
        (FRAGMENTS,),
        **_NAMES,
        details=(
            "`-o json` is one object per line and fragment, with the SHA-1 in hexadecimal as "
            "`sha1`. Fragments without a time are not stored yet."
        ),
        examples=(
            ("gazctl journals fragments -l topic=orders", "a table"),
            (
                "gazctl journals fragments -l topic=orders --from 1700000000 --url-ttl 1h -o json",
                "with URLs to download fragments stored since a time",
            ),
        ),
    ),
    Command(
        "journals prune",
        "Remove stored fragments that are older than their journal's retention",
        "gazette_sdk.cli.journals.fragments:run_prune",
        (PRUNE,),
        **_NAMES,
        details=(
            "Shows the number and size of each journal's fragments that would be removed. With "
            "--yes removes them, from the stores directly, with the credentials of this tool. "
            "Journals with a retention of 0 keep everything. Fragments which others cover are "
            "listed only after those are removed and brokers have refreshed the store: run it "
            "again later."
        ),
        examples=(
            (
                "gazctl journals prune -l topic=orders --log.level=info",
                "show what it would remove, and log each fragment",
            ),
            ("gazctl journals prune -l topic=orders --yes", "remove it"),
        ),
    ),
    Command(
        "journals move-store",
        "Move journals to another fragment store, while they are used",
        "gazette_sdk.cli.journals.store_move:run",
        (MOVE_STORE,),
        **_NAMES,
        in_doubt="journals may have both stores; run the same command again, which continues",
        details=(
            "Makes the new store the first of each journal, copies all fragments there, compares "
            "each with the SHA-1 of its name, and then lets the old stores leave the specs. "
            "Publishers, readers and shards continue meanwhile. This tool reads and writes the "
            "stores directly, with its own credentials, and holds copies in temporary files. "
            "Nothing in a store is overwritten or removed: at the end it shows the commands that "
            "remove the old content.\n\n"
            "It can be interrupted at any time. The same command continues: it compares the "
            "fragments that are copied with their SHA-1 again. It needs a token with LIST, READ "
            "and APPLY for all journals, and all brokers must be able to use the new store. "
            "Retention counts from the copy."
        ),
        examples=(
            (
                "gazctl journals move-store -l topic=orders --to s3://new/prod/ --dry-run",
                "show what would be copied",
            ),
            (
                "gazctl journals move-store -l topic=orders --to s3://new/prod/ --rate 50MB/s",
                "move a topic, and leave room for others on the network",
            ),
            (
                "gazctl journals move-store app/log --to s3://new/prod/ --file-root /srv/gazette",
                "from the brokers' files to S3",
            ),
        ),
    ),
    Command(
        "journals redrive",
        "Publish the records of dead letters again, exactly once",
        "gazette_sdk.cli.journals.redrive:run",
        (REDRIVE,),
        in_doubt="records may have been published; run the command again with the same file",
        details=(
            "Reads a journal of dead letters to its write head, and publishes their records: each "
            "to the journal that it came from if --to matches that, else to one of the others, and "
            "all of one journal to the same. --state is a file for the position. With the same "
            "file a later run continues after the last one, also after one that was killed: "
            "committed readers get each record once. Letters that --filter leaves out are passed "
            "over for this file.\n\n"
            "Letters of bytes that are no JSON object are counted and left alone: correct these by "
            "hand, and append them with `gazctl journals append`."
        ),
        examples=(
            (
                "gazctl journals redrive bad-orders --to topic=orders --state redrive.json",
                "all letters, once the handler was corrected",
            ),
            (
                "gazctl journals redrive bad-orders --to topic=orders --filter KeyError --dry-run",
                "count those of one error",
            ),
        ),
        arguments="JOURNAL",
        arguments_min=1,
        arguments_max=1,
    ),
    Command(
        "journals reset-head",
        "Reset write heads to the end of all stored content, after a loss of all replicas",
        "gazette_sdk.cli.journals.fragments:run_reset_head",
        (RESET_HEAD,),
        **_NAMES,
        details=(
            "After the loss of all replicas of a journal, appends fail with "
            "INDEX_HAS_GREATER_OFFSET: its stored fragments end after the offset that brokers "
            "know. Make sure that no former broker is left, and that brokers have refreshed their "
            "fragments. This command then sets the write head to the end of stored content. It is "
            "safe on healthy journals. A journal that waits for brokers which are away (column "
            "Waits For of `journals list`) goes on by itself when one of them is back over its "
            "spool directory. For such a journal this command gives up what they have not stored, "
            "and names them."
        ),
        examples=(
            ("gazctl journals reset-head -l prefix=orders/ --log.level=info", "all of a directory"),
        ),
    ),
    Command(
        "journals suspend",
        "Suspend journals until the next append",
        "gazette_sdk.cli.journals.specs:run_suspend",
        (SUSPEND,),
        **_NAMES,
        details=(
            "A journal whose fragments are all stored loses its replicas. Other journals do not "
            "change or, with --force, keep one replica until their fragments are stored."
        ),
        examples=(
            ("gazctl journals suspend -l topic=archive", "journals whose fragments are all stored"),
            ("gazctl journals suspend -l topic=archive --force --log.level=info", "all journals"),
        ),
    ),
    Command(
        "journals store-health",
        "Check a fragment store through a broker",
        "gazette_sdk.cli.journals.fragments:run_store_health",
        (STORE_HEALTH,),
        arguments="STORE_URL",
        arguments_min=1,
        arguments_max=1,
        examples=(
            ("gazctl journals store-health s3://bucket/prefix/", "put, get, list and sign"),
            (
                "gazctl journals store-health --check-delete-prefix=tmp/ s3://bucket/prefix/",
                "and delete",
            ),
        ),
    ),
)
