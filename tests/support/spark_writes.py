"""Writes of Spark in tests, and what stands in the journals behind them."""

from __future__ import annotations

from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from gazette_sdk import Reader
from gazette_sdk.embedded import EmbeddedCluster


def last_line(error: PySparkException) -> str:
    """Last line of a message, in front of the code that Spark adds where it plans."""
    text, _, _ = str(error).strip().partition("\n SQLSTATE: ")
    return text.splitlines()[-1]


def write(frame: DataFrame, cluster: EmbeddedCluster, mode: str = "append", **options: Any) -> None:
    given = {"address": cluster.address, "journals": "topic=copies", **options}
    frame.write.format("gazette").options(**given).mode(mode).save()


def committed(cluster: EmbeddedCluster, selector: str = "topic=copies") -> list[dict]:
    return [e.message for e in Reader(dict, selector, transport=cluster.transport)]


def log_lines(
    cluster: EmbeddedCluster, writer: str, prefix: str = "gazette-spark/transactions"
) -> list[dict]:
    name = f"{prefix}/{writer}"
    return [e.message for e in Reader(dict, name=name, transport=cluster.transport)]


def producers_by_journal(
    cluster: EmbeddedCluster, selector: str = "topic=copies"
) -> dict[str, set[bytes]]:
    """Producers of all messages, also of those that are not committed."""
    found: dict[str, set[bytes]] = {}
    reader = Reader(dict, selector, transport=cluster.transport, isolation="uncommitted")
    for envelope in reader:
        found.setdefault(envelope.journal, set()).add(envelope.producer)
    return found
