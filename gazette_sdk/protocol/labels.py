"""Label sets: sorted multi-maps from names to values (protocol sections 5.1 and 16).

Functions that take a set and a name change the set in place; ``union``, ``intersect`` and
``subtract`` return new sets. All of them expect sorted sets and keep the order.

Label selectors are parsed, formatted and matched here (protocol sections 5.2 to 5.4). Labels of one
name are ORed, different names are ANDed, and no excluded name may match.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import (
    PATH_CLASS,
    TOKEN_CLASS,
    at,
    strip_meta,
    validate_path_characters,
    validate_token,
)

CONTENT_TYPE = "content-type"
"""Framing of a journal's messages."""
RECOVERY_LOG = "application/x-gazette-recoverylog"
"""Content type of the recovery logs of shards."""
MESSAGE_TYPE = "app.gazette.dev/message-type"
MESSAGE_SUBTYPE = "app.gazette.dev/message-subtype"
TAG = "app.gazette.dev/tag"
"""Free text about a journal; may have several values."""
MANAGED_BY = "app.gazette.dev/managed-by"
TABLE = "app.gazette.dev/table"  # of a shard: a source of which a table is made
BROADCAST = "app.gazette.dev/broadcast"  # of a shard: a source that others read, too
RESET = "app.gazette.dev/reset"  # of a shard: name of its last reset that kept its state
SKIP = "app.gazette.dev/skip"  # of a shard: content that it passes over, as JOURNAL=BEGIN-END
INSTANCE = "app.gazette.dev/instance"
REGION = "app.gazette.dev/region"

NEEDED_FROM = "gazette_sdk/needed-from"
"""Offset of a recovery log before which no recovery reads it: brokers remove what is stored there.
The consumer sets it."""

CONTINUES = "gazette_sdk/continues"
"""Etcd revision at which the journal was created that this one continues, after a restore into
another Etcd. Listings have it as the journal's create revision, so that positions of readers and
shards stay valid. A restore sets it; a journal that is created otherwise has none."""

SKIPPED_TO = "gazette_sdk/skipped-to"
"""Offset at which a journal continued after a restore, after a gap: no broker is left that has the
bytes directly before it, so that reads pass over the gap at once. A restore sets it."""

OF_RESTORE = (CONTINUES, SKIPPED_TO)
"""Names of labels that only a restore sets: they stay when a spec is applied."""

NAME = "name"
"""Not a label of specs: selectors match it against the journal's name."""
PREFIX = "prefix"
"""Not a label of specs: in a List, a directory that the journal's name must begin with."""

