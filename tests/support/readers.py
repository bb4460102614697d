"""Journals of numbered messages, and what a reader reads of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gazette_sdk import JsonMessage
from support.memory_transport import MemoryTransport

__all__ = ["Order", "fill", "interruptible", "line", "numbers"]


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


def interruptible(monkeypatch, sequencer):
    """Return a function after whose call the sequencer is interrupted at its next message."""
    queue, step, called = sequencer.queue, sequencer.step, []

    def interrupted(method, *args):
        if called:
            raise KeyboardInterrupt
        return method(*args)

    monkeypatch.setattr(sequencer, "queue", partial(interrupted, queue))
    monkeypatch.setattr(sequencer, "step", partial(interrupted, step))
    return lambda: called.append(True)
