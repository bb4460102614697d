"""A shard without a store: it copies committed messages of one journal to others, exactly once.

Its log is a journal of checkpoints, one a line, fenced by an author. It does what a runner does
with an input and an output, in the same order, and can be stopped between any two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from operator import length_hint

from gazette_sdk import JsonMessage
from gazette_sdk.errors import OffsetNotYetAvailableError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.shard.transaction.input import Input
from gazette_sdk.shard.transaction.transaction import Output
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.journal_reader import RetryReader

__all__ = ["ChainedShard", "Entry", "content_of"]

_authors = itertools.count()


@dataclass
class Entry(JsonMessage):
    n: int


async def content_of(transport, journal):
    """Return all content of a journal."""
    reader = RetryReader(transport, pb.ReadRequest(journal=journal, offset=0))
    content = b""
    with contextlib.suppress(OffsetNotYetAvailableError):
        while True:
            content += await reader.read()
    await reader.aclose()
    return content


class ChainedShard:
    """One primary run. All methods are called on the event loop.

    Attributes:
        consumed: numbers of the messages that were consumed.
    """

    def __init__(self, transport, source, log, mapping, **options):
        self.author = f"author-{next(_authors)}"
        self._transport = transport
        self._source = source
        self._mapping = mapping
        self._service = AppendService(transport)
        self._log_name = log
        self._log = self._service.appender(log)
        self._options = options
        self.output = Output(transport)
        self.input = None
        self._rest = iter(())
        self.consumed = []

    async def start(self):
        """Fence the run before, restore its checkpoint, and send its acknowledgements again."""
        author = pb.LabelSet(labels=[pb.Label(name="author", value=self.author)])
        await self._log.append(f"{self.author}\n".encode(), union=author)
        checkpoint = await self.restore()
        self._stored = self.output.send_stored(checkpoint.ack_intents)

    async def restore(self):
        """Open an input behind the last checkpoint of the log."""
        if self.input is not None:
            await self.input.aclose()
        lines = (await content_of(self._transport, self._log_name)).decode().splitlines()
        stored = [line for line in lines if not line.startswith("author")]
        checkpoint = Checkpoint.from_bytes(bytes.fromhex(stored[-1])) if stored else Checkpoint()
        self._rest = iter(())
        self.input = Input(
            self._transport, {self._source: 0}, checkpoint, lambda _spec: Entry, **self._options
        )
        return checkpoint

    async def consume(self, count, upto):
        """Copy so many messages, or until one has the number ``upto``, or none is left.

        Returns:
            True if no more follow.
        """

        def work():
            nonlocal count
            while count:
                for envelope in self._rest:
                    self.output.publish(envelope.message, self._mapping)
                    self.consumed.append(envelope.message.n)
                    count -= 1
                    if envelope.message.n == upto:
                        return True
                    if not count:
                        return False
                batch = self.input.poll()
                if batch is None:
                    return True if self.input.ended else None
                self._rest = iter(batch)
            return False

        while (ended := await asyncio.to_thread(work)) is None:
            await self.input.arrived()
        return ended

    async def start_commit(self):
        """Begin to commit what was consumed.

        Returns:
            The commit, and the acknowledgements.
        """
        await asyncio.gather(*self._stored.values())
        checkpoint, intents = await asyncio.to_thread(self._close)
        checkpoint.ack_intents = intents
        selector = pb.LabelSelector()
        selector.include.labels.add(name="author", value=self.author)
        line = checkpoint.to_bytes().hex().encode() + b"\n"
        commit = self._log.append(line, after=self.output.pending(), check=selector)
        return commit, self.output.acknowledge(intents, commit)

    def _close(self):
        return self.input.checkpoint(length_hint(self._rest)), self.output.end()

    async def abort(self):
        """Discard the open transaction, and read again from the last commit."""
        await self.output.roll_back()
        await self.restore()

    async def crash(self):
        """Stop, whatever is on its way."""
        if self.input is not None:
            await self.input.aclose()
        await self.output.aclose()
        await self._service.aclose()
