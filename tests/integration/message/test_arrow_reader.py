"""Columns of what publishers wrote through a real broker, transactions among it."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa
import pytest

from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.message.uuid import ACK_TXN
from integration.message.topics import Topic

SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("name", pa.string()),
        ("_journal", pa.string()),
        ("_offset", pa.int64()),
        ("_end", pa.int64()),
        ("_uuid", pa.string()),
        ("_time", pa.timestamp("us", tz="UTC")),
        ("_flags", pa.int32()),
    ]
)


class RolledBackError(Exception):
    pass


def write(topic: Topic) -> set[int]:
    """Messages outside of transactions, in some, and in one that is rolled back."""
    numbers = iter(range(10_000))
    committed: set[int] = set()

    def message() -> dict:
        n = next(numbers)
        return {"n": n, "name": f"näme {n}" if n % 500 == 0 else f"name {n}"}

    with Publisher(mapping=mapping.random(topic.selector)) as publisher:
        plain = [message() for _ in range(2000)]
        publisher.publish_batch(plain)
        for _ in range(3):
            with publisher.transaction() as txn:
                within = [message() for _ in range(300)]
                for each in within:
                    txn.publish(each)
            plain += within
        with suppress(RolledBackError), publisher.transaction() as txn:
            for _ in range(50):
                txn.publish(message())
            raise RolledBackError
        last = [message() for _ in range(100)]
        for each in last:
            publisher.publish(each)
    committed.update(each["n"] for each in [*plain, *last])
    return committed


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_columns_are_what_a_reader_delivers(topic: Topic, isolation: str):
    topic.create(0, 1)
    committed = write(topic)
    table = pa.table(Reader(dict, topic.selector, isolation=isolation).arrow(SCHEMA))
    envelopes = list(Reader(dict, topic.selector, isolation=isolation))
    order = [("_journal", "ascending"), ("_offset", "ascending")]
    if isolation == "committed":
        assert set(table.column("n").to_pylist()) == committed
        assert table.num_rows == len(committed)
    else:
        assert ACK_TXN in table.column("_flags").to_pylist()
    assert table.sort_by(order).to_pylist() == [
        {
            "n": each.message.get("n"),
            "name": each.message.get("name"),
            "_journal": each.journal,
            "_offset": each.begin,
            "_end": each.end,
            "_uuid": str(each.uuid),
            "_time": each.time,
            "_flags": each.flags,
        }
        for each in sorted(envelopes, key=lambda each: (each.journal, each.begin))
    ]
