"""Options of ``gazette bench``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gazette_sdk.server.options import Group, Option, Seconds, Settings

__all__ = ["BENCH", "BENCH_CLUSTER", "PHASES", "BenchSettings", "ClusterSettings"]

PHASES = ("publish", "tail", "read")
"""The phases of a run, in the order in which they run."""

SIZE_BYTES_MIN = 64
SIZE_BYTES_MAX = 1 << 20


def _phases(text: str) -> str:
    named = [name.strip() for name in text.split(",")]
    for name in named:
        if name not in PHASES:
            raise ValueError(f"{name!r} is no phase: name some of {', '.join(PHASES)}")
    if named == ["read"]:
        raise ValueError("there is nothing to read unless `publish` or `tail` wrote it")
    return ",".join(name for name in PHASES if name in named)


def _prefix(text: str) -> str:
    if text and not text.endswith("/"):
        raise ValueError(f"{text!r} must end in /")
    return text


class BenchSettings(Settings):
    """Of ``gazette bench``."""

    embedded: Annotated[
        bool,
        Option("Embedded", "Start a cluster of its own, in a directory which is gone afterwards"),
    ] = False
    phases: Annotated[
        str,
        Option("Phases", "What to measure: some of publish, tail and read, joined by commas"),
        AfterValidator(_phases),
    ] = "publish,tail,read"
    messages: Annotated[
        int, Option("Messages", "How many messages `publish` publishes"), Field(ge=1)
    ] = 100_000
    size: Annotated[
        int,
        Option("Size", "Length of a message as JSON, without its UUID, in bytes"),
        Field(ge=SIZE_BYTES_MIN, le=SIZE_BYTES_MAX),
    ] = 200
    mode: Annotated[
        Literal["publish", "publish_batch"],
        Option("Mode", "Method of Publisher that `publish` calls: with a message, or a list"),
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
        Seconds, Option("Duration", "How long `tail` publishes"), Field(gt=0, le=86_400)
    ] = 10.0
    journals: Annotated[
        int, Option("Journals", "How many journals to make"), Field(ge=1, le=10_000)
    ] = 4
    replication: Annotated[
        int, Option("Replication", "Replicas of each journal"), Field(ge=1, le=9)
    ] = 1
    store: Annotated[
        str, Option("Store", "URL of the journals' fragment store"), Field(min_length=1)
    ] = "file:///"
    prefix: Annotated[
        str,
        Option(
            "Prefix", "Names of the journals begin with this; by default bench/ and something new"
        ),
        AfterValidator(_prefix),
    ] = ""
    keep: Annotated[bool, Option("Keep", "Leave the journals behind, with what is in them")] = False
    json_output: Annotated[
        bool, Option("JSON", "Print one JSON object instead of tables", long="json", in_ini=False)
    ] = False


class ClusterSettings(Settings):
    """Which cluster to measure, and how to reach it."""

    address: Annotated[
        str,
        Option(
            "Address",
            "Address of a broker: http(s)://host:port or unix:///path",
            env="GAZETTE_ADDRESS",
        ),
    ] = "http://localhost:8080"
    cert_file: Annotated[
        str, Option("CertFile", "Client certificate, PEM", env="BROKER_CERT_FILE")
    ] = ""
    cert_key_file: Annotated[
        str, Option("CertKeyFile", "Its key, PEM", env="BROKER_CERT_KEY_FILE")
    ] = ""
    trusted_ca_file: Annotated[
        str,
        Option(
            "TrustedCAFile",
            "Authorities that sign the brokers' certificates, PEM",
            env="BROKER_TRUSTED_CA_FILE",
        ),
    ] = ""
    auth_keys: Annotated[
        str,
        Option(
            "AuthKeys",
            "Base64 keys of the cluster: the first signs requests",
            env="BROKER_AUTH_KEYS",
            secret=True,
        ),
    ] = ""
    auth_token: Annotated[
        str,
        Option(
            "AuthToken",
            "Ready-made bearer token, used where no keys are given",
            env="BROKER_AUTH_TOKEN",
            secret=True,
        ),
    ] = ""


BENCH = Group("bench", BenchSettings)
BENCH_CLUSTER = Group("bench.Cluster", ClusterSettings, env_prefix="")
