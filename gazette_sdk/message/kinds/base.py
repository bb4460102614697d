"""Interface of the kinds of messages: between objects of one class and payloads."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.kinds.empty import empty_instance
from gazette_sdk.message.uuid import RawUuid, Stamp

__all__ = ["Decoded", "JsonMessage", "Kind", "Spliced"]

M = TypeVar("M")


class JsonMessage:
    """Base of dataclasses which are messages.

    ::

        @dataclass
        class Order(JsonMessage):
            customer: str
            cents: int

    A class may offer ``validate(self) -> None``, which raises to refuse a message before it is
    published, and may override :meth:`new_acknowledgement`.

    Args (of the class statement):
        uuid_field: key of the UUID in the written object, by default ``UUID``. Readers accept
            ``UUID`` and ``uuid`` in any case.
    """

    __slots__ = ()

    uuid_field: ClassVar[str] = "UUID"

    def __init_subclass__(cls, *, uuid_field: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if uuid_field is not None:
            cls.uuid_field = uuid_field

    def new_acknowledgement(self, journal: str) -> Self:
        """Return an empty message of this class, which ends a transaction in ``journal``.

        Its fields are zeros, empty texts and the like. Override this if readers need others.
        """
        del journal
        return empty_instance(type(self))


@dataclasses.dataclass(slots=True)
class Decoded(Generic[M]):
    """Messages of a run of frames.

    Attributes:
        messages: the messages, in order, up to the first that cannot be decoded.
        uuids: each message's UUID, as it is written there.
        error: error of the frame behind ``messages``; None if all are decoded.
        texts: the UUIDs as rows of text, where they are at a fixed place; they may be invalid.
    """

    messages: list[M]
    uuids: Sequence[RawUuid]
    error: Exception | None = None
    texts: npt.NDArray[np.uint8] | None = None


class Spliced(NamedTuple):
    """JSON objects encoded in bulk, into each of which a UUID is spliced as the first key.

    Attributes:
        prefix: bytes before a UUID's text, from the opening brace on.
        lines: the objects, each on a line of its own.
    """

    prefix: bytes
    lines: bytes


class Kind(abc.ABC, Generic[M]):
    """Adapter between the objects of one class and payloads of one form.

    Attributes:
        message_type: the class.
        form: the form of payloads, as of :attr:`gazette_sdk.framing.Framing.form`.
        validate: raises to refuse a message before it is published; None where the class has no
            such function.
        no_uuid: reason why objects of the class hold no UUID, with the remedy; empty if they do.
    """

    form: ClassVar[str]

    def __init__(self, message_type: type[M]) -> None:
        self.message_type = message_type
        self.validate: Callable[[M], object] | None = None
        self.no_uuid = ""

    @abc.abstractmethod
    def encode(self, message: M, stamp: Stamp) -> bytes:
        """Return the payload of ``message``, with the stamp's UUID.

        Raises:
            ValidationError: the message has a value that cannot be written in this form.
        """

    def encode_many(self, messages: Sequence[M]) -> Spliced | None:
        """Return the payloads of messages without their UUIDs, in bulk.

        Args:
            messages: at least one.

        Returns:
            None where messages are encoded one by one, each with its UUID.

        Raises:
            ValidationError: a message has a value that cannot be written in this form.
        """
        del messages
        return None

    @abc.abstractmethod
    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[M]:
        """Return the messages of frames, in bulk."""

    @abc.abstractmethod
    def new_acknowledgement(self, message: M, journal: str) -> M:
        """Return an empty message, to end ``message``'s transaction by an acknowledging UUID."""
