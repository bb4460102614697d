"""Listing of a journal's stored fragments (broker section 11).

A store may show an object of a fragment's name that does not have its content: one that a crash of
the store cut off. Its length contradicts its name. It counts as no content, but its offsets were
given: a journal never begins before them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from gazette_sdk.errors import ValidationError
from gazette_sdk.fragment.stores.base import Store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_name, length_of, parse_content_path

__all__ = ["StoredFragment", "list_fragments", "list_stored"]

_log = logging.getLogger(__name__)

_NAMED_SKIPS: Final = 3
"""Number of foreign objects that a listing's log message names."""


class StoredFragment(NamedTuple):
    """Object of a listing that has a fragment's name.

    Attributes:
        fragment: its name, with ``mod_time`` and ``backing_store``.
        length: number of stored bytes; -1 if the listing does not have it.
    """

    fragment: pb.Fragment
    length: int

    @property
    def is_torn(self) -> bool:
        """True if its length contradicts its name."""
        return contradicts(self.fragment, self.length)


def contradicts(fragment: pb.Fragment, length: int) -> bool:
    """Return True if an object of this length cannot have a fragment's content.

    Args:
        fragment: its name.
        length: number of stored bytes; -1 if it is not known.
    """
    if length < 0:
        return False
    if fragment.compression_codec == pb.NONE:
        return length != length_of(fragment)
    return length == 0 < length_of(fragment)


def list_fragments(store: Store, journal: str) -> list[pb.Fragment]:
    """Return all fragments of a journal in one store, without torn ones.

    Objects that are no fragments are skipped, and logged. It blocks: call it in a thread.

    Returns:
        Fragments with ``mod_time`` and ``backing_store``, in the order of their offsets, by which
        cover sets are made in linear time.

    Raises:
        StoreError: the store failed.
    """
    return [stored.fragment for stored in list_stored(store, journal) if not stored.is_torn]


def list_stored(store: Store, journal: str) -> list[StoredFragment]:
    """Return all objects of a journal in one store that have names of fragments, also torn ones.

    See :func:`list_fragments`.
    """
    found: list[StoredFragment] = []
    skipped = []
    for stored in store.list(journal + "/"):
        if stored.path.endswith("/"):
            continue
        try:
            fragment = parse_content_path(journal, stored.path)
        except ValidationError as error:
            skipped.append(f"{stored.path!r} ({error})")
            continue
        fragment.mod_time = stored.mod_time
        fragment.backing_store = store.url
        found.append(StoredFragment(fragment, stored.length))
    found.sort(key=lambda stored: (stored.fragment.begin, stored.fragment.end))
    _warn_of_torn(store, journal, [each for each in found if each.is_torn])
    if skipped:
        named = ", ".join(skipped[:_NAMED_SKIPS])
        more = ", …" if len(skipped) > _NAMED_SKIPS else ""
        _log.warning(
            "store %s: journal %s: skipped %d objects that are no fragments: %s%s",
            store.url,
            journal,
            len(skipped),
            named,
            more,
        )
    return found


def _warn_of_torn(store: Store, journal: str, torn: Sequence[StoredFragment]) -> None:
    if not torn:
        return
    named = ", ".join(
        f"{content_name(fragment)} ({length} bytes)" for fragment, length in torn[:_NAMED_SKIPS]
    )
    _log.error(
        "store %s: journal %s: %d objects do not have the length that their names state, and are "
        "not counted as stored: %s%s; a broker that has the content in its spool directory stores "
        "it again, otherwise put a good copy in its place",
        store.url, journal, len(torn), named, ", …" if len(torn) > _NAMED_SKIPS else "",
    )  # fmt: skip
