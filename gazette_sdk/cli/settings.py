"""Options that several commands share.

Options of ``attach-uuids``, ``print-config`` and ``dev``.

``print-config``: the effective configuration as an INI file.

Options that commands of journals and of shards share, as annotated types of their fields.

Options of ``gazette run-consumer`` (cli section 4, shard section 13).
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import Field

from gazette_sdk.cli.client import BrokerClientSettings
from gazette_sdk.cli.program import Invocation, TimeoutSettings
from gazette_sdk.server.options import Group, Option, Seconds, Settings, load, print_config
from gazette_sdk.server.settings import EtcdAddress, EtcdPrefix, EtcdSettings, MemberSettings
from gazette_sdk.transport.router import DEFAULT_SIZE


def run(invocation: Invocation) -> None:
    """Write the configuration to standard output (cli section 1.5)."""
    shown = [(group, load(group, invocation.sources, partial=True)) for group in invocation.known]
    show_secrets = invocation.settings(PRINT_CONFIG).show_secrets
    sys.stdout.write(print_config(shown, show_secrets=show_secrets))


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


class AttachUuidsSettings(Settings):
    """Options of ``gazctl attach-uuids``."""

    template: Annotated[
        str,
        Option(
            "Template",
            "Text to write for each line, with {{.UUID}} and {{.Line}} in it, and with its newline",
        ),
    ] = "{{.UUID}},{{.Line}}\n"
    max_length: Annotated[
        int, Option("MaxLength", "Greatest length of a line, in bytes"), Field(ge=1)
    ] = 4194304
    skip_header: Annotated[bool, Option("SkipHeader", "Drop the first line of each file")] = False


class PrintConfigSettings(Settings):
    """Options of ``print-config``."""

    show_secrets: Annotated[
        bool, Option("ShowSecrets", "Write keys and tokens, too", in_ini=False)
    ] = False


_DATA = Option("Data", "Directory of everything the cluster keeps")

DEV_DATA = "./gazette-data"


class DevSettings(Settings):
    """Options of ``gazette dev``."""

    data: Annotated[str, _DATA] = DEV_DATA
    port: Annotated[
        int, Option("Port", "Port of the first broker; 0 for a free one"), Field(ge=0, le=65535)
    ] = 8080
    brokers: Annotated[
        int,
        Option("Brokers", "How many brokers to run; of several each is a process of its own"),
        Field(ge=1, le=32),
    ] = 1
    zones: Annotated[
        str,
        Option("Zones", "Names of zones, separated by commas, which are given to brokers in turn"),
    ] = "local"
    lease_s: Annotated[
        Seconds,
        Option(
            "LeaseTTL",
            "Lifetime of the brokers' leases in Etcd. After a longer pause of this process, the "
            "brokers join the cluster again",
        ),
        Field(ge=1),
    ] = 20.0


class DevControlSettings(TimeoutSettings):
    """Options of ``gazette dev kill`` and its siblings."""

    data: Annotated[str, _DATA] = DEV_DATA
    format: Annotated[
        Literal["table", "json"],
        Option("Format", "Output format; json is one object per line", short="o", in_ini=False),
    ] = "table"


ATTACH_UUIDS = Group("attach-uuids", AttachUuidsSettings)
PRINT_CONFIG = Group("print-config", PrintConfigSettings)
DEV = Group("dev", DevSettings)
DEV_CONTROL = Group("dev", DevControlSettings)


class ConsumerSettings(MemberSettings):
    """Consumer process."""

    flags = "consumer."

    max_hot_standbys: Annotated[
        int, Option("MaxHotStandbys", "Greatest number of hot standbys of any shard"), Field(ge=0)
    ] = 3
    directory: Annotated[
        str,
        Option(
            "Directory",
            "Directory below which shards keep their files while they run; empty for the "
            "temporary directory",
        ),
    ] = ""
    workers: Annotated[
        int, Option("Workers", "Threads that run the code of shards, at most"), Field(ge=1, le=1024)
    ] = 32
    prune_period_s: Annotated[
        Seconds,
        Option(
            "PrunePeriod",
            "Time between looks for content of recovery logs that no recovery needs, which brokers "
            "then remove; 0 for none",
            "prune-period",
        ),
        Field(ge=0),
    ] = 3600.0
    ready_fails_on: Annotated[
        Literal["none", "failed"],
        Option(
            "ReadyFailsOn", "Answer 503 at /debug/ready while a shard of the process has failed"
        ),
    ] = "none"


class ConsumerEtcdSettings(EtcdSettings):
    """Etcd of a consumer process."""

    address: Annotated[
        EtcdAddress,
        Option(
            "Address",
            "Address of Etcd, or several separated by commas; empty to ask the broker, which "
            "answers if it is of `gazette dev`",
        ),
    ] = ""
    prefix: Annotated[
        EtcdPrefix,
        Option(
            "Prefix",
            "Prefix of the application's keys in Etcd; empty for /gazette/consumers/NAME",
        ),
    ] = ""


class ConsumerBrokerSettings(BrokerClientSettings):
    """Connection of a consumer process to brokers."""

    cache_size: Annotated[
        int,
        Option(
            "Size",
            "Number of journals whose routes are cached, to call their brokers directly; 0 sends "
            "all calls to the address",
            long="cache.size",
            env="CACHE_SIZE",
        ),
    ] = DEFAULT_SIZE
    file_root: Annotated[
        str,
        Option(
            "FileRoot",
            "Directory of the brokers' file:// stores on this machine: their fragments are read "
            "from it; empty to read them through brokers",
        ),
    ] = ""


CONSUMER = Group(
    "Consumer", ConsumerSettings, prefix=ConsumerSettings.flags, env_prefix="CONSUMER_"
)
CONSUMER_ETCD = Group("Etcd", ConsumerEtcdSettings, prefix="etcd.", env_prefix="ETCD_")
CONSUMER_BROKER = Group("Broker", ConsumerBrokerSettings, prefix="broker.", env_prefix="BROKER_")
