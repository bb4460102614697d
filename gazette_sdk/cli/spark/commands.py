"""The commands of ``gazette spark``.

Their options, the run of a pipeline by ``spark-submit``, and the care of the logs of sinks, which
starts no Spark.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import orjson
from pydantic import Field

from gazette_sdk.cli.formats import NONE, write_table
from gazette_sdk.cli.program import Command, CommandFailedError, Invocation, TimeoutSettings
from gazette_sdk.cli.settings import OutcomeFormat
from gazette_sdk.errors import ConfigurationError, needs_extra
from gazette_sdk.server.options import Group, Option, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gazette_spark.transactions import LogState


_ADDRESS = Option(
    "Address", "Address of a broker, which executors reach, too", env="GAZETTE_ADDRESS"
)
_JOURNALS = Option(
    "Journals", "Label selector; with --store a journal's name, or a prefix that ends in /"
)


class SparkSettings(Settings):
    """Options about the Spark cluster and the output."""

    master: Annotated[str, Option("Master", "Master URL of Spark")] = "local[*]"
    conf: Annotated[
        tuple[str, ...], Option("Conf", "Property of Spark, KEY=VALUE; may be repeated")
    ] = ()
    format: Annotated[
        Literal["table", "json"],
        Option("Format", "Format of the summary", short="o", in_ini=False),
    ] = "table"


class SourceSettings(Settings):
    """Options of what is read."""

    journals: Annotated[str, _JOURNALS]
    address: Annotated[str, _ADDRESS] = ""
    store: Annotated[str, Option("Store", "URL of a fragment store; no broker is involved")] = ""
    columns: Annotated[
        str,
        Option("Schema", "Columns of the messages in DDL; by default those of a sample", "schema"),
    ] = ""
    option: Annotated[
        tuple[str, ...],
        Option("Option", "Option of the data source, KEY=VALUE; may be repeated"),
    ] = ()

    def source(self) -> dict[str, str]:
        """Return the options of the data source.

        Raises:
            ConfigurationError: an option is not ``KEY=VALUE``.
        """
        return {
            "journals": self.journals,
            **({"address": self.address} if self.address and not self.store else {}),
            **({"store": self.store} if self.store else {}),
            **parse_pairs("--option", self.option),
        }


class LakeSettings(Settings):
    """Directory of Parquet files."""

    lake: Annotated[
        str, Option("Lake", "URL of the directory of Parquet files, as Spark writes it")
    ]


class ExportSettings(SourceSettings, LakeSettings):
    """Options of ``gazette spark export``."""


class CompactSettings(LakeSettings):
    """Options of ``gazette spark compact``."""


class BackfillSettings(Settings):
    """Options of ``gazette spark backfill``."""

    files: Annotated[str, Option("Files", "URL of a directory of files, as Spark reads it")]
    journals: Annotated[str, Option("Journals", "Label selector of the journals")]
    key: Annotated[
        str, Option("Key", "Column that maps a row to a journal; by default journals take turns")
    ] = ""
    address: Annotated[str, _ADDRESS] = ""
    input: Annotated[
        Literal["parquet", "json"], Option("InputFormat", "Format of the files", "input-format")
    ] = "parquet"
    columns: Annotated[
        str, Option("Schema", "Columns in DDL; by default those of the files", "schema")
    ] = ""

    def target(self) -> dict[str, str]:
        """Return the options of the data source."""
        return {
            "journals": self.journals,
            **({"key": self.key} if self.key else {}),
            **({"address": self.address} if self.address else {}),
        }


class ReconcileSettings(SourceSettings):
    """Options of ``gazette spark reconcile``."""

    other: Annotated[str, Option("Other", "What --journals is compared with")]
    other_address: Annotated[
        str, Option("OtherAddress", "Address of the broker of --other; by default the same")
    ] = ""
    other_store: Annotated[
        str, Option("OtherStore", "Fragment store of --other; by default the same")
    ] = ""
    by: Annotated[
        tuple[str, ...],
        Option("By", "Column of the key; may be repeated. By default content is compared"),
    ] = ()
    samples: Annotated[
        int, Option("Samples", "Greatest number of differences to show"), Field(ge=0, le=10_000)
    ] = 20

    def other_source(self) -> dict[str, str]:
        """Return the options of the data source for the other side."""
        other: dict[str, str | tuple[str, ...]] = {"journals": self.other}
        if self.other_address or self.other_store:
            other |= {"address": self.other_address, "store": self.other_store}
        return self.model_copy(update=other).source()


class WordCountSettings(SourceSettings):
    """Options of ``gazette spark word-count``."""

    column: Annotated[str, Option("Column", "Column with texts")] = "text"
    output: Annotated[str, Option("Output", "Write all counts to this directory, as Parquet")] = ""
    top: Annotated[int, Option("Top", "How many words to show"), Field(ge=0, le=100_000)] = 20


class LogSettings(Settings):
    """Location of transaction logs."""

    address: Annotated[str, Option("Address", "Address of a broker", env="GAZETTE_ADDRESS")] = ""
    transaction_log: Annotated[
        str, Option("TransactionLog", "The writer's option transactionLog")
    ] = ""

    def where(self) -> dict[str, str]:
        """Return the arguments ``address`` and ``transaction_log``, without defaults."""
        given = {"address": self.address, "transaction_log": self.transaction_log}
        return {name: value for name, value in given.items() if value}


class ListLogsSettings(LogSettings):
    """Options of ``gazette spark transactions list``."""

    format: OutcomeFormat = "table"


class CreateLogSettings(LogSettings):
    """Options of ``gazette spark transactions create``."""

    journals: Annotated[
        str, Option("Journals", "Label selector of the journals that the query writes")
    ]
    after: Annotated[
        int,
        Option("After", "Number of the last micro-batch that is written", in_ini=False),
        Field(ge=0),
    ]


class DeleteLogsSettings(ListLogsSettings):
    """Options of ``gazette spark transactions delete``."""

    yes: Annotated[
        bool,
        Option(
            "Yes",
            "Delete logs whose last transaction is open, too; without it, only show them",
            short="y",
            in_ini=False,
        ),
    ] = False
    dry_run: Annotated[bool, Option("DryRun", "Only show what would be deleted")] = False


def parse_pairs(name: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Return the pairs of texts ``KEY=VALUE``.

    Raises:
        ConfigurationError: a text is no such pair.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigurationError(f"{name} {text!r} is no pair; write KEY=VALUE")
        pairs[key] = value
    return pairs


SPARK = Group("spark", SparkSettings)
EXPORT = Group("spark.export", ExportSettings)
COMPACT = Group("spark.compact", CompactSettings)
BACKFILL = Group("spark.backfill", BackfillSettings)
RECONCILE = Group("spark.reconcile", ReconcileSettings)
TRANSACTIONS = Group("spark.transactions", TimeoutSettings, env_prefix="")
LIST_LOGS = Group("spark.transactions.list", ListLogsSettings)
WRITER = Group("spark.transactions.complete", LogSettings)
DELETE_LOGS = Group("spark.transactions.delete", DeleteLogsSettings)
CREATE_LOG = Group("spark.transactions.create", CreateLogSettings)
WORD_COUNT = Group("spark.word-count", WordCountSettings)


STOP_TIMEOUT_S = 10.0
"""Bound of the wait for Spark to remove its temporary files."""


def run(invocation: Invocation) -> None:
    """Run the pipeline of a command, and wait for its end.

    Raises:
        ConfigurationError: PySpark or Java is missing.
        CommandFailedError: the pipeline failed.
    """
    [group] = [group for group in invocation.groups if group is not SPARK]
    spark = invocation.settings(SPARK)
    pipeline = group.title.rpartition(".")[2]
    conf = {"spark.log.level": "ERROR", **parse_pairs("--conf", spark.conf)}
    options = invocation.settings(group).model_dump()
    environ = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    with TemporaryDirectory(prefix="gazette-spark-") as directory:
        command = [
            *(_spark_submit(), "--master", spark.master, "--name", f"gazette {pipeline}"),
            *(part for pair in conf.items() for part in ("--conf", "=".join(pair))),
            *invocation.arguments,
            str(Path(__file__).with_name("driver.py")),
            json.dumps([pipeline, spark.format, options, directory]),
        ]
        status = _run_to_end(command, {**environ, **os.environ})
        summary, failure = Path(directory, "summary"), Path(directory, "failure")
        if summary.exists():
            sys.stdout.write(summary.read_text(encoding="utf-8"))
        elif not status:
            sys.stderr.write(
                f"{pipeline}: its driver ran in the cluster, with the summary in its log\n"
            )
        if status:
            reason = failure.read_text(encoding="utf-8") if failure.exists() else "see above"
            raise CommandFailedError(f"{pipeline}: {reason} (spark-submit: status {status})")


def _run_to_end(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program and return its exit status. It ends with this one, and removes its files."""
    signal.signal(signal.SIGTERM, _exit)
    with subprocess.Popen(command, env=environ, stdout=sys.stderr) as program:  # noqa: S603 - our own
        try:
            return program.wait()
        except BaseException:
            program.terminate()
            try:
                program.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                program.kill()
            raise


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _spark_submit() -> str:
    """Return the path of ``spark-submit``: of SPARK_HOME, else of the installed PySpark.

    Raises:
        ConfigurationError: there is none, or no Java to run it.
    """
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise ConfigurationError("Spark needs Java 17 or later; install it, or set JAVA_HOME")
    if home := os.environ.get("SPARK_HOME"):
        return str(Path(home) / "bin" / "spark-submit")
    with needs_extra("spark", "jobs of Spark"):
        found = find_spec("pyspark")
        if found is None or found.origin is None:
            raise ModuleNotFoundError(name="pyspark")
    return str(Path(found.origin).parent / "bin" / "spark-submit")


_PASSED_ON = "What follows -- is passed on to spark-submit."


def _pipeline(
    name: str, summary: str, group: Group[Any], details: str, *examples: tuple[str, str]
) -> Command:
    return Command(
        f"spark {name}",
        summary,
        "gazette_sdk.cli.spark.commands:run",
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
        "gazette_sdk.cli.spark.commands:list_logs",
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
        "gazette_sdk.cli.spark.commands:complete",
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
        "gazette_sdk.cli.spark.commands:delete",
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
        "Begin the transaction log of a streaming query anew, after a micro-batch",
        "gazette_sdk.cli.spark.commands:create",
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
