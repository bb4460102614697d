"""Table of the commands of ``gazctl shards``, ``consumers`` and ``topics``: names, functions.

The options of each command are here, too (cli section 8).
"""

from __future__ import annotations

from typing import Annotated, Literal

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
from gazette_sdk.server.options import Group, Option, Settings

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
    fail_on: Annotated[
        Literal["none", "failed"],
        Option(
            "FailOn", "Exit with status 1 if a shard has failed, or never for that", in_ini=False
        ),
    ] = "none"


class ApplySettings(Settings):
    """Options of ``apply``."""

    specs: SpecsPath = "-"
    dry_run: Annotated[
        bool, Option("DryRun", "Check the specs and their journals, and print the request")
    ] = False
    max_txn_size: MaxTxnSize = 0
    format: OutcomeFormat = "table"


class DeleteSettings(Settings):
    """Options of ``delete``."""

    selector: Annotated[
        str, Option("Selector", "Label selector of the shards", short="l", in_ini=False)
    ] = ""
    yes: DeleteYes = False
    with_log: Annotated[
        bool,
        Option(
            "WithLog",
            "Delete their recovery logs, too, with fragments, by this tool's credentials",
            in_ini=False,
        ),
    ] = False
    format: OutcomeFormat = "table"
    file_root: FileRoot = ""


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


class ConsumersSettings(Settings):
    """Options of ``consumers list`` and ``describe``."""

    format: Annotated[
        Literal["table", "yaml", "json"], Option("Format", "Output format", short="o")
    ] = "table"


class GrowSettings(Settings):
    """Options of ``topics grow``."""

    partitions: Annotated[
        int,
        Option("Partitions", "Number of partitions to have, more than now", in_ini=False),
        Field(ge=0, le=1000),
    ] = 0
    dry_run: Annotated[
        bool, Option("DryRun", "Only show what would be created, and who reads the topic")
    ] = False
    force: Annotated[
        bool,
        Option("Force", "Grow also where states of shards are split, or not known", in_ini=False),
    ] = False
    format: Annotated[
        Literal["table", "json"], Option("Format", "Output format", short="o", in_ini=False)
    ] = "table"


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


class ResetSettings(Settings):
    """Options of ``reset``."""

    selector: Annotated[str, _SELECTOR] = ""
    to: Annotated[
        str,
        Option(
            "To",
            "Position to read from: begin, end, a time, 2h for two hours ago, or "
            "JOURNAL=OFFSET,... for each source",
            in_ini=False,
        ),
    ] = ""
    keep_state: Annotated[
        bool, Option("KeepState", "Keep the state; by default it is emptied", in_ini=False)
    ] = False
    dry_run: Annotated[bool, Option("DryRun", "Only show what would be reset")] = False
    format: OutcomeFormat = "table"


class SkipSettings(Settings):
    """Options of ``skip``."""

    count: Annotated[
        int, Option("Count", "Number of records to skip", in_ini=False), Field(ge=1, le=1_000_000)
    ] = 1
    save: Annotated[
        str, Option("Save", "File to which the records are appended as they are", in_ini=False)
    ] = ""
    dry_run: Annotated[bool, Option("DryRun", "Only show what would be skipped; saves nothing")] = (
        False
    )


class StateSettings(Settings):
    """Options of ``state``."""

    what: Annotated[
        Literal["state", "tables", "windows", "timers"],
        Option("What", "Part of the state to show", in_ini=False),
    ] = "state"
    from_log: Annotated[
        bool,
        Option("FromLog", "Restore it from the recovery log; does not ask the primary"),
    ] = False
    limit: Annotated[int, Option("Limit", "Greatest number of entries"), Field(ge=1, le=10_000)] = (
        100
    )
    format: Annotated[
        Literal["table", "json"],
        Option("Format", "Output format; json is one object per line and entry", short="o"),
    ] = "table"
    file_root: FileRoot = ""


class ScaleSettings(Settings):
    """Options of ``scale``."""

    format: OutcomeFormat = "table"


class UnassignSettings(Settings):
    """Options of ``unassign``."""

    selector: Annotated[str, _SELECTOR] = ""
    failed: Annotated[bool, Option("OnlyFailed", "Only shards that have failed", long="failed")] = (
        False
    )
    dry_run: Annotated[bool, Option("DryRun", "Only show what would be unassigned")] = False


