"""Publishers whose threads send inline appends to real brokers: what tests of them share.

Load the fixture in a test module with ``from support.inline_appends import inline_appends``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from gazette_sdk import Publisher, Reader
from gazette_sdk.message.receipt import Receipt
from gazette_sdk.transport.append import appender
from gazette_sdk.transport.append import appender as service
from gazette_sdk.transport.append.appender import AppendSender
from gazette_sdk.transport.stream.blocking import StreamBlockingCall

__all__ = [
    "NEVER_S",
    "PAUSE_S",
    "WAIT_S",
    "are_done",
    "found",
    "inline_appends",
    "leave_answers",
    "publish_each",
    "until",
    "until_idle",
    "until_inline",
    "wait_for_each",
]

WAIT_S = 30.0

PAUSE_S = 0.003
"""Between messages that nobody waits for."""

NEVER_S = 600.0


@pytest.fixture
def inline_appends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that sent inline appends. Connections for these are opened soon."""
    monkeypatch.setattr(appender, "PREPARE_S", 0.02)
    names: list[str] = []
    send = StreamBlockingCall.send

    def noting(self, data):
        names.append(threading.current_thread().name)
        send(self, data)

    monkeypatch.setattr(StreamBlockingCall, "send", noting)
    return names


def leave_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the event loop receive no inline answer by itself. Before the publisher is opened."""
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)


def wait_for_each(publisher: Publisher, count: int, **more: object) -> None:
    for n in range(count):
        receipt = publisher.publish({"n": n, **more}).result(WAIT_S)
        assert receipt.end > receipt.begin


def publish_each(publisher: Publisher, numbers: range, **more: object) -> list[Receipt]:
    """Publish, and wait for none."""
    receipts = []
    for n in numbers:
        receipts.append(publisher.publish({"n": n, **more}))
        time.sleep(PAUSE_S)
    return receipts


def until_inline(publisher: Publisher, appends: list[str]) -> int:
    """Publish until messages are sent inline, and the journal is idle; return their number."""
    for n in range(1000):
        before = len(appends)
        publisher.publish({"n": n}).result(WAIT_S)
        until_idle(publisher)
        if len(appends) > before:
            return n + 1
        time.sleep(PAUSE_S)
    raise AssertionError


def until_idle(publisher: Publisher) -> None:
    """Wait until nobody sends to any journal."""
    outboxes = publisher._sender.outboxes.values()
    until(lambda: all(each.appender._sender is AppendSender.NOBODY for each in outboxes))


def are_done(receipts: list[Receipt]) -> bool:
    """Return True if they are, without receiving an answer."""
    return all(receipt.append.done() for receipt in receipts)


def until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def found(journal: str) -> list[dict]:
    return [envelope.message for envelope in Reader(dict, name=journal)]
