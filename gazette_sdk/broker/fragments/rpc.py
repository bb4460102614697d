"""Answers of ListFragments and FragmentStoreHealth to resolved calls (broker section 14)."""

from __future__ import annotations

import asyncio
from typing import Final

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.read import sign_get
from gazette_sdk.errors import GazetteError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_seconds

__all__ = [
    "DELETE_PROBE_TIMEOUT_S",
    "PAGE_LIMIT_DEFAULT",
    "check_store",
    "list_page",
]

PAGE_LIMIT_DEFAULT: Final = 1000
"""Fragments of a page if the request has no limit."""

DELETE_PROBE_TIMEOUT_S: Final = 60.0
"""Bound of the probe of a store's permission to delete."""


async def list_page(
    request: pb.FragmentsRequest, index: Index, stores: StoreRegistry
) -> pb.FragmentsResponse:
    """Return a page of a journal's fragments, with signed URLs if they are requested.

    It waits for the first listing of the journal's stores.

    Args:
        request: a valid one.
        index: of the replica.
        stores: of the process.

    Returns:
        the response, without its header.

    Raises:
        StoreError: a URL cannot be signed.
    """
    await index.first_refresh.wait()
    page = index.page(
        begin_mod_time=request.begin_mod_time,
        end_mod_time=request.end_mod_time,
        token=request.next_page_token,
        limit=request.page_limit or PAGE_LIMIT_DEFAULT,
    )
    response = pb.FragmentsResponse(status=pb.OK, next_page_token=page.next_page_token)
    for fragment in page.fragments:
        response.fragments.add(spec=fragment)
    if request.HasField("signatureTTL"):
        ttl_s = to_seconds(request.signatureTTL)
        await asyncio.to_thread(_sign_all, stores, response, ttl_s)
    return response


async def check_store(
    request: pb.FragmentStoreHealthRequest, stores: StoreRegistry
) -> pb.FragmentStoreHealthResponse:
    """Return the health of a store and, if requested, of the permission to delete from it.

    Args:
        request: a valid one.
        stores: of the process.

    Returns:
        the response, without its header.
    """
    health = stores.health(request.fragment_store)
    await health.wait_first()
    error = health.error
    if error is None and request.check_delete:
        try:
            async with asyncio.timeout(DELETE_PROBE_TIMEOUT_S):
                await health.check_delete(request.check_delete_prefix)
        except TimeoutError:
            error = f"the delete probe was not done within {DELETE_PROBE_TIMEOUT_S:.0f} s"
        except GazetteError as failure:
            error = str(failure)
    if error is None:
        return pb.FragmentStoreHealthResponse(status=pb.OK)
    return pb.FragmentStoreHealthResponse(
        status=pb.FRAGMENT_STORE_UNHEALTHY, store_health_error=error
    )


def _sign_all(stores: StoreRegistry, response: pb.FragmentsResponse, ttl_s: float) -> None:
    for entry in response.fragments:
        if entry.spec.backing_store:
            entry.signed_url = sign_get(stores, entry.spec, ttl_s)
