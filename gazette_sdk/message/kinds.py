"""Kinds of messages: how the objects of one class become payloads, and where their UUID lives.

======================== ============== =======================================================
class                    form           where its UUID lives
======================== ============== =======================================================
``dict``                 ``"json"``     first key of the written object, ``UUID``; taken out of
                                        the dict when it is read
dataclass on JsonMessage ``"json"``     the same, beside its fields; or its own field ``UUID``
msgspec Struct           ``"json"``     the same
pydantic model           ``"json"``     the same
generated protobuf class ``"protobuf"`` its field ``bytes uuid``
``list``, CsvRecord      ``"csv"``      its first item, as text
======================== ============== =======================================================

An adapter (:class:`Kind`) is found by class and form, see :func:`kind_of`.
"""

from __future__ import annotations

import abc
import dataclasses
import typing
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.uuid import Stamp

__all__ = ["Decoded", "JsonMessage", "Kind", "RawUuid", "Spliced", "kind_of", "validator_of"]

M = TypeVar("M")

RawUuid: TypeAlias = bytes | str | uuid.UUID | None
"""A UUID as it stands in a message: text (as str or ASCII), 16 bytes, or nothing at all."""


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
        uuid_field: key of the UUID in the written object, ``UUID`` unless told otherwise.
            ``UUID`` and ``uuid`` are understood by readers in any case.
    """

    __slots__ = ()

    uuid_field: ClassVar[str] = "UUID"

    def __init_subclass__(cls, *, uuid_field: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if uuid_field is not None:
            cls.uuid_field = uuid_field

    def new_acknowledgement(self, journal: str) -> Self:
        """An empty message of this class, which ends a transaction in ``journal``.

        Its fields are zeros, empty texts and the like. A class whose readers need some fields to
        be filled overrides this.
        """
        del journal
        from gazette_sdk.message.empty import empty_instance  # noqa: PLC0415 - it knows all kinds

        return empty_instance(type(self))


@dataclasses.dataclass(slots=True)
class Decoded(Generic[M]):
    """Messages of a run of frames.

    Attributes:
        messages: the messages, in order, up to the first which cannot be decoded.
        uuids: each message's UUID, as it stands there.
        error: why the frame behind ``messages`` cannot be decoded; None if all are.
        texts: the UUIDs as rows of text, where they were found so; they need not be UUIDs.
    """

    messages: list[M]
    uuids: Sequence[RawUuid]
    error: Exception | None = None
    texts: npt.NDArray[np.uint8] | None = None


class Spliced(NamedTuple):
    """JSON objects without their UUIDs, encoded in bulk, of which each will get one in front.

    Attributes:
        prefix: what stands before a UUID's text, from the opening brace on.
        lines: the objects, each on a line of its own.
    """

    prefix: bytes
    lines: bytes


class Kind(abc.ABC, Generic[M]):
    """Adapter between the objects of one class and payloads of one form.

    Attributes:
        message_type: the class.
        form: the form of payloads, as of :attr:`gazette_sdk.framing.Framing.form`.
        validate: refuses a message by raising, before it is published; None where the class
            offers nothing.
    """

    form: ClassVar[str]

    def __init__(self, message_type: type[M]) -> None:
        self.message_type = message_type
        self.validate: Callable[[M], object] | None = None

    @abc.abstractmethod
    def encode(self, message: M, stamp: Stamp) -> bytes:
        """The payload of ``message``, with the stamp's UUID.

        Raises:
            ValidationError: the message holds something that has no form.
        """

    def encode_many(self, messages: Sequence[M]) -> Spliced | None:
        """The payloads of messages but for their UUIDs, in bulk.

        Args:
            messages: at least one.

        Returns:
            None where messages are encoded one by one, each with its UUID.

        Raises:
            ValidationError: a message holds something that has no form.
        """
        del messages
        return None

    @abc.abstractmethod
    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[M]:
        """The messages of frames, in bulk."""

    @abc.abstractmethod
    def new_acknowledgement(self, message: M, journal: str) -> M:
        """An empty message which, with an acknowledging UUID, ends ``message``'s transaction."""


def kind_of(message_type: type[M], form: str) -> Kind[M]:
    """The adapter of a class.

    Args:
        message_type: class of the messages.
        form: form of payloads, ``"json"``, ``"protobuf"`` or ``"csv"``.

    Raises:
        ValidationError: objects of the class can carry no UUID, or have no such form.
    """
    found = _known_kind(message_type)
    if found.form != form:
        raise ValidationError(
            f"{message_type.__qualname__} is a {found.form} message, but the journal's framing"
            f" holds {form}; use {_CLASSES.get(form, 'another class')}, or a journal with another"
            " content-type label",
            kind="message_form",
        )
    return found


_CLASSES = {
    "json": "a dataclass on JsonMessage, a pydantic model, a msgspec Struct or a dict",
    "protobuf": "a generated protobuf class with a field `bytes uuid`",
    "csv": "CsvRecord or list",
}


def validator_of(message_type: type[M]) -> Callable[[M], object] | None:
    """What refuses messages of a class before they are published; None where nothing does.

    Raises:
        ValidationError: objects of the class can carry no UUID.
    """
    return _known_kind(message_type).validate


_known: dict[type, Kind[Any]] = {}
"""Adapters by class; classes of messages live as long as the program."""


def _known_kind(message_type: type[M]) -> Kind[M]:
    if not isinstance(message_type, type):
        raise _no_class(message_type)
    found: Kind[M] = _known.get(message_type) or _find(message_type)
    return found


def _no_class(given: object) -> ValidationError:
    origin = typing.get_origin(given)
    hint = f": derive a class from it, or use {origin.__name__}" if origin is not None else ""
    return ValidationError(f"{given!r} is no class of messages{hint}", kind="message_type")


def _find(message_type: type[M]) -> Kind[M]:
    from gazette_sdk.message import (  # noqa: PLC0415 - they use this one
        csv_kind,
        json_kinds,
        protobuf_kind,
    )

    found: Kind[M] | None = (
        json_kinds.find(message_type)
        or protobuf_kind.find(message_type)
        or csv_kind.find(message_type)
    )
    if found is None:
        raise ValidationError(
            f"{message_type.__qualname__} can carry no message UUID: use a dataclass on"
            " JsonMessage, a pydantic model, a msgspec Struct, a dict, a generated protobuf class,"
            " or, for CSV, a list",
            kind="no_uuid",
        )
    _known[message_type] = found
    return found
