"""Description of a cluster for a simulation: its members, its items, and their assignments.

It comes from the mirror of a live cluster, or from YAML::

    members:                  # in the order in which they joined
    - {zone: a, id: broker-1, limit: 1024}
    - {zone: b, id: broker-2, limit: 1024, exiting: true}
    journals:
    - name: orders/part-000
      replication: 2
      assignments: [a/broker-1, b/broker-2]     # the primary first
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic import ValidationError as PydanticValidationError

from gazette_sdk.cluster.allocator.codec import Allocation
from gazette_sdk.cluster.item_keyspace import ItemKeySpace
from gazette_sdk.errors import GazetteError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.protocol.rules import JOURNAL_LIMIT_MOST, validate_process_id
from gazette_sdk.protocol.strict_yaml import problem_of

__all__ = [
    "ClusterDescription",
    "DescribedItem",
    "DescribedMember",
    "MemberId",
    "describe",
    "dump_description",
    "parse_description",
]


class MemberId(NamedTuple):
    """Zone of a member, and its id within the zone. Its text is ``zone/id``."""

    zone: str
    id: str

    def __str__(self) -> str:
        """Return the text by which options and descriptions name the member."""
        return f"{self.zone}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> MemberId:
        """Return the id of a text ``zone/id``, or ``zone#id`` for a zone with slashes.

        Raises:
            ValidationError: the text is no such name.
        """
        zone, _, name = text.partition("#" if "#" in text else "/")
        if not zone or not name:
            raise ValidationError(f"{text!r} names no member: write ZONE/ID, such as a/broker-1")
        found = cls(zone, name)
        validate_process_id(pb.ProcessSpec.ID(zone=zone, suffix=name), text)
        return found


@dataclass(frozen=True, slots=True)
class DescribedMember:
    """Member of a described cluster.

    Attributes:
        id: its zone and its id.
        limit: number of items that it offers to hold.
        exiting: True if it is leaving.
    """

    id: MemberId
    limit: int
    exiting: bool = False


@dataclass(frozen=True, slots=True)
class DescribedItem:
    """Item of a described cluster.

    Attributes:
        name: its name.
        replication: number of members that it should have.
        holders: its members, the primary first.
    """

    name: str
    replication: int
    holders: tuple[MemberId, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Members of a cluster in the order in which they joined, and its items by name.

    Raises:
        ValidationError: a name is used twice, or an item is assigned to an unknown member, or
            twice to the same one.
    """

    members: tuple[DescribedMember, ...]
    items: tuple[DescribedItem, ...]

    def __post_init__(self) -> None:
        members = [member.id for member in self.members]
        _check_unique("member", map(str, members))
        _check_unique("journal", (item.name for item in self.items))
        known = set(members)
        for item in self.items:
            _check_unique(f"{item.name}: assignment to", map(str, item.holders))
            for holder in item.holders:
                if holder not in known:
                    raise ValidationError(
                        f"{item.name} is assigned to {holder}, which is no member"
                    )


def describe(
    keyspace: ItemKeySpace[Any, Any, Any], allocation: Allocation[Any, Any, Any]
) -> ClusterDescription:
    """Return the description of a live cluster.

    Args:
        keyspace: its mirror. Assignments without their item or member are left out: they are
            about to be removed.
        allocation: rules for its values.
    """
    entries = sorted(keyspace.members(), key=lambda m: (m.create_revision, m.key))
    members = tuple(
        DescribedMember(
            MemberId(m.zone, m.suffix),
            allocation.item_limit(m.value),
            allocation.is_exiting(m.value),
        )
        for m in entries
    )
    known = {member.id for member in members}
    items = []
    for item in keyspace.items():
        slots = sorted(keyspace.assignments(item.id), key=lambda a: a.slot)
        holders = dict.fromkeys(MemberId(a.zone, a.suffix) for a in slots)
        items.append(
            DescribedItem(
                item.id,
                allocation.desired_replication(item.value),
                tuple(holder for holder in holders if holder in known),
            )
        )
    return ClusterDescription(members, tuple(items))


# ------------------------------------------------------------------- YAML


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class _Member(_Strict):
    zone: str
    id: str
    limit: Annotated[int, Field(ge=0, le=JOURNAL_LIMIT_MOST)]
    exiting: bool = False


class _Journal(_Strict):
    name: str
    replication: Annotated[int, Field(ge=0)]
    assignments: list[str] = []


class _Cluster(_Strict):
    members: list[_Member]
    journals: list[_Journal] = []


def parse_description(text: str | bytes) -> ClusterDescription:
    """Return the cluster that a YAML document describes.

    Raises:
        ValidationError: the document is malformed; the text names the place.
    """
    try:
        cluster = _Cluster.model_validate(yaml.load(text, Loader=_Loader))  # noqa: S506 - is safe
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValidationError(f"the description is not YAML: {problem_of(error)}") from None
    except PydanticValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"]) or "it"
        raise ValidationError(f"the description is malformed: {place}: {problem['msg']}") from None
    try:
        return ClusterDescription(
            tuple(
                DescribedMember(_member_id(each), each.limit, each.exiting)
                for each in cluster.members
            ),
            tuple(_item(each) for each in cluster.journals),
        )
    except GazetteError as error:
        raise ValidationError(f"the description is malformed: {error}") from None


def dump_description(description: ClusterDescription) -> str:
    """Return a description as YAML, which :func:`parse_description` reads."""
    members = [
        {"zone": each.id.zone, "id": each.id.id, "limit": each.limit}
        | ({"exiting": True} if each.exiting else {})
        for each in description.members
    ]
    journals = [
        {
            "name": each.name,
            "replication": each.replication,
            "assignments": [_text(holder) for holder in each.holders],
        }
        for each in description.items
    ]
    text: str = yaml.dump(
        {"members": members, "journals": journals},
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=1 << 20,
    )
    return text


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _member_id(member: _Member) -> MemberId:
    return MemberId.parse(f"{member.zone}#{member.id}")


def _item(journal: _Journal) -> DescribedItem:
    validate_journal(journal.name, journal.name)
    holders = tuple(MemberId.parse(text) for text in journal.assignments)
    return DescribedItem(journal.name, journal.replication, holders)


def _text(member: MemberId) -> str:
    """Return the name of a member in YAML, which tells the zone from the id."""
    return str(member) if "/" not in member.zone else f"{member.zone}#{member.id}"


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValidationError(f"{what} {name} is there twice")
        seen.add(name)
