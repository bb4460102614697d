"""Threads whose failures a test sees."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

__all__ = ["in_parallel"]


def in_parallel(functions: Iterable[Callable[[], object]], timeout_s: float = 60.0) -> None:
    """Call each function in a thread of its own, and wait for all.

    Raises:
        BaseExceptionGroup: what they raised.
        AssertionError: one of them hangs.
    """
    failures: list[BaseException] = []

    def call(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=call, args=(each,), daemon=True) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if failures:
        raise BaseExceptionGroup("some threads failed", failures)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
