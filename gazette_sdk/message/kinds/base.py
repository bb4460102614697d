"""Interface of the kinds of messages: between objects of one class and payloads.

:func:`kind_of` finds the kind of a class. :func:`empty_instance` makes an empty message of a class,
for acknowledgements.
"""

from __future__ import annotations

import abc
import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.uuid import RawUuid, Stamp
from gazette_sdk.user_code import check_done

M = TypeVar("M")

_ZEROS = frozenset({str, int, float, bool, bytes, list, dict, set, frozenset, tuple})
"""Classes whose instances are empty without arguments."""

_DEPTH_MAX = 8
"""Limit of the nesting of classes; fields below are None."""


def empty_instance(message_type: type[M]) -> M:
    """Return an instance whose fields are zeros, empty texts, empty containers, and defaults.

    No ``__init__``, ``__post_init__`` or validator runs: they could refuse empty fields.
    """
    return typing.cast("M", _empty(message_type, _DEPTH_MAX))


def _empty(kind: Any, depth: int) -> Any:
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return arguments[0]
    if origin is typing.Annotated:
        return _empty(arguments[0], depth)
    if origin in {typing.Union, types.UnionType}:
        return None if type(None) in arguments else _empty(arguments[0], depth)
    return _empty_of_class(origin or kind, depth)


def _empty_of_class(kind: Any, depth: int) -> Any:
    if not isinstance(kind, type) or depth == 0:
        return None
    if kind in _ZEROS:
        return kind()
    fields = _fields(kind)
    return None if fields is None else _assemble(kind, fields, depth)


def _fields(kind: type) -> dict[str, Any] | None:
    """Return each field's default, or ``_MISSING``; None if the class has no fields."""
    if dataclasses.is_dataclass(kind):
        return {
            field.name: _default(field.default, field.default_factory, dataclasses.MISSING)
            for field in dataclasses.fields(kind)
        }
    if issubclass(kind, msgspec.Struct):
        return {
            field.name: _default(field.default, field.default_factory, msgspec.NODEFAULT)
            for field in msgspec.structs.fields(kind)
        }
    if issubclass(kind, pydantic.BaseModel):
        return {
            name: _MISSING if field.is_required() else field.get_default(call_default_factory=True)
            for name, field in kind.model_fields.items()
        }
    return None


_MISSING = object()


def _default(value: Any, factory: Any, missing: object) -> Any:
    if value is not missing:
        return value
    return _MISSING if factory is missing else factory()


def _assemble(kind: type, fields: dict[str, Any], depth: int) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    values = {
        name: _empty(hints[name], depth - 1) if value is _MISSING else value
        for name, value in fields.items()
    }
    if issubclass(kind, pydantic.BaseModel):
        return kind.model_construct(**values)
    if issubclass(kind, msgspec.Struct):
        # The constructor of a Struct runs only __post_init__, which a subclass overrides.
        quiet = {"__post_init__": lambda _: None}
        if hasattr(kind, "__post_init__"):
            kind = msgspec.defstruct(kind.__name__, [], bases=(kind,), namespace=quiet)
        return kind(**values)
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def union_classes(declared: Any) -> tuple[Any, ...]:
    """Return the classes of a union, as ``Ride | Driver``; none of anything else."""
    is_union = typing.get_origin(declared) in {typing.Union, types.UnionType}
    return typing.get_args(declared) if is_union else ()


