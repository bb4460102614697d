"""Type checkers find mistakes in programs of users, and nothing else."""

from __future__ import annotations

import re
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


DECLARATIONS = """
from dataclasses import dataclass

import msgspec

from gazette_sdk import JsonMessage, Reader, shard


@dataclass
class Order(JsonMessage):
    customer: str


@dataclass
class Other(JsonMessage):
    customer: str


class Ride(msgspec.Struct, tag=True):
    driver: str


class Driver(msgspec.Struct, tag=True):
    driver: str


class Totals(shard.RocksStore[str, int]):
    pass


@shard.handler(message=Order, store=shard.RocksStore[str, int])
def totals(txn: shard.Transaction[shard.RocksStore[str, int]], order: Order) -> None:
    count: int = txn.store.get(order.customer, 0)
    txn.store[order.customer] = count + 1
    txn.store[order.customer] = order.customer  # error


@shard.handler(message=Order, store=Totals)
def of_base(txn: shard.Transaction[shard.RocksStore[str, int]], order: Order) -> None:
    pass


@shard.handler(message=Order, store=shard.RocksStore.of(key=str, value=int))
async def of_codecs(txn: shard.Transaction[shard.RocksStore[str, int]], order: Order) -> None:
    pass


@shard.handler(message=Order, store=shard.SqlStore.of("sqlite://"))
def of_maker(txn: shard.Transaction[shard.SqlStore], order: Order) -> None:
    pass


@shard.handler(message=Order, store=shard.JsonStore)
def untyped(txn: shard.Transaction[shard.JsonStore[dict[str, int]]], order: Order) -> None:
    pass


@shard.handler(message=Ride | Driver, store=shard.JsonStore)
def union(txn: shard.Transaction, event: Ride | Driver) -> None:
    pass


@shard.handler(
    message={"topic=rides": Ride | Driver, "topic=orders": Order},
    sources=shard.partitions("topic=rides", "topic=orders"),
    store=shard.JsonStore,
)
def topics(txn: shard.Transaction, event: Ride | Driver | Order) -> None:
    pass


@shard.handler(message=Order, store=shard.JsonStore)  # error
def of_another_message(txn: shard.Transaction, order: Other) -> None:
    pass


@shard.handler(message=Ride | Driver, store=shard.JsonStore)  # error
def of_one_class(txn: shard.Transaction, event: Ride) -> None:
    pass


@shard.handler(message=Order, store=shard.RocksStore[str, int])  # error
def of_other_values(txn: shard.Transaction[shard.RocksStore[str, str]], order: Order) -> None:
    pass


@shard.handler(message=Order, store=shard.JsonStore)  # error
def without_message(txn: shard.Transaction) -> None:
    pass


for envelope in Reader(Ride | Driver, "topic=rides"):
    print(envelope.message.driver)
    print(envelope.message.cents)  # error
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("programs")
    (made / "program.py").write_text(MAPPINGS)
    (made / "declarations.py").write_text(DECLARATIONS)
    return made


def check(directory, *command):
    """Run a type checker over both programs; return its output and the lines of errors."""
    names = ["program.py", "declarations.py"]
    run = subprocess.run(
        [sys.executable, "-m", *command, *(str(directory / name) for name in names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    output = run.stdout + run.stderr
    found = re.findall(r"(\w+\.py):(\d+):.* error", output)
    return output, {(name, int(line)) for name, line in found}


def wanted():
    lines = enumerate(DECLARATIONS.splitlines(), 1)
    return {("declarations.py", number) for number, line in lines if line.endswith("# error")}


@pytest.mark.timeout(180)
def test_mypy_finds_the_mistakes_of_programs_and_nothing_else(directory):
    output, found = check(directory, "mypy", "--strict")
    assert found == wanted(), output


@pytest.mark.timeout(180)
def test_pyright_finds_the_mistakes_of_programs_and_nothing_else(directory):
    output, found = check(directory, "basedpyright", "--level", "error")
    assert found == wanted(), output