LIST = Group("shards.list", ListSettings)
APPLY = Group("shards.apply", ApplySettings)
DELETE = Group("shards.delete", DeleteSettings)
EDIT = Group("shards.edit", EditSettings)
GENERATE = Group("shards.generate", GenerateSettings)
PRUNE = Group("shards.prune", PruneSettings)
RECOVER = Group("shards.recover", RecoverSettings)
RESET_SHARDS = Group("shards.reset", ResetSettings)
SCALE = Group("shards.scale", ScaleSettings)
SKIP_RECORDS = Group("shards.skip", SkipSettings)
STATE = Group("shards.state", StateSettings)
UNASSIGN = Group("shards.unassign", UnassignSettings)
LIST_CONSUMERS = Group("consumers.list", ConsumersSettings)
DESCRIBE_CONSUMER = Group("consumers.describe", ConsumersSettings)
GROW = Group("topics.grow", GrowSettings)


_ADDRESS = (
    "--consumer.address (CONSUMER_ADDRESS) is any process of the application; beside `gazette dev` "
    "the only application that runs is found without it. Selectors are label "
    "requirements joined by commas: a=b, a!=b, a in (x, y), a notin (x, y), a, !a. `id` matches "
    "the shard's id; a:prefix=b matches values that begin with b."
)

