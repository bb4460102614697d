"""Program that publishes chunks of many streams, and verifies the sum of each: once, right, soon.

    python -m examples.stream_sum.chunker --chunker.streams 100

It ends with status 1 if a sum is wrong, is delivered twice, or is not there after the time-out.
"""

import argparse
import asyncio
import logging
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress

from examples.stream_sum.messages import (
    ID_BYTES,
    SUMS,
    TO_CHUNKS,
    Chunk,
    Sum,
    hex_of,
    key_of,
)
from gazette_sdk import GazetteError, Publisher, Reader, Transport, connect
from gazette_sdk.errors import UnavailableError
from gazette_sdk.message import Checkpoint
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append import append

TIMEOUT_S = 40.0
"""Longest time from the end of a stream to its sum: a lease of 20 s, back-off, and a margin."""

WARN_AFTER_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0)

RETRY_PAUSE_S = 0.5
"""Pause before sums are read again."""

DATA_BYTES = 32
"""Length of the data of a chunk."""

OWN_ID_BYTES = 8
"""Length of the part of an id that is the same for all streams of one chunker."""

RING_SIZE = 16
"""Messages of open transactions that are kept in memory: few, so that longer ones are re-read."""

_log = logging.getLogger(__name__)

Verified = Callable[[Sum, float], object]
"""Function of a verified sum, and of the seconds between the end of its stream and its arrival."""


class WrongSumError(GazetteError):
    """A sum is wrong, was delivered again, or is late."""


def streams(
    count: int, chunks: int, chance: random.Random, own_id: bytes = b""
) -> Iterator[tuple[Chunk, Sum | None]]:
    """Yield the chunks of streams, in random turns; with the last of a stream its sum.

    Args:
        count: number of streams; -1 for no end.
        chunks: number of chunks of a stream, without the empty one that ends it.
        chance: random choices.
        own_id: begin of the streams' ids.
    """
    left = count
    opened: list[Sum] = []
    while left or opened:
        at = chance.randrange(len(opened) + (1 if left else 0))
        if at == len(opened):
            rest = chance.randbytes(ID_BYTES - len(own_id))
            opened.append(Sum(tuple(own_id + rest)))
            left -= 1
        found = opened[at]
        ends = found.seq_no == chunks
        chunk = Chunk(found.id, found.seq_no + 1, None if ends else chance.randbytes(DATA_BYTES))
        found.add(chunk)
        yield chunk, opened.pop(at) if ends else None


