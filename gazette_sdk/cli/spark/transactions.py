"""``gazette spark transactions``: care of the logs of sinks. No Spark is started."""

from __future__ import annotations

import sys

from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.spark.settings import CREATE_LOG, WRITER

__all__ = ["complete", "create"]


def complete(invocation: Invocation) -> None:
    """Complete the last transaction of a writer.

    Raises:
        GazetteError: PySpark is not installed, the writer has no log, or a call failed.
    """
    from gazette_spark import transactions  # noqa: PLC0415 - imports PySpark

    settings = invocation.settings(WRITER)
    [writer] = invocation.arguments
    number = transactions.complete(writer, address=settings.address or None, **settings.log())
    done = "has nothing to complete" if number is None else f"transaction {number} is complete"
    sys.stdout.write(f"{writer}: {done}\n")


def create(invocation: Invocation) -> None:
    """Create the log of a streaming query that lost it.

    Raises:
        GazetteError: PySpark is not installed, the log has records, or a call failed.
    """
    from gazette_spark import transactions  # noqa: PLC0415 - imports PySpark

    settings = invocation.settings(CREATE_LOG)
    [writer] = invocation.arguments
    transactions.create(
        writer,
        settings.journals,
        after=settings.after,
        address=settings.address or None,
        **settings.log(),
    )
    sys.stdout.write(f"{writer}: the log begins behind micro-batch {settings.after}\n")
