"""``gazctl``: the tool of operators (cli section 4)."""

from __future__ import annotations

import sys

from gazette_sdk.cli.client import (
    ADDRESS_ALIASES,
    BROKER_CLIENT,
    CONSUMER_CLIENT,
    SHARDS_BROKER_CLIENT,
    SHARDS_ZONE,
    ZONE,
)
from gazette_sdk.cli.completion import completion_command
from gazette_sdk.cli.console import ADDRESS as CONSOLE
from gazette_sdk.cli.journals.commands import COMMANDS as JOURNALS
from gazette_sdk.cli.program import Command, Program
from gazette_sdk.cli.settings import (
    ATTACH_UUIDS,
    BACKUP,
    BACKUP_ETCD,
    CHECK_KEYS,
    CREATE_TOKEN,
    DRAIN,
    LIST_BROKERS,
    PRINT_CONFIG,
    REPORT,
    RESTORE,
    SHOW_BACKUP,
    SHOW_TOKEN,
    VERIFY_BACKUP,
)
from gazette_sdk.cli.shards.commands import COMMANDS as SHARDS
from gazette_sdk.cli.shards.commands import CONSUMERS, TOPICS
from gazette_sdk.server.options import Group
from gazette_sdk.server.settings import LoggingSettings

_JOURNALS_LOGGING = Group("journals.Logging", LoggingSettings, prefix="log.", env_prefix="LOG_")
_SHARDS_LOGGING = Group("shards.Logging", LoggingSettings, prefix="log.", env_prefix="LOG_")

_SHARDS = (CONSUMER_CLIENT, SHARDS_BROKER_CLIENT, SHARDS_ZONE, _SHARDS_LOGGING)

_ATTACH_UUIDS = Command(
    "attach-uuids",
    "Write lines of files with a fresh UUID each",
    "gazette_sdk.cli.journals.append:run_attach",
    (ATTACH_UUIDS,),
    details=(
        "Prepares lines for journals whose readers drop duplicates: CSV by default. The UUIDs of a "
        "run ascend and have one producer. Without files it reads standard input."
    ),
    examples=(
        ("gazctl attach-uuids --skip-header rides.csv", "CSV with the UUID as first column"),
        (
            "gazctl attach-uuids --template=$'{{.UUID}}\\t{{.Line}}\\n' < lines",
            "another template; newlines in it must be real ones",
        ),
    ),
    arguments="[FILE...]",
    arguments_max=None,
    completes="files",
)

_BROKERS = Command(
    "brokers list",
    "List the brokers of the cluster",
    "gazette_sdk.cli.cluster:run_brokers",
    (LIST_BROKERS,),
    details=(
        "REPLICAS is the number of journals that a broker holds, of those it takes at most. LEASE "
        "is the time until its lease in Etcd ends unless it is renewed, which it is at two thirds. "
        "LAG is the longest time for which its event loop was held in the last ten seconds. STATE "
        "is ok, exiting (it drains), silent (it does not answer) or refused (it does not accept "
        "the token).\n\n"
        "What is not known is shown as -, and null in JSON. Brokers of other implementations do "
        "not describe themselves: a broker of this one at --broker.address lists them with what "
        "Etcd says; one of another implementation shows only brokers that hold journals.\n\n"
        "It needs a token without a selector that may LIST."
    ),
    examples=(
        ("gazctl brokers list", "all brokers of the cluster"),
        ("gazctl brokers list -o json", "with keys, clocks and rates, for scripts"),
    ),
)

_DRAIN = Command(
    "brokers drain",
    "Drain brokers and wait for their next start, one after the other: a rolling upgrade",
    "gazette_sdk.cli.drain:run",
    (DRAIN,),
    details=(
        "A broker that is asked to drain does what SIGTERM does: other brokers take its journals "
        "over, it stores what only it has, and its process ends with status 0. What supervises the "
        "process must start it again also after that status, as systemd does with Restart=always. "
        "It then runs the version that is installed by then.\n\n"
        "Nothing is drained if the others lack room: before, the allocator's simulation finds a "
        "place for each replica of each broker, and other zones for the journals that have several "
        "now. Journals whose replicas are not in sync are waited for first.\n\n"
        "The command keeps no state. A broker drains further if the command is ended, and a second "
        "one begins with it. Brokers that are done are passed over with --to-version or "
        "--started-before. Exit status 124 says that --wait-timeout was reached.\n\n"
        "It needs a token without a selector that may LIST and APPLY. Brokers of other "
        "implementations, and of versions without this call, are drained by SIGTERM alone."
    ),
    examples=(
        ("gazctl brokers drain --one-by-one --wait --dry-run", "which brokers, and is there room"),
        (
            "gazctl brokers drain --one-by-one --wait --to-version 0.2.0",
            "to the version that is installed on all hosts; run again, it continues",
        ),
        (
            "gazctl brokers drain --one-by-one --wait --started-before 2026-01-31T12:00:00Z",
            "after a change of options; brokers that have started since are done",
        ),
        ("gazctl brokers drain --broker a/broker-1 --wait", "one broker"),
    ),
    in_doubt="a broker that was asked drains further; run the command again to continue",
)

