"""Label sets: sorted multi-maps from names to values (protocol sections 5.1 and 16).

Functions that take a set and a name change the set in place; ``union``, ``intersect`` and
``subtract`` return new sets. All of them expect sorted sets and keep the order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import at, validate_path_characters, validate_token

__all__ = [
    "CONTENT_TYPE",
    "INSTANCE",
    "MANAGED_BY",
    "MESSAGE_SUBTYPE",
    "MESSAGE_TYPE",
    "NAME",
    "PREFIX",
    "REGION",
    "SINGLE_VALUE_NAMES",
    "TAG",
    "add",
    "intersect",
    "label_set",
    "pairs_of",
    "remove",
    "set_value",
    "subtract",
    "union",
    "validate_label",
    "validate_label_set",
    "validate_single_values",
    "value_of",
    "values_of",
]

CONTENT_TYPE = "content-type"
"""Framing of a journal's messages."""
MESSAGE_TYPE = "app.gazette.dev/message-type"
MESSAGE_SUBTYPE = "app.gazette.dev/message-subtype"
TAG = "app.gazette.dev/tag"
"""Free text about a journal; may have several values."""
MANAGED_BY = "app.gazette.dev/managed-by"
INSTANCE = "app.gazette.dev/instance"
REGION = "app.gazette.dev/region"


NAME = "name"
"""Not a label of specs: selectors match it against the journal's name."""
PREFIX = "prefix"
"""Not a label of specs: in a List, a directory that the journal's name must begin with."""

SINGLE_VALUE_NAMES = frozenset(
    {CONTENT_TYPE, INSTANCE, MANAGED_BY, MESSAGE_SUBTYPE, MESSAGE_TYPE, REGION}
)
"""Names which have at most one value in the label set of a spec."""

_PREFIX_SUFFIX = ":prefix"
_NAME_LENGTH_BYTES = (2, 64)
_VALUE_LENGTH_BYTES = (0, 1024)

_name = attrgetter("name")
_order = attrgetter("name", "value")


# -------------------------------------------------------------- reading, changing


def label_set(pairs: Iterable[tuple[str, str]] = (), /, **single: str) -> pb.LabelSet:
    """Return a label set of name and value pairs, and of keyword arguments.

    A name that ends in ``:prefix`` sets the label's prefix flag.
    """
    made = pb.LabelSet()
    for name, value in pairs:
        add(made, name, value)
    for name, value in single.items():
        add(made, name, value)
    return made


def pairs_of(labels: pb.LabelSet) -> Iterator[tuple[str, str]]:
    """Yield the set's names and values, in order."""
    for label in labels.labels:
        yield label.name, label.value


def add(labels: pb.LabelSet, name: str, value: str) -> None:
    """Insert a label in order, unless the set has an identical one.

    Order ignores the prefix flag: adding ``x=v`` and ``x:prefix=v`` leaves both, and a set
    that fails validation.
    """
    label = _label(name, value)
    place = bisect_left(labels.labels, (label.name, value), key=_order)
    if place == len(labels.labels):
        labels.labels.append(label)
    elif labels.labels[place] != label:
        labels.labels.insert(place, label)


def set_value(labels: pb.LabelSet, name: str, value: str) -> None:
    """Replace all values of a name with one."""
    remove(labels, name.removesuffix(_PREFIX_SUFFIX))
    add(labels, name, value)


def remove(labels: pb.LabelSet, name: str) -> None:
    """Remove all values of a name."""
    del labels.labels[_first(labels, name) : _first(labels, name, after=True)]


def values_of(labels: pb.LabelSet, name: str) -> list[str]:
    """Return all values of a name, in order; empty if there are none."""
    return [label.value for label in labels.labels if label.name == name]


def value_of(labels: pb.LabelSet, name: str) -> str:
    """Return the first value of a name, or the empty string."""
    for label in labels.labels:
        if label.name == name:
            return label.value
    return ""


# -------------------------------------------------------------- set operations


