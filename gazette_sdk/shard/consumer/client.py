"""Client of the shard service: for ``gazctl``, for tests, and for forwarded calls.

``apply_in_batches`` and ``verify_references`` are the steps of applying shards that a consumer
process leaves to its clients.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.contexts import AsyncClosable
from gazette_sdk.errors import (
    ConfigurationError,
    FramingError,
    ShardStatusError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.framing.base import framing_for
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Authorizer, RequestedClaims, claims_for
from gazette_sdk.protocol.labels import CONTENT_TYPE, RECOVERY_LOG, label_set, value_of
from gazette_sdk.protocol.names import may_send_token, strip_meta
from gazette_sdk.protocol.rules import (
    SCALE_RPC,
    SHARD_RPCS_BY_NAME,
    SHARDS_PAGE_RPC,
    STATE_RPC,
    Rpc,
)
from gazette_sdk.protocol.shard_spec import recovery_log, validate_shard_rpc
from gazette_sdk.server.authorization import PROXY_HEADER_METADATA
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.grpc import GrpcWire
from gazette_sdk.transport.listing import list_journals
from gazette_sdk.transport.wire import (
    CONNECT_TIMEOUT_S,
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    SERVICE,
    Destination,
    Peer,
    Tls,
    WireOptions,
    where,
)

_LISTED_MAX = 100
"""Names in the selector of one listing of journals."""


class ShardClient(AsyncClosable):
    """Client of the consumer processes of one application.

    Args:
        address: endpoint URL of a process.
        authorizer: signs a token for each call; None for none.
        tls: certificates, for ``https``.
        connect_timeout_s: time that a call waits for a process to be reachable.
        call_timeout_s: time limit of a call; 0 for none. The process has it, too.

    Raises:
        ValidationError: the address is not an endpoint URL.
    """

    def __init__(
        self,
        address: str,
        *,
        authorizer: Authorizer | None = None,
        tls: Tls | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        call_timeout_s: float = 0.0,
    ) -> None:
        self._address = address
        self._authorizer = authorizer
        self._wire = GrpcWire(
            WireOptions(
                address=address,
                tls=tls or Tls(),
                max_receive_bytes=MAX_RECEIVE_BYTES,
                reconnect_backoff_max_s=RECONNECT_BACKOFF_MAX_S,
                connect_timeout_s=connect_timeout_s,
                read_chunk_bytes=None,
                call_timeout_s=call_timeout_s,
            )
        )

    async def stat(self, request: cpb.StatRequest, peer: Peer = SERVICE) -> cpb.StatResponse:
        """Ask for the offsets of a shard; any status is an answer.

        Args:
            request: it may name offsets to wait for.
            peer: the process to ask, by default the one at the client's address.

        Raises:
            GazetteError: there is no answer.
            ValidationError: the answer is malformed.
        """
        response: cpb.StatResponse = await self._call("Stat", request, peer)
        return response

    async def list(
        self, selector: pb.LabelSelector | None = None, *, with_processes: bool = False
    ) -> cpb.ListResponse:
        """Return the shards that a selector matches, by default all.

        Args:
            selector: labels of shards.
            with_processes: return the application and its processes, too, where members are of
                this SDK.

        Raises:
            ShardStatusError: the status is not OK.
            GazetteError: there is no answer, or it is malformed.
        """
        response: cpb.ListResponse = await self._call(
            "List", cpb.ListRequest(selector=selector, with_processes=with_processes)
        )
        _check_status(response.status)
        return response

    async def apply(self, request: cpb.ApplyRequest) -> cpb.ApplyResponse:
        """Create, change and delete shards, all in one transaction.

        Raises:
            ShardStatusError: the status is not OK.
            GazetteError: there is no answer, or it is malformed.
        """
        validate_shard_rpc(request)
        response: cpb.ApplyResponse = await self._call("Apply", request)
        _check_status(response.status)
        return response

    async def get_hints(self, shard: str) -> cpb.GetHintsResponse:
        """Return the hints of a shard.

        Raises:
            ShardStatusError: the status is not OK.
            GazetteError: there is no answer, or it is malformed.
        """
        response: cpb.GetHintsResponse = await self._call(
            "GetHints", cpb.GetHintsRequest(shard=shard)
        )
        _check_status(response.status, shard)
        return response

    async def state(self, request: cpb.StateRequest) -> cpb.StateResponse:
        """Return a part of a shard's state, as its primary has committed it.

        Raises:
            CallError: the shard or its primary is not there, or cannot show its state; the code is
                UNIMPLEMENTED for processes that have no such call.
        """
        response: cpb.StateResponse = await self.call(STATE_RPC, request, claims_for(request))
        return response

    async def unassign(self, request: cpb.UnassignRequest) -> cpb.UnassignResponse:
        """Remove assignments of shards.

        Raises:
            ShardStatusError: the status is not OK.
            GazetteError: there is no answer, or it is malformed.
        """
        validate_shard_rpc(request)
        response: cpb.UnassignResponse = await self._call("Unassign", request)
        _check_status(response.status)
        return response

    async def page(self, request: clpb.ShardsPageRequest) -> clpb.ShardsPageResponse:
        """Return a page of shards, with their lag.

        Raises:
            CallError: the request is malformed; the code is UNIMPLEMENTED for processes that have
                no such call.
        """
        response: clpb.ShardsPageResponse = await self.call(
            SHARDS_PAGE_RPC, request, claims_for(request)
        )
        return response

    async def scale(self) -> clpb.ScaleResponse:
        """Return how many processes the shards need.

        Raises:
            CallError: as :meth:`page`.
        """
        request = clpb.ScaleRequest()
        response: clpb.ScaleResponse = await self.call(SCALE_RPC, request, claims_for(request))
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._wire.aclose()

    async def _call(self, name: str, request: Message, peer: Peer = SERVICE) -> Any:
        rpc = SHARD_RPCS_BY_NAME[name]
        response = await self.call(rpc, request, claims_for(request), peer)
        if response.status == cpb.OK:
            validate_shard_rpc(response)
        return response

    async def call(
        self,
        rpc: Rpc,
        request: Message,
        wanted: RequestedClaims,
        peer: Peer = SERVICE,
        *,
        proxy_header: str | None = None,
    ) -> Any:
        """Call a method of the shard service, or of the application's own.

        Args:
            rpc: the method, of one request and one response.
            request: the request.
            wanted: claims of the token.
            peer: the process to ask, by default the one at the client's address.
            proxy_header: header of the resolution, as JSON, if the call is forwarded.

        Returns:
            The response.

        Raises:
            GazetteError: there is no answer.
        """
        metadata = () if proxy_header is None else ((PROXY_HEADER_METADATA, proxy_header),)
        token = self.authorization(wanted, peer)
        to = Destination(rpc, None, peer, self._address, token, metadata)
        try:
            return await self._wire.call(to, request)
        except UnavailableError as error:
            if peer != SERVICE:
                raise
            raise UnavailableError(
                f"{error}; check that a process of the application runs at {self._address}, or set "
                "CONSUMER_ADDRESS to the address of one"
            ) from error

    def authorization(self, wanted: RequestedClaims, peer: Peer) -> str | None:
        """Return a token that is good for just one call; None where none is needed.

        Args:
            wanted: its claims.
            peer: the process that it is sent to.

        Raises:
            ConfigurationError: it would be readable on the network, and not at our own address.
        """
        if self._authorizer is None:
            return None
        self._check_secrecy(peer)
        return self._authorizer.header(
            wanted.capability, wanted.selector, wanted.ttl_s, time.time()
        )

    def _check_secrecy(self, peer: Peer) -> None:
        """Raise a ConfigurationError if a token would be readable on the way to a process."""
        if peer != SERVICE and not may_send_token(self._address, peer.endpoint):
            raise ConfigurationError(
                f"the token is not sent to {where(peer, self._address)}: it has no TLS, while "
                f"{self._address} has; serve TLS on that process"
            )


def _check_status(status: int, shard: str = "") -> None:
    if status != cpb.OK:
        raise ShardStatusError(status, shard=shard)


# ---------------------------------------------------------------- applying


async def apply_in_batches(
    client: ShardClient, request: cpb.ApplyRequest, size: int = 0
) -> AsyncGenerator[tuple[cpb.ApplyRequest, cpb.ApplyResponse]]:
    """Apply changes in transactions of bounded size, and yield each with its answer.

    Those before a failed one stay applied.

    Args:
        client: the client.
        request: the changes.
        size: changes in each transaction; 0 for all in one.

    Raises:
        ShardStatusError: a transaction failed.
        GazetteError: there is no answer, or it is malformed.
    """
    size = size or max(len(request.changes), 1)
    for begin in range(0, len(request.changes), size):
        batch = cpb.ApplyRequest(
            changes=request.changes[begin : begin + size], extension=request.extension
        )
        yield batch, await client.apply(batch)


async def verify_references(transport: Transport, request: cpb.ApplyRequest) -> None:
    """Check that the journals of shards to apply exist and are of the right kinds.

    Sources have the content type of a framing of messages, recovery logs that of recovery logs.

    Args:
        transport: how to reach brokers.
        request: the changes.

    Raises:
        ValidationError: a journal does not exist, or is of another kind.
        GazetteError: brokers could not be asked.
    """
    specs = [change.upsert for change in request.changes if change.HasField("upsert")]
    named = {strip_meta(source.journal) for spec in specs for source in spec.sources}
    named |= {log for spec in specs if (log := recovery_log(spec))}
    content_types = await _content_types(transport, sorted(named))
    for spec in specs:
        for source in spec.sources:
            _check_source(spec.id, strip_meta(source.journal), content_types)
        if log := recovery_log(spec):
            found = _content_type(spec.id, log, content_types)
            if found != RECOVERY_LOG:
                raise ValidationError(
                    f"expected {log} to have content-type {RECOVERY_LOG} but was "
                    f"{found!r}; label the journal",
                    kind="no_recovery_log",
                    path=f"Shard[{spec.id}]",
                )


async def _content_types(transport: Transport, names: Sequence[str]) -> dict[str, str]:
    """Return the content types of those journals that exist."""
    found: dict[str, str] = {}
    for begin in range(0, len(names), _LISTED_MAX):
        batch = names[begin : begin + _LISTED_MAX]
        selector = pb.LabelSelector(include=label_set(("name", name) for name in batch))
        listing = await list_journals(transport, selector)
        for journal in listing.journals:
            found[journal.spec.name] = value_of(journal.spec.labels, CONTENT_TYPE)
    return found


def _content_type(shard: str, journal: str, content_types: dict[str, str]) -> str:
    found = content_types.get(journal)
    if found is None:
        raise ValidationError(
            f"named journal does not exist ({journal}); create it first",
            kind="journal_not_found",
            path=f"Shard[{shard}]",
        )
    return found


def _check_source(shard: str, journal: str, content_types: dict[str, str]) -> None:
    content_type = _content_type(shard, journal, content_types)
    try:
        framing_for(content_type)
    except FramingError as error:
        raise ValidationError(
            f"message framing: unrecognized content-type ({content_type}); label the journal with "
            "that of its messages",
            kind="no_framing",
            path=f"Shard[{shard}].Sources[{journal}]",
        ) from error