_REPORT = Command(
    "report",
    "Show the state of the cluster, and what needs attention",
    "gazette_sdk.cli.cluster:run_report",
    (REPORT,),
    details=(
        "Shows how many brokers, journals, stores and shards there are, their rates, and each "
        "problem with a command that shows more or mends it. A broker asks all members for it.\n\n"
        "Its exit status is 0 if nothing needs attention, 1 for warnings, and 2 for errors, or if "
        "there is no report.\n\n"
        "It needs a token without a selector that may LIST; rates, and bytes that are in no store, "
        "are shown to those that may READ, too."
    ),
    examples=(
        ("gazctl report", "on one screen"),
        ("gazctl report -o json || page-someone", "for scripts"),
    ),
)

_PRINT_CONFIG = Command(
    "print-config",
    "Print the effective configuration as an INI file",
    "gazette_sdk.cli.settings:run",
    (PRINT_CONFIG,),
    details="Defaults are comments. Keys and tokens are shown with --show-secrets only.",
    examples=(("gazctl print-config > gazctl.ini", "write a first INI file"),),
)

_TOKENS = (
    Command(
        "token create",
        "Create a token for a person or a program",
        "gazette_sdk.cli.tokens:run_create",
        (CREATE_TOKEN,),
        details=(
            "Prints the token alone. The keys are those of the brokers and consumers: who has "
            "them can make any token. A token cannot be taken back before it expires, except by "
            "removing its key from all servers."
        ),
        examples=(
            (
                "gazctl token create --key-file keys --capability READ -l topic=runs --subject ada",
                "for a person who reads the orders",
            ),
            (
                "gazctl token create --key-file keys --capability LIST --expires 1h",
                "for `gazctl report` and the console",
            ),
        ),
    ),
    Command(
        "token show",
        "Explain what a token allows, and until when",
        "gazette_sdk.cli.tokens:run_show",
        (SHOW_TOKEN,),
        details=(
            "TOKEN is the token, with or without `Bearer`; without it, or with -, it is read from "
            "standard input, where `ps` does not show it. Without keys its signature is not "
            "checked, and the output says so. Exit status 1 says that servers with the keys refuse "
            "the token."
        ),
        examples=(
            ("gazctl token show < token", "what it says"),
            ("gazctl token show --key-file keys < token", "also whether a key has signed it"),
        ),
        arguments="[TOKEN]",
        arguments_max=1,
    ),
)

_CHECK_KEYS = Command(
    "keys check",
    "Show which keys the members accept, and which key can go",
    "gazette_sdk.cli.tokens:run_check",
    (CHECK_KEYS,),
    details=(
        "Asks all brokers and consumers for the ids of the keys that they accept. Keys without an "
        "id have a fingerprint. The first key of a member signs its own calls.\n\n"
        "A key may sign once all members accept it. It can go once no member signs with it, and "
        "all accept the keys that sign: tokens that people have of it are refused from then on. "
        "With KEY, the exit status is 0 if that key can go, and 1 if it cannot or a member does "
        "not answer. Without it, the status is 0 if all members accept the same keys, and with "
        "--key-file if they accept those of the file, too.\n\n"
        "It needs a token without a selector that may LIST."
    ),
    examples=(
        ("gazctl keys check", "which member accepts which keys"),
        ("gazctl keys check --key-file new-keys", "before tokens of the new keys are given away"),
        ("gazctl keys check 2025", "before the key with the id 2025 is removed"),
    ),
    arguments="[KEY]",
    arguments_max=1,
)

