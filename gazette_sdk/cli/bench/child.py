"""Processes of a run beside the one that the user started."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from gazette_sdk.server.logging import configure_logging
from gazette_sdk.server.settings import LoggingSettings

__all__ = ["child_process"]


@contextmanager
def child_process(
    work: Callable[[Connection], None], logging: LoggingSettings, stop_timeout_s: float
) -> Iterator[Connection]:
    """A process, until the context ends.

    Ctrl-C is not for it: it ends when its pipe does, or is killed when it takes too long.

    Args:
        work: what it does, with its end of a pipe; can be pickled.
        logging: how it logs.
        stop_timeout_s: what it may take to end.

    Yields:
        The other end of the pipe.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(work, logging, there), daemon=True)
    # It inherits the mask: an interrupt while it starts would be told of by it, too.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    there.close()  # that end is then the child's alone: when it ends, the pipe does
    try:
        yield here
    finally:
        here.close()
        process.join(stop_timeout_s)
        process.kill()
        process.join()


def _run(work: Callable[[Connection], None], logging: LoggingSettings, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    configure_logging(logging.level, logging.format)
    with suppress(BrokenPipeError):  # nobody wants to know any more
        work(pipe)
