"""Chunkers of stream_sum, with a record of every sum that they verified."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

from crash.cluster_load import StalledError
from examples.stream_sum.chunker import Chunker
from examples.stream_sum.messages import SUMS, Sum, key_of
from gazette_sdk import Reader, connect
from gazette_sdk.errors import OffsetNotYetAvailableError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.mapping import fnv1a32
from gazette_sdk.transport import loop as sdk_loop

__all__ = ["LATEST_S", "SumLoad", "VerifiedSum"]

LATEST_S = 30.0
"""Longest time from the end of a stream to its sum."""

CHUNKS = 3
WORKERS = 2
PAUSE_S = 0.4
"""Pause of a worker between two streams: the load leaves processors to what is tested."""

IDLE_TIMEOUT_S = 30.0

SETTLE_S = 60.0
"""Limit of the time until brokers that read have copied what others hold."""


@dataclass(frozen=True)
class VerifiedSum:
    """Sum that a chunker verified.

    Attributes:
        shard: number of the shard that made it.
        begin: time at which its stream ended, by the monotonic clock.
        took_s: time until the sum arrived.
    """

    found: Sum
    shard: int
    begin: float
    took_s: float


class SumLoad:
    """Chunkers, each on a thread of its own, within ``with``.

    Args:
        addresses: URLs of brokers, one for each chunker.
        shards: number of shards.
        timeout_s: a chunker fails if a sum takes longer.

    Attributes:
        verified: all sums that were verified.
    """

    def __init__(self, addresses: Sequence[str], shards: int, timeout_s: float = LATEST_S) -> None:
        self.verified: list[VerifiedSum] = []
        self._shards = shards
        self._timeout_s = timeout_s
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(address,), name=f"chunker {number}")
            for number, address in enumerate(addresses)
        ]
        self._seen: dict[bytes, tuple[int, int]] = {}
        self._checkpoint: Checkpoint | None = None

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(IDLE_TIMEOUT_S)
            assert not thread.is_alive(), f"{thread.name} does not end"

    @property
    def done(self) -> str:
        """Text about what was done so far."""
        latest_s = max((each.took_s for each in self.verified), default=0.0)
        return f"{len(self.verified)} sums, the latest after {latest_s:.2f} s"

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until each shard has summed a stream that ended from now on.

        Raises:
            StalledError: one has not in time.
        """
        now = time.monotonic()
        at = len(self.verified)
        missing = set(range(self._shards))
        while missing:
            self.raise_failure()
            if time.monotonic() > now + timeout_s:
                raise StalledError(f"no sums for {timeout_s:g} s of the shards {sorted(missing)}")
            time.sleep(0.01)
            end = len(self.verified)
            missing -= {each.shard for each in self.verified[at:end] if each.begin >= now}
            at = end

    def latest(self, since: float) -> VerifiedSum:
        """Return the sum that took longest of those that arrived since a time."""
        found = [each for each in self.verified if each.begin + each.took_s >= since]
        return max(found, key=lambda each: each.took_s)

    def check(self, address: str) -> None:
        """Read the sums that were published since the last check: each once, and as verified."""
        verified = list(self.verified)
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                self._read(address)
                break
            except OffsetNotYetAvailableError:  # a replica that joined has not copied it yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        for each in (each.found for each in verified):
            seen = self._seen.get(key_of(each))
            assert seen == (each.seq_no, each.value), f"published is {seen}, verified {each}"

    def _read(self, address: str) -> None:
        """Read the sums up to the write head, behind those that were read before."""
        transport = connect(address)
        reader = Reader(
            Sum, name=SUMS, block=False, transport=transport, checkpoint=self._checkpoint
        )
        try:
            for envelope in reader:
                found = envelope.message
                assert key_of(found) not in self._seen, f"published twice: {found}"
                self._seen[key_of(found)] = found.seq_no, found.value
        finally:
            self._checkpoint = reader.checkpoint()
            sdk_loop.run(transport.aclose(), IDLE_TIMEOUT_S)

    def raise_failure(self) -> None:
        """Raise the error with which a chunker has ended."""
        if self._failure is not None:
            raise self._failure

    def _run(self, address: str) -> None:
        try:
            asyncio.run(self._chunk(address))
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self._failure = self._failure or error

    async def _chunk(self, address: str) -> None:
        async with aclosing(connect(address)) as transport:
            chunker = Chunker(
                transport,
                chunks=CHUNKS,
                timeout_s=self._timeout_s,
                pause_s=PAUSE_S,
                verified=self._note,
            )
            chunking = asyncio.create_task(chunker.run(workers=WORKERS))
            stopping = asyncio.create_task(asyncio.to_thread(self._stopping.wait))
            await asyncio.wait([chunking, stopping], return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()  # one that has failed ends all
            chunking.cancel()
            await asyncio.wait([chunking, stopping])
            if not chunking.cancelled():
                chunking.result()

    def _note(self, found: Sum, took_s: float) -> None:
        shard = fnv1a32(key_of(found)) % self._shards
        self.verified.append(VerifiedSum(found, shard, time.monotonic() - took_s, took_s))