class Chunker:
    """Publisher of chunks, and verifier of their sums. Belongs to one event loop.

    Args:
        transport: transport to the journals.
        chunks: number of chunks of a stream.
        timeout_s: longest time from the end of a stream to its sum.
        verified: called with each sum that is right.
        pause_s: pause of a worker between two streams.

    Attributes:
        own_id: begin of the ids of its streams.
        count: number of verified sums.
        latest_s: longest time that a verified sum took.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        chunks: int = 100,
        timeout_s: float = TIMEOUT_S,
        verified: Verified | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self.own_id = secrets.token_bytes(OWN_ID_BYTES)
        self.count = 0
        self.latest_s = 0.0
        self._transport = transport
        self._chunks = chunks
        self._timeout_s = timeout_s
        self._verified = verified
        self._pause_s = pause_s
        self._expected: dict[bytes, tuple[Sum, asyncio.Future[None]]] = {}

    async def run(self, *, workers: int = 4, count: int = -1) -> None:
        """Publish and verify until all streams are verified.

        Args:
            workers: number of concurrent workers.
            count: number of streams of each; -1 for no end.

        Raises:
            WrongSumError: a sum is wrong, was delivered again, or is late.
            GazetteError: a journal cannot be read or written.
        """
        # Sums behind this offset are those of chunks that are published from now on.
        head = (await append(self._transport, pb.AppendRequest(journal=SUMS), [])).commit.end
        publisher = Publisher(mapping=TO_CHUNKS, transport=self._transport, delivery_timeout_s=None)
        async with publisher:
            verifying = asyncio.create_task(self._verify(head))
            working = [asyncio.create_task(self._publish(publisher, count)) for _ in range(workers)]
            try:
                await _first_failure([verifying], working)
            finally:
                for task in (verifying, *working):
                    task.cancel()
                await asyncio.gather(verifying, *working, return_exceptions=True)

    async def _publish(self, publisher: Publisher, count: int) -> None:
        """Publish the chunks of streams, and wait for the sum of each stream when it ends."""
        chance = random.Random(secrets.token_bytes(ID_BYTES))
        for chunk, expected in streams(count, self._chunks, chance, self.own_id):
            if expected is None:
                await publisher.apublish(chunk)
                continue
            begin = time.monotonic()
            arrival = asyncio.get_running_loop().create_future()
            self._expected[key_of(expected)] = expected, arrival
            await publisher.apublish(chunk)
            await self._wait(arrival, expected, begin)
            took_s = time.monotonic() - begin
            self.count += 1
            self.latest_s = max(self.latest_s, took_s)
            if self._verified is not None:
                self._verified(expected, took_s)
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    async def _wait(self, arrival: asyncio.Future[None], expected: Sum, begin: float) -> None:
        """Wait for a sum, and log that it is awaited."""
        for after_s in (*(each for each in WARN_AFTER_S if each < self._timeout_s), None):
            until = begin + (self._timeout_s if after_s is None else after_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    await asyncio.shield(arrival)
                    return
            if after_s is not None:
                _log.warning(
                    "the sum of stream %s is not there after %g s", hex_of(expected), after_s
                )
        raise WrongSumError(
            f"the sum of stream {hex_of(expected)} is not there after {self._timeout_s:g} s; list "
            "the statuses of the shards: gazctl shards list --primary"
        )

    async def _verify(self, head: int) -> None:
        """Verify committed sums from an offset on. Outages of brokers are waited out."""
        checkpoint = Checkpoint({SUMS: head})
        while True:
            reader = Reader(
                Sum,
                name=SUMS,
                transport=self._transport,
                block=True,
                checkpoint=checkpoint,
                ring_size=RING_SIZE,
            )
            try:
                async for envelope in reader:
                    self._take(envelope.message)
            except UnavailableError as error:
                _log.warning("sums are read again behind the last one: %s", error)
                checkpoint = reader.checkpoint()
                await asyncio.sleep(RETRY_PAUSE_S)

    def _take(self, found: Sum) -> None:
        """Compare a sum with what is expected; pass over those of other chunkers."""
        key = key_of(found)
        if not key.startswith(self.own_id):
            return
        if key not in self._expected:
            raise WrongSumError(f"the sum of stream {hex_of(found)} was delivered again: {found}")
        expected, arrival = self._expected.pop(key)
        if (found.seq_no, found.value) != (expected.seq_no, expected.value):
            raise WrongSumError(f"the sum is {found}, and has to be {expected}")
        if not arrival.done():
            arrival.set_result(None)


async def _first_failure(
    endless: Sequence[asyncio.Task[None]], ending: Sequence[asyncio.Task[None]]
) -> None:
    """Wait until all of ``ending`` have ended, or any task has failed; raise its error."""
    left: set[asyncio.Task[None]] = set(ending)
    while left:
        done, _ = await asyncio.wait({*endless, *left}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        left -= done


async def _run(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    async with aclosing(connect(options.address, zone=options.zone)) as transport:
        chunker = Chunker(transport, chunks=options.chunks, timeout_s=options.timeout)
        try:
            await chunker.run(workers=options.workers, count=options.streams)
        finally:
            print(
                f"{chunker.count} sums were verified in {time.monotonic() - begin:.1f} s; the "
                f"latest took {chunker.latest_s:.2f} s"
            )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    address = os.environ.get("BROKER_ADDRESS") or os.environ.get("GAZETTE_ADDRESS")
    add("--broker.address", dest="address", default=address, help="URL of a broker")
    add(
        "--chunker.streams",
        dest="streams",
        type=int,
        default=-1,
        help="of each worker; -1: endless",
    )
    add("--chunker.chunks", dest="chunks", type=int, default=100, help="of each stream")
    add("--chunker.workers", dest="workers", type=int, default=4, help="concurrent workers")
    add("--chunker.zone", dest="zone", default="", help="availability zone of this process")
    add("--chunker.timeout", dest="timeout", type=float, default=TIMEOUT_S, help="for a sum, in s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return the exit status."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_run(options))
    except KeyboardInterrupt:
        return 0
    except GazetteError as error:
        print(f"chunker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
