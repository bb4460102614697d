"""Option groups of server processes (cli sections 2 and 3.1)."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.protocol.authorization import check_key_lengths
from gazette_sdk.protocol.names import validate_endpoint, validate_journal
from gazette_sdk.protocol.rules import validate_suffix, validate_zone
from gazette_sdk.server.options import Group, Option, Seconds, Settings

if TYPE_CHECKING:
    from gazette_sdk.cluster.membership import EtcdConfig


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator of an option by a function that raises an error, unless it is empty."""

    def checked(value: str) -> str:
        try:
            if value:
                check(value)
        except GazetteError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(checked)


def check_port(port: str) -> None:
    """Check a port to serve on.

    Raises:
        ConfigurationError: it is neither a number nor the URL of a socket.
    """
    if port.startswith("unix://"):
        if not port.removeprefix("unix://").partition("/")[2]:
            raise ConfigurationError(f"{port!r} names no socket; write unix:///path/to/socket")
    elif not port.isascii() or not port.isdigit() or int(port) > PORT_MAX:
        raise ConfigurationError(
            f"{port!r} is no port: give a number up to {PORT_MAX}, 0 for a free one, or"
            " unix:///path"
        )


def _check_etcd(address: str) -> None:
    from gazette_sdk.cluster.etcd_connections import dial_target  # noqa: PLC0415 - it loads gRPC

    for each in address.split(","):
        dial_target(each.strip())


def _check_prefix(prefix: str) -> None:
    from gazette_sdk.cluster.keyspace import check_root  # noqa: PLC0415 - it loads gRPC

    check_root(prefix)


PORT_MAX = 65535

EtcdAddress: TypeAlias = Annotated[str, _checked(_check_etcd)]
"""Type of options of addresses of Etcd, separated by commas."""

EtcdPrefix: TypeAlias = Annotated[str, _checked(_check_prefix)]
"""Type of options of prefixes of keys in Etcd."""


class LoggingSettings(Settings):
    """Level and format of log records."""

    level: Annotated[
        Literal["trace", "debug", "info", "warn", "error", "fatal"],
        Option("Level", "Least level of records to log"),
    ] = "warn"
    format: Annotated[
        Literal["text", "json", "color"], Option("Format", "Format of log records")
    ] = "text"


class DebugSettings(Settings):
    """Port of the diagnostics."""

    port: Annotated[
        str,
        Option("Port", "Port of the diagnostics, over plain HTTP; empty for none of its own"),
        _checked(check_port),
    ] = ""
    private: Annotated[bool, Option("Private", "Keep the diagnostics off the service port")] = False


class MetricsSettings(Settings):
    """Series of the metrics."""

    journals: Annotated[
        Literal["all", "topic"],
        Option(
            "Journals",
            "Series of journals: one for each, or only sums by their label topic, which keeps a "
            "scrape small where there are thousands",
        ),
    ] = "all"


class EtcdSettings(Settings):
    """Etcd of a cluster."""

    address: Annotated[
        EtcdAddress,
        Option("Address", "Address of Etcd, or several separated by commas; others are learned"),
    ] = "http://localhost:2379"
    cert_file: Annotated[
        str, Option("CertFile", "Client certificate toward Etcd, PEM (with https)")
    ] = ""
    cert_key_file: Annotated[str, Option("CertKeyFile", "Its key, PEM")] = ""
    trusted_ca_file: Annotated[
        str, Option("TrustedCAFile", "Authorities that sign Etcd's certificate, PEM")
    ] = ""
    user: Annotated[str, Option("User", "User of Etcd, if Etcd has authentication enabled")] = ""
    password: Annotated[str, Option("Password", "Its password")] = ""
    password_file: Annotated[
        str, Option("PasswordFile", "File with the password instead of Password")
    ] = ""
    lease_s: Annotated[
        Seconds,
        Option("LeaseTTL", "Lifetime of this process's lease in Etcd", env="LEASE_TTL"),
        Field(ge=1),
    ] = 20.0
    prefix: Annotated[EtcdPrefix, Option("Prefix", "Prefix of the cluster's keys in Etcd")] = (
        "/gazette/cluster"
    )

    @model_validator(mode="after")
    def _certificates_are_used(self) -> Self:
        files = {
            "--etcd.cert-file": self.cert_file,
            "--etcd.cert-key-file": self.cert_key_file,
            "--etcd.trusted-ca-file": self.trusted_ca_file,
        }
        given = [flag for flag, path in files.items() if path]
        addresses = [address.strip() for address in self.address.split(",")]
        if given and not all(address.startswith("https://") for address in addresses):
            raise ValueError(
                f"{given[0]} has no effect with --etcd.address {self.address}, which is reached "
                f"without TLS: write an https:// address, or leave out {' and '.join(given)}"
            )
        if bool(self.cert_file) != bool(self.cert_key_file):
            given_flag, missing = "--etcd.cert-file", "--etcd.cert-key-file"
            if self.cert_key_file:
                given_flag, missing = missing, given_flag
            raise ValueError(f"{given_flag} has no effect alone: set {missing}, too")
        return self

    def config(self) -> EtcdConfig:
        """Return how a member of a cluster, or a command, reaches this Etcd."""
        from gazette_sdk.cluster.membership import EtcdConfig  # noqa: PLC0415 - it loads gRPC

        return EtcdConfig(
            endpoint=self.address,
            cert_file=Path(self.cert_file) if self.cert_file else None,
            cert_key_file=Path(self.cert_key_file) if self.cert_key_file else None,
            trusted_ca_file=Path(self.trusted_ca_file) if self.trusted_ca_file else None,
            user=self.user,
            password=self.password,
            lease_ttl_s=math.ceil(self.lease_s),
        )


