"""A Spark driver of its own, beside that of a test: it runs one write, and ends.

Its argument is a JSON object of a write: ``kind``, ``options`` of the sink ``faulty``, and

- ``stream``: ``files`` and ``rows``, the schema, of the stream that is copied
- ``speculation``: ``count`` of the rows and ``tasks`` that write them, on a cluster of two workers
  with different addresses, as Spark never runs two attempts of a task on one host; ``directory``
  of the workers
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from support.spark_faults import FaultyDataSource
from support.spark_session import start_session

HOSTS = ("127.0.0.1", "127.0.0.2")

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.python.task.killTimeout": "300s",  # an attempt that lost runs to its end
    "spark.executor.memory": "512m",
    "spark.executor.cores": "2",
    "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
}


def main(text: str) -> None:
    given = json.loads(text)
    {"stream": stream, "speculation": speculation}[given.pop("kind")](**given)


def session(master: str, conf: dict[str, str]) -> SparkSession:
    spark = start_session(master, **conf)
    spark.dataSource.register(FaultyDataSource)
    return spark


def stream(options: dict[str, str], files: str, rows: str) -> None:
    spark = session("local[2]", {})
    copied = spark.readStream.format("json").schema(rows).load(files)
    writer = copied.writeStream.format("faulty").options(**options)
    writer.trigger(availableNow=True).start().awaitTermination()


def speculation(options: dict[str, str], count: int, tasks: int, directory: str) -> None:
    spark = session(start_cluster(directory), SPECULATION)
    rows = spark.range(0, count, 1, tasks).select(sf.col("id").alias("n"))
    rows.write.format("faulty").options(**options).mode("append").save()
    spark.stop()


def start_cluster(directory: str) -> str:
    """Start a master and its workers in the driver's JVM, and return the master's URL."""
    SparkContext._ensure_initialized()
    jvm: Any = SparkContext._jvm
    deploy, some = jvm.org.apache.spark.deploy, jvm.scala.Option
    conf = jvm.org.apache.spark.SparkConf()
    master = deploy.master.Master.startRpcEnvAndEndpoint(HOSTS[0], 0, 0, conf)
    address = master._1().address()
    urls = SparkContext._gateway.new_array(jvm.java.lang.String, 1)
    urls[0] = f"spark://{address.host()}:{address.port()}"
    size = (2, 1024)  # cores, MiB
    for number, host in enumerate(HOSTS):
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, *size, urls, directory, some.apply(number), conf, some.empty()
        )
    return urls[0]


if __name__ == "__main__":
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    main(sys.argv[1])
