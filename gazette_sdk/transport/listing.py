"""Listings, watches and changes of journals; their fragments; the health of stores.

Client section 8. Responses come with status OK from here; other statuses are raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Self

from gazette_sdk.contexts import AsyncClosable
from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ClosedError,
    ConfigurationError,
    DeadlineExceededError,
    GazetteError,
    JournalNotFoundError,
    UnavailableError,
    for_status,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import journal_selector, parse_selector
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.retries import Outage, Pause, pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ANYWHERE, Target

NO_ANSWER = (CallCancelledError, DeadlineExceededError, UnavailableError)
"""Errors of a call that no broker answered: none was reached, or it was too late, or stopped."""

LIST_AGAIN_TIMEOUT_S = 30.0
"""Longest wait for a broker that lists the stores again."""

logger = logging.getLogger(__name__)


async def list_journals(
    transport: Transport, selector: pb.LabelSelector | str = "", *, count_brokers: bool = False
) -> pb.ListResponse:
    """Return all journals that match a selector, as of one moment.

    Args:
        transport: how to reach them.
        selector: the selector, or its text (``topic=orders``); empty for every journal.
        count_brokers: ask for the number of brokers, too.

    Raises:
        StatusError: the broker answered another status than OK.
        CallError: the call failed.
    """
    if isinstance(selector, str):
        selector = parse_selector(selector)
    request = pb.ListRequest(selector=selector, count_brokers=count_brokers)
    async with aclosing(transport.list(request)) as responses:
        listing = await _read_snapshot(responses, is_watch=False)
    if listing is None:
        raise _broken("a listing ended without a message")
    return listing


def _broken(problem: str) -> CallError:
    """Return the error of a listing that breaks the protocol."""
    return CallError(
        f"{problem}: the peer is no Gazette broker, or a faulty one; check the address",
        code="INTERNAL",
    )


async def get_journal(transport: Transport, name: str) -> pb.ListResponse.Journal:
    """Return one journal by its name; metadata in the name is left out.

    Raises:
        JournalNotFoundError: there is no such journal.
        CallError: the call failed.
    """
    listing = await list_journals(transport, journal_selector(name))
    if not listing.journals:
        raise JournalNotFoundError("named journal does not exist", journal=strip_meta(name))
    return listing.journals[0]


async def apply_journals(transport: Transport, request: pb.ApplyRequest) -> pb.ApplyResponse:
    """Create, change and delete journals in one transaction.

    Raises:
        EtcdTransactionFailedError: a journal was changed by somebody else; nothing was applied.
        ValidationError: a specification is malformed.
        CallError: the call failed.
    """
    response = await transport.apply(request)
    if response.status != pb.OK:
        raise for_status(response.status)
    return response


async def apply_in_batches(
    transport: Transport, request: pb.ApplyRequest, size: int
) -> pb.ApplyResponse:
    """Apply many changes in transactions of ``size`` changes each, stopping at the first failure.

    Batches before a failed one stay applied.

    Args:
        transport: how to reach the cluster.
        request: the changes.
        size: changes per transaction; 0 for all in one (Etcd's own limit is 128 by default).

    Returns:
        The response of the last batch.
    """
    count = len(request.changes)
    size = size or max(count, 1)
    response = pb.ApplyResponse()
    for begin in range(0, max(count, 1), size):
        batch = pb.ApplyRequest(changes=request.changes[begin : begin + size])
        response = await apply_journals(transport, batch)
    return response


async def list_all_fragments(
    transport: Transport, request: pb.FragmentsRequest, target: Target = ANYWHERE
) -> pb.FragmentsResponse:
    """Return the fragments of a journal, of all pages.

    Returns:
        The first page's response, with the fragments of all of them and no further token.

    Raises:
        StatusError: the broker answered another status than OK.
        CallError: the call failed.
    """
    page = pb.FragmentsRequest()
    page.CopyFrom(request)
    first: pb.FragmentsResponse | None = None
    while True:
        response = await transport.list_fragments(page, target)
        if response.status != pb.OK:
            raise for_status(response.status, journal=request.journal)
        token = response.next_page_token
        if first is None:
            first = response
            first.next_page_token = 0
        else:
            first.fragments.extend(response.fragments)
        if token == 0:
            return first
        page.next_page_token = token


async def list_stores_again(transport: Transport, journal: pb.ListResponse.Journal) -> None:
    """Let all brokers of a journal list its stores, since fragments were removed from them.

    One that cannot be asked, or knows no such request, lists them some minutes later anyway.

    Args:
        transport: how to reach the cluster.
        journal: the journal, with its route.
    """

    async def ask(member: pb.ProcessSpec.ID) -> None:
        request = pb.FragmentsRequest(
            journal=journal.spec.name, do_not_proxy=True, list_again=True, page_limit=1
        )
        try:
            async with asyncio.timeout(LIST_AGAIN_TIMEOUT_S):
                await transport.list_fragments(request, Target(route=journal.route, member=member))
        except (GazetteError, TimeoutError) as error:
            logger.info(
                "%s/%s did not list the stores: %s",
                member.zone, member.suffix, error or "no answer in time",
            )  # fmt: skip

    await asyncio.gather(*map(ask, journal.route.members))


async def store_health(
    transport: Transport, store: str, delete_prefix: str | None = None
) -> pb.FragmentStoreHealthResponse:
    """Return the health of a fragment store as brokers see it.

    Args:
        transport: how to reach the cluster.
        store: the store's URL.
        delete_prefix: check, too, that objects below this prefix (which may be empty) can be
            deleted; ``None`` checks no deletion.

    Returns:
        A response of status OK or FRAGMENT_STORE_UNHEALTHY.

    Raises:
        StatusError: any other status.
        CallError: the call failed.
    """
    response = await transport.fragment_store_health(
        pb.FragmentStoreHealthRequest(
            fragment_store=store,
            check_delete=delete_prefix is not None,
            check_delete_prefix=delete_prefix or "",
        )
    )
    if response.status not in (pb.OK, pb.FRAGMENT_STORE_UNHEALTHY):
        raise for_status(response.status)
    return response


class WatchedList(AsyncClosable):
    """Journals that match a selector, kept up to date.

    Owns a task, which never gives up until it is closed::

        async with WatchedList(transport, "topic=orders") as watched:
            while True:
                use(watched.snapshot)
                await watched.changed()

    Routes within a snapshot can be old: brokers push when specifications change, and only then.

    Args:
        transport: how to reach the cluster.
        selector: the selector, or its text.
        pause: waits between attempts.

    Attributes:
        snapshot: the current listing; ``None`` before the first one.
        error: why the last attempt failed, until the next snapshot.
    """

    def __init__(
        self,
        transport: Transport,
        selector: pb.LabelSelector | str = "",
        *,
        pause: Pause = pause,
    ) -> None:
        self.snapshot: pb.ListResponse | None = None
        self.error: GazetteError | None = None
        self._transport = transport
        self._request = pb.ListRequest(
            selector=parse_selector(selector) if isinstance(selector, str) else selector,
            watch=True,
        )
        self._pause = pause
        self._signal = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Begin to watch. Twice is once."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="watched list of journals")

    async def changed(self) -> None:
        """Wait for a snapshot or a failure that came since the last such wait.

        Raises:
            GazetteError: the watch was interrupted; it continues by itself, and the snapshot
                stays readable.
        """
        await self._signal.wait()
        if self._task is None or not self._task.done():  # else the last signal stays
            self._signal.clear()
        if self.error is not None:
            raise self.error

    async def first_snapshot(self) -> pb.ListResponse:
        """Return the current snapshot; waits for the first one.

        Raises:
            GazetteError: the first attempt failed; the watch continues by itself.
        """
        while self.snapshot is None:
            await self.changed()
        return self.snapshot

    async def aclose(self) -> None:
        """Stop watching. The last snapshot stays readable."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _watch(self) -> None:
        attempt = 0
        outage = Outage(logger, "watch of journals")
        while True:
            try:
                async for snapshot in self._snapshots():
                    outage.ended()
                    self.snapshot, self.error = snapshot, None
                    self._request.watch_resume.CopyFrom(snapshot.header)
                    attempt = 0
                    self._signal.set()
            except (ClosedError, ConfigurationError) as error:
                self.error = error
                self._signal.set()
                return  # the transport will not carry any call any more
            except GazetteError as error:
                self.error = error
                self._signal.set()
                if attempt > 0:
                    outage.failed(error)
                await self._pause(attempt)
                attempt += 1
            else:
                attempt = 0
                await self._pause(attempt)

    async def _snapshots(self) -> AsyncIterator[pb.ListResponse]:
        """Yield snapshots of one call, until the server ends it."""
        resumed = pb.Header.Etcd()
        if self._request.HasField("watch_resume"):
            resumed.CopyFrom(self._request.watch_resume.etcd)
        async with aclosing(self._transport.list(self._request)) as responses:
            while (snapshot := await _read_snapshot(responses, is_watch=True)) is not None:
                found = snapshot.header.etcd
                # Revisions begin anew where a cluster was restored into another Etcd.
                if found.cluster_id == resumed.cluster_id and found.revision <= resumed.revision:
                    raise CallError(
                        f"a watch resumed at revision {resumed.revision} got a snapshot of "
                        f"revision {found.revision}",
                        code="INTERNAL",
                    )
                resumed.CopyFrom(found)
                yield snapshot


async def _read_snapshot(
    responses: AsyncIterator[pb.ListResponse], *, is_watch: bool
) -> pb.ListResponse | None:
    """Return the next snapshot: its first message, with the journals of those that follow.

    A snapshot ends with the stream or, where it is watched, with a message without journals.

    Returns:
        The snapshot; ``None`` when the stream had ended before.
    """
    snapshot = await anext(responses, None)
    if snapshot is None:
        return None
    if snapshot.status != pb.OK:
        raise for_status(snapshot.status)
    async for response in responses:
        if response.journals:
            snapshot.journals.extend(response.journals)
        elif is_watch:
            return snapshot
        else:
            raise _broken("a message of a listing has no journals")
    if is_watch:
        raise _broken("a watch ended in the middle of a snapshot")
    return snapshot
