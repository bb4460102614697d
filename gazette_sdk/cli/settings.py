"""Options of commands, and those that several commands share.

Those of commands of journals and of shards are annotated types of their fields. Here are also the
options of commands whose modules are costly to import: ``attach-uuids``, ``bench``, ``dev``,
``allocator simulate`` and ``run-consumer`` (cli section 4, shard section 13), and ``print-config``:
the effective configuration as an INI file.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gazette_sdk.cli.client import BrokerClientSettings, ConnectionSettings
from gazette_sdk.cli.program import Invocation, TimeoutSettings
from gazette_sdk.protocol.journal_spec import DEFAULT_MAX_REPLICATION
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

DeleteYes = Annotated[bool, Option("Yes", "Do not ask for confirmation", short="y", in_ini=False)]
"""Consent to a deletion."""

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


class MonitoringSettings(Settings):
    """Options of ``monitoring write``."""

    runbooks: Annotated[
        str,
        Option(
            "Runbooks",
            "URL of the page of runbooks, for the links of alerts; by default docs/runbooks.md",
            in_ini=False,
        ),
    ] = ""


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


class ClusterFormatSettings(Settings):
    """Options of ``brokers list`` and ``report``."""

    format: Annotated[Literal["table", "json"], Option("Format", "Output format", short="o")] = (
        "table"
    )


MaxReplication = Annotated[
    int,
    Option("MaxReplication", "The brokers' --broker.max-replication", in_ini=False),
    Field(ge=1),
]
"""Cap of every journal's replication, which brokers alone know."""


class DrainSettings(Settings):
    """Options of ``brokers drain``."""

    broker: Annotated[
        tuple[str, ...],
        Option(
            "Broker",
            "Broker ZONE/ID to drain; repeatable, in this order; by default all of them, by zone "
            "and id",
            in_ini=False,
        ),
    ] = ()
    one_by_one: Annotated[
        bool,
        Option(
            "OneByOne",
            "Drain one after the other, each when the one before is back; needs --wait",
            in_ini=False,
        ),
    ] = False
    wait: Annotated[
        bool,
        Option(
            "Wait",
            "Wait until the broker has left, has started again and serves, and all journals have "
            "their replicas in sync",
            in_ini=False,
        ),
    ] = False
    wait_timeout_s: Annotated[
        Seconds, Option("WaitTimeout", "Longest wait for one broker", in_ini=False), Field(gt=0)
    ] = 1800.0
    to_version: Annotated[
        str,
        Option(
            "ToVersion",
            "Version of the package that brokers should run: those that do are passed over, and "
            "one that is back with another version is an error",
            in_ini=False,
        ),
    ] = ""
    started_before: Annotated[
        str,
        Option(
            "StartedBefore",
            "Time such as 2026-01-31T12:00:00Z, or 2h for two hours ago: brokers that have started "
            "since are passed over",
            in_ini=False,
        ),
    ] = ""
    allow_single_zone: Annotated[
        bool,
        Option(
            "AllowSingleZone",
            "Drain also where journals have all replicas in one zone until the broker is back",
            in_ini=False,
        ),
    ] = False
    max_replication: MaxReplication = DEFAULT_MAX_REPLICATION
    dry_run: Annotated[
        bool, Option("DryRun", "Drain nothing, and show what would be done", in_ini=False)
    ] = False
    format: OutcomeFormat = "table"


class KeysSettings(Settings):
    """Keys of a cluster."""

    auth_keys: Annotated[
        str,
        Option(
            "AuthKeys",
            "Base64 keys of the servers, separated by spaces or commas",
            env="BROKER_AUTH_KEYS",
        ),
    ] = ""
    auth_keys_file: Annotated[
        str,
        Option(
            "AuthKeysFile",
            "File with the keys instead of --auth-keys, as the servers read it",
            long="key-file",
            env="BROKER_AUTH_KEYS_FILE",
        ),
    ] = ""


