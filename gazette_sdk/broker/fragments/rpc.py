"""Answers of ListFragments and FragmentStoreHealth to resolved calls (broker section 14)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.read import sign_get
from gazette_sdk.errors import GazetteError, UnauthenticatedError, ValidationError
from gazette_sdk.fragment.health import StoreHealth
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.durations import SECOND_NS, format_duration, to_ns, to_seconds
from gazette_sdk.protocol.labels import matches_journal, rewrite_prefix

PAGE_LIMIT_DEFAULT: Final = 1000
"""Fragments of a page if the request has no limit."""

SIGNATURE_TTL_MAX_S: Final = 7 * 24 * 3600
"""Longest validity of a signed URL: object stores sign for no longer either."""

DELETE_PROBE_TIMEOUT_S: Final = 60.0
"""Bound of the probe of a store's permission to delete."""


async def list_page(
    request: pb.FragmentsRequest, index: Index, stores: StoreRegistry
) -> pb.FragmentsResponse:
    """Return a page of a journal's fragments, with signed URLs if they are requested.

    It waits for the first listing of the journal's stores, unless only un-stored ones are wanted,
    or what is known now. It lists them again first if that is requested.

    Args:
        request: a valid one.
        index: of the replica.
        stores: of the process.

    Returns:
        the response, without its header.

    Raises:
        ValidationError: the URLs would be valid for too long.
        StoreError: a URL cannot be signed.
    """
    if to_ns(request.signatureTTL) > SIGNATURE_TTL_MAX_S * SECOND_NS:
        raise ValidationError(
            f"invalid signatureTTL ({format_duration(to_ns(request.signatureTTL))}; expected <= "
            f"{format_duration(SIGNATURE_TTL_MAX_S * SECOND_NS)})",
            kind="invalid_signature_ttl",
        )
    if request.list_again:
        await index.list_again()
    if not (request.unstored_only or request.do_not_wait):
        await index.first_refresh.wait()
    page = index.page(
        begin_mod_time=request.begin_mod_time,
        end_mod_time=request.end_mod_time,
        token=request.next_page_token,
        limit=request.page_limit or PAGE_LIMIT_DEFAULT,
        unstored_only=request.unstored_only,
        torn_only=request.torn_only,
    )
    response = pb.FragmentsResponse(status=pb.OK, next_page_token=page.next_page_token)
    for fragment in page.fragments:
        response.fragments.add(spec=fragment)
    if request.HasField("signatureTTL"):
        ttl_s = to_seconds(request.signatureTTL)
        await asyncio.to_thread(_sign_all, stores, response, ttl_s)
    return response


async def check_store(
    request: pb.FragmentStoreHealthRequest,
    stores: StoreRegistry,
    claims: Claims,
    specs: Iterable[pb.JournalSpec],
) -> pb.FragmentStoreHealthResponse:
    """Return the health of a store and, if requested, of the permission to delete from it.

    The broker connects to the address in a store's URL. So a caller may have those stores checked
    that are named by journals its claims match. A caller who could name the store in a new
    journal of any name may have every store checked, but the broker remembers nothing of it.

    Args:
        request: a valid one.
        stores: of the process.
        claims: of the caller.
        specs: all journals.

    Returns:
        the response, without its header.

    Raises:
        UnauthenticatedError: the claims do not allow the check.
    """
    url = request.fragment_store
    if _is_named(url, claims, specs):
        error = await _check(request, stores.health(url))
    elif _is_unrestricted(claims):
        async with stores.temporary_health(url) as health:
            error = await _check(request, health)
    else:
        raise UnauthenticatedError(
            f"the token does not allow to check the fragment store {url}: no journal that it "
            "matches has this store; create the journal first, or use a token with READ and APPLY "
            "for all journals"
        )
    if error is None:
        return pb.FragmentStoreHealthResponse(status=pb.OK)
    return pb.FragmentStoreHealthResponse(
        status=pb.FRAGMENT_STORE_UNHEALTHY, store_health_error=error
    )


async def _check(request: pb.FragmentStoreHealthRequest, health: StoreHealth) -> str | None:
    """Return the reason why a store is not healthy; None if it is."""
    await health.wait_first()
    if health.error is not None or not request.check_delete:
        return health.error
    try:
        async with asyncio.timeout(DELETE_PROBE_TIMEOUT_S):
            await health.check_delete(request.check_delete_prefix)
    except TimeoutError:
        return f"the delete probe was not done within {DELETE_PROBE_TIMEOUT_S:.0f} s"
    except GazetteError as failure:
        return str(failure)
    return None


def _is_named(url: str, claims: Claims, specs: Iterable[pb.JournalSpec]) -> bool:
    """Return True if a journal that the claims match has the store."""
    selector = rewrite_prefix(claims.selector)
    return any(url in spec.fragment.stores and matches_journal(selector, spec) for spec in specs)


def _is_unrestricted(claims: Claims) -> bool:
    """Return True if the claims allow to create any journal."""
    selector = claims.selector
    is_scoped = bool(selector.include.labels or selector.exclude.labels)
    return bool(claims.capability & Capability.APPLY) and not is_scoped


def _sign_all(stores: StoreRegistry, response: pb.FragmentsResponse, ttl_s: float) -> None:
    for entry in response.fragments:
        if entry.spec.backing_store:
            entry.signed_url = sign_get(stores, entry.spec, ttl_s)
