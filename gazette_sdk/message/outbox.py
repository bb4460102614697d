"""Messages of one journal on their way: stamped, encoded, batched, appended.

The thread that publishes does all the work for its message, under the publisher's lock: so a
later clock never stands before an earlier one in a journal. The event loop is woken once for
a batch, not for a message: while one append is in flight, what is published meanwhile gathers
in the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Framing
from gazette_sdk.message.kinds import Kind, kind_of
from gazette_sdk.message.receipt import Batch, Receipt
from gazette_sdk.message.uuid import Stamp

__all__ = ["Outbox"]

BATCH_BYTES_MAX = 4 << 20
"""A batch which is larger takes no further messages: a failed attempt sends all of it again, and
its first message waits for the last."""


STREAMING_COUNT_MIN = 16
"""A batch of so many messages says that its journal is being streamed to."""

LINGER_BYTES_MAX = 256 << 10
"""A batch of this size costs little beside its content, and waits for nothing."""


class Outbox:
    """What is published to one journal and not appended yet.

    All methods are called under the publisher's lock.

    Args:
        journal: name of the journal.
        framing: its framing.

    Attributes:
        journal: name of the journal.
        sender: the task that appends its batches, while there are some.
        is_sending: whether the sender runs, or was asked for.
    """

    def __init__(self, journal: str, framing: Framing) -> None:
        self.journal = journal
        self.sender: asyncio.Task[None] | None = None
        self.is_sending = False
        self._framing = framing
        self._encoders: dict[type, Kind[Any]] = {}
        self._batches: deque[Batch] = deque()
        self._sent: Batch | None = None

    def add(self, message: Any, stamp: Stamp) -> Receipt:
        """Encode a message at the end of what waits.

        Raises:
            ValidationError: it cannot be encoded; nothing was added.
            FramingError: likewise.
        """
        kind = self._encoders.get(type(message)) or self._encoder(type(message))
        payload = kind.encode(message, stamp)
        batch = self._batches[-1] if self._batches else None
        if batch is None or len(batch.content) >= BATCH_BYTES_MAX:
            fresh = Batch(self.journal)
            self._framing.encode(payload, fresh.content)
            self._batches.append(fresh)
            return Receipt(fresh, 0, len(fresh.content))
        content = batch.content
        begin = len(content)
        self._framing.encode(payload, content)
        batch.count += 1
        return Receipt(batch, begin, len(content))

    @property
    def is_streaming(self) -> bool:
        """Whether messages come so quickly that the next batch is worth a moment's wait.

        An append costs as much as encoding some hundred messages.
        """
        if self._sent is None or self._sent.count < STREAMING_COUNT_MIN:
            return False
        return not self._batches or len(self._batches[0].content) < LINGER_BYTES_MAX

    def take(self) -> Batch | None:
        """The oldest batch, which then takes no further messages; None if nothing waits."""
        self._sent = self._batches.popleft() if self._batches else None
        return self._sent

    def pending(self) -> list[Batch]:
        """Batches which are not acknowledged, oldest first."""
        return [*([self._sent] if self._sent is not None else ()), *self._batches]

    def drop(self) -> list[Batch]:
        """Everything that waits, which then will not be sent."""
        dropped = list(self._batches)
        self._batches.clear()
        return dropped

    def _encoder(self, message_type: type[Any]) -> Kind[Any]:
        try:
            kind = kind_of(message_type, self._framing.form)
        except ValidationError as error:
            raise ValidationError(
                error.reason, kind=error.kind, path=error.path, journal=self.journal
            ) from error
        self._encoders[message_type] = kind
        return kind
