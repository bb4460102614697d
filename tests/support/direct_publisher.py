"""A publisher over a transport in memory that takes appends from plain code.

Load the fixtures in a test module with ``from support.direct_publisher import publisher``.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.message.publishing import direct as direct_module
from gazette_sdk.message.publishing.handover import Habit
from gazette_sdk.message.publishing.outbox import Outbox
from support.direct_memory import JOURNAL, WAIT_S, DirectMemoryTransport

__all__ = [
    "NEVER_S",
    "form_habit",
    "gain_trust",
    "nobody_looks",
    "outbox_of",
    "publisher",
    "transport",
    "until",
    "wait_for",
]

NEVER_S = 1000.0


@pytest.fixture
def nobody_looks(monkeypatch):
    """The event loop does not call in what is away."""
    monkeypatch.setattr(direct_module, "AWAY_S", NEVER_S)


@pytest.fixture
def transport():
    made = DirectMemoryTransport()
    made.create(JOURNAL)
    return made


@pytest.fixture
def publisher(transport):
    """A publisher with the habit: its next message is sent by its caller."""
    made = Publisher(mapping=mapping.direct(JOURNAL), transport=transport)
    form_habit(made)
    yield made
    transport.let_end.set()
    made.close(WAIT_S)


async def wait_for(receipt):
    async with asyncio.timeout(WAIT_S):
        return await receipt


def outbox_of(publisher: Publisher, journal: str = JOURNAL) -> Outbox:
    return publisher._sender.outboxes[journal]


def form_habit(publisher: Publisher, journal: str = JOURNAL) -> None:
    """Publish one by one, until callers send; nothing is away then."""
    for _ in range(200):
        publisher.publish({"n": -1}, mapping=mapping.direct(journal)).result(WAIT_S)
        if outbox_of(publisher, journal).habit.is_formed:
            return
    raise AssertionError


def gain_trust(publisher: Publisher) -> None:
    """Keep the habit for as long as it takes to be trusted most."""
    until(lambda: _is_trusted_after_another(publisher))


def _is_trusted_after_another(publisher: Publisher) -> bool:
    publisher.publish({"n": -1}).result(WAIT_S)
    return outbox_of(publisher).habit.trust >= Habit.TRUST_MAX


def until(condition) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.001)
