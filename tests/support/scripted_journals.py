"""A journal service that does what a test wrote down, behind a real server.

Fronts are thin: what they do is seen best with a service whose every answer is known. Tests set
the functions they care about::

    journals = ScriptedJournals()
    journals.on_read = lambda request, call: items(metadata, b"content")
    async with serving(journals) as server: ...
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from gazette_sdk.broker.api.fronts import journal_methods, stream_methods
from gazette_sdk.broker.api.http_gateway import HttpGateway, json_methods
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority
from gazette_sdk.protocol.fragments import sum_of
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.json_gateway import JsonGateway
from gazette_sdk.server.process import Server

HEADER = pb.Header(
    process_id=pb.ProcessSpec.ID(zone="a", suffix="broker"),
    route=pb.Route(
        members=[pb.ProcessSpec.ID(zone="a", suffix="broker")], endpoints=["http://broker/path"]
    ),
    etcd=pb.Header.Etcd(cluster_id=12, member_id=34, revision=56, raft_term=78),
)


@dataclass(frozen=True)
class FileSpan:
    fd: int
    position: int
    length: int
    metadata: pb.ReadResponse | None = None


def metadata(offset: int = 0, write_head: int = 100, **fields: Any) -> pb.ReadResponse:
    """The metadata with which a read begins."""
    fragment = pb.Fragment(journal="a/journal", begin=0, end=100, compression_codec=pb.SNAPPY)
    values = {"header": HEADER, "fragment": fragment, **fields}
    return pb.ReadResponse(offset=offset, write_head=write_head, **values)


async def items(*listed: Any) -> AsyncGenerator[Any]:
    """Yields what it was given; raises what is an error."""
    for item in listed:
        if isinstance(item, BaseException):
            raise item
        yield item


class ScriptedJournals:
    """Every method calls the function of its name; the defaults answer OK."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.appended: list[list[Any]] = []
        self.on_list: Any = lambda _request, _call: items(pb.ListResponse(header=HEADER))
        self.on_read: Any = lambda _request, _call: items(metadata(), b"content")
        self.on_append: Any = self.collect
        self.on_replicate: Any = self.acknowledge

    async def collect(self, requests: AsyncIterator[Any], _call: Call) -> pb.AppendResponse:
        """Takes an append as a broker would."""
        taken = [item async for item in requests]
        self.appended.append(taken)
        assert taken[-1] == pb.AppendRequest(), "an append without its commit"
        content = b"".join(item for item in taken if isinstance(item, bytes))
        return pb.AppendResponse(
            header=HEADER,
            commit=pb.Fragment(
                journal=taken[0].journal,
                begin=100,
                end=100 + len(content),
                sum=sum_of(hashlib.sha1(content).digest()),
                compression_codec=pb.SNAPPY,
            ),
            registers=pb.LabelSet(),
        )

    async def acknowledge(
        self, requests: AsyncIterator[Any], _call: Call
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """Answers each request of a replication that wants an answer."""
        async for request in requests:
            if request.acknowledge:
                yield pb.ReplicateResponse()

    def list(self, request: pb.ListRequest, call: Call) -> AsyncGenerator[pb.ListResponse]:
        self.calls.append(call)
        return self.on_list(request, call)

    async def apply(self, _request: pb.ApplyRequest, call: Call) -> pb.ApplyResponse:
        self.calls.append(call)
        return pb.ApplyResponse(header=HEADER)

    def read(self, request: pb.ReadRequest, call: Call) -> AsyncGenerator[Any]:
        self.calls.append(call)
        return self.on_read(request, call)

    async def append(self, requests: AsyncIterator[Any], call: Call) -> pb.AppendResponse:
        self.calls.append(call)
        return await self.on_append(requests, call)

    def append_now(self, *_: Any) -> None:
        """Every append is scripted as a stream."""

    async def append_acknowledged(self, _: Any) -> bytes:
        raise AssertionError("no append is started")

    def replicate(self, requests: Any, call: Call) -> AsyncGenerator[pb.ReplicateResponse]:
        self.calls.append(call)
        return self.on_replicate(requests, call)

    async def list_fragments(self, _request: Any, call: Call) -> pb.FragmentsResponse:
        self.calls.append(call)
        return pb.FragmentsResponse(header=HEADER)

    async def fragment_store_health(self, _: Any, call: Call) -> pb.FragmentStoreHealthResponse:
        self.calls.append(call)
        return pb.FragmentStoreHealthResponse(header=HEADER)


@asynccontextmanager
async def serving(
    journals: Any,
    *,
    allow_origins: tuple[str, ...] = (),
    authority: Authority | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """A server with all fronts of a journal service."""
    server = Server(**options)
    if authority is not None:
        server.require_tokens(authority)
    server.grpc.add(journal_methods(journals))
    server.stream.add(stream_methods(journals))
    gateway = JsonGateway(json_methods(journals), authority=authority, allow_origins=allow_origins)
    server.http.mount("/v1/", gateway)
    server.http.mount("/", HttpGateway(journals))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


def stub(channel: grpc.aio.Channel, name: str, *, raw: bool = False) -> Any:
    """A callable for one RPC; ``raw`` sends and receives bytes."""
    rpc = RPCS_BY_NAME[name]
    shape = (
        ("stream" if rpc.client_streams else "unary")
        + "_"
        + ("stream" if rpc.server_streams else "unary")
    )
    if raw:
        return getattr(channel, shape)(rpc.path)
    return getattr(channel, shape)(
        rpc.path, rpc.request_type.SerializeToString, rpc.response_type.FromString
    )
