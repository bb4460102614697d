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
from gazette_sdk.cli.journals.commands import COMMANDS as JOURNALS
from gazette_sdk.cli.program import Command, Program
from gazette_sdk.cli.settings import ATTACH_UUIDS, PRINT_CONFIG
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
    },
    aliases=ADDRESS_ALIASES,
    sibling="gazette_sdk.cli.gazette:GAZETTE",
)


def main() -> int:
    """Run ``gazctl`` with this process's arguments; return the exit status."""
    return GAZCTL.main()


if __name__ == "__main__":
    sys.exit(main())