class ProcessSettings(Settings):
    """Address and identity of a server process."""

    zone: Annotated[
        str, Option("Zone", "Availability zone of this process"), _checked(validate_zone)
    ] = "local"
    id: Annotated[
        str,
        Option("ID", "Unique id of this process within its zone; empty for a random name"),
        _checked(validate_suffix),
    ] = ""
    host: Annotated[
        str,
        Option(
            "Host",
            "Host name to advertise; empty or localhost serves this machine only, any other "
            "name serves on all interfaces",
        ),
    ] = ""
    port: Annotated[
        str,
        Option("Port", "Port to serve on, or unix:///path; empty for a random free port"),
        _checked(check_port),
    ] = ""
    advertise_port: Annotated[
        int,
        Option(
            "AdvertisePort",
            "Port to advertise, if a proxy or a container maps it; 0 for the port that is served",
        ),
        Field(ge=0, le=65535),
    ] = 0
    server_cert_file: Annotated[
        str, Option("ServerCertFile", "Server certificate, PEM; turns TLS on")
    ] = ""
    server_cert_key_file: Annotated[str, Option("ServerCertKeyFile", "Its key, PEM")] = ""
    server_ca_file: Annotated[
        str, Option("ServerCAFile", "Authorities that client certificates must be signed by, PEM")
    ] = ""
    peer_cert_file: Annotated[
        str, Option("PeerCertFile", "Client certificate toward peers, PEM")
    ] = ""
    peer_cert_key_file: Annotated[str, Option("PeerCertKeyFile", "Its key, PEM")] = ""
    peer_ca_file: Annotated[
        str, Option("PeerCAFile", "Authorities that sign certificates of peers, PEM")
    ] = ""
    max_grpc_recv_size: Annotated[
        int, Option("MaxGRPCRecvSize", "Greatest gRPC message accepted, in bytes"), Field(ge=1)
    ] = 4194304
    max_peer_connections: Annotated[
        int,
        Option(
            "MaxPeerConnections",
            "Greatest number of connections of one IP address; 0: no limit",
        ),
        Field(ge=0),
    ] = 4096
    max_peer_calls: Annotated[
        int,
        Option(
            "MaxPeerCalls",
            "Greatest number of concurrent calls of one IP address, without appends of the stream "
            "transport that are in flight on a connection; 0: no limit",
        ),
        Field(ge=0),
    ] = 16384
    allow_origin: Annotated[
        tuple[str, ...],
        Option("AllowOrigin", "Origin that may call /v1/ from browsers; repeatable"),
    ] = ()
    allow_host: Annotated[
        tuple[str, ...],
        Option(
            "AllowHost",
            "Host name in URLs, beside those of this machine, for which a process that serves "
            "this machine only answers without a token; repeatable",
        ),
    ] = ()

    @property
    def bind_host(self) -> str:
        """Address to bind: loopback by default; empty for all interfaces."""
        return "localhost" if self.host in _LOOPBACK_NAMES else ""

    @property
    def advertise_host(self) -> str:
        """Host name to advertise; that of a socket is this machine's by default."""
        if self.port.startswith("unix://"):
            return self.host or socket.gethostname()
        return self.host or "localhost"


