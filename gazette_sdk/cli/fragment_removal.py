"""Removal of fragments from their stores, with the operator's own credentials."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.errors import FragmentNotFoundError, StoreError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, length_of

__all__ = ["remove_fragments"]

_log = logging.getLogger(__name__)

REMOVALS_MAX = 32
"""Concurrent removals of one journal's fragments."""


async def remove_fragments(
    stores: StoreRegistry,
    fragments: Iterable[pb.Fragment],
    removed: Callable[[pb.Fragment], None],
    *,
    dry_run: bool,
    failed: Callable[[pb.Fragment, Exception], None] | None = None,
) -> None:
    """Remove stored fragments. One that is not there any more counts as removed.

    Args:
        stores: the stores.
        fragments: fragments, each of which names its store.
        removed: called with each fragment that was, or would be, removed.
        dry_run: True if nothing is removed.
        failed: called with each fragment that could not be removed, and the error; by default the
            first error ends the removal.

    Raises:
        ExceptionGroup: of the first error, without ``failed``.
    """

    async def remove(fragment: pb.Fragment) -> None:
        path = content_path(fragment)
        fields = {"journal": fragment.journal, "path": path, "mod": fragment.mod_time}
        _log.info("pruning fragment", extra={**fields, "size": length_of(fragment)})
        if not dry_run:
            try:
                store = await stores.aget(fragment.backing_store)
                await asyncio.to_thread(store.remove, path)
            except FragmentNotFoundError:
                _log.info("the fragment has already been removed", extra=fields)
            except (StoreError, OSError) as error:
                if failed is None:
                    raise
                failed(fragment, error)
                return
        removed(fragment)

    await for_each(fragments, remove, REMOVALS_MAX)
