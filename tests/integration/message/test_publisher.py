"""Publishing to a real broker: what it costs, and what becomes of it when programs end."""

import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator
from operator import itemgetter

import pyarrow as pa
import pytest

from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.grpc import GrpcWire
from gazette_sdk.transport.wire import AppendItem, PreparedAppend
from integration.message.topics import Topic

WAIT_S = 30.0


@pytest.fixture
def counted(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> tuple[Transport, Counter]:
    """A transport over gRPC, and how many Append RPCs each journal had."""
    counts: Counter = Counter()
    append = GrpcWire.append

    async def counting(
        self: GrpcWire, prepared: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        counts[prepared.request.journal] += 1
        return await append(self, prepared, requests)

    monkeypatch.setattr(GrpcWire, "append", counting)
    return connect(f"{topic.cluster.address}?wire=grpc"), counts


def test_publishing_costs_one_rpc_for_each_journal_and_flush(topic: Topic, counted):
    topic.create(0, 1, 2, 3)
    transport, counts = counted
    by_n = mapping.modulo(topic.selector, key=itemgetter("n"))
    messages = [{"n": n} for n in range(4000)]
    with Publisher(by_n, transport=transport) as publisher:
        for flushes in range(1, 6):
            publisher.publish_batch(messages)
            publisher.flush(WAIT_S)
            assert set(counts.values()) == {flushes}
        with publisher.transaction() as txn:
            txn.publish_batch(messages)
        assert set(counts.values()) == {7}
        counts.clear()
        for message in messages:
            publisher.publish(message)
        publisher.flush(WAIT_S)
        # What gathers while an append is under way is the next: far fewer than messages.
        assert counts.total() <= 100


def test_columns_are_read_as_they_were_published(topic: Topic):
    topic.create(0, 1, 2)
    rows = [{"key": f"k{n % 11}", "n": n, "text": None if n % 3 else "ü"} for n in range(10_000)]
    by_key = mapping.rendezvous(topic.selector, key=itemgetter("key"))
    with Publisher(by_key) as publisher:
        receipt = publisher.publish_batch(pa.Table.from_pylist(rows)).result(WAIT_S)
        assert receipt.count == 10_000
        assert receipt.total_chunks >= len(receipt.journals)
        assert receipt.delayed_chunks == 0
    found = list(Reader(dict, topic.selector))
    assert sorted((e.message for e in found), key=itemgetter("n")) == rows
    for journal, landing in receipt.landed.items():
        own = [e for e in found if e.journal == journal]
        assert (own[0].begin, own[-1].end, len(own)) == (landing.begin, landing.end, landing.count)


_PROGRAM = """
    import logging, sys
    from gazette_sdk import Publisher, mapping
    logging.basicConfig(level=logging.WARNING)
    import gazette_sdk.message.publisher as module
    module.EXIT_TIMEOUT_S = float(sys.argv[2])
    publisher = Publisher(mapping.direct(sys.argv[1]))
    for n in range(1000):
        publisher.publish({"n": n})
    publisher.publish_batch([{"n": n} for n in range(1000, 5000)])
"""


def run_program(topic: Topic, journal: str, timeout_s: float) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), journal, str(timeout_s)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_what_a_program_published_before_its_end_is_delivered(topic: Topic):
    topic.create(0)
    assert run_program(topic, topic.name(0), 10) == ""
    found = [e.message["n"] for e in Reader(dict, name=topic.name(0))]
    assert found == list(range(5000))


def test_what_cannot_be_delivered_before_a_programs_end_is_told(topic: Topic):
    topic.create(0)
    said = run_program(topic, topic.name(0), 0)
    found = [e.message["n"] for e in Reader(dict, name=topic.name(0))]
    lost = 5000 - len(found)
    # An append under way may succeed after all, and even all of them.
    assert "messages could not be delivered before the end of the program" in said or lost == 0
