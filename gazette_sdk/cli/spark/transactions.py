"""``gazette spark transactions``: care of the logs of sinks. No Spark is started."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import orjson

from gazette_sdk.cli.formats import NONE, write_table
from gazette_sdk.cli.program import Invocation
from gazette_sdk.cli.spark.commands import CREATE_LOG, DELETE_LOGS, LIST_LOGS, WRITER
from gazette_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gazette_spark.transactions import LogState


_KEPT = (
    "Fragments of deleted logs that are stored stay in their stores: remove them before the same "
    "writer writes again."
)


async def list_logs(invocation: Invocation) -> None:
    """List the logs of writers, with the state of the last transaction of each.

    Raises:
        GazetteError: PySpark is not installed, or a call failed.
    """
    from gazette_spark import transactions  # noqa: PLC0415 - imports PySpark, if it is there

    settings = invocation.settings(LIST_LOGS)
    _show(await transactions.alist_logs(**settings.where()), settings.format)


async def complete(invocation: Invocation) -> None:
    """Complete the last transaction of a writer.

    Raises:
        GazetteError: PySpark is not installed, the writer has no log, or a call failed.
    """
    from gazette_spark import transactions  # noqa: PLC0415 - imports PySpark, if it is there

    [writer] = invocation.arguments
    number = await transactions.acomplete(writer, **invocation.settings(WRITER).where())
    done = "has nothing to complete" if number is None else f"transaction {number} is complete"
    sys.stdout.write(f"{writer}: {done}\n")


async def create(invocation: Invocation) -> None:
    """Create the log of a streaming query that lost it.

    Raises:
        GazetteError: PySpark is not installed, the log has records, or a call failed.
    """
    from gazette_spark import transactions  # noqa: PLC0415 - imports PySpark, if it is there

    settings = invocation.settings(CREATE_LOG)
    [writer] = invocation.arguments
    await transactions.acreate(writer, settings.journals, after=settings.after, **settings.where())
    sys.stdout.write(f"{writer}: the log begins after micro-batch {settings.after}\n")


async def delete(invocation: Invocation) -> None:
    """Delete the logs of writers; of a log with an open transaction only show that it would be.

    Raises:
        ConfigurationError: it is asked both to delete open logs and to delete nothing.
        GazetteError: PySpark is not installed, a writer has no log, or a call failed.
    """
    from gazette_spark import transactions  # noqa: PLC0415 - imports PySpark, if it is there

    settings = invocation.settings(DELETE_LOGS)
    if settings.yes and settings.dry_run:
        raise ConfigurationError("--yes deletes logs, and --dry-run does not: give one of them")
    where = settings.where()
    writers = sorted(set(invocation.arguments))
    found = [await transactions.astate(writer, **where) for writer in writers]
    outcomes: list[str] = []
    try:
        for each in found:
            if settings.dry_run or (each.is_open and not settings.yes):
                outcomes.append("would be deleted")
                continue
            await transactions.adelete(each.writer, gives_up_open=settings.yes, **where)
            outcomes.append("deleted")
    finally:
        _show(found[: len(outcomes)], settings.format, outcomes)
    if "deleted" in outcomes:
        sys.stderr.write(f"{_KEPT}\n")
    for each in found:
        if each.is_open and not settings.yes:
            sys.stderr.write(
                f"{each.writer}: messages of transaction {each.transaction} would be lost where"
                " they are not acknowledged; complete it by `gazette spark transactions complete"
                f" {each.writer}`, or give it up by --yes\n"
            )


def _show(found: Sequence[LogState], form: str, outcomes: Sequence[str] = ()) -> None:
    """Write the states of logs to standard output, and what came of each."""
    records = [
        {
            "writer": each.writer,
            "state": each.state,
            "transaction": each.transaction,
            "messages": each.messages,
            "log": each.log,
            **({"outcome": outcomes[index]} if outcomes else {}),
        }
        for index, each in enumerate(found)
    ]
    if form == "json":
        sys.stdout.write("".join(f"{orjson.dumps(record).decode()}\n" for record in records))
    else:
        headers = ["Writer", "State", "Transaction", "Messages", "Log"]
        cells = [
            [NONE if value is None else str(value) for value in record.values()]
            for record in records
        ]
        write_table([*headers, *(["Outcome"] if outcomes else [])], cells)
