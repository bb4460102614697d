"""Messages that tests publish to journals in memory, and what stands in the journals then."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import JsonMessage, mapping
from gazette_sdk.message.uuid import parse_uuid, uuid_of_text
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport

WAIT_S = 10.0


TO = mapping.direct("a/journal")


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


BY_KEY = mapping.modulo("topic=orders", key=attrgetter("customer"))


@dataclass
class Own(JsonMessage):
    n: object
    UUID: str = ""


def lines(transport: MemoryTransport, journal: str) -> list[dict]:
    return [json.loads(line) for line in transport.content_of(journal).splitlines()]


def clocks(transport: MemoryTransport, journal: str) -> list[int]:
    return [parse_uuid(uuid_of_text(line["UUID"])).clock for line in lines(transport, journal)]


def bare(transport: MemoryTransport, journal: str) -> list[dict]:
    found = lines(transport, journal)
    assert all(next(iter(line)) == "UUID" for line in found)
    return [{key: value for key, value in line.items() if key != "UUID"} for line in found]


def begun(transport: MemoryTransport, count: int) -> None:
    """Wait until so many appends were begun."""

    async def wait():
        async with asyncio.timeout(WAIT_S):
            await transport.until(lambda: transport.appends_begun >= count)

    run(wait())
