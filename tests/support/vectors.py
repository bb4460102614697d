"""Conformance vectors and golden recordings: finding them, and building messages from them.

The files' own conventions (``about.conventions`` of ``broker-vectors.json``): label sets are
lists of ``{name, value, prefix?}``, sums 40 hex digits, fields that end in ``_s`` seconds, other
keys proto field names; an absent key is an absent field.

    from support.vectors import build, cases, refuses
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import from_ns
from gazette_sdk.protocol.fragments import sum_of

TESTS = Path(__file__).resolve().parent.parent
VECTORS = TESTS / "vectors"
GOLDEN = TESTS / "golden"

M = TypeVar("M", bound=Message)


@cache
def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def group(file: str, name: str) -> Any:
    """A group of ``broker``, ``message`` or ``allocator`` vectors, as it stands in the file."""
    return _load(VECTORS / f"{file}-vectors.json")[name]


def cases(file: str, name: str) -> list[Any]:
    """A group's cases as pytest parameters with their ids.

    ``@pytest.mark.parametrize("case", cases("broker", "label"))``
    """
    found = group(file, name)
    listed = found["cases"] if isinstance(found, dict) else found
    assert listed, f"group {name} of {file}-vectors.json has no cases"
    return [
        pytest.param(case, id=case.get("id", f"{name}-{index}"))
        for index, case in enumerate(listed)
    ]


def golden(name: str) -> Any:
    """A golden recording, such as ``broker/grpc_append.json``."""
    return _load(GOLDEN / name)


def build(message_type: type[M], value: Any) -> M:
    """A message from a vector's dict form (or list form, where it is a label set)."""
    message = message_type()
    _fill(message, value)
    return message


def label_set(labels: list[dict[str, Any]] | None) -> pb.LabelSet:
    """A label set from a vector's list."""
    return build(pb.LabelSet, labels or [])


def selector(value: dict[str, Any] | None) -> pb.LabelSelector:
    """A selector from ``{"include": […], "exclude": […]}``."""
    return build(pb.LabelSelector, value or {})


def fragment(value: dict[str, Any]) -> pb.Fragment:
    """A fragment; its ``sum`` is 40 hex digits."""
    return build(pb.Fragment, value)


def journal_spec(value: dict[str, Any]) -> pb.JournalSpec:
    """A journal spec; durations are ``*_s`` seconds, the codec is a name."""
    return build(pb.JournalSpec, value)


def route(value: dict[str, Any]) -> pb.Route:
    """A route."""
    return build(pb.Route, value)


def header(value: dict[str, Any]) -> pb.Header:
    """A header."""
    return build(pb.Header, value)


def normal(message: Message) -> Message:
    """A copy without present-but-empty sub-messages: what equals what, whatever was sent."""
    copy = type(message)()
    copy.CopyFrom(message)
    for field, value in list(copy.ListFields()):
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        if field.is_repeated:
            for item in value:
                item.CopyFrom(normal(item))
            continue
        value.CopyFrom(normal(value))
        if not value.ListFields():
            copy.ClearField(field.name)
    return copy


@contextlib.contextmanager
def refuses(expect: dict[str, Any]) -> Iterator[None]:
    """Runs a block that must go as ``{"valid": …, "kind": …, "path": …}`` says."""
    if expect["valid"]:
        yield
        return
    with pytest.raises(ValidationError) as caught:
        yield
    assert (caught.value.kind, caught.value.path) == (expect["kind"], expect["path"])


# ------------------------------------------------------------------ building


def _fill(message: Message, value: Any) -> None:
    message.SetInParent()
    if isinstance(message, pb.LabelSet) and isinstance(value, list):
        for label in value:
            message.labels.add(**label)
        return
    if isinstance(message, pb.SHA1Sum) and isinstance(value, str):
        message.CopyFrom(sum_of(bytes.fromhex(value)))
        return
    for key, given in value.items():
        if given is None:
            continue
        field, item = _field_of(message, key, given)
        if field.is_repeated:
            listed = getattr(message, field.name)
            for entry in item:
                if field.type == FieldDescriptor.TYPE_MESSAGE:
                    _fill(listed.add(), entry)
                else:
                    listed.append(entry)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            target = getattr(message, field.name)
            if isinstance(item, Message):
                target.SetInParent()
                target.MergeFrom(item)
            else:
                _fill(target, item)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            setattr(message, field.name, _enum(field.enum_type, item))
        elif field.type == FieldDescriptor.TYPE_BYTES:
            setattr(message, field.name, item.encode() if isinstance(item, str) else item)
        else:
            setattr(message, field.name, item)


def _field_of(message: Message, key: str, item: Any) -> tuple[FieldDescriptor, Any]:
    fields = message.DESCRIPTOR.fields_by_name
    if key in fields:
        return fields[key], item
    assert key.endswith("_s"), f"{message.DESCRIPTOR.name} has no field {key}"
    name = key.removesuffix("_s")
    if name == "signature_ttl":
        name = "signatureTTL"
    return fields[name], from_ns(round(item * 1_000_000_000))


def _enum(enum_type: EnumDescriptor, item: Any) -> int:
    if isinstance(item, int):
        return item
    found = enum_type.values_by_name.get(item)
    return int(item) if found is None else found.number
