"""Transactions of tests: what is published in them, and what stands in the journals then."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gazette_sdk import Reader
from gazette_sdk.message.uuid import parse_uuid, uuid_of_text
from support.memory_transport import MemoryTransport


def by_to(message):
    return message["to"]


@dataclass(frozen=True)
class Written:
    producer: bytes
    clock: int
    flags: int
    message: dict


def written(transport: MemoryTransport, journal: str) -> list[Written]:
    found = []
    for line in transport.content_of(journal).splitlines():
        message = json.loads(line)
        found.append(Written(*parse_uuid(uuid_of_text(message.pop("UUID"))), message))
    return found


def flags(transport: MemoryTransport, journal: str) -> list[int]:
    return [each.flags for each in written(transport, journal)]


def committed(transport: MemoryTransport, journal: str) -> list:
    return [e.message for e in Reader(dict, name=journal, transport=transport)]


def transact(publisher, *messages, error=None, **options):
    """A transaction of some messages, which then ends well, or by an error."""
    with publisher.transaction(**options) as txn:
        for message in messages:
            txn.publish(message)
        if error is not None:
            raise error
    return txn
