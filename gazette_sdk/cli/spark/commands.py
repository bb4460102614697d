"""The commands of ``gazette spark``."""

from __future__ import annotations

from typing import Any

from gazette_sdk.cli.command import Command
from gazette_sdk.cli.spark.settings import (
    BACKFILL,
    COMPACT,
    CREATE_LOG,
    DELETE_LOGS,
    EXPORT,
    LIST_LOGS,
    RECONCILE,
    SPARK,
    TRANSACTIONS,
    WORD_COUNT,
    WRITER,
)
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
    Command(
        "spark transactions list",
        "List the transaction logs of writers, with the last transaction of each",
        "gazette_sdk.cli.spark.transactions:list_logs",
        (LIST_LOGS, TRANSACTIONS),
        details=(
            "A transaction is `decided` until its messages are acknowledged, `completing` while "
            "another run does so, and then `done`. Watch for logs which are not: they belong to a "
            "writer at work, or to one that died."
        ),
        examples=(("gazette spark transactions list -o json", "for programs"),),
    ),
    Command(
        "spark transactions complete",
        "Complete the last transaction of a writer whose driver died",
        "gazette_sdk.cli.spark.transactions:complete",
        (WRITER, TRANSACTIONS),
        details=(
            "WRITER is the id of a streaming query, the txnAppId of batch writes, or `batch`. A "
            "transaction that is decided is completed by the writer's next write, too; this is "
            "for writers that do not come back. Messages of undecided ones stay invisible."
        ),
        examples=(("gazette spark transactions complete nightly", "of txnAppId=nightly"),),
        arguments="WRITER",
        arguments_min=1,
        arguments_max=1,
        in_doubt="run it again: what is acknowledged already stays so",
    ),
    Command(
        "spark transactions delete",
        "Delete the transaction logs of writers that do not come back",
        "gazette_sdk.cli.spark.transactions:delete",
        (DELETE_LOGS, TRANSACTIONS),
        details=(
            "A log whose last transaction is open is only shown without --yes: messages of the "
            "transaction that are not acknowledged would be lost. No driver of the writer may run. "
            "One that comes back has forgotten what it wrote: a streaming query stops, and a batch "
            "write with an earlier txnVersion is written again."
        ),
        examples=(
            (
                "gazette spark transactions delete nightly",
                "of txnAppId=nightly, if nothing is open",
            ),
        ),
        arguments="WRITER...",
        arguments_min=1,
        arguments_max=None,
        in_doubt="see `gazette spark transactions list` for what is left",
    ),
    Command(
        "spark transactions create",
        "Begin the transaction log of a streaming query anew, behind a micro-batch",
        "gazette_sdk.cli.spark.transactions:create",
        (CREATE_LOG, TRANSACTIONS),
        details=(
            "For a query whose log was deleted, or that had another sink before. All that it "
            "wrote up to the micro-batch must be complete, or it is lost."
        ),
        examples=(
            (
                "gazette spark transactions create 1b9d… --journals topic=copies --after 41",
                "the query goes on with micro-batch 42",
            ),
        ),
        arguments="QUERY",
        arguments_min=1,
        arguments_max=1,
    ),
)