def union(left: pb.LabelSet, right: pb.LabelSet) -> pb.LabelSet:
    """Return every name of either; where both have a name, only the values of ``left``."""
    groups = {**_groups(right), **_groups(left)}
    return _of_groups(groups[name] for name in sorted(groups))


def intersect(left: pb.LabelSet, right: pb.LabelSet) -> pb.LabelSet:
    """Return the names whose complete lists of values are equal."""
    others = _groups(right)
    return _of_groups(
        values for name, values in _groups(left).items() if others.get(name) == values
    )


def subtract(left: pb.LabelSet, right: pb.LabelSet) -> pb.LabelSet:
    """Return ``left`` without the names whose complete lists of values are equal in ``right``."""
    others = _groups(right)
    return _of_groups(
        values for name, values in _groups(left).items() if others.get(name) != values
    )


# -------------------------------------------------------------- validation


def validate_label(label: pb.Label, path: str = "", *, allow_prefix: bool = False) -> None:
    """Check one label.

    Raises:
        ValidationError: of the name (``Name``), the value (``Value``), or of kind
            ``prefix_not_allowed`` where ``allow_prefix`` is false.
    """
    validate_token(label.name, at(path, "Name"), *_NAME_LENGTH_BYTES)
    validate_path_characters(label.value, at(path, "Value"), *_VALUE_LENGTH_BYTES)
    if label.prefix and not allow_prefix:
        raise ValidationError(
            f"label {label.name!r} must not match by prefix outside of a selector",
            kind="prefix_not_allowed",
            path=path,
        )


def validate_label_set(labels: pb.LabelSet, path: str = "", *, allow_prefix: bool = False) -> None:
    """Check every label, and that they are sorted and unique.

    Args:
        labels: the set.
        path: dotted path of the field, for the error.
        allow_prefix: True if labels may have the prefix flag, as those of selectors may.

    Raises:
        ValidationError: of a label, or of kind ``not_sorted_unique`` or ``mixed_empty_value``.
    """
    last: tuple[str, str] | None = None
    for index, label in enumerate(labels.labels):
        try:
            validate_label(label, allow_prefix=allow_prefix)
        except ValidationError as error:
            raise error.within(at(path, f"Labels[{index}]")) from None
        this = (label.name, label.value)
        if last is not None:
            _validate_order(last, this, path)
        last = this


def validate_single_values(labels: pb.LabelSet, path: str = "") -> None:
    """Check that the names in :data:`SINGLE_VALUE_NAMES` have one value only.

    Raises:
        ValidationError: kind ``multiple_values``.
    """
    last = ""
    for label in labels.labels:
        if label.name == last and last in SINGLE_VALUE_NAMES:
            raise ValidationError(
                f"label {last!r} must have one value only", kind="multiple_values", path=path
            )
        last = label.name


def _validate_order(last: tuple[str, str], this: tuple[str, str], path: str) -> None:
    if last >= this:
        raise ValidationError(
            f"labels must be sorted and unique ({this[0]}={this[1]} follows {last[0]}={last[1]})",
            kind="not_sorted_unique",
            path=path,
        )
    if last[0] == this[0] and not last[1]:
        raise ValidationError(
            f"label {last[0]!r} has both an empty and a non-empty value",
            kind="mixed_empty_value",
            path=path,
        )


def _label(name: str, value: str) -> pb.Label:
    bare = name.removesuffix(_PREFIX_SUFFIX)
    return pb.Label(name=bare, value=value, prefix=bare != name)


def _first(labels: pb.LabelSet, name: str, *, after: bool = False) -> int:
    """Return the index of the first label of a name, or of the first one after it."""
    for index, label in enumerate(labels.labels):
        if label.name > name or (label.name == name and not after):
            return index
    return len(labels.labels)


def _groups(labels: pb.LabelSet) -> dict[str, list[pb.Label]]:
    return {name: list(group) for name, group in groupby(labels.labels, _name)}


def _of_groups(groups: Iterable[list[pb.Label]]) -> pb.LabelSet:
    made = pb.LabelSet()
    for group in groups:
        made.labels.extend(group)
    return made
