"""The journal service as a table: its calls, their paths, numbers and messages.

gRPC paths are those of protocol section 3; numbers those of the stream transport.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["ERROR_METADATA", "RPCS", "RPCS_BY_NAME", "RPCS_BY_NUMBER", "SERVICE", "Rpc"]

SERVICE = "protocol.Journal"
"""Full name of the journal service."""

ERROR_METADATA = "gazette-error"
"""Trailing metadata of a failed call: name of the class of a store's error. Our own brokers send
it beside the code UNKNOWN, so that a client can tell a damaged fragment from a passing failure."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A call of the journal service.

    Attributes:
        name: its name, such as ``Append``.
        number: its method number on the stream transport.
        path: its gRPC path.
        request_type: class of requests.
        response_type: class of responses.
        client_streams: whether the client sends several requests.
        server_streams: whether the server sends several responses.
    """

    name: str
    number: int
    path: str
    request_type: type[Message]
    response_type: type[Message]
    client_streams: bool = False
    server_streams: bool = False


def _rpc(
    name: str,
    number: int,
    request_type: type[Message],
    response_type: type[Message],
    *,
    client_streams: bool = False,
    server_streams: bool = False,
) -> Rpc:
    return Rpc(
        name=name,
        number=number,
        path=f"/{SERVICE}/{name}",
        request_type=request_type,
        response_type=response_type,
        client_streams=client_streams,
        server_streams=server_streams,
    )


RPCS = (
    _rpc("List", 1, pb.ListRequest, pb.ListResponse, server_streams=True),
    _rpc("Apply", 2, pb.ApplyRequest, pb.ApplyResponse),
    _rpc("Read", 3, pb.ReadRequest, pb.ReadResponse, server_streams=True),
    _rpc("Append", 4, pb.AppendRequest, pb.AppendResponse, client_streams=True),
    _rpc(
        "Replicate",
        5,
        pb.ReplicateRequest,
        pb.ReplicateResponse,
        client_streams=True,
        server_streams=True,
    ),
    _rpc("ListFragments", 6, pb.FragmentsRequest, pb.FragmentsResponse),
    _rpc("FragmentStoreHealth", 7, pb.FragmentStoreHealthRequest, pb.FragmentStoreHealthResponse),
)
"""Every call of the journal service."""

RPCS_BY_NAME = {rpc.name: rpc for rpc in RPCS}
RPCS_BY_NUMBER = {rpc.number: rpc for rpc in RPCS}
