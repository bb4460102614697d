"""Table of the journal service's calls: paths, numbers and messages.

gRPC paths are those of protocol section 3; numbers those of the stream transport.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["ERROR_METADATA", "RPCS", "RPCS_BY_NAME", "SERVICE", "Rpc"]

SERVICE = "protocol.Journal"
"""Full name of the journal service."""

ERROR_METADATA = "gazette-error"
"""Trailing metadata of a failed call: the class name of a store's error. Brokers of this SDK send
it with the code UNKNOWN: a client can distinguish a damaged fragment from a temporary failure."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A call of the journal service.

    Attributes:
        name: its name, such as ``Append``.
        number: its method number on the stream transport.
        request_type: class of requests.
        response_type: class of responses.
        client_streams: True if the client sends several requests.
        server_streams: True if the server sends several responses.
    """

    name: str
    number: int
    request_type: type[Message]
    response_type: type[Message]
    client_streams: bool = False
    server_streams: bool = False

    @property
    def path(self) -> str:
        """Its gRPC path."""
        return f"/{SERVICE}/{self.name}"


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
