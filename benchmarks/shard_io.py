"""Processor time per message of a shard's input and output, beside a reader and a publisher.

    python benchmarks/shard_io.py [--messages 200000] [--rounds 5] [--json]

JSON words of about 73 bytes, from and to a dataclass. The broker runs in another process. Figures
are nanoseconds of the thread that calls, per message: without waiting, and without the event loop.
The input is polled, and the output published to, by a worker thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from measure import Figure, arguments, cluster, in_turn, report

from gazette_sdk import JsonMessage, Publisher, Reader, Transport, connect
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.transaction.input import Input
from gazette_sdk.shard.transaction.transaction import Output
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend
from gazette_sdk.transport.loop import run

JOURNALS = """
name: bench/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 67108864, stores: ["file:///"], compression_codec: NONE, refresh_interval: 5m}
children:
  - name: bench/plain
  - name: bench/transactions
  - name: bench/singles
  - name: bench/out
"""

TRANSACTION_COUNT = 1000
"""Messages of a transaction."""

PIECE_COUNT = 100
"""Messages of a transaction between which others stand, in ``bench/transactions``."""

SINGLES_SHARE = 20
"""There are so many times fewer messages in ``bench/singles``, which are published one by one."""


@dataclass
class Word(JsonMessage):
    """Message of the benchmark."""

    word: str
    count: int


def words(count: int) -> list[Word]:
    """Return messages."""
    return [Word(f"word-{n % 1000:06d}", n) for n in range(count)]


def to(journal: str) -> Callable[[Word], str]:
    """Return the mapping to one journal."""
    return lambda _word: journal


def fill(transport: Transport, count: int) -> None:
    """Fill the sources.

    The first has messages outside of transactions; the second, transactions of two producers, one
    within the other; the third, messages outside of transactions, each within one that is open.
    """
    messages = words(count)
    with Publisher(transport=transport) as publisher:
        publisher.publish_batch(messages, mapping=to("bench/plain"))
        mapping = to("bench/transactions")
        for begin in range(0, count, 2 * TRANSACTION_COUNT):
            part = messages[begin : begin + 2 * TRANSACTION_COUNT]
            with (
                publisher.transaction(mapping=mapping) as one,
                publisher.transaction(mapping=mapping) as two,
            ):
                for at in range(0, len(part), 2 * PIECE_COUNT):
                    one.publish_batch(part[at : at + PIECE_COUNT])
                    two.publish_batch(part[at + PIECE_COUNT : at + 2 * PIECE_COUNT])
        mapping = to("bench/singles")
        with publisher.transaction(mapping=mapping) as txn:
            for message in messages[: count // SINGLES_SHARE]:
                txn.publish(message)
                publisher.publish(message, mapping=mapping)


def read(transport: Transport, journal: str) -> float:
    """Return the nanoseconds per message of a reader in plain code."""
    begin = time.thread_time_ns()
    count = sum(1 for _ in Reader(Word, name=journal, transport=transport))
    return (time.thread_time_ns() - begin) / count


async def polled(transport: Transport, journal: str) -> float:
    """Return the nanoseconds per message of all polls of an input."""
    source = Input(transport, {journal: 0}, Checkpoint(), lambda _spec: Word, follows=False)
    spent_ns = count = 0

    def poll() -> None:
        nonlocal spent_ns, count
        begin = time.thread_time_ns()
        while (batch := source.poll()) is not None:
            for _envelope in batch:
                count += 1
        spent_ns += time.thread_time_ns() - begin

    while not source.ended:
        await asyncio.to_thread(poll)
        await source.arrived()
    await source.aclose()
    return spent_ns / count


def published(transport: Transport, messages: list[Word]) -> float:
    """Return the nanoseconds per message of a publisher's transactions, without their ends."""
    spent_ns = 0
    with Publisher(to("bench/out"), transport=transport) as publisher:
        for at in range(0, len(messages), TRANSACTION_COUNT):
            with publisher.transaction() as txn:
                begin = time.thread_time_ns()
                for message in messages[at : at + TRANSACTION_COUNT]:
                    txn.publish(message)
                spent_ns += time.thread_time_ns() - begin
    return spent_ns / len(messages)


async def output(transport: Transport, messages: list[Word], *, in_bulk: bool) -> float:
    """Return the nanoseconds per message that an output publishes in transactions."""
    written = Output(transport)
    mapping = to("bench/out")
    spent_ns = 0

    def publish(part: list[Word]) -> None:
        nonlocal spent_ns
        begin = time.thread_time_ns()
        if in_bulk:
            written.publish_batch(part, mapping)
        else:
            for message in part:
                written.publish(message, mapping)
        spent_ns += time.thread_time_ns() - begin

    for at in range(0, len(messages), TRANSACTION_COUNT):
        await asyncio.to_thread(publish, messages[at : at + TRANSACTION_COUNT])
        intents = await asyncio.to_thread(written.end)
        commit = asyncio.get_running_loop().create_task(_all(written.pending()))
        for acknowledgement in written.acknowledge(intents, commit).values():
            await acknowledgement
    await written.aclose()
    return spent_ns / len(messages)


async def _all(appends: set[AnyFuture]) -> None:
    for append in appends:
        assert isinstance(append, PendingAppend)
        await append


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", messages=200_000)
    messages = words(options.messages)
    sources = ["plain", "transactions", "singles"]
    with cluster(JOURNALS) as running:
        transport = connect(running.address)
        fill(transport, options.messages)
        ways: dict[str, Callable[[], float]] = {}
        for source in sources:
            journal = f"bench/{source}"
            ways[f"read {source}"] = partial(read, transport, journal)
            ways[f"poll {source}"] = lambda journal=journal: run(polled(transport, journal))
        ways["published"] = partial(published, transport, messages)
        ways["output"] = lambda: run(output(transport, messages, in_bulk=False))
        ways["output in bulk"] = lambda: run(output(transport, messages, in_bulk=True))
        found = in_turn(options.rounds, **ways)
        run(transport.aclose())
    figures = [
        (f"Input.poll, {source}", found[f"poll {source}"], found[f"read {source}"], 1.4)
        for source in sources
    ]
    figures += [
        ("Output.publish", found["output"], found["published"], 1.2),
        ("Output.publish_batch", found["output in bulk"], found["published"], 0.6),
    ]
    report(
        [Figure(*each[:3], "ns", each[3], more_is_better=False) for each in figures],
        options,
    )


if __name__ == "__main__":
    main()
