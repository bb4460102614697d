"""Acknowledgement intents: what is left to be written of a transaction that is decided.

A transaction over several journals is acknowledged in each of them by one message. These are
built when everything else is durable, can be stored together with whatever the transaction
stands for, and can be written again after a crash: readers take an acknowledgement which they
have seen before for the duplicate that it is (message section 11).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from google.protobuf.message import DecodeError

from gazette_sdk.errors import DecodeError as DamagedError
from gazette_sdk.errors import ValidationError
from gazette_sdk.message.sequencing.checkpoint import sealed, unsealed
from gazette_sdk.protocol import consumer_pb2

__all__ = ["AckIntents"]


class AckIntents(Mapping[str, bytes]):
    """The framed acknowledgement of each journal of a transaction, in the order of first use.

    Args:
        frames: by journal.
    """

    __slots__ = ("_frames",)

    def __init__(self, frames: Mapping[str, bytes] | None = None) -> None:
        self._frames = dict(frames or {})

    def __getitem__(self, journal: str) -> bytes:
        return self._frames[journal]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)

    def __hash__(self) -> int:
        return hash(frozenset(self._frames.items()))

    def to_bytes(self) -> bytes:
        """Return a stored ``Checkpoint`` that holds nothing else, with a checksum."""
        message = consumer_pb2.Checkpoint(ack_intents=self._frames)
        return sealed(message.SerializeToString(deterministic=True))

    @classmethod
    def from_bytes(cls, stored: bytes) -> AckIntents:
        """Intents which :meth:`to_bytes` wrote, or those of a stored checkpoint.

        Raises:
            ValidationError: ``stored`` is no checkpoint, or is damaged.
        """
        try:
            checkpoint = consumer_pb2.Checkpoint.FromString(unsealed(bytes(stored)))
        except (DamagedError, DecodeError, TypeError, ValueError) as error:
            raise ValidationError(
                f"these {len(stored)} bytes are no stored acknowledgement intents: {error}",
                kind="ack_intents",
            ) from error
        return cls(checkpoint.ack_intents)

    def __repr__(self) -> str:
        return f"<AckIntents of {', '.join(self._frames) or 'no journal'}>"
