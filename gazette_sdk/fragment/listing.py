"""Listing of a journal's stored fragments (broker section 11)."""

from __future__ import annotations

import logging
from typing import Final

from gazette_sdk.errors import ValidationError
from gazette_sdk.fragment.stores.base import Store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import parse_content_path

__all__ = ["list_fragments"]

_log = logging.getLogger(__name__)

_NAMED_SKIPS: Final = 3
"""Number of foreign objects that a listing's log message names."""


def list_fragments(store: Store, journal: str) -> list[pb.Fragment]:
    """Return all fragments of a journal in one store.

    Objects that are no fragments are skipped, and logged. It blocks: call it in a thread.

    Returns:
        Fragments with ``mod_time`` and ``backing_store``, in the order of their offsets, by which
        cover sets are made in linear time.

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
    found.sort(key=lambda fragment: (fragment.begin, fragment.end))
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
