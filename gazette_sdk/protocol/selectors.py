"""Label selectors: parsing, formatting and matching (protocol sections 5.2 to 5.4).

Labels of one name are ORed, different names are ANDed, and no excluded name may match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import NAME, PREFIX, add, label_set, validate_label_set
from gazette_sdk.protocol.names import PATH_CLASS, TOKEN_CLASS, at, strip_meta

__all__ = [
    "Matcher",
    "format_selector",
    "journal_selector",
    "matches",
    "matches_journal",
    "parse_selector",
    "rewrite_prefix",
    "topic_hint",
    "validate_selector",
]

_PREFIX_SUFFIX = ":prefix"

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
        self._include = _groups(selector.include)
        self._exclude = _groups(selector.exclude)
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


def _groups(labels: pb.LabelSet) -> list[_Group]:
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
