"""Application that processes of a test run: fares in euros, by rates that every shard reads."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import Journals, JsonMessage, Publisher, Reader, mapping, shard

FARES, RATES = "topic=fares", "topic=rates"


@dataclass
class Fare(JsonMessage):
    driver: str
    currency: str
    amount: int


@dataclass
class Rate(JsonMessage):
    currency: str
    euros: int


@dataclass
class Bill(JsonMessage):
    driver: str
    euros: int


TO_FARES = mapping.modulo(FARES, key=attrgetter("driver"))
TO_RATES = mapping.modulo(RATES, key=attrgetter("currency"))
TO_BILLS = mapping.direct("bills/part-000")

BY_CURRENCY = shard.table(
    shard.broadcast(RATES), key=attrgetter("currency"), message=Rate, bootstrap=True
)


@shard.handler(
    message=Fare,
    sources=FARES,
    tables=[BY_CURRENCY],
    store=shard.RocksStore[str, int],
    name="bills",
)
def bills(txn: shard.Transaction, fare: Fare) -> None:
    rate = txn.table(BY_CURRENCY)[fare.currency].euros
    txn.publish(Bill(fare.driver, fare.amount * rate), mapping=TO_BILLS)


@shard.handler(
    message={FARES: Fare, RATES: Rate},
    sources=shard.partitions(FARES, shard.broadcast(RATES)),
    store=shard.RocksStore[str, int],
    name="bills-by-source",
)
def bills_by_source(txn: shard.Transaction, message: Fare | Rate) -> None:
    if isinstance(message, Rate):
        assert txn.source == RATES
        txn.store[message.currency] = message.euros
        return
    assert txn.source == FARES
    euros = message.amount * txn.store.get(message.currency, 0)
    txn.publish(Bill(message.driver, euros), mapping=TO_BILLS)


def create_journals(transport, *, fares=2, rates=2):
    journals = Journals(transport=transport)
    for topic, partitions in [("fares", fares), ("rates", rates), ("bills", 1)]:
        if partitions:
            journals.create(topic, partitions=partitions, replication=1)


def publish(transport, messages, to):
    with Publisher(mapping=to, transport=transport) as publisher:
        publisher.publish_batch(messages).result(timeout=30)


def published(transport):
    """The bills, in their order."""
    reader = Reader(Bill, "topic=bills", block=False, transport=transport)
    return [each.message for each in reader]
