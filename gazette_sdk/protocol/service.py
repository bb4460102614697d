"""Tables of the calls of the journal service and the shard service: paths, numbers, messages.

gRPC paths are those of protocol section 3 and shard section 2; numbers those of the stream
transport.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb

__all__ = [
    "ERROR_METADATA",
    "RPCS",
    "RPCS_BY_NAME",
    "SERVICE",
    "SHARD_RPCS",
    "SHARD_RPCS_BY_NAME",
    "SHARD_SERVICE",
    "Rpc",
]

SERVICE = "protocol.Journal"
"""Full name of the journal service."""

SHARD_SERVICE = "consumer.Shard"
"""Full name of the shard service, which consumer processes serve."""

ERROR_METADATA = "gazette-error"
"""Trailing metadata of a failed call: the class name of a store's error. Brokers of this SDK send
it with the code UNKNOWN: a client can distinguish a damaged fragment from a temporary failure."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A call of a service.

    Attributes:
        name: its name, such as ``Append``.
        number: its method number on the stream transport; 0 if it is not served there.
        request_type: class of requests.
        response_type: class of responses.
        client_streams: True if the client sends several requests.
        server_streams: True if the server sends several responses.
        service: full name of its service, by default of the journal service.
    """

    name: str
    number: int
    request_type: type[Message]
    response_type: type[Message]
    client_streams: bool = False
    server_streams: bool = False
    service: str = SERVICE

    @property
    def path(self) -> str:
        """Its gRPC path."""
        return f"/{self.service}/{self.name}"


RPCS = (
    Rpc("List", 1, pb.ListRequest, pb.ListResponse, server_streams=True),
    Rpc("Apply", 2, pb.ApplyRequest, pb.ApplyResponse),
    Rpc("Read", 3, pb.ReadRequest, pb.ReadResponse, server_streams=True),
    Rpc("Append", 4, pb.AppendRequest, pb.AppendResponse, client_streams=True),
    Rpc(
        "Replicate",
        5,
        pb.ReplicateRequest,
        pb.ReplicateResponse,
        client_streams=True,
        server_streams=True,
    ),
    Rpc("ListFragments", 6, pb.FragmentsRequest, pb.FragmentsResponse),
    Rpc("FragmentStoreHealth", 7, pb.FragmentStoreHealthRequest, pb.FragmentStoreHealthResponse),
)
"""Every call of the journal service."""

RPCS_BY_NAME = {rpc.name: rpc for rpc in RPCS}

SHARD_RPCS = tuple(
    Rpc(name, 0, request_type, response_type, service=SHARD_SERVICE)
    for name, request_type, response_type in (
        ("Stat", cpb.StatRequest, cpb.StatResponse),
        ("List", cpb.ListRequest, cpb.ListResponse),
        ("Apply", cpb.ApplyRequest, cpb.ApplyResponse),
        ("GetHints", cpb.GetHintsRequest, cpb.GetHintsResponse),
        ("Unassign", cpb.UnassignRequest, cpb.UnassignResponse),
    )
)
"""Every call of the shard service."""

SHARD_RPCS_BY_NAME = {rpc.name: rpc for rpc in SHARD_RPCS}
