"""The documentation contains the promised snippets word for word, and they run."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from support.pages import ROOT, blocks_of, pages

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
