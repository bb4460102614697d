"""Waiting for log records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_record(logger: str, call: Callable[[], object]) -> Iterator[None]:
    """Call a function at each record of a logger, as a test's event to wait for."""

    def note(_: logging.LogRecord) -> bool:
        call()
        return True

    log = logging.getLogger(logger)
    log.addFilter(note)
    try:
        yield
    finally:
        log.removeFilter(note)
