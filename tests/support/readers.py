"""Journals of numbered messages, and what a reader reads of them."""

from __future__ import annotations

from dataclasses import dataclass

from gazette_sdk import JsonMessage
from support.memory_transport import MemoryTransport

__all__ = ["Order", "fill", "line", "numbers"]


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


def line(n: int) -> bytes:
    return b'{"n":%d}\n' % n


def fill(transport: MemoryTransport, name: str, *numbers: int, **labels: str):
    journal = transport.create(name, **labels)
    journal.content += b"".join(map(line, numbers))
    return journal


def numbers(reader) -> list[int]:
    return [envelope.message["n"] for envelope in reader]
