"""Options of ``gazette bench``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gazette_sdk.cli.client import ConnectionSettings
from gazette_sdk.server.options import Group, Option, Seconds, Settings

__all__ = ["BENCH", "BENCH_CLUSTER", "PHASES", "BenchSettings"]

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
