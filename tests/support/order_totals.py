"""Application that processes of a test run: totals of orders, published after each order."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter

from google.protobuf.wrappers_pb2 import StringValue, UInt64Value

from gazette_sdk import Journals, JsonMessage, Publisher, Reader, mapping, shard
from gazette_sdk.errors import CallError

CUSTOMERS = 5


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


@dataclass
class Total(JsonMessage):
    customer: str
    cents: int


BY_CUSTOMER = mapping.modulo("topic=orders", key=attrgetter("customer"))
TO_TOTALS = mapping.modulo("topic=totals", key=attrgetter("customer"))


@shard.handler(message=Order, store=shard.RocksStore[str, int], sources="topic=orders")
def totals(txn, order):
    total = txn.store.get(order.customer, 0) + order.cents
    txn.store[order.customer] = total
    txn.publish(Total(order.customer, total), mapping=TO_TOTALS)


@totals.get("/api/customers/{customer}", by=BY_CUSTOMER)
def customer_total(query, customer):
    return {"customer": customer, "cents": query.store.get(customer, 0), "shard": query.shard.id}


@totals.get("/api/count")
async def count(query):
    return str(len(list(query.store.items())))


@totals.post("/api/echo", by=mapping.direct("orders/part-000"))
def echo(query):
    return query.body


@totals.get("/api/broken")
def broken(query):
    raise ValueError("a mistake of the application")


BY_NAME = mapping.modulo("topic=orders", key=attrgetter("value"))


@totals.rpc("/orders.Totals/Total", StringValue, UInt64Value, by=BY_NAME)
async def total_of(query):
    return UInt64Value(value=query.store.get(query.request.value, 0))


@totals.rpc("/orders.Totals/Count", StringValue, UInt64Value, shard_of=attrgetter("value"))
def count_of(query):
    return UInt64Value(value=len(list(query.store.items())))


@totals.rpc("/orders.Totals/Echo", StringValue, StringValue)
def echo_request(request):
    return request


@totals.rpc("/orders.Totals/Broken", StringValue, StringValue, by=BY_NAME)
def broken_method(query):
    if query.request.value == "refused":
        raise CallError("this name is refused", code="FAILED_PRECONDITION")
    return UInt64Value()


def create_journals(transport, partitions=2):
    journals = Journals(transport=transport)
    journals.create("orders", partitions=partitions, replication=1)
    journals.create("totals", partitions=2, replication=1)


def publish(transport, count):
    """Publish orders of one cent, in turn for each customer."""
    with Publisher(mapping=BY_CUSTOMER, transport=transport) as publisher:
        for number in range(count):
            publisher.publish(Order(f"customer-{number % CUSTOMERS}", 1))


def published_totals(transport):
    """Return the committed totals of each customer, in order."""
    found = {}
    for envelope in Reader(Total, "topic=totals", block=False, transport=transport):
        found.setdefault(envelope.message.customer, []).append(envelope.message.cents)
    return found


def expected_totals(count):
    return {
        f"customer-{customer}": list(range(1, 1 + len(range(customer, count, CUSTOMERS))))
        for customer in range(min(CUSTOMERS, count))
    }


def states(shards, partitions=2):
    """Return what the stores of all shards hold, as their logs have it."""
    found = {}
    for number in range(partitions):
        store = shards.store(f"orders/part-{number:03}")
        held = dict(store.items())
        assert not held.keys() & found.keys(), "a customer is in one shard"
        found |= held
    return found


@shard.handler(message=Order, store=shard.RocksStore[str, int], sources="topic=orders")
def refusing_totals(txn, order):
    if order.cents < 0:
        raise ValueError("an order of negative cents")
    txn.store[order.customer] = txn.store.get(order.customer, 0) + order.cents


def wait_for_totals(transport, count):
    """Wait until all totals are published, and check them."""
    deadline = time.monotonic() + 90
    wanted = expected_totals(count)
    while (found := published_totals(transport)) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


PROGRAM = """
from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import JsonMessage, mapping, shard


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


@dataclass
class Total(JsonMessage):
    customer: str
    cents: int


@shard.handler(message=Order, store=shard.RocksStore, sources="topic=orders")
def totals(txn: shard.Transaction, order: Order) -> None:
    total = int(txn.store.get(order.customer, 0)) + order.cents
    txn.store[order.customer] = total
    to_totals = mapping.modulo("topic=totals", key=attrgetter("customer"))
    txn.publish(Total(order.customer, total), mapping=to_totals)
"""
"""A program with this application, for processes of its own."""