class CreateTokenSettings(KeysSettings):
    """Options of ``token create``."""

    capability: Annotated[
        tuple[str, ...],
        Option(
            "Capability",
            "Right of the token: LIST, READ, APPEND, APPLY, REPLICATE, ALL, or the number of a bit "
            "of an application, such as 0x10000; repeatable",
            in_ini=False,
        ),
    ] = ()
    selector: Annotated[
        str,
        Option(
            "Selector",
            "Label selector of the journals and shards that the token allows; by default all",
            short="l",
            in_ini=False,
        ),
    ] = ""
    expires_s: Annotated[
        Seconds,
        Option("Expires", "Time after which the token is refused", long="expires", in_ini=False),
        Field(gt=0),
    ] = 3600.0
    subject: Annotated[
        str, Option("Subject", "Name of the holder, for audit logs", in_ini=False)
    ] = ""
    key_id: Annotated[
        str,
        Option("KeyId", "Id of the key that signs; by default the first one does", in_ini=False),
    ] = ""


class ShowTokenSettings(KeysSettings):
    """Options of ``token show``."""

    format: Annotated[
        Literal["table", "json"], Option("Format", "Output format", short="o", in_ini=False)
    ] = "table"


class CheckKeysSettings(KeysSettings):
    """Options of ``keys check``."""

    auth_keys: Annotated[
        str, Option("AuthKeys", "Base64 keys that members should accept", in_ini=False)
    ] = ""
    auth_keys_file: Annotated[
        str,
        Option(
            "AuthKeysFile",
            "File with keys that members should accept",
            long="key-file",
            in_ini=False,
        ),
    ] = ""
    format: Annotated[
        Literal["table", "json"], Option("Format", "Output format", short="o", in_ini=False)
    ] = "table"


_CONSUMERS = Option("ConsumersPrefix", "Prefix in Etcd below which applications have their keys")


class BackupSettings(Settings):
    """Options of ``backup create``."""

    consumers_prefix: Annotated[EtcdPrefix, _CONSUMERS] = "/gazette/consumers"


class BackupEtcdSettings(EtcdSettings):
    """Etcd of a cluster that is backed up, or restored."""

    address: Annotated[
        EtcdAddress,
        Option(
            "Address",
            "Address of Etcd, or several separated by commas; empty to ask the broker, which "
            "answers if it is of `gazette dev`",
        ),
    ] = ""


class VerifyBackupSettings(Settings):
    """Options of ``backup verify``."""

    file_root: FileRoot = ""
    format: OutcomeFormat = "table"


class RestoreSettings(Settings):
    """Options of ``restore cluster``."""

    backup: Annotated[
        str,
        Option(
            "From",
            "Backup to restore: a path, or a URL such as s3://…",
            long="from",
            in_ini=False,
        ),
    ] = ""
    from_stores: Annotated[
        tuple[str, ...],
        Option(
            "FromStores",
            "URL of a fragment store from which specs are taken where there is no backup: from its "
            "mirrors, or else guessed from its fragments; repeatable",
            in_ini=False,
        ),
    ] = ()
    mirror: Annotated[
        str,
        Option("Mirror", "Name of the mirror to use; by default the latest one", in_ini=False),
    ] = ""
    consumers_prefix: Annotated[EtcdPrefix, _CONSUMERS] = "/gazette/consumers"
    file_root: FileRoot = ""
    lost: Annotated[
        tuple[str, ...],
        Option(
            "Lost",
            "Broker ZONE/ID of the backup whose spool directory is lost, or `all`; repeatable",
            in_ini=False,
        ),
    ] = ()
    skip: Annotated[
        int,
        Option(
            "Skip",
            "Bytes from the known end of a journal to where it continues, if no broker has its "
            "last bytes; 0 only if nothing was appended after the backup that no store has",
            in_ini=False,
        ),
        Field(ge=0, le=1 << 60),
    ] = 1 << 40
    dry_run: Annotated[
        bool, Option("DryRun", "Write nothing, and show what would be written", in_ini=False)
    ] = False
    format: OutcomeFormat = "table"


