"""Partitions of a DataFrame by the journals that its rows will be written to."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as sf
from pyspark.sql.pandas.functions import arrow_udf

from gazette_sdk.errors import ConfigurationError, JournalNotFoundError
from gazette_sdk.message import mapping
from gazette_sdk.message.mapping import Partitions
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import loop as sdk_loop
from gazette_spark.connection import list_patiently, open_transport
from gazette_spark.failure import clear_errors
from gazette_spark.write_options import check_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["partition_by_journal"]

_INDEX = "_journal_index"


def partition_by_journal(
    df: DataFrame, journals: str, key: str, *, address: str | None = None
) -> DataFrame:
    """Return the rows in one partition for each journal that they will be written to.

    One task then writes a journal, and not all tasks write all journals: committed readers take
    its messages as they come, and need not read the journal again for each task.

    Args:
        df: a DataFrame, batch or streaming.
        journals: the option ``journals`` of the write.
        key: the option ``key`` of the write.
        address: URL of a broker; by default that of ``GAZETTE_ADDRESS``.

    Raises:
        ConfigurationError: the key is no column, or of a type that is no key.
        JournalNotFoundError: no journal matches.
        GazetteError: the journals cannot be listed.
    """

    async def names() -> list[str]:
        async with open_transport(address) as transport:
            listing = await list_patiently(transport, journals)
            return [journal.spec.name for journal in listing.journals]

    if _INDEX in df.columns:
        raise ConfigurationError(f"gazette: the DataFrame has a column {_INDEX!r}; rename it")
    with clear_errors():
        check_key(key, df.columns, df.schema)
        found = sdk_loop.run(names())
        if not found:
            raise JournalNotFoundError(f"no journal matches {journals!r}")

    def indexes(keys: pa.Array) -> pa.Array:
        """Return the index of the journal of each key."""
        partitions = Partitions(pb.JournalSpec(name=name) for name in found)
        by_key = mapping.modulo(journals, key=itemgetter(0))
        values = keys.to_pylist()
        picked = by_key.pick_many([(value,) for value in values], partitions, values)
        return pa.array(list(picked), type=pa.int32())

    index_of: Any = arrow_udf(indexes, "int")  # type: ignore[call-overload]  # Spark's enum is untyped
    return (
        df.withColumn(_INDEX, index_of(sf.col(key)))
        .repartitionById(len(found), sf.col(_INDEX))
        .drop(_INDEX)
    )
