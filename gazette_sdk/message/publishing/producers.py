"""Producers of transactions: lent, told of the end of each transaction, and taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gazette_sdk.message.clock import Clock
from gazette_sdk.message.publishing.batch import Batch
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.publishing.producer import Producer, Sequences

__all__ = ["Producers"]


class Producers:
    """The producers of one publisher's transactions.

    Args:
        lock: the publisher's.
        clock: a shared clock; None follows the wall clock.
        add_frames: writes frames as they are, one to each outbox, under the lock; returns for
            each its batch, and where it begins there.
    """

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock | None,
        add_frames: Callable[[list[tuple[Outbox, bytes]]], list[tuple[Batch, int, bytes]]],
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._add_frames = add_frames
        self._idle: list[Producer] = []

    def lend(self) -> Sequences:
        """Lend a producer to a transaction."""
        with self._lock:
            return Sequences(self._idle.pop() if self._idle else Producer())

    def take_back(self, producer: Producer) -> None:
        """Of a transaction that ended well: nothing of it can be written any more."""
        with self._lock:
            self._idle.append(producer)

    def end(self, sequences: Sequences) -> AckIntents:
        """Refuse further messages, and build the acknowledgement of each journal.

        Raises:
            ClosedError: the transaction has ended.
        """
        with self._lock:
            stamp = sequences.stamp
            sequences.is_ended = True
            frames = {}
            for journal, part in sequences.parts.items():
                if self._clock is None:
                    stamp.tick_now()
                else:
                    stamp.clock = self._clock.tick()
                frames[journal] = sequences.acknowledging_frame(part, stamp.clock)
                sequences.clocks[journal] = stamp.clock
            return AckIntents(frames)

    def acknowledge(self, sequences: Sequences, intents: AckIntents) -> list[Batch] | None:
        """Write the acknowledgements behind all messages; None if one of those has failed.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            parts = sequences.parts
            if any(part.failed for part in parts.values()):
                return None
            added = self._add_frames([(parts[name].outbox, intents[name]) for name in parts])
            return [batch for batch, _, _ in added]

    def roll_back(self, sequences: Sequences) -> list[Batch]:
        """Refuse further messages, and write what discards those of each journal.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            sequences.is_ended = True
            parts = sequences.parts.values()
            frames = [(part.outbox, sequences.rolling_back_frame(part)) for part in parts]
            return [batch for batch, _, _ in self._add_frames(frames)]
