"""From a message to the journal it belongs to (message section 9).

A mapping is any callable from a message to the name of a journal. Those made here choose among
the journals that match a label selector, which a publisher watches: new partitions are used as
soon as they are listed. Keys are hashed as other implementations hash them, so that the same
key is written to the same partition from everywhere::

    by_key = mapping.modulo("topic=orders", key=attrgetter("customer"))

A key is a str (its UTF-8 bytes), bytes (as they are), or an int (its decimal text).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, TypeAlias

import numpy as np

from gazette_sdk.errors import MappingError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.protocol.selectors import parse_selector

__all__ = [
    "Direct",
    "Key",
    "Mapping",
    "Partitions",
    "SelectorMapping",
    "direct",
    "fnv1a32",
    "key_bytes",
    "modulo",
    "random",
    "rendezvous",
]

Key: TypeAlias = str | bytes | int
"""What a key function returns."""

Mapping: TypeAlias = Callable[[Any], str]
"""From a message to the name of a journal."""

_HASHES_CACHED = 1 << 14
"""Hashes of so many recent keys are kept: hashing a byte costs as much as finding a key."""


# --------------------------------------------------------------------- hash


def fnv1a32(content: bytes) -> int:
    """The 32-bit FNV-1a hash of ``content``."""
    state = 2166136261
    for byte in content:
        state = (state ^ byte) * 16777619 & 0xFFFF_FFFF
    return state


def key_bytes(key: Key) -> bytes:
    """The bytes that are hashed for a key.

    Raises:
        MappingError: the key is of another type.
    """
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key).encode()
    raise MappingError(
        f"a mapping key of type {type(key).__name__} has no agreed bytes; let the key function"
        " return str, bytes or int"
    )


@functools.lru_cache(maxsize=_HASHES_CACHED, typed=True)
def _cached_hash(key: Key) -> int:
    return fnv1a32(key_bytes(key))


def _hash(key: Key) -> int:
    try:
        return _cached_hash(key)
    except TypeError:  # not hashable, as a bytearray is not
        return fnv1a32(key_bytes(key))


# --------------------------------------------------------------- partitions


class Partitions:
    """The journals that match a selector, as of one listing.

    Args:
        specs: their specs, in any order.

    Attributes:
        names: their names, in ascending byte order: mappings depend on it.
        content_types: each one's ``content-type`` label, ``""`` where it has none.
    """

    def __init__(self, specs: Iterable[pb.JournalSpec]) -> None:
        found = sorted(specs, key=lambda spec: spec.name.encode())
        self.names = tuple(spec.name for spec in found)
        self.content_types = {spec.name: value_of(spec.labels, CONTENT_TYPE) for spec in found}

    @functools.cached_property
    def hashes(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """Hashes of the names."""
        return np.array([fnv1a32(name.encode()) for name in self.names], dtype=np.uint32)


# ----------------------------------------------------------------- mappings


class SelectorMapping:
    """A mapping over the journals that match a label selector.

    A publisher watches the selector and asks :meth:`pick`. To use one on its own, list the
    journals first: ``by_key.pick(message, Partitions(specs))``.

    Args:
        selector: label selector, as ``"topic=orders"``.
        choose: from a message and the journals, of which there is at least one, to an index.

    Raises:
        ValidationError: the selector is malformed.
    """

    __slots__ = ("_choose", "label_selector", "selector")

    def __init__(self, selector: str, choose: Callable[[Any, Partitions], int]) -> None:
        self.selector = selector
        self.label_selector = parse_selector(selector)
        self._choose = choose

    def pick(self, message: Any, partitions: Partitions) -> str:
        """The journal of ``message``.

        Raises:
            MappingError: no journal matches the selector.
        """
        names = partitions.names
        if not names:
            raise MappingError(
                f"no journal matches the selector {self.selector!r} (empty ListResponse); create"
                " one with `gazctl journals apply`, or check its labels"
            )
        return names[self._choose(message, partitions)]


class Direct:
    """Maps every message to one journal.

    Raises:
        ValidationError: ``journal`` is no valid name.
    """

    def __init__(self, journal: str) -> None:
        validate_journal(journal)
        self.journal = journal

    def __call__(self, message: Any) -> str:
        """The journal, whatever the message."""
        del message
        return self.journal


def modulo(selector: str, *, key: Callable[[Any], Key]) -> SelectorMapping:
    """The hash of the key modulo the number of journals. Adding journals moves most keys.

    Args:
        selector: label selector of the journals.
        key: from a message to its key.
    """

    def choose(message: Any, partitions: Partitions) -> int:
        return _hash(key(message)) % len(partitions.names)

    return SelectorMapping(selector, choose)


def rendezvous(selector: str, *, key: Callable[[Any], Key]) -> SelectorMapping:
    """The journal whose name's hash goes best with the key's. Adding one of N moves 1/N of keys.

    Args:
        selector: label selector of the journals.
        key: from a message to its key.
    """

    def choose(message: Any, partitions: Partitions) -> int:
        # The first of equal maxima, so that ties go to the lowest index.
        return int((partitions.hashes ^ np.uint32(_hash(key(message)))).argmax())

    return SelectorMapping(selector, choose)


def random(selector: str, *, source: Random | None = None) -> SelectorMapping:
    """Any journal, each as likely as the other.

    Args:
        selector: label selector of the journals.
        source: of randomness; its own, unless given.
    """
    drawn_from = source or Random()  # noqa: S311 - spreads load, guards nothing
    return SelectorMapping(
        selector, lambda _, partitions: drawn_from.randrange(len(partitions.names))
    )


def direct(journal: str) -> Direct:
    """Always this journal.

    Args:
        journal: its name.
    """
    return Direct(journal)
