"""Which fragments of a journal are stored (broker section 11)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from gazette_sdk.errors import ValidationError
from gazette_sdk.fragment.cover import CoverSet
from gazette_sdk.fragment.stores.base import Store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import parse_content_path

__all__ = ["list_fragments", "walk_stores"]

_log = logging.getLogger(__name__)

_NAMED_SKIPS: Final = 3
"""How many foreign objects a listing's log line names."""


def walk_stores(stores: Iterable[Store], journal: str) -> CoverSet:
    """The cover set of what all stores of a journal hold.

    Args:
        stores: in the order of the journal's spec; of one span the later store's counts.
        journal: name of the journal, without metadata.

    Raises:
        StoreError: one of the stores failed. A part of the truth is not given: it could hide
            offsets.
    """
    cover = CoverSet()
    for store in stores:
        for fragment in list_fragments(store, journal):
            cover.add(fragment)
    return cover


def list_fragments(store: Store, journal: str) -> list[pb.Fragment]:
    """All fragments of a journal in one store.

    Objects which are no fragments are passed over, and logged. Blocks: call it in a thread.

    Returns:
        Fragments with ``mod_time`` and ``backing_store``, in no order.

    Raises:
        StoreError: the store failed.
    """
    found: list[pb.Fragment] = []
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
        found.append(fragment)
    if skipped:
        named = ", ".join(skipped[:_NAMED_SKIPS])
        more = ", …" if len(skipped) > _NAMED_SKIPS else ""
        _log.warning(
            "store %s: journal %s: passed over %d objects that are no fragments: %s%s",
            store.url,
            journal,
            len(skipped),
            named,
            more,
        )
    return found
