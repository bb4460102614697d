"""Count of n-grams by shards, one for each journal of counts, and queries of them.

    gazette run-consumer examples.word_count.counter:Counter

`WORD_COUNT_N` is the number of words of an n-gram, by default 2. All processes need the same.
"""

import os
from operator import attrgetter

from examples.word_count.grams import grams_of
from examples.word_count.word_count_pb2 import (
    NGramCount,
    PublishRequest,
    PublishResponse,
    QueryRequest,
    QueryResponse,
)
from gazette_sdk import Publisher, mapping, shard

SELECTOR = "app.gazette.dev/message-type=word_count.NGramCount"
BY_GRAM = mapping.modulo(SELECTOR, key=attrgetter("n_gram"))
BY_PREFIX = mapping.modulo(SELECTOR, key=attrgetter("prefix"))  # the shard of an equal n-gram

Store = shard.RocksStore[str, int]


class Counter(shard.Application[NGramCount, Store]):
    message = NGramCount
    store = shard.RocksStore.of(key=str, value=shard.codec.uvarint)
    sources = SELECTOR
    name = "word-count"

    def __init__(self, n: int | None = None) -> None:
        super().__init__()
        self.n = n or int(os.environ.get("WORD_COUNT_N", "2"))
        self.get("/api/grams")(self.all_counts)
        self.get("/api/grams/{prefix}", by=BY_PREFIX)(self.counts)

    def start(self, process: shard.Process) -> None:
        self.publisher = Publisher(mapping=BY_GRAM, transport=process.transport)

    def stop(self) -> None:
        self.publisher.close()

    def consume(self, txn: shard.Transaction[Store], counted: NGramCount) -> None:
        txn.store[counted.n_gram] = txn.store.get(counted.n_gram, 0) + counted.count

    # ------------------------------------------------------------------- gRPC

    def rpcs(self) -> list[shard.Method]:
        service = "/word_count.NGram/"
        return [
            shard.Method(
                service + "Publish",
                PublishRequest,
                PublishResponse,
                self.publish,  # about no shard: the process that is asked publishes
                capability=shard.Capability.APPEND,
            ),
            shard.Method(
                service + "Query",
                QueryRequest,
                QueryResponse,
                self.query,
                shard_of=attrgetter("shard"),
                by=BY_PREFIX,
            ),
        ]

    def publish(self, request: PublishRequest) -> PublishResponse:
        """Publish the n-grams of a text, and wait until they are acknowledged.

        They are many messages, not a transaction: if this fails, some of them may count.
        """
        grams = [NGramCount(n_gram=gram, count=1) for gram in grams_of(request.text, self.n)]
        self.publisher.publish_batch(grams).result()
        return PublishResponse()

    def query(self, query: shard.Query[Store]) -> QueryResponse:
        found = query.store.items(prefix=query.request.prefix)
        return QueryResponse(grams=[NGramCount(n_gram=gram, count=count) for gram, count in found])

    # ------------------------------------------------------------------- HTTP

    def counts(self, query: shard.Query[Store], prefix: str) -> dict[str, int]:
        return dict(query.store.items(prefix=prefix))

    def all_counts(self, query: shard.Query[Store]) -> dict[str, int]:
        return dict(query.store.items())