_BACKUPS = (
    Command(
        "backup create",
        "Save what only Etcd has: specs, hints, suspensions, and heads of journals",
        "gazette_sdk.cli.backup.commands:run_create",
        (BACKUP, BACKUP_ETCD),
        details=(
            "FILE is a path, or a URL of any file system of fsspec, such as s3://bucket/name. It "
            "must not exist. It is a tar.gz with the SHA-256 of its parts in a manifest that is "
            "written last, so that half a file is not taken for a backup. Content of journals is "
            "in fragment stores, and not in it.\n\n"
            "All keys of Etcd are read at one revision; heads and registers are asked of brokers. "
            "It may run at any time, and takes some seconds for 10,000 journals. With keys it "
            "needs a token that may LIST and READ."
        ),
        examples=(
            ("gazctl backup create cluster-$(date +%F).tar.gz", "every day, by cron"),
            (
                "gazctl backup create s3://ops/$(date +%F).tar.gz --etcd.address http://etcd:2379",
                "to a bucket",
            ),
        ),
        arguments="FILE",
        arguments_min=1,
        arguments_max=1,
    ),
    Command(
        "backup show",
        "Show what a backup has",
        "gazette_sdk.cli.backup.commands:run_show",
        (SHOW_BACKUP,),
        details="The sums of its parts are checked. No cluster is asked.",
        examples=(
            ("gazctl backup show cluster.tar.gz", "journals with their heads, shards, members"),
            ("gazctl backup show cluster.tar.gz -o json", "one object, for scripts"),
        ),
        arguments="FILE",
        arguments_min=1,
        arguments_max=1,
    ),
    Command(
        "backup verify",
        "Compare a backup with the fragment stores",
        "gazette_sdk.cli.backup.commands:run_verify",
        (VERIFY_BACKUP,),
        details=(
            "Checks the sums of its parts, and lists the fragments of each journal, with the "
            "credentials of this tool. What lies before a journal's saved head and is in no store "
            "is shown: right after the backup that is what brokers have in their spools. Exit "
            "status 1 says that something is missing.\n\n"
            "file:// stores need --file-root."
        ),
        examples=(
            ("gazctl backup verify s3://ops/gazette-2026-11-29.tar.gz", "the next day"),
            ("gazctl backup verify cluster.tar.gz -o json", "each journal, for scripts"),
        ),
        arguments="FILE",
        arguments_min=1,
        arguments_max=1,
    ),
)

_RESTORE = Command(
    "restore cluster",
    "Restore a cluster whose Etcd was lost",
    "gazette_sdk.cli.backup.commands:run_restore",
    (RESTORE, BACKUP_ETCD),
    in_doubt="a part may be written; run the command again to continue",
    details=(
        "Before: stop all consumers, start an empty Etcd, and start all brokers, each over its "
        "spool directory. They claim the journals of which they have the last bytes. Look at the "
        "result of --dry-run, which writes nothing.\n\n"
        "Writes journals, then shards with their hints. Each journal continues at or after its "
        "saved head, the end of its stored content, and what its brokers have, so that no offset "
        "is given twice. Where no broker has the last bytes of a journal, it continues --skip "
        "bytes later: bytes may have been acknowledged that are lost, and readers pass over the "
        "gap.\n\n"
        "It refuses to work if brokers of the backup are absent, unless --lost says that their "
        "spool directories are gone; if a broker of the old cluster answers; if a process of an "
        "application runs; and if Etcd has journals or shards, unless they are of the same restore "
        "that was interrupted. That one is continued.\n\n"
        "--from-stores is for those who have no backup. It takes specs, hints and members from the "
        "mirrors that brokers with --broker.mirror-specs write below .gazette/ of their stores. "
        "Without mirrors it makes journals of the fragments that it finds: names, heads and codecs "
        "are theirs, and replication, content type and the rest are guessed, and marked in the "
        "table. Correct those with `gazctl journals edit`.\n\n"
        "It writes to Etcd directly. With keys it needs those, or a token that may do all."
    ),
    examples=(
        (
            "gazctl restore cluster --from b.tar.gz --etcd.address http://etcd:2379 --dry-run",
            "what would be written",
        ),
        (
            "gazctl restore cluster --from s3://ops/gazette.tar.gz --lost eu-1a/broker-3",
            "after one of the disks was lost, too",
        ),
        (
            "gazctl restore cluster --from-stores s3://bucket/ --dry-run",
            "what can be rebuilt without a backup",
        ),
    ),
)

GAZCTL = Program(
    name="gazctl",
    summary="gazctl: inspect and change the journals and shards of a Gazette cluster.",
    commands=(
        *JOURNALS,
        *SHARDS,
        *CONSUMERS,
        *TOPICS,
        _BROKERS,
        _DRAIN,
        _REPORT,
        CONSOLE,
        *_TOKENS,
        _CHECK_KEYS,
        *_BACKUPS,
        _RESTORE,
        _ATTACH_UUIDS,
        _PRINT_CONFIG,
        completion_command("gazctl"),
    ),
    ini="gazctl.ini",
    shared={
        "journals": (BROKER_CLIENT, ZONE, _JOURNALS_LOGGING),
        "shards": _SHARDS,
        "consumers": _SHARDS,
        "topics": _SHARDS,
        "brokers": (BROKER_CLIENT, ZONE, _JOURNALS_LOGGING),
        "keys": (BROKER_CLIENT, ZONE, _JOURNALS_LOGGING),
        "backup": (BROKER_CLIENT, ZONE, _JOURNALS_LOGGING),
        "restore": (BROKER_CLIENT, ZONE, _JOURNALS_LOGGING),
        "report": (BROKER_CLIENT, ZONE, _JOURNALS_LOGGING),
    },
    aliases=ADDRESS_ALIASES,
    sibling="gazette_sdk.cli.gazette:GAZETTE",
)


def main() -> int:
    """Run ``gazctl`` with this process's arguments; return the exit status."""
    return GAZCTL.main()


if __name__ == "__main__":
    sys.exit(main())
