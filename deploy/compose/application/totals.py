"""Application of the compose file: the total of each customer's orders."""

from __future__ import annotations

from dataclasses import dataclass

from gazette_sdk import JsonMessage, shard


@dataclass
class Order(JsonMessage):
    """Order of a customer."""

    customer: str
    cents: int


@shard.handler(message=Order, store=shard.RocksStore[str, int], sources="topic=orders")
def totals(txn: shard.Transaction, order: Order) -> None:
    """Add an order to the total of its customer."""
    txn.store[order.customer] = txn.store.get(order.customer, 0) + order.cents
