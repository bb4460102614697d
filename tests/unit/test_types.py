"""Programs of users pass ``mypy --strict``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAPPINGS = """
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from gazette_sdk import JsonMessage, Publisher, Reader, mapping, shard


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


@dataclass
class Total(JsonMessage):
    customer: str
    cents: int


def everything(message: object) -> str:
    return "totals/part-000"


by_customer = mapping.modulo("topic=totals", key=attrgetter("customer"))
by_parameter = mapping.rendezvous("topic=totals", key=itemgetter("customer"))


@shard.handler(name="totals", message=Order, store=shard.JsonStore, sources="topic=orders")
def totals(txn: shard.Transaction, order: Order) -> None:
    txn.publish(Total(order.customer, 1), mapping=by_customer)
    txn.publish(Total(order.customer, 1), mapping=mapping.direct("totals/part-000"))
    txn.publish_batch([Total(order.customer, 1)], mapping=mapping.random("topic=totals"))
    txn.publish(Total(order.customer, 1), mapping=everything)


@totals.get("/totals/{customer}", by=by_parameter)
def total(query: shard.Query, customer: str) -> object:
    return query.store.state.get(customer)


def publish() -> None:
    with Publisher(mapping=by_customer) as publisher:
        publisher.publish(Order("ada", 1)).result()
        publisher.publish(Order("ada", 1), mapping=everything).result()
    for envelope in Reader(Order, "topic=orders", block=False):
        print(envelope.message.cents)
"""


@pytest.mark.timeout(180)
def test_mappings_and_handlers_are_typed_as_they_are_used(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MAPPINGS)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
