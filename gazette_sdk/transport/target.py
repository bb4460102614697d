"""What calls of a transport are made of, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.service import Rpc

__all__ = ["ANYWHERE", "SERVICE", "AppendItem", "Destination", "Peer", "ReadItem", "Target"]

ReadItem: TypeAlias = pb.ReadResponse | bytes
"""What a read yields: metadata (a response without content), or content which continues at the
offset where the item before it ended (a metadata item's ``offset``, or the end of content)."""

AppendItem: TypeAlias = pb.AppendRequest | bytes
"""What an append is made of, in order: the request that names the journal, non-empty chunks of
content, and an *empty* ``AppendRequest()``, which commits. Ending without it rolls back."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a call.

    Attributes:
        route: the journal's route as the caller knows it; the transport picks a member.
        member: exactly this member.
    """

    route: pb.Route | None = None
    member: pb.ProcessSpec.ID | None = None


ANYWHERE = Target()


@dataclass(frozen=True, slots=True)
class Peer:
    """A broker that can be dialled. The configured service address is :data:`SERVICE`."""

    zone: str
    suffix: str
    endpoint: str


SERVICE = Peer("", "", "")


class Destination(NamedTuple):
    """Where one call goes, and what it is about.

    Attributes:
        rpc: which call.
        journal: the journal it is about.
        peer: the broker.
        where: the broker in words.
        authorization: the call's ``authorization``, where one is needed.
    """

    rpc: Rpc
    journal: str | None
    peer: Peer
    where: str
    authorization: str | None
