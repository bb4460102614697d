"""Application that sums the chunks of each stream, and publishes the sum when the stream ends.

Run it beside a cluster: ``gazette run-consumer examples.stream_sum.summer:summer``. A shard keeps
its sums in RocksDB or SQLite, as its label ``store`` says.
"""

from typing import TypeAlias

from examples.stream_sum.messages import TO_SUMS, Chunk, Sum, key_of
from gazette_sdk import shard
from gazette_sdk.errors import ConfigurationError


class RocksSums(shard.RocksStore[bytes, Sum]):
    """Sums by stream in RocksDB, in the layout of Gazette's own summer."""

    def find(self, key: bytes) -> Sum | None:
        """Return the sum of a stream; None of one that is new."""
        return self.get(key)

    def keep(self, key: bytes, found: Sum) -> None:
        """Store the sum of a stream."""
        self[key] = found


class SqliteSums(shard.SqliteStore):
    """Sums by stream in SQLite."""

    def find(self, key: bytes) -> Sum | None:
        """Return the sum of a stream; None of one that is new."""
        row = self.execute("SELECT seq_no, val FROM sums WHERE id = ?", (key,)).fetchone()
        return row and Sum(tuple(key), row[0], int.from_bytes(row[1], "big"))

    def keep(self, key: bytes, found: Sum) -> None:
        """Store the sum of a stream."""
        row = key, found.seq_no, found.value.to_bytes(8, "big")
        self.execute("INSERT OR REPLACE INTO sums (id, seq_no, val) VALUES (?, ?, ?)", row)


SCHEMA = """
CREATE TABLE IF NOT EXISTS sums (id BLOB PRIMARY KEY NOT NULL, seq_no INTEGER, val BLOB)
"""

Sums: TypeAlias = RocksSums | SqliteSums


class Summer(shard.Application[Chunk, Sums]):
    """Sum of each stream, published to the journal of sums with the chunk that ends the stream."""

    name = "stream-sum"
    message = Chunk

    def new_store(self, shard: shard.Shard) -> Sums:
        """Return the store that the shard's label ``store`` names."""
        stores = shard.labels("store")
        if stores == ("rocksdb",):
            return RocksSums(shard.directory)
        if stores == ("sqlite",):
            return SqliteSums(shard.directory, schema=SCHEMA)
        raise ConfigurationError(
            f"shard {shard.id} has the labels store={stores}; give it one, rocksdb or sqlite"
        )

    def consume(self, txn: shard.Transaction[Sums], chunk: Chunk) -> None:
        """Add a chunk to the sum of its stream."""
        key = key_of(chunk)
        found = txn.store.find(key) or Sum(chunk.id)
        ended = found.add(chunk)
        txn.store.keep(key, found)
        if ended:
            txn.publish(found, mapping=TO_SUMS)


summer = Summer()