COMMANDS = (
    Command(
        "shards list",
        "List shards and their statuses",
        "gazette_sdk.cli.shards.list:run",
        (LIST,),
        details=(
            f"{_ADDRESS}\n\n"
            "STATUS is the greatest of IDLE, BACKFILL, STANDBY, PRIMARY and FAILED among the "
            "shard's processes; --errors shows why shards have failed. --lag asks each primary how "
            "far it has read, and the brokers for the write heads; it is <none> for a shard whose "
            "primary does not answer.\n\n"
            "`-o yaml` writes specs for `apply`, `-o json` one object, `-o proto` protobuf text."
        ),
        examples=(
            ("gazctl shards list", "all shards"),
            ("gazctl shards list -p -r --rf --lag", "with their processes, and what is unread"),
            ("gazctl shards list -l app.gazette.dev/managed-by=totals --errors", "of one handler"),
            ("gazctl shards list --fail-on failed", "for a check that runs on a schedule"),
            ("gazctl shards list -l id:prefix=totals/ -o yaml", "specs to edit and apply"),
        ),
    ),
    Command(
        "shards apply",
        "Create, change or delete shards by a YAML document",
        "gazette_sdk.cli.shards.specs:run_apply",
        (APPLY,),
        in_doubt="changes may have been applied; `gazctl shards list` shows them",
        details=(
            "Checks through a broker that all source journals and recovery logs exist and have the "
            "right content types, also with --dry-run. Then it shows for each shard whether it was "
            "created, updated, deleted, or is unchanged.\n\n"
            "Each shard takes the values of `common` that it does not set itself; a boolean that "
            "is true in `common` stays true. `revision` must be the shard's current revision; 0 or "
            "none creates a shard, -1 matches any. `delete: true` deletes. All changes are one "
            "transaction. With --max-txn-size they are several: those before a failed one stay "
            "applied."
        ),
        examples=(
            ("gazctl shards apply --specs shards.yaml", "apply a file"),
            (
                "gazctl shards apply --specs shards.yaml --dry-run",
                "check it and its journals, and print the request",
            ),
            (
                "gazctl shards apply --specs many.yaml --max-txn-size 100",
                "more changes than the 128 of one Etcd transaction",
            ),
        ),
    ),
    Command(
        "shards edit",
        "Edit specs of shards in an editor, and apply them",
        "gazette_sdk.cli.shards.specs:run_edit",
        (EDIT,),
        keeps_time=True,
        details=(
            "Runs $GAZ_EDITOR, else $EDITOR, else vi. If the saved specs cannot be applied, the "
            "editor opens again with the reason. Quit it without a change to cancel."
        ),
        examples=(
            ("gazctl shards edit -l id:prefix=totals/", "edit all shards of a handler"),
            ("EDITOR='code --wait' gazctl shards edit -l id=totals/part-000", "in another editor"),
        ),
    ),
    Command(
        "shards delete",
        "Delete shards, and their recovery logs if asked to",
        "gazette_sdk.cli.shards.reset:run_delete",
        (DELETE,),
        in_doubt="shards may be disabled; run the command again",
        details=(
            "Asks for confirmation on a terminal. The shards are disabled, and deleted with their "
            "hints once their processes have ended them. Their recovery logs stay, unless "
            "--with-log is given. It is refused where another shard of the application needs such "
            "a log.\n\n"
            "A process that declares `sources` creates a shard for each of their journals again: "
            "with an empty state after --with-log, else with that of the log, as far as it is "
            "still stored. `gazctl shards reset` empties the state of shards that are to stay."
        ),
        examples=(
            ("gazctl shards delete -l id:prefix=totals/ --with-log", "shards, and their state"),
            (
                "gazctl shards delete -l id=totals/part-000 --yes",
                "one shard, without a question; its log stays",
            ),
        ),
    ),
    Command(
        "shards generate",
        "Create the shards of an application, with their recovery logs",
        "gazette_sdk.cli.shards.specs:run_generate",
        (GENERATE,),
        in_doubt="shards may have been created; `gazctl shards list` shows them",
        details=(
            "Each journal of the application's sources gets a shard, if it has none: with the "
            "values that the application declares, and a recovery log of the replication and "
            "stores of its source. What exists is left as it is.\n\n"
            "Processes of an application that declares `sources` do this by themselves. This "
            "command is for one that does not, and for a look at specs before processes start "
            "from them. The module is also looked for in the current directory. A process of the "
            "application must run."
        ),
        examples=(
            ("gazctl shards generate orders:totals", "of the sources that it declares"),
            (
                "gazctl shards generate orders:totals --sources topic=orders --watch",
                "of all partitions of a topic, also of later ones",
            ),
            (
                "gazctl shards generate orders:totals --dry-run",
                "specs to edit and apply; create their recovery logs first",
            ),
        ),
        arguments="MODULE:APPLICATION",
        arguments_min=1,
        arguments_max=1,
    ),
    Command(
        "shards unassign",
        "Take shards from their processes, to be assigned and started anew",
        "gazette_sdk.cli.shards.logs:run_unassign",
        (UNASSIGN,),
        in_doubt="shards may have been unassigned; `gazctl shards list` shows them",
        details=(
            "Removes the assignments of primaries, and all that have failed; with --failed only "
            "those. The shards are then assigned anew, often to the same process: it starts them "
            "from their last commit. This is how a failed shard is tried again once its cause is "
            "removed. The command ends after 10 s if it gets no answer."
        ),
        examples=(
            ("gazctl shards unassign -l id --failed", "try all failed shards again"),
            ("gazctl shards unassign -l id=totals/part-000", "start one shard anew"),
            ("gazctl shards unassign -l id --failed --dry-run", "see which ones have failed"),
        ),
    ),
    Command(
        "shards reset",
        "Have shards read from another position, with an empty state or their own",
        "gazette_sdk.cli.shards.reset:run_reset",
        (RESET_SHARDS,),
        in_doubt="shards may be disabled; run the command again",
        details=(
            "Ends the shards, and starts them anew at the position of --to in all of their "
            "sources. Their state is emptied: they get new recovery logs, and the old ones stay. "
            "With --keep-state it stays as it is, for instance to pass over messages, or to read "
            "some again. Tables are always made from the begin of their topics. What the shards "
            "have published stays, and messages that are read again are published again.\n\n"
            "`--to end` is the write heads of now. A time is that of the messages' UUIDs: reading "
            "begins at the first one since then. An offset has to be that of a message's begin.\n\n"
            "Reading again with --keep-state needs that all processes of the application run this "
            "SDK: those of Gazette do not know of it, and a shard that comes back from one would "
            "read again once more. "
            "Shards whose state is in an SQL database need --keep-state: empty its tables there. "
            "If the command is interrupted, run it again: until then the shards may be disabled."
        ),
        examples=(
            ("gazctl shards reset -l id:prefix=totals/ --to begin", "count everything anew"),
            (
                "gazctl shards reset -l id=totals/orders/part-000 --to end --keep-state",
                "pass over what is not read yet",
            ),
            (
                "gazctl shards reset -l id:prefix=totals/ --to 2h --keep-state",
                "read two hours again",
            ),
            (
                "gazctl shards reset -l id:prefix=totals/ --to 2026-01-31T12:00:00Z --dry-run",
                "see the offsets",
            ),
        ),
    ),
    Command(
        "shards skip",
        "Have a failed shard pass over the record at which it stands",
        "gazette_sdk.cli.shards.reset:run_skip",
        (SKIP_RECORDS,),
        in_doubt="the record may be skipped already; `gazctl shards list` shows the shard",
        details=(
            "The shard is started again, leaves the record out, and continues with the next one. "
            "All records before it are handled. With --count the next ones of its journal are left "
            "out, too. --save keeps them. It is for a single shard that has failed at a record: "
            "`on_error=` of the application passes over bad records by itself, and `gazctl shards "
            "unassign` tries a record again."
        ),
        examples=(
            (
                "gazctl shards skip totals/orders/part-000 --save bad.jsonl",
                "pass over a record, and keep it in a file",
            ),
            ("gazctl shards skip totals/orders/part-000 --dry-run", "see which one it is"),
        ),
        arguments="ID",
        arguments_min=1,
        arguments_max=1,
    ),
    Command(
        "shards scale",
        "Show how many processes the shards of an application need",
        "gazette_sdk.cli.shards.consumers:run_scale",
        (SCALE,),
        details=(
            "--consumer.address (CONSUMER_ADDRESS) is any process of the application; beside "
            "`gazette dev` the only application that runs is found without it.\n\n"
            "PROCESSES is the number of shards whose lag is over a minute, but at least one more "
            "than the most hot standbys of a shard. Failed shards do not count, as another process "
            "does not help them; those of a process that does not answer do. LAG and AGE are of "
            "all shards. It is what an autoscaler gets from /v1/shards/scale at any process, such "
            "as KEDA by its metrics-api trigger. Take processes away one at a time: each shard "
            "that moves is recovered elsewhere.\n\n"
            "It needs a token that may LIST; shards that it may not list do not count."
        ),
        examples=(
            ("gazctl shards scale", "of the application beside gazette dev"),
            (
                "gazctl shards scale --consumer.address http://orders-0:8080 -o json",
                "for a script that starts processes",
            ),
        ),
    ),
    Command(
        "shards recover",
        "Restore the files of a shard's store from its recovery log",
        "gazette_sdk.cli.shards.logs:run_recover",
        (RECOVER,),
        details=(
            "Plays the recovery log into a directory, to its present write head. The shard itself "
            "is not touched and may run. Everything in the directory is deleted first."
        ),
        examples=(
            (
                "gazctl shards recover --id totals/part-000 --dir ./recovered",
                "the files of a store, as of now",
            ),
        ),
    ),
    Command(
        "shards state",
        "Show the state of a shard: keys and values, tables, windows or timers",
        "gazette_sdk.cli.shards.logs:run_state",
        (STATE,),
        details=(
            "Asks the primary for what it has committed, as a query of the application does: with "
            "a token that may READ the shard. --from-log plays the recovery log into a temporary "
            "directory instead, which also works for shards that have failed, and for those of "
            "other implementations.\n\n"
            "KEY is a text, an integer, a list in JSON of the elements of a tuple, or bytes as "
            "base64:…; of an SqliteStore it is the name of a table. The types that the application "
            "declares are not known here: keys and values are shown as JSON, and what is neither "
            "JSON nor text as base64. PLACE is the column family, the table of SQL, the topic of a "
            "table (or its digest, where the topic is not known), or the clock of a timer."
        ),
        examples=(
            ("gazctl shards state totals/orders/part-000", "the first hundred keys and values"),
            ("gazctl shards state totals/orders/part-000 ada", "the value of a key"),
            ("gazctl shards state totals/orders/part-000 '[\"ada\", 7]'", "of a tuple"),
            ("gazctl shards state totals/orders/part-000 --what windows -o json", "open windows"),
            ("gazctl shards state totals/orders/part-000 --from-log", "what the log has"),
        ),
        arguments="ID [KEY]",
        arguments_min=1,
        arguments_max=2,
    ),
    Command(
        "shards prune",
        "Remove fragments of recovery logs that no recovery needs any more",
        "gazette_sdk.cli.shards.logs:run_prune",
        (PRUNE,),
        in_doubt="fragments may have been removed",
        details=(
            "Shows what would be removed; --yes removes it, with your own credentials toward the "
            "stores. A fragment is kept if any hints of the shards, primary or backup, need it. A "
            "log is left alone, with a warning, if hints are missing, its store is not healthy, or "
            "it is suspended. An idle shard gets its primary hints after five minutes, and a "
            "backup with each recovery.\n\n"
            "All shards whose history shares a log must be selected, also those that were made "
            "from another shard's log, in this application or another: the fragments that only "
            "they need would be removed. A log that belongs to a shard which is not selected is "
            "never pruned.\n\n"
            "It ends with status 1 if a fragment could not be removed."
        ),
        examples=(
            ("gazctl shards prune -l id", "see what could be removed"),
            ("gazctl shards prune -l id --yes", "remove it, for instance every night"),
            (
                "gazctl shards prune -l id --yes --file-root /data/fragments",
                "where stores are file://",
            ),
        ),
    ),
)

