"""The table of the commands of ``gazctl journals``: names, help, and what runs them."""

from __future__ import annotations

from gazette_sdk.cli.command import Command
from gazette_sdk.cli.journals import settings

__all__ = ["COMMANDS"]

_SELECTORS = (
    "Selectors are label requirements joined by commas: a=b, a!=b, a in (x, y), a notin (x, y), a, "
    "!a. `name` and `prefix` (which ends in /) match the journal's name; a:prefix=b matches "
    "values that begin with b."
)

COMMANDS = (
    Command(
        "journals list",
        "List journals",
        "gazette_sdk.cli.journals.list:run",
        (settings.LIST,),
        details=(
            f"{_SELECTORS}\n\n"
            "`-o yaml` is what `apply` takes; `-o json` is one object, `-o proto` protobuf text."
        ),
        examples=(
            ("gazctl journals list", "all journals"),
            (
                "gazctl journals list -l topic=orders -L part --rf -p -r --stores",
                "journals of a topic, with a label, replication, members and stores",
            ),
            ("gazctl journals list -l prefix=orders/ -o yaml", "specs to edit and apply"),
            ("gazctl journals list --watch -o json", "a listing per line, on every change"),
        ),
    ),
    Command(
        "journals apply",
        "Create, change or delete journals as a YAML document says",
        "gazette_sdk.cli.journals.apply:run",
        (settings.APPLY,),
        details=(
            "Directories (names that end in /) give what they say to all journals below. "
            "`revision` must be the journal's current one; 0 or none means that it must not exist "
            "yet, -1 takes any. `delete: true` deletes. All happens in one transaction or, with "
            "--max-txn-size, in several: those before a failed one stay applied."
        ),
        examples=(
            ("gazctl journals apply --specs journals.yaml", "apply a file"),
            (
                "gazctl journals apply --specs journals.yaml --dry-run",
                "check it, and show the request; calls no broker",
            ),
            (
                "gazctl journals apply --specs many.yaml --max-txn-size 100",
                "more changes than Etcd's 128 of one transaction",
            ),
        ),
    ),
    Command(
        "journals edit",
        "Edit specs of journals in an editor, and apply them",
        "gazette_sdk.cli.journals.edit:run",
        (settings.EDIT,),
        details=(
            "Runs $GAZ_EDITOR, else $EDITOR, else vi. When what you saved cannot be applied, the "
            "editor opens again with the reason. Leave it without a change to give up."
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
        (settings.APPEND,),
        details=(
            "With framing none the whole input is one atomic append to a random matching journal. "
            "Else each record is atomic, and records of one journal keep their order: with `lines` "
            "a line, with `fixed` a header (66 33 93 36, little-endian length) and its payload."
            "\n\n"
            "With mapping modulo, rendezvous or direct, each record follows a key in the same "
            "framing: hashed over the matching journals, or with direct the name of one."
        ),
        examples=(
            ("gazctl journals append -l name=app/log -i backup.log", "a file, as one append"),
            ("tail -f app.log | gazctl journals append -l name=app/log -f lines", "line by line"),
            (
                "jq -r '.id, tojson' o.json | gazctl journals append -l topic=o -f lines -m modulo",
                "JSON lines, each after its key, over the partitions of a topic",
            ),
        ),
    ),
    Command(
        "journals read",
        "Read journals to a file or standard output",
        "gazette_sdk.cli.journals.read:run",
        (settings.READ,),
        details=(
            "Reads all matching journals at once, to their write heads, or with --block on and on. "
            "Appends are never mixed into each other. Ctrl-C ends it cleanly.\n\n"
            "With --offsets and --offsets-out of one file, each run goes on where the last one "
            "ended; the file is replaced atomically, and the previous one kept as .previous."
        ),
        examples=(
            ("gazctl journals read -l name=app/log", "all of a journal"),
            ("gazctl journals read -l topic=orders --tail --block", "what comes from now on"),
            (
                "gazctl journals read -l topic=o --offsets o.json --offsets-out o.json -o new",
                "what is new since the last run; begin with `echo '{}' > o.json`",
            ),
        ),
    ),
    Command(
        "journals fragments",
        "List fragments of journals",
        "gazette_sdk.cli.journals.fragments:run",
        (settings.FRAGMENTS,),
        details=(
            "`-o json` is one object per line and fragment. Fragments without a time are not "
            "stored yet."
        ),
        examples=(
            ("gazctl journals fragments -l topic=orders", "a table"),
            (
                "gazctl journals fragments -l topic=orders --from 1700000000 --url-ttl 1h -o json",
                "with URLs to download what was stored since a time",
            ),
        ),
    ),
    Command(
        "journals prune",
        "Remove stored fragments that are older than their journal's retention",
        "gazette_sdk.cli.journals.prune:run",
        (settings.PRUNE,),
        details=(
            "Removes from the stores directly, with the credentials of this tool. Journals with a "
            "retention of 0 keep everything. Fragments that others cover are seen only once these "
            "are removed and brokers have listed the store again: run it again later."
        ),
        examples=(
            (
                "gazctl journals prune -l topic=orders --dry-run --log.level=info",
                "say what would be removed",
            ),
            ("gazctl journals prune -l topic=orders", "remove it"),
        ),
    ),
    Command(
        "journals reset-head",
        "Reset write heads behind all stored content, after a disaster",
        "gazette_sdk.cli.journals.reset_head:run",
        (settings.RESET_HEAD,),
        details=(
            "When all replicas of a journal were lost, its appends fail with "
            "INDEX_HAS_GREATER_OFFSET, as its stored fragments reach past what brokers remember. "
            "Make sure that no former broker is left and that fragments were listed again; then "
            "this continues the journals behind what is stored. Safe on healthy journals."
        ),
        examples=(
            ("gazctl journals reset-head -l prefix=orders/ --log.level=info", "a directory"),
        ),
    ),
    Command(
        "journals suspend",
        "Suspend journals until they are appended to",
        "gazette_sdk.cli.journals.suspend:run",
        (settings.SUSPEND,),
        details=(
            "A journal whose fragments are all stored gives its replicas back. Others stay as they "
            "are or, with --force, keep a single replica until they are stored."
        ),
        examples=(
            ("gazctl journals suspend -l topic=archive", "what is stored already"),
            ("gazctl journals suspend -l topic=archive --force --log.level=info", "all of it"),
        ),
    ),
    Command(
        "journals store-health",
        "Ask a broker whether a fragment store works",
        "gazette_sdk.cli.journals.store_health:run",
        (settings.STORE_HEALTH,),
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