BACKUP = Group("backup.create", BackupSettings, env_prefix="")
BACKUP_ETCD = Group("Etcd", BackupEtcdSettings, prefix="etcd.", env_prefix="ETCD_")
SHOW_BACKUP = Group("backup.show", ClusterFormatSettings)
VERIFY_BACKUP = Group("backup.verify", VerifyBackupSettings)
RESTORE = Group("restore.cluster", RestoreSettings)
ATTACH_UUIDS = Group("attach-uuids", AttachUuidsSettings)
PRINT_CONFIG = Group("print-config", PrintConfigSettings)
MONITORING = Group("monitoring.write", MonitoringSettings)
LIST_BROKERS = Group("brokers.list", ClusterFormatSettings)
DRAIN = Group("brokers.drain", DrainSettings)
REPORT = Group("report", ClusterFormatSettings)
CREATE_TOKEN = Group("token.create", CreateTokenSettings, env_prefix="")
SHOW_TOKEN = Group("token.show", ShowTokenSettings, env_prefix="")
CHECK_KEYS = Group("keys.check", CheckKeysSettings)
DEV = Group("dev", DevSettings)
DEV_CONTROL = Group("dev", DevControlSettings)


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File with the processor time that a container may use, and the period of it, on Linux."""


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text(encoding="ascii").split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or `max` for no limit
        return count


def _processes(text: str) -> str:
    if text != "auto" and not (
        text.isascii() and text.isdigit() and 1 <= int(text) <= PROCESSES_MAX
    ):
        raise ValueError(f"{text!r} is neither a number from 1 to {PROCESSES_MAX} nor auto")
    return text


PROCESSES_MAX = 1024


class ProcessesSettings(Settings):
    """Number of members on one machine."""

    processes: Annotated[
        str,
        Option(
            "Processes",
            "Number of members to run on this machine, each a process with an id, ports and "
            "directories of its own; auto for one per processor core",
        ),
        AfterValidator(_processes),
    ] = "1"

    @property
    def count(self) -> int:
        """Number of members."""
        return cores() if self.processes == "auto" else int(self.processes)


BROKER_PROCESSES = Group("Broker", ProcessesSettings, env_prefix="BROKER_")
CONSUMER_PROCESSES = Group("Consumer", ProcessesSettings, env_prefix="CONSUMER_")


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


class DoctorBrokerSettings(BrokerClientSettings):
    """Connection of ``doctor`` to a broker, and what a broker on this machine uses."""

    auth_keys_file: Annotated[
        str, Option("AuthKeysFile", "File with the keys instead of AuthKeys")
    ] = ""
    spool_dir: Annotated[str, Option("SpoolDir", "Spool directory of a broker on this machine")] = (
        ""
    )
    server_cert_file: Annotated[
        str, Option("ServerCertFile", "Certificate of a server on this machine, PEM")
    ] = ""


class DoctorSettings(Settings):
    """Options of ``doctor``."""

    as_json: Annotated[
        bool, Option("JSON", "Write one JSON object, for programs", long="json", in_ini=False)
    ] = False
    bundle: Annotated[
        str,
        Option(
            "Bundle",
            "File to write for a report of a fault: a tar.gz of 20 MB at most, without secrets, "
            "with specs, members, metrics, events, stacks and a profile of ten seconds",
            in_ini=False,
        ),
    ] = ""
    consumer: Annotated[
        tuple[str, ...],
        Option(
            "Consumer",
            "Address of a process of an application that brokers do not know of; repeatable",
            in_ini=False,
        ),
    ] = ()


DOCTOR = Group("doctor", DoctorSettings)
DOCTOR_BROKER = Group("Broker", DoctorBrokerSettings, prefix="broker.", env_prefix="BROKER_")


class SimulateSettings(Settings):
    """Options of ``gazette allocator simulate``."""

    cluster: Annotated[
        str,
        Option(
            "Cluster",
            "Description of the cluster in YAML, - for standard input; by default the live "
            "cluster in Etcd",
            in_ini=False,
        ),
    ] = ""
    save: Annotated[
        str,
        Option(
            "Save",
            "Write the cluster's description to this file, - for standard output, and "
            "simulate nothing unless a change is given",
            in_ini=False,
        ),
    ] = ""
    remove: Annotated[
        tuple[str, ...],
        Option("Remove", "Broker ZONE/ID that is lost, with its assignments", in_ini=False),
    ] = ()
    remove_zone: Annotated[
        tuple[str, ...],
        Option("RemoveZone", "Zone all of whose brokers are lost", in_ini=False),
    ] = ()
    drain: Annotated[
        tuple[str, ...],
        Option(
            "Drain",
            "Broker ZONE/ID that drains, and leaves when it holds nothing",
            in_ini=False,
        ),
    ] = ()
    add: Annotated[
        tuple[str, ...],
        Option(
            "Add",
            "Broker ZONE/ID or ZONE/ID:LIMIT that joins; by default with the greatest limit of "
            "the cluster's brokers",
            in_ini=False,
        ),
    ] = ()
    replication: Annotated[
        tuple[str, ...],
        Option(
            "Replication",
            "New replication JOURNAL=N; a name that ends with / stands for all journals below it",
            in_ini=False,
        ),
    ] = ()
    specs: Annotated[
        str,
        Option(
            "Specs",
            "File of specs in YAML that are applied, as by `gazctl journals apply`",
            in_ini=False,
        ),
    ] = ""
    max_replication: MaxReplication = DEFAULT_MAX_REPLICATION
    verbose: Annotated[
        bool, Option("Verbose", "List each journal that changes", short="v", in_ini=False)
    ] = False
    format: Annotated[
        Literal["table", "json"], Option("Format", "Output format", short="o", in_ini=False)
    ] = "table"


SIMULATE = Group("simulate", SimulateSettings)


PHASES = ("publish", "tail", "read")
"""Phases of a run, in order."""

SIZE_BYTES_MIN = 64
SIZE_BYTES_MAX = 1 << 20


def _phases(text: str) -> str:
    named = [name.strip() for name in text.split(",")]
    for name in named:
        if name not in PHASES:
            raise ValueError(f"{name!r} is not a phase; name some of {', '.join(PHASES)}")
    if named == ["read"]:
        raise ValueError("`read` needs `publish` or `tail`, which write the messages")
    return ",".join(name for name in PHASES if name in named)


def _prefix(text: str) -> str:
    if text and not text.endswith("/"):
        raise ValueError(f"{text!r} must end in /")
    return text


class BenchSettings(Settings):
    """Options of ``gazette bench``."""

    embedded: Annotated[
        bool,
        Option("Embedded", "Measure a temporary cluster on this machine"),
    ] = False
    phases: Annotated[
        str,
        Option("Phases", "Phases to run: some of publish, tail and read, joined by commas"),
        AfterValidator(_phases),
    ] = "publish,tail,read"
    messages: Annotated[int, Option("Messages", "Number of messages of `publish`"), Field(ge=1)] = (
        100_000
    )
    size: Annotated[
        int,
        Option("Size", "Length of a message as JSON, without its UUID, in bytes"),
        Field(ge=SIZE_BYTES_MIN, le=SIZE_BYTES_MAX),
    ] = 200
    mode: Annotated[
        Literal["publish", "publish_batch"],
        Option(
            "Mode", "Publisher method of the phase `publish`: for single messages, or for lists"
        ),
    ] = "publish"
    batch: Annotated[
        int,
        Option("Batch", "Messages in a list of publish_batch"),
        Field(ge=1, le=100_000),
    ] = 1000
    rate: Annotated[
        float, Option("Rate", "Messages per second of `tail`"), Field(gt=0, le=10_000_000)
    ] = 1000.0
    duration_s: Annotated[
        Seconds, Option("Duration", "Duration of `tail`"), Field(gt=0, le=86_400)
    ] = 10.0
    journals: Annotated[
        int, Option("Journals", "Number of journals to create"), Field(ge=1, le=10_000)
    ] = 4
    replication: Annotated[
        int, Option("Replication", "Replicas of each journal"), Field(ge=1, le=9)
    ] = 1
    store: Annotated[
        str, Option("Store", "URL of the journals' fragment store"), Field(min_length=1)
    ] = "file:///"
    prefix: Annotated[
        str,
        Option("Prefix", "Prefix of the journals' names; by default bench/ and a random name"),
        AfterValidator(_prefix),
    ] = ""
    keep: Annotated[bool, Option("Keep", "Do not delete the journals")] = False
    json_output: Annotated[
        bool, Option("JSON", "Print one JSON object instead of tables", long="json", in_ini=False)
    ] = False


BENCH = Group("bench", BenchSettings)
BENCH_CLUSTER = Group("bench.Cluster", ConnectionSettings, env_prefix="BROKER_")
