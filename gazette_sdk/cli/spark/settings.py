"""Options of ``gazette spark``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gazette_sdk.cli.command import TimeoutSettings
from gazette_sdk.cli.shared_options import OutcomeFormat
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Group, Option, Settings

__all__ = [
    "BACKFILL",
    "COMPACT",
    "CREATE_LOG",
    "DELETE_LOGS",
    "EXPORT",
    "LIST_LOGS",
    "NO_PYSPARK",
    "RECONCILE",
    "SPARK",
    "TRANSACTIONS",
    "WORD_COUNT",
    "WRITER",
    "BackfillSettings",
    "CompactSettings",
    "CreateLogSettings",
    "DeleteLogsSettings",
    "ExportSettings",
    "ListLogsSettings",
    "LogSettings",
    "ReconcileSettings",
    "SparkSettings",
    "WordCountSettings",
]

NO_PYSPARK = "PySpark is not installed; pip install 'gazette-sdk[spark]'"

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
    """Where transaction logs are."""

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