class ConsoleContentSettings(Settings):
    """Content of journals in the web console."""

    mask: Annotated[
        tuple[str, ...],
        Option(
            "Mask",
            "Fields of JSON messages that the web console masks, as SELECTOR: FIELD, FIELD, such "
            "as 'topic=orders: customer.email, card.*'; content of these journals that is no JSON "
            "is not shown; repeatable",
            long="console.mask",
            env="CONSOLE_MASK",
        ),
    ] = ()
    descriptors: Annotated[
        str,
        Option(
            "Descriptors",
            "Protobuf descriptor set, by which the web console names the fields of messages whose "
            "type is in the label app.gazette.dev/message-type of their journal",
            long="console.descriptors",
            env="CONSOLE_DESCRIPTORS",
        ),
    ] = ""


class MemberSettings(ProcessSettings):
    """Server process that is a member of a cluster in Etcd.

    Attributes:
        flags: prefix of its options.
    """

    flags: ClassVar[str]

    limit: Annotated[
        int,
        Option("Limit", "Greatest number of journal replicas, or shards, that this process takes"),
        Field(ge=0, le=131072),
    ] = 1024
    console: Annotated[
        Literal["on", "off"], Option("Console", "Serve the web console at /console/")
    ] = "on"
    watch_delay_s: Annotated[
        Seconds, Option("WatchDelay", "How long changes in Etcd are gathered"), Field(ge=0)
    ] = 0.03
    auth_keys: Annotated[
        str,
        Option(
            "AuthKeys",
            "Base64 keys, separated by spaces or commas: the first signs, all verify; ID:KEY gives "
            "a key an id; the extra key AA== admits requests without a token",
        ),
        _checked(check_key_lengths),
    ] = ""
    auth_keys_file: Annotated[
        str, Option("AuthKeysFile", "File with the keys instead of AuthKeys")
    ] = ""

    @model_validator(mode="after")
    def _certificates_are_used(self) -> Self:
        flags = f"--{self.flags}"
        for given, path, needed, other in (
            ("server-ca-file", self.server_ca_file, "server-cert-file", self.server_cert_file),
            (
                "server-cert-key-file",
                self.server_cert_key_file,
                "server-cert-file",
                self.server_cert_file,
            ),
            ("peer-cert-key-file", self.peer_cert_key_file, "peer-cert-file", self.peer_cert_file),
        ):
            if path and not other:
                raise ValueError(
                    f"{flags}{given} has no effect without {flags}{needed}: set that, too, or "
                    f"leave out {flags}{given}"
                )
        return self