_LAG = (
    "LAG is the bytes of the sources that are not read yet, and AGE the time since the first "
    "message of these was published, by the clock of this machine. AGE is not known of messages "
    "without a UUID, or of protobuf. What is not known is shown as -, and null in other formats: "
    "the lag of a shard whose primary does not answer, for example."
)

CONSUMERS = (
    Command(
        "consumers list",
        "List applications, with their processes, shards and lag",
        "gazette_sdk.cli.shards.consumers:run_list",
        (LIST_CONSUMERS,),
        details=(
            "--consumer.address (CONSUMER_ADDRESS) is any process of an application, and of "
            "several applications one each, separated by commas: those are listed, as this tool "
            "does not ask Etcd. Beside `gazette dev` all applications that run are found without "
            f"it.\n\n{_LAG} The lag of an application is that of its shards whose lag is known.\n\n"
            "It ends with status 1 if an address does not answer, after the list of the others."
        ),
        examples=(
            ("gazctl consumers list", "what runs beside gazette dev"),
            (
                "gazctl consumers list --consumer.address http://totals:8090,http://rides:8090",
                "two applications",
            ),
            ("gazctl consumers list -o json", "for scripts"),
        ),
    ),
    Command(
        "consumers describe",
        "Show an application, its processes and its shards",
        "gazette_sdk.cli.shards.consumers:run_describe",
        (DESCRIBE_CONSUMER,),
        details=(
            "NAME is the application's name as `gazctl consumers list` shows it, or its address; "
            "--consumer.address (CONSUMER_ADDRESS) has the address of one of its processes.\n\n"
            f"{_LAG} WATERMARK is the event time that a shard has reached. RECOVERED shows how far "
            "a primary that recovers has read its log. Processes of other implementations show "
            "neither, and no process without shards."
        ),
        examples=(
            ("gazctl consumers describe totals", "an application beside gazette dev"),
            ("gazctl consumers describe totals -o yaml", "with the offsets of each source"),
        ),
        arguments="NAME",
        arguments_min=1,
        arguments_max=1,
    ),
)

