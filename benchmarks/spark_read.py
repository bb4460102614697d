"""Spark batch read, compared with `spark.read.json` of the same fragment files.

    python benchmarks/spark_read.py [--rounds 3] [--messages 1000000] [--json]

Both read every column of the same schema from the same gzip files, and aggregate over it. Figures
are seconds. A third run also reads the metadata columns, which `spark.read.json` does not have.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from measure import Figure, arguments, cluster, in_turn, report

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from pyspark.sql import SparkSession

from gazette_sdk import Publisher, connect, mapping
from gazette_spark import GazetteDataSource

BAR = 1.3
PARTITIONS = 4
SCHEMA = "key string, amount double, city string, payload string, n long"
AGGREGATE = ["count(key)", "sum(amount)", "count(city)", "sum(length(payload))", "max(n)"]
METADATA = "_journal string, _offset long, _uuid string, _time timestamp"
JOURNALS = """
name: bench/spark/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}, {name: topic, value: spark}]
fragment:
  length: 16777216
  compression_codec: GZIP
  stores: ["file:///"]
  refresh_interval: 10s
children:
""" + "".join(f"  - name: bench/spark/part-{i:03d}\n" for i in range(PARTITIONS))


def publish(address: str, count: int) -> None:
    """Publish messages of about 200 bytes."""
    by_key = mapping.modulo("topic=spark", key=lambda message: message["key"])
    with Publisher(mapping=by_key, transport=connect(address)) as publisher:
        for i in range(count):
            publisher.publish(
                {
                    "key": f"user-{i % 1000}",
                    "amount": i * 0.5,
                    "city": "springfield",
                    "payload": "x" * 60,
                    "n": i,
                }
            )


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", rounds=3, messages=1_000_000)
    with cluster(JOURNALS) as running:
        publish(running.address, options.messages)
        running.stop()  # which stores what is left
        root = running.data / "fragments"
        files = sorted(str(path) for path in root.rglob("*.gz"))
        size = sum(Path(path).stat().st_size for path in files)
        print(f"{len(files)} files, {size / 1e6:.0f} MB compressed", file=sys.stderr)
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.log.level", "ERROR")
            .getOrCreate()
        )
        spark.dataSource.register(GazetteDataSource)
        gazette = (
            spark.read.format("gazette")
            .option("store", f"file://{root}/")
            .option("journals", "bench/spark/")
        )

        def timed(frame_of: object, columns: list[str]) -> float:
            begun = time.perf_counter()
            row = frame_of().selectExpr(*columns).first()  # type: ignore[operator]
            assert row[0] == options.messages
            return time.perf_counter() - begun

        medians = in_turn(
            options.rounds,
            gazette=lambda: timed(lambda: gazette.schema(SCHEMA).load(), AGGREGATE),
            json=lambda: timed(lambda: spark.read.schema(SCHEMA).json(files), AGGREGATE),
            metadata=lambda: timed(
                lambda: gazette.schema(f"{SCHEMA}, {METADATA}").load(),
                [*AGGREGATE, "max(_offset)", "count(_uuid)", "max(_time)", "count(_journal)"],
            ),
        )
        spark.stop()
    report(
        [
            Figure(
                "batch read", medians["gazette"], medians["json"], "s", BAR, more_is_better=False
            ),
            Figure(
                "with metadata",
                medians["metadata"],
                medians["json"],
                "s",
                BAR,
                more_is_better=False,
            ),
        ],
        options,
    )


if __name__ == "__main__":
    main()
