"""Empty messages of a class, for acknowledgements."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

import msgspec
import pydantic

__all__ = ["empty_instance"]

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
