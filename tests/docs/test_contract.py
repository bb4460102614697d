"""The documentation contains the promised snippets word for word, and they run."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gazette_sdk import Journals, Publisher, Reader, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.framing.base import FRAME_BYTES_MAX
from support.pages import DOCUMENTED_ADDRESS, ROOT, blocks_of, pages
from support.protobuf_messages import Gram

ORDERS = """
from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import JsonMessage, Publisher, Reader, mapping


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


by_key = mapping.modulo("topic=orders", key=attrgetter("customer"))


def publish_some() -> None:
    with Publisher(mapping=by_key) as publisher:
        receipt = publisher.publish(Order("ada", 250))
        receipt.result(timeout=10)
        print(receipt.journal, receipt.end)


def read_all() -> None:
    for envelope in Reader(Order, "topic=orders", block=False):
        print(envelope.journal, envelope.begin, envelope.end, envelope.message)
"""

SPARK = """
from gazette_spark import GazetteDataSource

spark.dataSource.register(GazetteDataSource)

orders = (
    spark.read.format("gazette")
    .option("address", "http://localhost:8080")
    .option("journals", "topic=orders")
    .schema(
        "customer string, cents long,"
        " _journal string, _offset long, _uuid string, _time timestamp"
    )
    .load()
)
"""

SPARK_WRITE = (
    'orders.write.format("gazette").option("journals", "topic=copies")'
    '.option("key", "customer").mode("append").save()'
)

CURL = (
    "curl -X PUT --data-binary @- http://localhost:8080/examples/foobar",
    'curl "http://localhost:8080/examples/foobar?offset=7"',
    'curl -N "http://localhost:8080/examples/foobar?offset=7&block=true"',
)


def _blocks(language: str) -> list[str]:
    found = [block for page in pages() for block in blocks_of(page)]
    return [
        block.text for block in found if block.language == language and block.marker != "not run"
    ]


def _dumped(source: str) -> list[str]:
    return [ast.dump(statement) for statement in ast.parse(source).body]


@pytest.mark.parametrize("snippet", [ORDERS, SPARK], ids=["orders", "spark"])
def test_the_snippets_stand_in_a_page(snippet: str):
    assert any(_dumped(text) == _dumped(snippet) for text in _blocks("python"))


def test_the_page_of_messages_has_the_limit_of_their_length():
    page = (ROOT / "docs/messages.md").read_text(encoding="utf-8")
    assert f"A message may have {FRAME_BYTES_MAX >> 20} MiB with its framing." in page


def test_the_orders_example_is_the_snippet():
    example = ast.parse((ROOT / "examples" / "orders.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(example)
    wanted = _dumped(ORDERS)
    assert [ast.dump(statement) for statement in example.body[1 : 1 + len(wanted)]] == wanted


def test_the_orders_example_runs(gazette: EmbeddedCluster):
    gazette.apply((ROOT / "examples" / "orders.journals.yaml").read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "orders.py"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples/orders/part-00") == 2
    assert "Order(customer='ada', cents=250)" in done.stdout


@pytest.mark.parametrize("command", CURL)
def test_the_curl_commands_stand_in_the_readme_and_are_run(command: str):
    readme = [
        block.text
        for block in blocks_of(ROOT / "README.md")
        if block.language == "console" and block.marker != "not run"
    ]
    assert any(command in text for text in readme)


SPARK_SESSION = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
"""

SPARK_OPTIONS = """
import datetime as dt
import json
import sys

directory, offsets = sys.argv[1:]
rows = lambda frame: [[each["customer"], each["cents"]] for each in frame.collect()]
found = {"batch": rows(orders), "columns": orders.columns}
found["times"] = orders.where("_uuid is not null and _time > '2020-01-01'").count()

def read(journals="topic=orders", **options):
    reader = spark.read.format("gazette").options(journals=journals, **options)
    return reader.schema("customer string, cents long").load()

found["uncommitted"] = rows(read(isolation="uncommitted", framing="json"))
found["begin"] = rows(read(begin=offsets))
found["end"] = rows(read(end=offsets))
found["later"] = rows(read(begin=dt.datetime.now(dt.UTC).isoformat()))
grams = spark.read.format("gazette").option("journals", "topic=grams")
grams = grams.option("message", "support.protobuf_messages:Gram").load()
found["message"] = [each["text"] for each in grams.collect()]
"""

SPARK_STREAM = """
stream = (
    spark.readStream.format("gazette")
    .options(address="http://localhost:8080", journals="topic=orders", maxBytesPerTrigger="1k")
    .schema("customer string, cents long")
    .load()
)
for _ in range(2):
    query = (
        stream.writeStream.format("gazette")
        .options(journals="topic=streamed", key="customer", checkpointLocation=directory)
        .start()
    )
    query.processAllAvailable()
    query.stop()
"""

