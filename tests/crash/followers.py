"""A committed reader which follows the write heads, and is made anew from its checkpoints."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Self, TypeVar

from crash.transactions import Message
from gazette_sdk.errors import ClosedError, UnavailableError
from gazette_sdk.message import Reader

__all__ = ["Follower", "read_all"]

STOP_TIMEOUT_S = 60.0
TAKEN_MAX = 1500
REFUSED_PAUSE_S = 0.05
"""A reader is replaced after at most so many messages."""

M = TypeVar("M")


class _Stored(NamedTuple):
    """A checkpoint, and how many messages of each journal were taken before it."""

    checkpoint: bytes | None
    counts: dict[str, int]


class Follower(Generic[M]):
    """Reads in a thread of its own within ``with``, and then what is there up to the write heads.

    Readers are replaced at random, also in the middle of a transaction. The next one goes on from
    a checkpoint that was stored as bytes: the last one, or an earlier one, as a program does that
    was killed, whose work since then never happened.

    Attributes:
        delivered: what has been delivered, by journal, in order.
        restarts: how often a reader was replaced.
        relapses: how often of these from an earlier checkpoint.
    """

    def __init__(
        self,
        message_type: type[M],
        selector: str,
        message_of: Callable[[M], Message],
        *,
        chance: random.Random,
        ring_size: int,
    ) -> None:
        self.delivered: dict[str, list[Message]] = {}
        self.restarts = 0
        self.relapses = 0
        self._type = message_type
        self._selector = selector
        self._message_of = message_of
        self._chance = chance
        self._ring_size = ring_size
        self._stored: list[_Stored] = [_Stored(None, {})]
        self._reader: Reader[M] | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._stopping = True
            reader = self._reader
        if reader is not None:
            reader.close()
        self._thread.join(STOP_TIMEOUT_S)
        if failure is not None:
            return
        assert not self._thread.is_alive(), "a closed reader does not end"
        if self._failure is not None:
            raise self._failure
        with self._make(block=False) as reader:
            for envelope in reader:
                self._take(envelope.journal, envelope.message)

    def check_checkpoints(self, count: int) -> None:
        """From some of its checkpoints, readers of now see exactly what was behind them."""
        for stored in self._chance.sample(self._stored, min(count, len(self._stored))):
            rest = read_all(
                self._type, self._selector, self._message_of, checkpoint=stored.checkpoint
            )
            for journal, delivered in self.delivered.items():
                wanted = delivered[stored.counts.get(journal, 0) :]
                assert rest.get(journal, []) == wanted, f"{journal}: a checkpoint leads astray"

    def _follow(self) -> None:
        try:
            while self._read_some():
                self.restarts += 1
        except BaseException as error:  # noqa: BLE001 - __exit__ raises it
            self._failure = error

    def _read_some(self) -> bool:
        with self._lock:
            if self._stopping:
                return False
            reader = self._reader = self._make(block=True)
        stores_at = self._chance.randrange(TAKEN_MAX)
        ends_at = self._chance.randrange(1, TAKEN_MAX)
        has_begun = False
        with reader:
            try:
                for taken, envelope in enumerate(reader):
                    has_begun = True
                    self._take(envelope.journal, envelope.message)
                    if taken == stores_at:
                        self._store(reader)
                    if taken == ends_at:
                        break
            except ClosedError:
                if not self._stopping:
                    raise
            except UnavailableError:
                if has_begun:
                    raise
                # Nobody listens at its address: the broker was killed. Only a reader that has
                # begun waits for its broker.
                time.sleep(REFUSED_PAUSE_S)
            if self._stopping or self._chance.random() < 0.5:
                self._store(reader)
            else:
                self._relapse()
        return True

    def _make(self, *, block: bool) -> Reader[M]:
        return Reader(
            self._type,
            self._selector,
            block=block,
            checkpoint=self._stored[-1].checkpoint,
            ring_size=self._ring_size,
        )

    def _take(self, journal: str, message: M) -> None:
        self.delivered.setdefault(journal, []).append(self._message_of(message))

    def _store(self, reader: Reader[M]) -> None:
        counts = {name: len(taken) for name, taken in self.delivered.items()}
        self._stored.append(_Stored(reader.checkpoint().to_bytes(), counts))

    def _relapse(self) -> None:
        """Forget what was taken since the checkpoint that was stored last."""
        self.relapses += 1
        for journal, taken in self.delivered.items():
            del taken[self._stored[-1].counts.get(journal, 0) :]


def read_all(
    message_type: type[M],
    selector: str,
    message_of: Callable[[M], Message],
    *,
    ring_size: int = 8192,
    checkpoint: bytes | None = None,
) -> dict[str, list[Message]]:
    """What a committed reader sees, from the begin or a checkpoint, to the write heads."""
    delivered: dict[str, list[Message]] = {}
    with Reader(message_type, selector, ring_size=ring_size, checkpoint=checkpoint) as reader:
        for envelope in reader:
            delivered.setdefault(envelope.journal, []).append(message_of(envelope.message))
    return delivered
