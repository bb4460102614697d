"""Gazette journals as a Spark data source, over the Python Data Source API of Spark 4.2.

::

    from gazette_spark import GazetteDataSource

    spark.dataSource.register(GazetteDataSource)
    orders = (
        spark.read.format("gazette")
        .option("store", "s3://bucket/prefix/")
        .option("journals", "examples/orders/")
        .schema("customer string, cents long, _journal string, _offset long")
        .load()
    )

In reading order:

- ``options``: options of a read, connections by them, and errors as Spark shows them
- ``source``: the data source and its batch reads, and ``schema``: its columns
- ``planning``: what journals hold, and ranges, several small ones for each task
- ``range_read``: record batches of ranges, on executors
- ``stream``: streaming reads, their offsets, which Spark stores, and the lag
- ``sink``: batch and streaming writes, by ``write_options``, and the producers of a worker
- ``transaction_log``: what a writer has decided; ``transactions``: care of logs
- ``pipelines``: whole jobs, which ``gazette spark`` runs

Workers run the interpreter which imported this package, unless ``PYSPARK_PYTHON`` is set: Spark
would start the first ``python3`` on ``PATH``. Import it before you create the session.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING

from gazette_sdk.errors import ConfigurationError, needs_extra

with needs_extra("spark", "the source and the sink of Spark"):
    import pyspark

if tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 2):
    raise ConfigurationError(
        f"gazette_spark needs PySpark 4.2 or later, and {pyspark.__version__} is installed:"
        " pip install 'pyspark>=4.2'"
    )

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from gazette_spark.source import GazetteDataSource

if TYPE_CHECKING:
    from gazette_spark import transactions
    from gazette_spark.sink import partition_by_journal
    from gazette_spark.stream import lag

__all__ = ["GazetteDataSource", "lag", "partition_by_journal", "transactions"]


def __getattr__(name: str) -> object:
    """Import a name when it is first used: the processes that plan a query need none of them."""
    if name == "transactions":
        return importlib.import_module("gazette_spark.transactions")
    module = {"lag": "stream", "partition_by_journal": "sink"}.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"gazette_spark.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
