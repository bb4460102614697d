"""Calls of other members of the cluster, on behalf of a caller.

Answers about a cluster as a whole (:mod:`gazette_sdk.protocol.cluster_pb2`) are put together from
those of its members. Each call carries the caller's token, which the called member verifies: a
process lends no rights of its own. Members are called at the same time, and each has the same time
limit. One that is down, or is of another implementation and has no such call, is no failure of the
whole: its answer is an error, for the caller to show.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import Message

from gazette_sdk.cluster.items import ProcessKeySpace
from gazette_sdk.errors import CallError, DeadlineExceededError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import may_send_token
from gazette_sdk.protocol.rules import Rpc
from gazette_sdk.transport.grpc import GrpcWire
from gazette_sdk.transport.wire import (
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    Destination,
    Peer,
    Tls,
    WireOptions,
)

TIME_LIMIT_S = 1.0
"""Time limit of a call of one member, its connection included. People wait for the answer."""


class Caller(Protocol):
    """Call on whose behalf members are called."""

    @property
    def authorization(self) -> str | None:
        """Value of its ``authorization`` metadata; None without one."""


class MemberAnswer(NamedTuple):
    """Answer of one member.

    Attributes:
        member: the member.
        response: its response; None if there is none.
        error: why there is none.
    """

    member: pb.ProcessSpec
    response: Message | None = None
    error: GazetteError | None = None

    @property
    def has_no_such_call(self) -> bool:
        """True if the member is of another implementation, or an older version."""
        return isinstance(self.error, CallError) and self.error.code == "UNIMPLEMENTED"


class MemberCalls:
    """Calls of other members.

    Args:
        keyspace: mirror of Etcd, which has the endpoints of brokers, or of processes of a consumer.
        local_id: this process, which is not among the others.
        endpoint: endpoint of this process, at which callers' tokens are received.
        tls: certificates of connections to peers.
        time_limit_s: time limit of a call of one member.

    Attributes:
        time_limit_s: the same.
    """

    def __init__(
        self,
        keyspace: ProcessKeySpace[Any, Any, Any],
        local_id: pb.ProcessSpec.ID,
        *,
        endpoint: str,
        tls: Tls | None = None,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._endpoint = endpoint
        self.time_limit_s = time_limit_s
        self._wire = GrpcWire(
            WireOptions(
                address=endpoint,
                tls=tls or Tls(),
                max_receive_bytes=MAX_RECEIVE_BYTES,
                reconnect_backoff_max_s=RECONNECT_BACKOFF_MAX_S,
                connect_timeout_s=time_limit_s,
                read_chunk_bytes=None,
                call_timeout_s=0.0,
            )
        )

    def others(self) -> Sequence[pb.ProcessSpec]:
        """Return the other members, in the order of their keys."""
        specs = (entry.value.process_spec for entry in self._keyspace.members())
        return [spec for spec in specs if spec.id != self._local_id]

    async def ask_all(self, rpc: Rpc, request: Message, call: Caller) -> Sequence[MemberAnswer]:
        """Send one request to all other members at the same time.

        Args:
            rpc: a call of one response.
            request: the request.
            call: that of the caller, whose token is passed on.

        Returns:
            the answers, in the order of :meth:`others`.
        """
        return await self.ask(rpc, ((member, request) for member in self.others()), call)

    async def ask(
        self, rpc: Rpc, requests: Iterable[tuple[pb.ProcessSpec, Message]], call: Caller
    ) -> Sequence[MemberAnswer]:
        """Send requests to members at the same time.

        Args:
            rpc: a call of one response.
            requests: members, brokers or consumers, and the request for each.
            call: that of the caller, whose token is passed on.

        Returns:
            the answers, in the order of the requests.
        """
        return await asyncio.gather(*(self._ask(rpc, *each, call) for each in requests))

    async def _ask(
        self, rpc: Rpc, member: pb.ProcessSpec, request: Message, call: Caller
    ) -> MemberAnswer:
        try:
            to = self._destination(rpc, member, call)
            async with asyncio.timeout(self.time_limit_s):
                return MemberAnswer(member, await self._wire.call(to, request))
        except TimeoutError:
            late = f"{rpc.name} at {to.where}: no answer within {self.time_limit_s:g} s"
            return MemberAnswer(member, error=DeadlineExceededError(late))
        except GazetteError as error:
            return MemberAnswer(member, error=error)

    async def stream(
        self, rpc: Rpc, request: Message, member: pb.ProcessSpec, call: Caller
    ) -> AsyncGenerator[Message]:
        """Yield the responses of a call of one member, which has no time limit.

        Args:
            rpc: a call of many responses.
            request: the request.
            member: the member.
            call: that of the caller, whose token is passed on.

        Raises:
            GazetteError: the call failed; a :class:`CallError` with the code ``UNIMPLEMENTED`` if
                the member has no such call.
        """
        to = self._destination(rpc, member, call)
        async with aclosing(self._wire.stream(to, request)) as items:
            async for item in items:
                yield item

    async def aclose(self) -> None:
        """Close the connections."""
        await self._wire.aclose()

    def _destination(self, rpc: Rpc, member: pb.ProcessSpec, call: Caller) -> Destination:
        """Return where a call goes, with the caller's token.

        Raises:
            GazetteError: the token came by TLS, and the member has none.
        """
        if call.authorization and not may_send_token(self._endpoint, member.endpoint):
            raise GazetteError(
                f"the token is not sent to {member.endpoint}, which has no TLS: serve TLS there"
            )
        peer = Peer(member.id.zone, member.id.suffix, member.endpoint)
        return Destination(rpc, None, peer, member.endpoint, call.authorization)
