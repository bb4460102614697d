"""The commands of ``gazette spark``."""

from __future__ import annotations

from typing import Any

from gazette_sdk.cli.command import Command
from gazette_sdk.cli.spark.settings import BACKFILL, COMPACT, EXPORT, RECONCILE, SPARK, WORD_COUNT
from gazette_sdk.server.options import Group

__all__ = ["SPARK_COMMANDS"]

_PASSED_ON = "What stands behind -- is passed on to spark-submit."


def _pipeline(
    name: str, summary: str, group: Group[Any], details: str, *examples: tuple[str, str]
) -> Command:
    return Command(
        f"spark {name}",
        summary,
        "gazette_sdk.cli.spark.submit:run",
        (group, SPARK),
        details=f"{details} {_PASSED_ON}",
        examples=examples,
        arguments="[-- SPARK-SUBMIT-OPTION...]",
        arguments_max=None,
    )


SPARK_COMMANDS = (
    _pipeline(
        "export",
        "Export journals to Parquet by date and hour, from where the last run ended",
        EXPORT,
        "Rows lie in LAKE/date=/hour=/batch=, by the time of their publication in UTC. A run that "
        "died is continued by the next one, without gaps or duplicates.",
        (
            "gazette spark export --journals topic=orders --lake /data/lake",
            "the journals of `gazette dev`",
        ),
        (
            "gazette spark export --store s3://acme/journals/ --journals shop/ --lake s3a://acme/lake",
            "without a broker",
        ),
    ),
    _pipeline(
        "compact",
        "Merge the exported batches of each hour",
        COMPACT,
        "The newest batch is left out. While an hour is replaced, readers can see its rows twice.",
        (
            "gazette spark compact --lake s3a://acme/lake --master spark://sp:7077",
            "on a cluster",
        ),
    ),
    _pipeline(
        "backfill",
        "Publish files of Parquet or JSON to journals, exactly once",
        BACKFILL,
        "Files are published in transactions of up to 1 GiB. A run that died is completed by the "
        "next one with the same files and options.",
        (
            "gazette spark backfill --files /data/2025 --journals topic=orders --key customer",
            "rows of one customer in one journal",
        ),
    ),
    _pipeline(
        "reconcile",
        "Compare two sets of journals: what is missing, what differs",
        RECONCILE,
        "The exit status is 1 if they differ.",
        (
            "gazette spark reconcile --journals topic=orders --other topic=copies --by order_id",
            "by a column",
        ),
    ),
    _pipeline(
        "word-count",
        "Count the words of a column over all history",
        WORD_COUNT,
        "Words are runs of the letters a to z in the text in lower case.",
        ("gazette spark word-count --journals topic=words", "the twenty most frequent words"),
    ),
)
