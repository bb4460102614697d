"""Gazette journals as a Spark data source, over the Python Data Source API of Spark 4.

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

- ``options``: options of a read
- ``source``: the data source and its schema
- ``batch``: partitions, and their reads on executors
- ``decode``: record batches of blocks of frames

Workers run the interpreter which imported this package, unless ``PYSPARK_PYTHON`` is set: Spark
would start the first ``python3`` on ``PATH``. Import it before you create the session.
"""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from gazette_spark.source import GazetteDataSource

__all__ = ["GazetteDataSource"]
