"""Driver of streaming queries from files to journals, which runs until it is killed.

It prints ``ready`` when each query has ended a micro-batch in this run, and ``failed`` for each
query that fails, which it starts again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from gazette_spark import GazetteDataSource
from support.spark_session import start_session


def main(text: str) -> None:
    options = json.loads(text)
    spark = start_session("local[2]", **{"spark.log.level": "OFF"})
    spark.dataSource.register(GazetteDataSource)
    queries = [start(spark, Path(directory), options) for directory in options["directories"]]
    if options["ends"]:
        for query in queries:
            query.awaitTermination()
        return
    is_ready = False
    while True:
        for number, query in enumerate(queries):
            if query.exception() is not None:
                print("failed", flush=True)
                queries[number] = start(spark, Path(options["directories"][number]), options)
        if not is_ready and all(query.lastProgress for query in queries):
            is_ready = True
            print("ready", flush=True)
        time.sleep(0.1)


def start(spark: SparkSession, directory: Path, options: dict) -> StreamingQuery:
    ends = options["ends"]
    rows = (
        spark.readStream.format("json")
        .schema("query string, n long, key string")
        .option("maxFilesPerTrigger", 10_000 if ends else 1)
        .load(str(directory / "files"))
        .repartition(2)
    )
    writer = (
        rows.writeStream.format("gazette")
        .option("address", options["address"])
        .option("journals", "topic=copies")
        .option("key", "key")
        .option("checkpointLocation", str(directory / "checkpoint"))
    )
    return (writer.trigger(availableNow=True) if ends else writer).start()


if __name__ == "__main__":
    main(sys.argv[1])
