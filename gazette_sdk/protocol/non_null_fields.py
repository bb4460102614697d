"""Sub-messages that are encoded even when they are empty (protocol section 1).

Other implementations always encode the sub-messages marked "NN" there. They decode messages
without them alike: completing a message matters only where bytes are compared, but costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

__all__ = ["OWN_FIELDS_FROM", "complete", "is_non_null", "json_fields"]

OWN_FIELDS_FROM = 101
"""Least number of fields that only this implementation has. Others ignore them."""

_NON_NULL: dict[str, tuple[str, ...]] = {
    "protocol.LabelSelector": ("include", "exclude"),
    "protocol.JournalSpec": ("labels", "fragment"),
    "protocol.JournalSpec.Fragment": ("refresh_interval", "retention", "flush_interval"),
    "protocol.ProcessSpec": ("id",),
    "protocol.BrokerSpec": ("process_spec",),
    "protocol.Fragment": ("sum",),
    "protocol.Header": ("process_id", "route", "etcd"),
    "protocol.AppendResponse": ("header",),
    "protocol.ListRequest": ("selector",),
    "protocol.ListResponse": ("header",),
    "protocol.ListResponse.Journal": ("spec", "route"),
    "protocol.ApplyResponse": ("header",),
    "protocol.FragmentsResponse": ("header",),
    "protocol.FragmentsResponse._Fragment": ("spec",),
    "protocol.FragmentStoreHealthResponse": ("header",),
    "consumer.ShardSpec": ("max_txn_duration", "min_txn_duration", "labels"),
    "consumer.ConsumerSpec": ("process_spec",),
    "consumer.ListRequest": ("selector",),
    "consumer.ListResponse": ("header",),
    "consumer.ListResponse.Shard": ("spec", "route"),
    "consumer.ApplyResponse": ("header",),
    "consumer.StatResponse": ("header",),
    "consumer.GetHintsResponse": ("header", "primary_hints"),
}

M = TypeVar("M", bound=Message)


def complete(message: M) -> M:
    """Make the sub-messages present that are always encoded, at every depth.

    Args:
        message: any message; changed in place.

    Returns:
        The same message.
    """
    always, present, repeated = _plan(message.DESCRIPTOR)
    for name, nested in always:
        inner = getattr(message, name)
        inner.SetInParent()
        if nested:
            complete(inner)
    for name in present:
        if message.HasField(name):
            complete(getattr(message, name))
    for name in repeated:
        for inner in getattr(message, name):
            complete(inner)
    return message


def is_non_null(field: FieldDescriptor) -> bool:
    """Return True for a field with a sub-message that is encoded even when it is empty."""
    of = field.containing_type
    return of is not None and field.name in _NON_NULL.get(of.full_name, ())


def json_fields(message: Message) -> list[FieldDescriptor]:
    """Return the fields of a message in JSON: all, but of ours only those that are set."""
    ours = {field.number for field, _ in message.ListFields() if field.number >= OWN_FIELDS_FROM}
    every = cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields)
    return [field for field in every if field.number < OWN_FIELDS_FROM or field.number in ours]


_Plan = tuple[tuple[tuple[str, bool], ...], tuple[str, ...], tuple[str, ...]]
"""Fields that are always present, with True where they have such fields; other single fields that
have such fields; repeated fields that have them."""


@cache
def _plan(descriptor: Descriptor) -> _Plan:
    non_null = _NON_NULL.get(descriptor.full_name, ())
    inner = [field for field in descriptor.fields if field.type == FieldDescriptor.TYPE_MESSAGE]
    deep = [field for field in inner if any(_plan(field.message_type))]
    return (
        tuple((name, descriptor.fields_by_name[name] in deep) for name in non_null),
        tuple(f.name for f in deep if not f.is_repeated and f.name not in non_null),
        tuple(field.name for field in deep if field.is_repeated),
    )
