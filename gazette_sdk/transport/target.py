"""Items of reads and appends, and destinations of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import Rpc

__all__ = [
    "ANYWHERE",
    "SERVICE",
    "AppendItem",
    "Destination",
    "Peer",
    "ReadItem",
    "ReplicateItem",
    "Target",
]

ReadItem: TypeAlias = pb.ReadResponse | bytes
"""Item of a read: metadata (a response without content), or content which continues at the
offset where the item before it ended (a metadata item's ``offset``, or the end of content)."""

AppendItem: TypeAlias = pb.AppendRequest | bytes
"""Item of an append. In order: the request that names the journal, non-empty chunks of
content, and an *empty* ``AppendRequest()``, which commits. Ending without it rolls back."""

ReplicateItem: TypeAlias = pb.ReplicateRequest | bytes
"""Item of a replication: a proposal, or non-empty content that follows the content since the last
proposal. Requests with content, which other implementations send, name their place themselves."""


@dataclass(frozen=True, slots=True)
class Target:
    """Brokers to which a call may go.

    Attributes:
        route: the journal's route, if the caller has one; the transport picks a member.
        member: exactly this member.
    """

    route: pb.Route | None = None
    member: pb.ProcessSpec.ID | None = None


ANYWHERE = Target()


@dataclass(frozen=True, slots=True)
class Peer:
    """Broker that can be dialled. The configured service address is :data:`SERVICE`."""

    zone: str
    suffix: str
    endpoint: str


SERVICE = Peer("", "", "")


class Destination(NamedTuple):
    """Broker, journal and token of one call.

    Attributes:
        rpc: which call.
        journal: the journal it is about.
        peer: the broker.
        where: the broker in words.
        authorization: the call's ``authorization``, where one is needed.
        metadata: further metadata of a call over gRPC.
    """

    rpc: Rpc
    journal: str | None
    peer: Peer
    where: str
    authorization: str | None
    metadata: tuple[tuple[str, str], ...] = ()
