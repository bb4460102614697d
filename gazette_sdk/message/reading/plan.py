"""Plan of a reader: which journals it reads, and from which offsets to which."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.message.reading.content_queue import CONTENT_BYTES_MAX, Opened
from gazette_sdk.message.sequencing.checkpoint import Checkpoint
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.protocol.names import validate_journal

__all__ = ["Offsets", "OnMissing", "Plan", "plan_of"]

Offsets: TypeAlias = Literal["begin", "end"] | Mapping[str, int] | datetime | None
"""Offsets at which a reader begins: the begin of all journals, their write heads, by journal, or
at the first message since a time."""

OnMissing: TypeAlias = Literal["raise", "begin", "end"]
"""Treatment of a position that its journal does not have: raise an error, or begin at the journal's
begin or write head instead."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Journals to read, with their offsets.

    Attributes:
        selector: label selector of the journals; None for names alone.
        names: names of journals. One beside a selector precedes it, if the journal exists.
        text: selector or name as the user gave it, for errors.
        block: follow the write heads, and the listing.
        begin: offset at which journals begin that ``offsets`` does not name; -1 is the head.
        offsets: offsets at which journals begin, by journal.
        end_offsets: offsets at which journals end, by journal.
        since: time of the first message of journals that ``offsets`` does not name; None for all.
        revisions: create revisions of journals that were read before, by journal. One that was
            created anew is read from its begin.
        item_bytes_max: limit of the content of a journal that is decoded at once.
        on_missing: treatment of an offset, or create revision, that its journal does not have.
        is_verified: True if the positions were read before, and are not verified again.
        is_fixed: True if exactly the named journals are read: one that vanishes is an error. Else
            one is waited for, and read again once it is created.
    """

    selector: pb.LabelSelector | None
    names: tuple[str, ...]
    text: str
    block: bool
    begin: int
    offsets: Mapping[str, int]
    end_offsets: Mapping[str, int]
    since: datetime | None = None
    revisions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    item_bytes_max: int = CONTENT_BYTES_MAX
    on_missing: OnMissing = "raise"
    is_verified: bool = False
    is_fixed: bool = False

    def continued(self, offsets: Mapping[str, int], opened: Mapping[str, Opened]) -> Plan:
        """Return the plan to read on behind this one: new journals are read from their begin."""
        revisions = {
            **self.revisions,
            **{name: each.create_revision for name, each in opened.items() if each.create_revision},
        }
        return dataclasses.replace(
            self, begin=0, offsets=dict(offsets), revisions=revisions, is_verified=True
        )

    def restored(self, checkpoint: Checkpoint) -> Plan:
        """Return the plan to read on behind a checkpoint.

        Raises:
            ConfigurationError: the plan has an offset of a journal in the checkpoint.
        """
        twice = sorted(self.offsets.keys() & checkpoint.offsets.keys())
        if twice:
            raise ConfigurationError(
                f"both checkpoint= and offsets= say where {twice[0]} begins; leave it out of"
                " offsets="
            )
        return dataclasses.replace(
            self,
            offsets={**self.offsets, **checkpoint.offsets},
            revisions=checkpoint.create_revisions,
        )


def plan_of(
    selector: str | None,
    name: str | None,
    *,
    block: bool,
    offsets: Offsets,
    end_offsets: Mapping[str, int] | None,
    on_missing: OnMissing = "raise",
) -> Plan:
    """Return the plan of a reader's arguments, see :class:`~gazette_sdk.message.Reader`.

    Raises:
        ConfigurationError: they do not go together, or are not known.
        ValidationError: the selector, or the name, is malformed.
    """
    _check_types(selector, name, offsets)
    if (selector is None) == (name is None):
        raise ConfigurationError(
            "a Reader takes either a selector or a name: give one, such as Reader(dict, 'topic=t')"
        )
    wanted = None
    if selector is None:
        assert name is not None
        validate_journal(name)
    elif ";" in selector:
        validate_journal(selector)
        name = selector
    else:
        wanted = parse_selector(selector)
        # A bare word may be a name, or the selector of a label's existence. It is a name if such
        # a journal exists.
        name = selector if _is_name(selector) else None
    text = selector if selector is not None else name
    assert text is not None
    begin = -1 if offsets == "end" else 0
    by_journal: Mapping[str, int] = {}
    if isinstance(offsets, str) and offsets not in {"begin", "end"}:
        raise ConfigurationError(
            f"offsets={offsets!r}: use 'begin', 'end', a mapping, or a datetime"
        )
    since = offsets if isinstance(offsets, datetime) else None
    if since is not None and since.utcoffset() is None:
        raise ConfigurationError(
            f"offsets={offsets!r} has no time zone; give it one, as datetime.now(UTC) has, or"
            " with .astimezone() if it is local time"
        )
    if offsets is not None and not isinstance(offsets, str | datetime):
        by_journal = dict(offsets)
    ends = dict(end_offsets or {})
    for journal, offset in [*by_journal.items(), *ends.items()]:
        if not isinstance(offset, int) or offset < -1:
            raise ConfigurationError(
                f"offset {offset!r} of {journal}: use a byte offset, or -1 for the write head"
            )
    if on_missing not in {"raise", "begin", "end"}:
        raise ConfigurationError(f"on_missing={on_missing!r}: use 'raise', 'begin' or 'end'")
    names = () if name is None else (name,)
    return Plan(wanted, names, text, block, begin, by_journal, ends, since, on_missing=on_missing)


def _check_types(selector: object, name: object, offsets: object) -> None:
    """Refuse arguments of other types, which are likely to stand in each other's places.

    Raises:
        ConfigurationError: there is one.
    """
    for text in (selector, name):
        if text is not None and not isinstance(text, str):
            raise ConfigurationError(
                f"{text!r} is no selector or name: give the class of messages first, and then a"
                " selector, such as Reader(dict, 'topic=t')"
            )
    if offsets is not None and not isinstance(offsets, str | Mapping | datetime):
        raise ConfigurationError(
            f"offsets={offsets!r}: use 'begin', 'end', a mapping from journals to offsets, or a"
            " datetime"
        )


def _is_name(text: str) -> bool:
    if any(operator in text for operator in "=!, ()"):
        return False
    try:
        validate_journal(text)
    except ValidationError:
        return False
    return True
