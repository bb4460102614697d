"""Waiting for the end of a batch."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from gazette_sdk.message.publishing.batch import Batch


def test_threads_wait_for_its_end():
    batch = Batch("a/journal")
    assert not batch.wait(0)
    assert not batch.wait(0.01)
    assert not batch.is_awaited
    woken = []
    threads = [
        threading.Thread(target=lambda: woken.append(batch.wait(10.0)), daemon=True)
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + 10
    while len(batch._gates) < 5:
        assert time.monotonic() < ends_at
        time.sleep(0.001)
    assert batch.is_awaited
    batch.settle(7)
    for thread in threads:
        thread.join(10)
    assert woken == [True] * 5
    assert batch.wait(None)
    assert batch.result() == 7


def test_a_thread_that_is_interrupted_while_it_waits_holds_nothing_up():
    batch = Batch("a/journal")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(200):
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            with pytest.raises(KeyboardInterrupt):
                batch.wait(10.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    ending = threading.Thread(target=batch.settle, args=(7,), daemon=True)
    ending.start()
    ending.join(10)
    assert batch.wait(0)