class BrokerSettings(MemberSettings):
    """Broker process."""

    flags = "broker."

    file_root: Annotated[
        str, Option("FileRoot", "Directory of file:// fragment stores; must exist")
    ] = ""
    file_only: Annotated[
        bool, Option("FileOnly", "Serve fragment stores of every scheme from the file root")
    ] = False
    max_append_rate: Annotated[
        int,
        Option("MaxAppendRate", "Greatest append rate of a journal, bytes/s; 0: no limit"),
        Field(ge=0),
    ] = 0
    max_replication: Annotated[
        int, Option("MaxReplication", "Greatest replication of any journal"), Field(ge=1)
    ] = 9
    min_append_rate: Annotated[
        int,
        Option("MinAppendRate", "Slower append streams are aborted, bytes/s; 0: never"),
        Field(ge=0),
    ] = 65536
    auth_keys_file: Annotated[
        str,
        Option(
            "AuthKeysFile",
            "File with the keys instead of AuthKeys; it is read again when it changes, and at "
            "SIGHUP",
        ),
    ] = ""
    audit: Annotated[
        Literal["off", "refusals", "all"],
        Option("Audit", "Calls in the audit log: none, refused ones, or also appends and changes"),
    ] = "refusals"
    audit_journal: Annotated[
        str,
        Option(
            "AuditJournal",
            "Journal that gets the records of the audit log, too, as CloudEvents; it must exist, "
            "with the content type application/x-ndjson",
        ),
        _checked(validate_journal),
    ] = ""
    tracing: Annotated[
        Literal["on", "off"],
        Option(
            "Tracing",
            "Spans of OpenTelemetry for appends whose callers are traced, exported as the OTEL_* "
            "variables say; needs opentelemetry-sdk and an exporter",
        ),
    ] = "off"
    allow_store: Annotated[
        tuple[str, ...],
        Option(
            "AllowStore",
            "Fragment store that tokens with a selector may give to journals; repeatable",
        ),
    ] = ()
    auto_suspend: Annotated[
        bool, Option("AutoSuspend", "Suspend journals whose fragments are all persisted")
    ] = False
    mirror_specs: Annotated[
        bool,
        Option(
            "MirrorSpecs",
            "Write specs of journals and shards, and hints, into the fragment stores, below "
            ".gazette/: `gazctl restore cluster --from-stores` rebuilds a cluster of them",
        ),
    ] = False
    prune: Annotated[
        Literal["true", "false", "dry-run"],
        Option(
            "Prune",
            "Remove stored fragments that are older than their journal's retention; dry-run only "
            "logs them",
        ),
    ] = "true"
    spool_dir: Annotated[
        str,
        Option(
            "SpoolDir",
            "Directory of spools: what is appended and not stored yet, which a restarted broker "
            "of the same zone and id finds again; empty for one below the temporary directory, "
            "which only a broker on loopback may use",
        ),
    ] = ""
    durability: Annotated[
        Literal["replicated", "persisted"],
        Option(
            "Durability",
            "When an append is acknowledged: once every replica has it, or has it on disk",
        ),
    ] = "replicated"
    consumers_prefix: Annotated[
        EtcdPrefix,
        Option(
            "ConsumersPrefix",
            "Prefix in Etcd below which applications have their keys, for the list of members and "
            "the report",
        ),
    ] = "/gazette/consumers"
    application: Annotated[
        tuple[str, ...],
        Option(
            "Application",
            "NAME=URL of a process of an application that Etcd does not show to this broker, for "
            "the list of members and the report; repeatable",
        ),
    ] = ()

    @property
    def applications(self) -> tuple[tuple[str, str], ...]:
        """Names and URLs of applications."""
        parts = (each.partition("=") for each in self.application)
        return tuple((name, url) for name, _, url in parts)

    @model_validator(mode="after")
    def _applications_have_urls(self) -> Self:
        for name, url in self.applications:
            try:
                validate_endpoint(url)
            except GazetteError as error:
                reason = str(error)
            else:
                reason = "" if name else "it has no name"
            if reason:
                raise ValueError(
                    f"--broker.application {name}={url}: {reason}; write NAME=URL, such as "
                    "totals=http://consumer-1:8081"
                )
        return self

    @model_validator(mode="after")
    def _audit_journal_gets_records(self) -> Self:
        if self.audit_journal and self.audit == "off":
            raise ValueError(
                "--broker.audit-journal has no effect with --broker.audit off: choose refusals or "
                "all, or leave out --broker.audit-journal"
            )
        return self

    @model_validator(mode="after")
    def _file_only_has_a_root(self) -> Self:
        if self.file_only and not self.file_root:
            raise ValueError(
                "a file root must be defined when using --broker.file-only: set --broker.file-root"
            )
        return self


_LOOPBACK_NAMES = frozenset({"", "localhost", "127.0.0.1", "::1"})

CONSOLE = Group("Console", ConsoleContentSettings, env_prefix="")
BROKER = Group("Broker", BrokerSettings, prefix=BrokerSettings.flags, env_prefix="BROKER_")
ETCD = Group("Etcd", EtcdSettings, prefix="etcd.", env_prefix="ETCD_")
LOGGING = Group("Logging", LoggingSettings, prefix="log.", env_prefix="LOG_")
DEBUG = Group("Debug", DebugSettings, prefix="debug.", env_prefix="DEBUG_")
METRICS = Group("Metrics", MetricsSettings, prefix="metrics.", env_prefix="METRICS_")


_ADJECTIVES = """
able amber bold brave brief bright calm clear clever coral crisp deep eager early fair fast fine
firm fond free fresh gentle glad gold grand great green happy keen kind large late lively loyal
lucky mellow merry mild neat noble open plain polite prime proper proud pure quick quiet rapid
ready rich robust sharp silent smart solid steady sunny swift tidy true vivid warm wise
"""
_ANIMALS = """
badger bear beaver bee bison bobcat buck camel cat cobra condor cougar crab crane cricket crow deer
dolphin dove duck eagle eel elk falcon ferret finch fox frog gazelle gecko goose hawk hen heron
horse ibex jackal jay kite koala lark lemur lion lynx marten mole moose newt otter owl panda perch
pigeon pony quail rabbit raven robin seal shrew snail swan tiger trout turtle wolf
"""


def pet_name() -> str:
    """Return a random two-word name, for a process without a configured id."""
    chance = random.SystemRandom()
    return f"{chance.choice(_ADJECTIVES.split())}-{chance.choice(_ANIMALS.split())}"
