"""Journals of a test of chained shards."""

from __future__ import annotations

import contextlib
import itertools

from gazette_sdk import Publisher, Reader
from gazette_sdk.transport.loop import run
from support.chained_shard import ChainedShard, Entry

__all__ = ["WAIT_S", "Topic", "of_outputs"]

WAIT_S = 120.0

_names = itertools.count()


class Topic:
    """Journals of one test: a source, a log and two outputs."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.transport = cluster.transport
        name = f"chain-{next(_names)}"
        self.source, self.log = f"{name}/source", f"{name}/log"
        self.outputs = [f"{name}/even", f"{name}/odd"]
        journals = "".join(
            f"  - name: {each}\n" for each in sorted([self.source, self.log, *self.outputs])
        )
        cluster.apply(
            f"name: {name}/\nreplication: 1\n"
            "labels: [{name: content-type, value: application/x-ndjson}]\n"
            "fragment: {length: 1048576, stores: [file:///], compression_codec: NONE,"
            f" refresh_interval: 5m}}\nchildren:\n{journals}"
        )

    def mapping(self, entry):
        return self.outputs[entry.n % 2]

    def shard(self, transport=None, **options):
        return ChainedShard(
            transport or self.transport, self.source, self.log, self.mapping, **options
        )

    def fill(self, sizes):
        """Write transactions of these sizes, every third of which is rolled back."""
        numbers = itertools.count()
        expected = []
        with Publisher(lambda _entry: self.source, transport=self.transport) as publisher:
            for index, size in enumerate(sizes):
                part = [next(numbers) for _ in range(size)]
                if index % 3 == 1:
                    with contextlib.suppress(ZeroDivisionError), publisher.transaction() as txn:
                        for n in part:
                            txn.publish(Entry(n))
                        raise ZeroDivisionError
                    continue
                if index % 3 == 2:
                    for n in part:
                        publisher.publish(Entry(n))
                else:
                    with publisher.transaction() as txn:
                        for n in part:
                            txn.publish(Entry(n))
                publisher.flush()
                expected += part
            last = next(numbers)
            publisher.publish(Entry(last)).result(WAIT_S)
        return [*expected, last]

    def copied(self):
        """Return the numbers that committed readers see, in the outputs' order."""
        return [
            [each.message.n for each in Reader(Entry, name=name, transport=self.transport)]
            for name in self.outputs
        ]

    def play(self, coroutine):
        return run(coroutine, WAIT_S, self.transport.loop)


def of_outputs(numbers):
    """Return the numbers of each output, in its order."""
    return [[n for n in numbers if n % 2 == parity] for parity in (0, 1)]