SPARK_STORE = SPARK.replace(
    '.option("address", "http://localhost:8080")', '.option("store", "STORE")'
).replace("topic=orders", "orders/")

Row = tuple[str, int]


class RollBackError(Exception):
    pass


def _publish_orders(cluster: EmbeddedCluster) -> tuple[list[Row], list[Row], dict[str, int]]:
    """Publish orders in transactions, of which one is rolled back and one stays open.

    Returns:
        The orders before and behind some offsets, and the offsets.
    """
    orders = [(f"customer {cents % 5}", cents) for cents in range(60)]
    by_customer = mapping.modulo("topic=orders", key=lambda order: order["customer"])
    offsets: dict[str, int] = {}
    with Publisher(mapping=by_customer, transport=cluster.transport) as publisher:

        def transact(rows: list[Row]) -> None:
            with publisher.transaction() as transaction:
                for customer, cents in rows:
                    transaction.publish({"customer": customer, "cents": cents})
                if rows[0][1] < 0:
                    raise RollBackError

        transact(orders[:20])
        for envelope in Reader(
            dict, "topic=orders", transport=cluster.transport, isolation="uncommitted"
        ):
            offsets[envelope.journal] = envelope.end
        with pytest.raises(RollBackError):
            transact([(customer, -1) for customer, _ in orders[:5]])
        transact(orders[20:50])
        for customer, cents in orders[50:]:
            publisher.publish({"customer": customer, "cents": cents})
    return orders[:20], orders[20:], offsets


def _run_program(directory: Path, address: str, *parts: str, arguments: list[str]) -> Any:
    """Run a program, typed into a new process; return what it has found."""
    program = directory / "program.py"
    text = "\n".join((SPARK_SESSION, *parts, "print(json.dumps(found))"))
    program.write_text(text.replace(DOCUMENTED_ADDRESS, address))
    environ = {**os.environ, "GAZETTE_ADDRESS": address, "SPARK_LOCAL_IP": "127.0.0.1"}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    paths = [ROOT / "tests", ROOT, ROOT / "contrib" / "spark", environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    environ.pop("PYSPARK_PYTHON", None)  # a user has not set it
    done = subprocess.run(
        [sys.executable, program, *arguments],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _committed(cluster: EmbeddedCluster, topic: str) -> list[Row]:
    reader = Reader(dict, f"topic={topic}", transport=cluster.transport)
    messages = [envelope.message for envelope in reader]
    assert {tuple(message) for message in messages} == {("customer", "cents")}
    return sorted((message["customer"], message["cents"]) for message in messages)


@pytest.mark.timeout(600)  # Spark starts many processes, which takes minutes on a busy machine
def test_the_spark_snippets_run_as_they_are_written(
    gazette_cluster: Callable[[int], EmbeddedCluster], tmp_path: Path
):
    cluster = gazette_cluster(1)
    journals = Journals(cluster.transport)
    for topic in ("orders", "copies", "streamed"):
        journals.create(topic, partitions=2, replication=1, stores=["file:///"])
    journals.create("grams", partitions=1, content_type="application/x-protobuf-fixed")
    before, behind, offsets = _publish_orders(cluster)
    every = sorted(before + behind)
    with Publisher(mapping=mapping.random("topic=grams"), transport=cluster.transport) as publisher:
        publisher.publish(Gram(text="a gram"))

    found = _run_program(
        tmp_path,
        cluster.address,
        SPARK,
        SPARK_OPTIONS,
        SPARK_WRITE,
        SPARK_STREAM,
        arguments=[str(tmp_path / "checkpoint"), json.dumps(offsets)],
    )

    assert found["columns"] == ["customer", "cents", "_journal", "_offset", "_uuid", "_time"]
    assert found["times"] == len(every)
    rows = {
        name: sorted((customer, cents) for customer, cents in found[name] if customer)
        for name in ("batch", "uncommitted", "begin", "end", "later")
    }
    rolled_back = [(f"customer {number}", -1) for number in range(5)]
    assert rows == {
        "batch": every,
        "uncommitted": sorted(every + rolled_back),
        "begin": sorted(behind),
        "end": sorted(before),
        "later": [],
    }
    assert found["message"] == ["a gram"]
    for topic in ("copies", "streamed"):
        assert _committed(cluster, topic) == every
    by_customer: dict[str, set[str]] = {}
    for envelope in Reader(dict, "topic=copies", transport=cluster.transport):
        by_customer.setdefault(envelope.message["customer"], set()).add(envelope.journal)
    assert {len(names) for names in by_customer.values()} == {1}

    cluster.stop()  # a stop stores what was only local
    snippet = SPARK_STORE.replace("STORE", f"file://{cluster.fragments}/")
    collect = (
        'import json\nfound = [[each["customer"], each["cents"]] for each in orders.collect()]'
    )
    stored = _run_program(tmp_path, "http://127.0.0.1:9", snippet, collect, arguments=[])
    assert sorted(map(tuple, stored)) == every
