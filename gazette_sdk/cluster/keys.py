"""Names of the keys of a cluster: items, members and assignments (allocator section 1).

::

    ROOT/items/ID
    ROOT/members/ZONE#SUFFIX
    ROOT/assign/ID#ZONE#SUFFIX#SLOT

No part holds a byte up to ``#``, so the order of keys is that of the tuples of their parts.
"""

from __future__ import annotations

import re

_SLOT = re.compile(r"[+-]?[0-9]+")


def items_prefix(root: str) -> bytes:
    """Return the prefix of the keys of all items."""
    return f"{root}/items/".encode()


def members_prefix(root: str) -> bytes:
    """Return the prefix of the keys of all members."""
    return f"{root}/members/".encode()


def assignments_prefix(root: str) -> bytes:
    """Return the prefix of the keys of all assignments."""
    return f"{root}/assign/".encode()


def item_key(root: str, item: str) -> bytes:
    """Return the key of an item."""
    return items_prefix(root) + _part(item)


def member_key(root: str, zone: str, suffix: str) -> bytes:
    """Return the key of a member."""
    return members_prefix(root) + _part(zone) + b"#" + _part(suffix)


def item_assignments_prefix(root: str, item: str) -> bytes:
    """Return the prefix of the keys of all assignments of one item, with its separator."""
    return assignments_prefix(root) + _part(item) + b"#"


def assignment_key(root: str, item: str, zone: str, suffix: str, slot: int) -> bytes:
    """Return the key of an assignment."""
    prefix = item_assignments_prefix(root, item)
    return prefix + b"%s#%s#%d" % (_part(zone), _part(suffix), slot)


def parse_item(section: str) -> str:
    """Return the id of an item, from its key after ``ROOT/items/``, or raise ValueError."""
    (item,) = _split(section, 1)
    return item


def parse_member(section: str) -> tuple[str, str]:
    """Return zone and suffix of a member, from its key after ``ROOT/members/``, or raise."""
    zone, suffix = _split(section, 2)
    return zone, suffix


def parse_assignment(section: str) -> tuple[str, str, str, int]:
    """Return item, zone, suffix and slot, from a key after ``ROOT/assign/``, or raise."""
    item, zone, suffix, slot = _split(section, 4)
    if not _SLOT.fullmatch(slot):
        raise ValueError(f"the slot {slot!r} is no number")
    return item, zone, suffix, int(slot)


def _split(section: str, count: int) -> list[str]:
    parts = section.split("#")
    if len(parts) != count:
        raise ValueError(f"expected {count} parts between '#', found {len(parts)}")
    return parts


def _part(text: str) -> bytes:
    """Return a part of a key as bytes. A byte that would break the order is a programming error."""
    part = text.encode()
    if part and min(part) <= 0x23:
        raise ValueError(f"{text!r} can not be a part of a key: it holds a byte up to '#'")
    return part