def name_of(message_type: Any) -> str:
    """Return the name of a class of messages, or of a union of classes."""
    classes = union_classes(message_type)
    name: str = getattr(message_type, "__qualname__", None) or repr(message_type)
    return " | ".join(map(name_of, classes)) if classes else name


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
        error: error of the frame after ``messages``; None if all are decoded.
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
        message_type: the class; or a union of classes, of which messages are only read.
        name: its name.
        form: the form of payloads, as of :attr:`gazette_sdk.framing.Framing.form`.
        validate: raises to refuse a message before it is published; None where the class has no
            such function.
        no_uuid: reason why objects of the class hold no UUID, with the remedy; empty if they do.
    """

    form: ClassVar[str]

    def __init__(self, message_type: type[M]) -> None:
        self.message_type = message_type
        self.name = name_of(message_type)
        self.validate: Callable[[M], object] | None = None
        self.no_uuid = ""

    @abc.abstractmethod
    def encode(self, message: M, stamp: Stamp) -> bytes:
        """Return the payload of ``message``, with the stamp's UUID.

        Raises:
            ValidationError: the message has a value that cannot be written in this form.
        """

    def with_uuid_of(self, message: M, other: M) -> M:
        """Return a message with the UUID of another one, where the class has a field for it."""
        del other
        return message

    def with_parent(self, message: M, payload: bytes, parent: str) -> bytes:
        """Return an encoded message with the context of a trace, where this form has a place.

        Args:
            message: the message. A context that it has is kept.
            payload: what :meth:`encode` returned for it.
            parent: the context, as of W3C Trace Context.
        """
        del message, parent
        return payload

    def parents(
        self, framing: Framing, buffer: Buffer, frames: Frames, messages: Sequence[M]
    ) -> dict[int, str]:
        """Return the contexts of messages whose traces are sampled, by index.

        Args:
            framing: of the frames.
            buffer: content.
            frames: its frames.
            messages: what they were decoded to, up to the first bad one.
        """
        del framing, buffer, frames, messages
        return {}

    def record_fields(self, message: M) -> int:
        """Return the number of fields that all records of a journal must have as this one; else 0.

        Args:
            message: the record.
        """
        del message
        return 0

    def check_readable(self, message: M) -> None:
        """Check that the class reads what is written of a message.

        Raises:
            ValidationError: it does not, or the message cannot be encoded.
        """
        del message  # of most kinds, all that can be written can be read

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


def call_validate(message: Any) -> None:
    """Call the ``validate`` method of the message.

    Raises:
        UserCodeError: it is ``async def``, or has a ``yield``: nothing of it has run.
        Exception: whatever it raises.
    """
    check_done(message.validate(), type(message).validate)


FINDERS: list[Callable[[type[Any]], Kind[Any] | None]] = []
"""Functions that return the adapter of a class, or None for a class of another kind."""


def kind_of(message_type: type[M], form: str, *, needs_uuid: bool = True) -> Kind[M]:
    """Return the adapter of a class.

    Args:
        message_type: class of the messages.
        form: form of payloads, ``"json"``, ``"protobuf"`` or ``"csv"``.
        needs_uuid: False if messages are only read, and not sequenced: protobuf classes then
            need no field of a UUID.

    Raises:
        ValidationError: objects of the class cannot hold a UUID, or have another form.
    """
    found = known_kind(message_type, needs_uuid=needs_uuid)
    if found.form != form:
        raise ValidationError(
            f"{found.name} is a {found.form} message, but the journal's framing"
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


_known: dict[Any, Kind[Any]] = {}
"""Adapters by class, or union of classes. Classes of messages are never dropped."""


def known_kind(message_type: type[M], *, needs_uuid: bool = True) -> Kind[M]:
    """Return the adapter of a class, in the one form that its messages have.

    Args:
        message_type: the class; or a union of msgspec Structs with tags, for reading.
        needs_uuid: as of :func:`kind_of`.

    Raises:
        ValidationError: objects of the class cannot hold a UUID, see :func:`kind_of`; or the
            classes of a union cannot be distinguished.
    """
    declared: Any = message_type
    if not isinstance(declared, type) and not union_classes(declared):
        raise _no_class(declared)
    found: Kind[M] = _known.get(message_type) or _made(message_type)
    if needs_uuid and found.no_uuid:
        raise ValidationError(found.no_uuid, kind="no_uuid")
    return found


def _no_class(given: object) -> ValidationError:
    origin = typing.get_origin(given)
    hint = f": derive a class from it, or use {origin.__name__}" if origin is not None else ""
    return ValidationError(f"{given!r} is no class of messages{hint}", kind="message_type")


def _made(message_type: type[M]) -> Kind[M]:
    found: Kind[M] | None = next(filter(None, (find(message_type) for find in FINDERS)), None)
    if found is None:
        raise ValidationError(
            f"{message_type.__qualname__} can carry no message UUID: use a dataclass on"
            " JsonMessage, a pydantic model, a msgspec Struct, a dict, a generated protobuf class,"
            " or, for CSV, a list",
            kind="no_uuid",
        )
    _known[message_type] = found
    return found
