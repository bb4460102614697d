"""Program: writes of a Spark cluster of two worker processes, with tasks that fail and lag.

``python -m support.spark_cluster_writes ADDRESS FAULTS`` writes the numbers from 0 to 299 in three
jobs of 100 each. In the first a task raises, in the second a Python worker is killed, and in the
third a task lags, so that a second attempt at it is the one that is committed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from support.spark_faults import FaultyDataSource, plant

LAG_S = 30.0
"""Longer than a second attempt takes. Spark ends the first attempt then."""


def main(address: str, faults: str) -> None:
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.speculation", "true")
        .config("spark.speculation.interval", "200ms")
        .config("spark.speculation.quantile", "0.5")
        .config("spark.speculation.multiplier", "1.1")
        .getOrCreate()
    )
    spark.dataSource.register(FaultyDataSource)
    for number, (place, what) in enumerate(
        [("task-published", "raise"), ("task-prepared", "kill"), ("task-prepared", f"wait {LAG_S}")]
    ):
        plant(Path(faults), place, what)
        frame = spark.range(100 * number, 100 * (number + 1), 1, 4)
        frame.select(sf.col("id").alias("n")).write.format("faulty").options(
            address=address, journals="topic=copies", key="n", faults=faults
        ).mode("append").save()
    spark.stop()


if __name__ == "__main__":
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    main(*sys.argv[1:])