SINGLE_VALUE_NAMES = frozenset(
    {CONTENT_TYPE, INSTANCE, MANAGED_BY, MESSAGE_SUBTYPE, MESSAGE_TYPE, NEEDED_FROM, REGION}
    | set(OF_RESTORE)
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


def needed_from(labels: pb.LabelSet) -> int:
    """Return the offset before which no recovery reads a recovery log; 0 if that is not known."""
    return _number(labels, NEEDED_FROM)


def continued_revision(labels: pb.LabelSet) -> int:
    """Return the create revision of the journal that this one continues; 0 if there is none."""
    return _number(labels, CONTINUES)


def skipped_to(labels: pb.LabelSet) -> int:
    """Return the offset at which a journal continued after a gap; 0 if there is none."""
    return _number(labels, SKIPPED_TO)


def _number(labels: pb.LabelSet, name: str) -> int:
    text = value_of(labels, name)
    return int(text) if text.isascii() and text.isdigit() else 0


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


# ---------------------------------------------------------------- parsing

_NAME = rf" ?(?P<name>{TOKEN_CLASS}{{2,}}(?::prefix)?)"
_VALUE = rf" ?(?P<value>{PATH_CLASS}*)"
_LIST = r" ?\((?P<list>[^)]+)\)"
_END = r" ?(?:,|\Z)"

# In the order in which they are tried; True if the labels are included.
_FORMS = tuple(
    (re.compile(form + _END), included)
    for form, included in (
        (rf"{_NAME} ?==?{_VALUE}", True),
        (rf"{_NAME} ?!={_VALUE}", False),
        (rf"{_NAME} in{_LIST}", True),
        (rf"{_NAME} not ?in{_LIST}", False),
        (_NAME, True),
        (rf" ?!{_NAME}", False),
    )
)
_ITEM = re.compile(_VALUE + _END)

_OPERATORS = frozenset("=!,() ")


def parse_selector(text: str) -> pb.LabelSelector:
    """Return the selector of a text such as ``topic=orders,env in (a,b),!draft``.

    Raises:
        ValidationError: kind ``unmatched_expression`` or ``unmatched_set_item`` quotes the rest of
            the text from the first error on; else as :func:`validate_selector`.
    """
    if not isinstance(text, str):
        raise ValidationError(
            f"a label selector is a text, such as 'topic=orders', and not {text!r}", kind="type"
        )
    selector = pb.LabelSelector()
    place = 0
    while place < len(text):
        match, included = _match(text, place)
        labels = selector.include if included else selector.exclude
        for value in _values(match.groupdict()):
            add(labels, match["name"], value)
        place = match.end()
    validate_selector(selector)
    return selector


def _match(text: str, place: int) -> tuple[re.Match[str], bool]:
    for form, included in _FORMS:
        if match := form.match(text, place):
            return match, included
    raise ValidationError(
        f"could not match {text[place:]!r} to a label selector expression, such as topic=orders, "
        "zone in (a,b) or !draft; names of labels have at least two characters",
        kind="unmatched_expression",
    )


def _values(groups: dict[str, str | None]) -> Iterator[str]:
    listed = groups.get("list")
    if listed is None:
        yield groups.get("value") or ""
        return
    place = 0
    while place < len(listed):
        item = _ITEM.match(listed, place)
        if item is None:
            raise ValidationError(
                f"could not match {listed[place:]!r} to a label selector set item, such as a of "
                "zone in (a,b)",
                kind="unmatched_set_item",
            )
        yield item["value"]
        place = item.end()


# ---------------------------------------------------------------- formatting


def format_selector(selector: pb.LabelSelector) -> str:
    """Return the canonical text of a selector.

    Parsing it gives the same selector, with one exception: an included single value which
    itself begins with ``=`` loses that character.
    """
    return ",".join(
        [
            *_format_half(selector.include, one="", equal="=", several="in"),
            *_format_half(selector.exclude, one="!", equal="!=", several="notin"),
        ]
    )


def _format_half(labels: pb.LabelSet, *, one: str, equal: str, several: str) -> Iterator[str]:
    named = [
        (label.name + _PREFIX_SUFFIX if label.prefix else label.name, label.value)
        for label in labels.labels
    ]
    named.sort(key=lambda pair: pair[0])
    for name, group in groupby(named, key=lambda pair: pair[0]):
        values = [value for _, value in group]
        if len(values) > 1:
            yield f"{name} {several} ({','.join(values)})"
        elif values[0]:
            yield f"{name}{equal}{values[0]}"
        else:
            yield one + name


# ---------------------------------------------------------------- matching


class Matcher:
    """A selector that is prepared for matching many label sets.

    Args:
        selector: the selector; later changes to it have no effect.
    """

    __slots__ = ("_exclude", "_include", "_only_names")

    def __init__(self, selector: pb.LabelSelector) -> None:
        self._include = _label_groups(selector.include)
        self._exclude = _label_groups(selector.exclude)
        # Journals are often selected by their name alone: then their labels are not read.
        self._only_names = all(name == NAME for name, *_ in (*self._include, *self._exclude))

    @property
    def names(self) -> frozenset[str] | None:
        """Names of the only journals that it may match; None if it may match others, too."""
        for name, any_value, exact, prefixes in self._include:
            if name == NAME and not any_value and not prefixes:
                return exact
        return None

    def labels(self, labels: pb.LabelSet) -> bool:
        """Return True if the selector matches a label set."""
        if not self._include and not self._exclude:
            return True
        return self._matches(_by_name(labels))

    def journal(self, spec: pb.JournalSpec) -> bool:
        """Return True if the selector matches a journal: its labels, and its ``name``."""
        if not self._include and not self._exclude:
            return True
        by_name = {} if self._only_names else _by_name(spec.labels)
        by_name[NAME] = [spec.name]
        return self._matches(by_name)

    def _matches(self, by_name: dict[str, list[str]]) -> bool:
        for group in self._exclude:
            if _group_matches(group, by_name):
                return False
        return all(_group_matches(group, by_name) for group in self._include)


_Group = tuple[str, bool, frozenset[str], tuple[str, ...]]
"""A name; True if any value matches; values that match; prefixes of values that match."""


def matches(selector: pb.LabelSelector, labels: pb.LabelSet) -> bool:
    """Return True if a selector matches a label set. Use a :class:`Matcher` for many label sets."""
    return Matcher(selector).labels(labels)


def matches_journal(selector: pb.LabelSelector, spec: pb.JournalSpec) -> bool:
    """Return True if a selector matches a journal. Use a :class:`Matcher` for many journals."""
    return Matcher(selector).journal(spec)


def _label_groups(labels: pb.LabelSet) -> list[_Group]:
    found: dict[str, tuple[set[str], list[str]]] = {}
    for label in labels.labels:
        exact, prefixes = found.setdefault(label.name, (set(), []))
        if label.prefix:
            prefixes.append(label.value)
        else:
            exact.add(label.value)
    return [
        (name, "" in exact or "" in prefixes, frozenset(exact), tuple(prefixes))
        for name, (exact, prefixes) in found.items()
    ]


def _by_name(labels: pb.LabelSet) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = {}
    for label in labels.labels:
        by_name.setdefault(label.name, []).append(label.value)
    return by_name


def _group_matches(group: _Group, by_name: dict[str, list[str]]) -> bool:
    name, any_value, exact, prefixes = group
    values = by_name.get(name)
    if values is None:
        return False
    if any_value or not exact.isdisjoint(values):
        return True
    return bool(prefixes) and any(value.startswith(prefixes) for value in values)


# ---------------------------------------------------------------- making and checking


def journal_selector(*journals: str) -> pb.LabelSelector:
    """Return the selector of exactly some journals, by their names without metadata."""
    return pb.LabelSelector(include=label_set([(NAME, name) for name in map(strip_meta, journals)]))


def rewrite_prefix(selector: pb.LabelSelector) -> pb.LabelSelector:
    """Return a copy in which every label ``prefix`` is ``name`` with the prefix flag.

    Only List does this, with its request and with the claims of its caller.
    """
    rewritten = pb.LabelSelector()
    for source, target in (
        (selector.include, rewritten.include),
        (selector.exclude, rewritten.exclude),
    ):
        target.SetInParent()
        for label in source.labels:
            renamed = label.name == PREFIX
            name = NAME if renamed else label.name
            add(target, name + _PREFIX_SUFFIX if renamed or label.prefix else name, label.value)
    return rewritten


def topic_hint(text: str) -> str:
    """Return text on selecting a topic, for errors about a selector that selects no journal.

    Args:
        text: the selector. Only for a mere word, which may be meant as a topic, is there a hint.
    """
    is_word = _OPERATORS.isdisjoint(text) and "/part-" not in text
    return f"; the journals of a topic are selected by 'topic={text}'" if is_word and text else ""


def validate_selector(selector: pb.LabelSelector, path: str = "") -> None:
    """Check both halves of a selector, in which labels may have the prefix flag.

    Raises:
        ValidationError: as :func:`~gazette_sdk.protocol.labels.validate_label_set`, under
            ``Include`` and then ``Exclude``.
    """
    validate_label_set(selector.include, at(path, "Include"), allow_prefix=True)
    validate_label_set(selector.exclude, at(path, "Exclude"), allow_prefix=True)