TOPICS = (
    Command(
        "topics grow",
        "Add partitions to a topic, unless states of shards would be split",
        "gazette_sdk.cli.shards.topics:run_grow",
        (GROW,),
        in_doubt="partitions may have been created; `gazctl journals list` shows them",
        details=(
            "Creates NAME/part-003 and so on, like the first partition. The topic must have been "
            "made as `gazctl journals create` makes it, and partitions are never removed.\n\n"
            "A mapping by the hash of a key then maps most keys to other partitions "
            "(mapping.modulo), or some (mapping.rendezvous), from the moment at which a publisher "
            "sees them. With state in shards, an old part of a key's state would be in one shard, "
            "and a new one in another. So the shards that read the topic are looked up in the "
            "applications at --consumer.address (CONSUMER_ADDRESS), one process each, separated by "
            "commas, or beside `gazette dev`, and are asked for their state, which needs a token "
            "that may READ them. It is refused if a shard has state, or may have: it cannot be "
            "asked, or has not begun to read. Other applications, and Readers, are not seen.\n\n"
            "--force grows the topic all the same. Nothing that exists is changed: the content of "
            "partitions stays where it is, and so does the state of shards. The messages of a key "
            "that moves go on in another partition, whose shard begins without the key's state; "
            "the shard of before keeps it, and gets no further message of the key. Messages of the "
            "key in both are not in order. To have all state by the new partitions, publish the "
            "topic into a new one of more partitions, and let applications read that. Mappings "
            "that do not depend on a key, such as mapping.random, have no such effects."
        ),
        examples=(
            (
                "gazctl topics grow rides --partitions 8 --dry-run",
                "who reads it, with state or not",
            ),
            (
                "gazctl topics grow rides --partitions 8 --consumer.address http://a:80,http://b:80",
                "where two applications read it",
            ),
        ),
        arguments="NAME",
        arguments_min=1,
        arguments_max=1,
    ),
)
