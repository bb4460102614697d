"""Publishers whose threads send by themselves, to real brokers: what tests of them share.

Load the fixture in a test module with ``from support.direct_appends import direct_appends``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from gazette_sdk import Publisher, Reader
from gazette_sdk.message.publishing.receipt import Receipt
from gazette_sdk.transport.wires.stream.blocking import BlockingClient

__all__ = [
    "NEVER_S",
    "PAUSE_S",
    "WAIT_S",
    "are_done",
    "direct_appends",
    "form_habit",
    "found",
    "publish_each",
    "until",
    "wait_for_each",
]

WAIT_S = 30.0

PAUSE_S = 0.003
"""Between messages that nobody waits for."""

NEVER_S = 600.0
"""By itself, the event loop looks for no answer."""


@pytest.fixture
def direct_appends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that appended by themselves."""
    names: list[str] = []
    append = BlockingClient.append

    def noting(self, *arguments):
        call = append(self, *arguments)
        if call is not None:
            names.append(threading.current_thread().name)
        return call

    monkeypatch.setattr(BlockingClient, "append", noting)
    return names


def wait_for_each(publisher: Publisher, count: int, **more: object) -> None:
    for n in range(count):
        receipt = publisher.publish({"n": n, **more}).result(WAIT_S)
        assert receipt.end > receipt.begin


def publish_each(publisher: Publisher, numbers: range, **more: object) -> list[Receipt]:
    """Waiting for none."""
    receipts = []
    for n in numbers:
        receipts.append(publisher.publish({"n": n, **more}))
        time.sleep(PAUSE_S)
    return receipts


def form_habit(publisher: Publisher, appends: list[str]) -> int:
    """Wait for each until its messages are sent by this thread; how many those were."""
    for n in range(200):
        before = len(appends)
        publisher.publish({"n": n}).result(WAIT_S)
        if len(appends) > before:
            return n + 1
    raise AssertionError


def are_done(receipts: list[Receipt]) -> bool:
    """Whether they are, without asking them: that would have them looked for."""
    return all(receipt.batch.is_done for receipt in receipts)


def until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def found(journal: str) -> list[dict]:
    return [envelope.message for envelope in Reader(dict, name=journal)]
