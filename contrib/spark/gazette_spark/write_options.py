"""Options of a write, parsed and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import types as st

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.message import mapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import (
    CONTENT_TYPE,
    MANAGED_BY,
    label_set,
    matches_journal,
    rewrite_prefix,
)
from gazette_sdk.protocol.names import strip_meta, validate_journal
from gazette_spark.options import BROKER_SCHEMES, DEFAULT_ADDRESS, load_message, refuse_path
from gazette_spark.transaction_log import MANAGER

TRANSACTION_LOG = "gazette-spark/transactions"
"""Prefix of the journals which are transaction logs."""

UNNAMED = "batch"
"""Writer of batch writes without ``txnAppId``."""

METADATA_COLUMNS = frozenset({"_journal", "_offset", "_uuid", "_time", "_labels"})
"""Columns which the source adds to messages. They are not written."""

KNOWN = frozenset(
    {"address", "journals", "key", "message", "transactionlog", "txnappid", "txnversion"}
)

_OF_SPARK = frozenset({"path", "checkpointlocation", "queryname"})

_KEY_TYPES = (
    st.StringType,
    st.CharType,
    st.VarcharType,
    st.BinaryType,
    st.ByteType,
    st.ShortType,
    st.IntegerType,
    st.LongType,
)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Checked options of one write.

    Attributes:
        url: URL of the broker.
        journals: label selector of the journals.
        key: column whose value chooses the journal of a row; empty for a random journal.
        message: ``module:Class`` of a generated protobuf message, or empty.
        transaction_log: prefix of the journals which are transaction logs.
        app: ``txnAppId``, or empty.
        version: ``txnVersion``; None without ``txnAppId``.
        columns: the columns that are written, in order.
    """

    url: str
    journals: str
    key: str
    message: str
    transaction_log: str
    app: str
    version: int | None
    columns: tuple[str, ...]

    @classmethod
    def parse(
        cls, given: Mapping[str, str], schema: st.StructType, *, is_stream: bool
    ) -> WriteOptions:
        """Parse and check options.

        Args:
            given: the options.
            schema: of the rows.
            is_stream: they are those of a streaming query.

        Raises:
            ConfigurationError: an option is unknown, missing, or has a wrong value.
        """
        options = {key.lower(): value for key, value in given.items()}
        url = options.get("address") or os.environ.get("GAZETTE_ADDRESS") or DEFAULT_ADDRESS
        if "store" in options or not url.lower().startswith(BROKER_SCHEMES):
            raise ConfigurationError(
                "gazette: only brokers write; give the 'address' of one, and no 'store'"
            )
        refuse_path(options)
        unknown = sorted(set(options) - KNOWN - _OF_SPARK)
        if unknown:
            raise ConfigurationError(
                f"gazette: unknown option {unknown[0]!r} of a write; known are"
                f" {', '.join(sorted(KNOWN))}"
            )
        if not options.get("journals"):
            raise ConfigurationError("gazette: the option 'journals' is missing: a label selector")
        app, version = _transaction(options, is_stream=is_stream)
        parsed = cls(
            url=url,
            journals=options["journals"],
            key=options.get("key", ""),
            message=options.get("message", ""),
            transaction_log=options.get("transactionlog", TRANSACTION_LOG).rstrip("/"),
            app=app,
            version=version,
            columns=tuple(f.name for f in schema.fields if f.name not in METADATA_COLUMNS),
        )
        parsed._check(schema)
        return parsed

    def _check(self, schema: st.StructType) -> None:
        if not self.columns:
            raise ConfigurationError("gazette: there is no column to write")
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ConfigurationError(
                f"gazette: columns have the same name, {twice[0]!r}; rename or drop one of them"
            )
        for name in self.columns:
            kind = schema[name].dataType.simpleString()
            if re.search("interval (year|month)", kind):  # Python has no type for it
                raise ConfigurationError(
                    f"gazette: column {name!r} has type {kind}, which cannot be written; cast it to"
                    " string or to a number of months"
                )
        if self.key:
            check_key(self.key, self.columns, schema)
        if self.message:
            load_message(self.message)
        try:
            selector = mapping.random(self.journals).label_selector
        except ValidationError as error:
            raise ConfigurationError(f"gazette: journals {self.journals!r}: {error}") from error
        # As commits create it. Rows in a log would stop its writer for good.
        log = pb.JournalSpec(
            name=log_name(self.transaction_log, self.app or UNNAMED),
            labels=label_set([(MANAGED_BY, MANAGER), (CONTENT_TYPE, "application/x-ndjson")]),
        )
        if matches_journal(rewrite_prefix(selector), log):
            raise ConfigurationError(
                f"gazette: journals {self.journals!r} are also transaction logs, as {log.name};"
                f" add ',{MANAGED_BY}!={MANAGER}'"
            )


def log_name(prefix: str, writer: str) -> str:
    """Return the name of the transaction log of a writer.

    Raises:
        ConfigurationError: a journal cannot have this name.
    """
    name = f"{prefix}/{writer}"
    try:
        validate_journal(name)
    except ValidationError as error:
        reason = str(error)
    else:
        reason = "it has a ';'" if strip_meta(name) != name else ""
    if reason:
        raise ConfigurationError(
            f"gazette: the transaction log cannot be named {name!r} ({reason}); change txnAppId or"
            " transactionLog"
        )
    return name


def _transaction(options: Mapping[str, str], *, is_stream: bool) -> tuple[str, int | None]:
    app, version = options.get("txnappid", ""), options.get("txnversion", "")
    if is_stream and (app or version):
        raise ConfigurationError(
            "gazette: txnAppId and txnVersion are for batch writes; a streaming query is known by"
            " its id and its micro-batches"
        )
    if bool(app) != bool(version):
        raise ConfigurationError("gazette: give both of txnAppId and txnVersion, or neither")
    if app == UNNAMED:
        raise ConfigurationError(f"gazette: txnAppId {UNNAMED!r} is reserved; choose another")
    if not version:
        return "", None
    if not version.isdecimal():
        raise ConfigurationError(f"gazette: txnVersion {version!r} is no integer of at least 0")
    return app, int(version)


def check_key(key: str, columns: Sequence[str], schema: st.StructType) -> None:
    """Check the column whose value chooses the journal of a row.

    Raises:
        ConfigurationError: it is none of the columns, or its type is that of no key.
    """
    if key not in columns:
        raise ConfigurationError(
            f"gazette: key {key!r} is none of the columns that are written: {', '.join(columns)}"
        )
    kind = schema[key].dataType
    if not isinstance(kind, _KEY_TYPES):
        raise ConfigurationError(
            f"gazette: key {key!r} has type {kind.simpleString()}; a key is a string, binary or an"
            " integer"
        )
