"""Publish orders, and read them.

It needs a broker (`gazette dev`) and the journals of `orders.journals.yaml`.
"""

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
        receipt = publisher.publish(Order("ada", 250))  # returns at once; batched in the background
        receipt.result(timeout=10)  # or, in a coroutine: await receipt
        print(receipt.journal, receipt.end)  # where it landed: journal and end offset


def read_all() -> None:
    for envelope in Reader(Order, "topic=orders", block=False):  # committed messages
        print(envelope.journal, envelope.begin, envelope.end, envelope.message)


if __name__ == "__main__":
    publish_some()
    read_all()
