"""Application that processes of a test run: visits, whose entries have a time to live."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, itemgetter

from gazette_sdk import JsonMessage, mapping, shard

TO_VISITS = mapping.modulo("topic=visits", key=attrgetter("user"))


@dataclass
class Visit(JsonMessage):
    user: str
    after_s: float


@shard.handler(
    message=Visit, sources="topic=visits", store=shard.RocksStore[str, int], name="expiring-visits"
)
def visits(txn: shard.Transaction[shard.RocksStore[str, int]], visit: Visit) -> None:
    txn.store[visit.user] = txn.store.get(visit.user, 0) + 1
    txn.store.expire(visit.user, visit.after_s)


@visits.get("/visits/{user}", by=mapping.modulo("topic=visits", key=itemgetter("user")))
def visits_of(query: shard.Query, user: str) -> object:
    return query.store.get(user, 0)
