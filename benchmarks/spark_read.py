"""Spark batch reads, compared with `spark.read.json` of the same fragment files.

    python benchmarks/spark_read.py [--rounds 3] [--messages 1000000] [--fragments 100000] [--json]

Queries read every column of the same schema from the same files, uncompressed and gzip, and
aggregate over it; figures are seconds. `metadata` also reads the metadata columns, which
`spark.read.json` does not have. Memory is the peak of any Python worker, in MiB, also over one
fragment of 400 MiB, uncompressed and gzip. Planning is the time of the driver for a journal of
that many fragments.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import Figure, arguments, cluster, in_turn, report

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from gazette_sdk import Publisher, connect, mapping
from gazette_sdk.message.uuid import OUTSIDE_TXN, build_uuid
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, sum_of
from gazette_spark import GazetteDataSource
from gazette_spark.options import Options
from gazette_spark.source import GazetteBatchReader

BARS = {"uncommitted": 1.0, "committed": 1.1, "metadata": 1.1}
MEMORY_MIB_MAX = 500
PLANNING_S_MAX = 20
LARGE_BYTES = 400 << 20
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


def session() -> SparkSession:
    """Start Spark."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    spark.dataSource.register(GazetteDataSource)
    return spark


def compare(spark: SparkSession, codec: str, rounds: int, messages: int) -> list[Figure]:
    """Compare reads of the fragments of a codec."""
    with cluster(JOURNALS.replace("GZIP", codec)) as running:
        publish(running.address, messages)
        running.stop()  # which stores what is left
        root = running.data / "fragments"
        files = sorted(str(path) for path in root.rglob("*-*-*"))
        size = sum(Path(path).stat().st_size for path in files)
        print(f"{codec}: {len(files)} files, {size / 1e6:.0f} MB", file=sys.stderr)

        def gazette(isolation: str, schema: str) -> DataFrame:
            reader = spark.read.format("gazette").option("store", f"file://{root}/")
            reader = reader.option("journals", "bench/spark/").option("isolation", isolation)
            return reader.schema(schema).load()

        def timed(frame_of: Callable[[], DataFrame], columns: list[str] = AGGREGATE) -> float:
            begun = time.perf_counter()
            row = frame_of().selectExpr(*columns).first()
            assert row is not None
            assert row[0] == messages
            return time.perf_counter() - begun

        of_metadata = ["max(_offset)", "count(_uuid)", "max(_time)", "count(_journal)"]
        medians = in_turn(
            rounds,
            json=lambda: timed(lambda: spark.read.schema(SCHEMA).json(files)),
            uncommitted=lambda: timed(lambda: gazette("uncommitted", SCHEMA)),
            committed=lambda: timed(lambda: gazette("committed", SCHEMA)),
            metadata=lambda: timed(
                lambda: gazette("committed", f"{SCHEMA}, {METADATA}"), [*AGGREGATE, *of_metadata]
            ),
        )
    return [
        Figure(f"{name}, {codec}", medians[name], medians["json"], "s", bar, more_is_better=False)
        for name, bar in BARS.items()
    ]


def write_fragment(
    root: Path,
    journal: str,
    begin: int,
    content: bytes,
    codec: pb.CompressionCodec = pb.NONE,
) -> None:
    """Write a fragment, uncompressed or gzip."""
    fragment = pb.Fragment(
        journal=journal,
        begin=begin,
        end=begin + len(content),
        sum=sum_of(hashlib.sha1(content).digest()),
        compression_codec=codec,
    )
    path = root / content_path(fragment)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, 1) if codec == pb.GZIP else content)


def read_large(spark: SparkSession, root: Path) -> None:
    """Read one large fragment of each codec, committed and uncommitted."""
    payload = "x" * 800
    lines = [
        f'{{"UUID":"{build_uuid(b"worker", i << 4, OUTSIDE_TXN)}","payload":"{payload}","n":{i}}}\n'
        for i in range(1, LARGE_BYTES // 880)
    ]
    content = "".join(lines).encode()
    for codec in (pb.NONE, pb.GZIP):
        prefix = f"large-{codec}/"
        write_fragment(root, f"{prefix}journal", 0, content, codec)
        for isolation in ("committed", "uncommitted"):
            reader = spark.read.format("gazette").option("store", root.as_uri())
            reader = reader.option("journals", prefix).option("isolation", isolation)
            frame = reader.schema("payload string, n long").load()
            assert frame.selectExpr("count(payload)").first()[0] == len(lines)


def peak_of_workers_mib() -> float:
    """Return the greatest peak of the memory of all Python workers of this session."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, check=True)
    rows = [line.split(maxsplit=2) for line in listed.stdout.decode().splitlines()]
    family, size = {os.getpid()}, 0
    while len(family) > size:
        size = len(family)
        family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
    peak = 0
    for pid, _, command in rows:
        if int(pid) in family and "pyspark.daemon" in command:
            status = Path(f"/proc/{pid}/status").read_text("ascii")
            peak = max(peak, *(int(x.split()[1]) for x in status.splitlines() if "VmHWM" in x))
    assert peak, "a worker lives on for a minute"
    return peak / 1024


def planning_s(root: Path, count: int) -> float:
    """Return the time of planning a journal of many fragments."""
    for number in range(count):
        write_fragment(root, "many/journal", number * 8, b'{"n":1}\n')
    worst = 0.0
    for isolation in ("committed", "uncommitted"):
        given = {"store": root.as_uri(), "journals": "many/", "isolation": isolation}
        reader = GazetteBatchReader(Options.parse(given), StructType([]))
        begun = time.perf_counter()
        parts = reader.partitions()
        worst = max(worst, time.perf_counter() - begun)
        assert parts[-1].ranges[-1].end == count * 8
    return worst


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", rounds=3, messages=1_000_000, fragments=100_000)
    spark = session()
    figures = [
        figure
        for codec in ("GZIP", "NONE")
        for figure in compare(spark, codec, options.rounds, options.messages)
    ]
    with tempfile.TemporaryDirectory() as directory:
        read_large(spark, Path(directory))
        peak = peak_of_workers_mib()
        planning = planning_s(Path(directory), options.fragments)
    spark.stop()
    figures += [
        Figure("worker memory", peak, MEMORY_MIB_MAX, "MiB", 1.0, more_is_better=False),
        Figure("planning", planning, PLANNING_S_MAX, "s", 1.0, more_is_better=False),
    ]
    report(figures, options)


if __name__ == "__main__":
    main()
