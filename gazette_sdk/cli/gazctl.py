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
from gazette_sdk.cli.settings import ATTACH_UUIDS, LIST_BROKERS, PRINT_CONFIG, REPORT
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
    "gazette_sdk.cli.attach_uuids:run",
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

GAZCTL = Program(
    name="gazctl",
    summary="gazctl: inspect and change the journals and shards of a Gazette cluster.",
    commands=(
        *JOURNALS,
        *SHARDS,
        *CONSUMERS,
        *TOPICS,
        _BROKERS,
        _REPORT,
        CONSOLE,
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
