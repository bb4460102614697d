"""Batches of messages, encoded and stamped in bulk.

Beside its own encoding a message costs a key, a slice of the encoded lines and a UUID's text out
of a matrix: all in loops of C. All messages are checked before the first one is stamped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import FramingError, ValidationError
from gazette_sdk.framing import JsonLines
from gazette_sdk.message.clock import TICK
from gazette_sdk.message.kinds.base import Spliced
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.uuid import PRODUCER_BYTES, Stamp

__all__ = ["SLICE_COUNT", "Routed", "Slice"]

SLICE_COUNT = 4096
"""Messages which are stamped at once: others of the publisher wait for them. More of them make
each no cheaper."""


@dataclass(slots=True)
class Routed:
    """Outboxes of messages.

    Attributes:
        outboxes: of their journals.
        indexes: index of each message's outbox; None if there is one only.
    """

    outboxes: list[Outbox]
    indexes: npt.NDArray[np.integer[Any]] | None = None

    def of(self, index: int) -> Outbox:
        """Return the outbox of one message."""
        return self.outboxes[0 if self.indexes is None else int(self.indexes[index])]

    def firsts(self) -> list[int]:
        """Return the index of each journal's first message, ascending."""
        if self.indexes is None:
            return [0]
        firsts: list[int] = np.sort(np.unique(self.indexes, return_index=True)[1]).tolist()
        return firsts


class Slice:
    """Successive messages of a batch, which were checked.

    Args:
        begin: index of the first one in the batch.
        messages: the messages.
        routed: their outboxes.
        load: returns the messages again.

    Attributes:
        count: number of messages.
        routed: their outboxes.
        length_bytes: about the length of their frames.

    Raises:
        ValidationError: one cannot be encoded; says which.
        FramingError: likewise.
    """

    __slots__ = ("_begin", "_load", "_spliced", "count", "length_bytes", "routed")

    def __init__(
        self,
        begin: int,
        messages: Sequence[Any],
        routed: Routed,
        load: Callable[[int], Sequence[Any]],
    ) -> None:
        self.count = len(messages)
        self.routed = routed
        self._begin = begin
        self._load = load
        self._spliced = self._encode(messages)
        if self._spliced is None:
            self.length_bytes = self._check(messages)
        else:
            self.length_bytes = len(self._spliced.lines)

    def forget(self) -> None:
        """Give the memory back; the messages are encoded again when they are sent."""
        self._spliced = None

    def frames(self, stamp: Stamp, first: int) -> list[tuple[Outbox, int, bytes, int]]:
        """Return the messages' frames, stamped with successive ticks. Only once.

        Args:
            stamp: of their producer.
            first: clock of the first message.

        Returns:
            For each journal its outbox, the index of its first message, the frames, and their
            number.
        """
        spliced, self._spliced = self._spliced, None
        if spliced is None:
            messages = self._load(self._begin)
            spliced = self._encode(messages)
            if spliced is None:
                return self._frames_one_by_one(messages, stamp, first)
        pieces, joint = _cut(spliced.lines)
        rows = stamp.texts(first, self.count, b"\n" + spliced.prefix, joint)
        indexes = self.routed.indexes
        if indexes is None:
            return [(self.routed.outboxes[0], 0, _lines(rows, pieces), self.count)]
        found = []
        for number, outbox in enumerate(self.routed.outboxes):
            chosen = np.flatnonzero(indexes == number)
            own: Sequence[bytes] = [pieces[index] for index in chosen[:1]]
            if len(chosen) > 1:
                own = itemgetter(*chosen.tolist())(pieces)
            if own:
                found.append((outbox, int(chosen[0]), _lines(rows[chosen], own), len(own)))
        return found

    # ---------------------------------------------------------------- pieces

    def _encode(self, messages: Sequence[Any]) -> Spliced | None:
        outboxes = self.routed.outboxes
        types = set(map(type, messages))
        spliced = None
        try:
            if len(types) == 1 and all(type(box.framing) is JsonLines for box in outboxes):
                message_type = types.pop()
                kinds = [box.kind(message_type) for box in outboxes]
                spliced = kinds[0].encode_many(messages)
        except ValidationError:
            self._check(messages)
            raise
        return spliced

    def _check(self, messages: Sequence[Any]) -> int:
        """Encode each message for nothing, to find a bad one before any is published.

        Returns:
            The length of all frames.
        """
        stamp = Stamp(bytes(PRODUCER_BYTES))
        length_bytes = 0
        for index, message in enumerate(messages):
            outbox = self.routed.of(index)
            try:
                length_bytes += len(outbox.frame(message, stamp))
            except (ValidationError, FramingError) as error:
                text = f"message {self._begin + index} of the batch: {error}"
                if isinstance(error, FramingError):
                    raise FramingError(text, journal=outbox.journal) from error
                raise ValidationError(text, kind=error.kind, journal=outbox.journal) from error
        return length_bytes

    def _frames_one_by_one(
        self, messages: Sequence[Any], stamp: Stamp, first: int
    ) -> list[tuple[Outbox, int, bytes, int]]:
        found: dict[str, tuple[Outbox, int, bytearray, list[int]]] = {}
        try:
            for index, message in enumerate(messages):
                outbox = self.routed.of(index)
                stamp.clock = first + index * TICK
                if outbox.journal not in found:
                    found[outbox.journal] = (outbox, index, bytearray(), [])
                _, _, content, indexes = found[outbox.journal]
                content += outbox.frame(message, stamp)
                indexes.append(index)
        finally:
            stamp.clock = first + (self.count - 1) * TICK
        return [
            (outbox, index, bytes(content), len(indexes))
            for outbox, index, content, indexes in found.values()
        ]


def _cut(lines: bytes) -> tuple[list[bytes], bytes]:
    """Return JSON objects without their opening braces, and the text between UUID and object."""
    pieces = lines.split(b"\n{")
    pieces[0] = pieces[0][1:]
    pieces[-1] = pieces[-1][:-1]
    if b"}" in pieces:
        return [piece if piece == b"}" else b"," + piece for piece in pieces], b'"'
    return pieces, b'",'


def _lines(rows: npt.NDArray[np.uint8], pieces: Sequence[bytes]) -> bytes:
    """Return JSON lines: each row, which begins with the line break before it, and its piece."""
    # No row ends in a zero, which numpy would strip from text.
    heads = rows.reshape(-1).view(f"S{rows.shape[1]}").tolist()
    heads[0] = heads[0][1:]
    parts: list[Any] = [b"\n"] * (2 * len(pieces) + 1)
    parts[:-1:2] = heads
    parts[1::2] = pieces
    return b"".join(parts)
