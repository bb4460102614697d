"""Count of words by shards, one for each journal of lines.

It can also be run by itself, beside a cluster: ``gazette run-consumer
examples.demo.counter:counter``.
"""

from examples.demo.words import Line, words_of
from gazette_sdk import shard


@shard.handler(message=Line, store=shard.RocksStore[str, int], sources="topic=words")
def counter(txn: shard.Transaction, line: Line) -> None:
    """Count the words of one line. Each line counts once, whichever process dies."""
    for word in words_of(line.text):
        txn.store[word] = txn.store.get(word, 0) + 1


@counter.get("/api/words")
def words(query: shard.Query) -> dict[str, int]:
    """Return the counts of one shard, which the request names."""
    return dict(query.store.items())
