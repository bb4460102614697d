"""Child processes of a run: one that tails, and an embedded cluster."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from gazette_sdk.cli.failure import CommandFailedError, explain
from gazette_sdk.errors import GazetteError
from gazette_sdk.server.logging import configure_logging
from gazette_sdk.server.settings import LoggingSettings

__all__ = ["child_process", "running_cluster"]

CLUSTER_STOP_TIMEOUT_S = 60.0
"""Limit of an orderly stop of the cluster. Its directory is deleted in any case."""


@contextmanager
def child_process(
    work: Callable[[Connection], None], logging: LoggingSettings, stop_timeout_s: float
) -> Iterator[Connection]:
    """Run a child process until the context ends.

    It ignores Ctrl-C. It ends when its pipe is closed, and is killed after the timeout.

    Args:
        work: function of the child process, with its end of a pipe; can be pickled.
        logging: logging of the child process.
        stop_timeout_s: limit of its end.

    Yields:
        The other end of the pipe.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(work, logging, there), daemon=True)
    # The child inherits the mask. An interrupt during its start would print a traceback.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    there.close()  # so that the pipe ends with the child
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
    with suppress(BrokenPipeError):  # the parent has closed the pipe
        work(pipe)


@contextmanager
def running_cluster(brokers: int, logging: LoggingSettings) -> Iterator[str]:
    """Run a cluster in a child process, over a temporary directory.

    Args:
        brokers: number of brokers.
        logging: logging of the cluster.

    Yields:
        The address of its first broker.

    Raises:
        CommandFailedError: it cannot start.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gazette-bench-", ignore_cleanup_errors=True) as data,
        child_process(
            functools.partial(_serve_cluster, data, brokers), logging, CLUSTER_STOP_TIMEOUT_S
        ) as pipe,
    ):
        try:
            address, problem = pipe.recv()
        except EOFError:
            address, problem = "", "its process ended"
        if problem:
            raise CommandFailedError(f"the embedded cluster does not start: {problem}")
        yield address


def _serve_cluster(data: str, brokers: int, pipe: Connection) -> None:
    from gazette_sdk.embedded import EmbeddedCluster  # noqa: PLC0415 - only in the child

    cluster = EmbeddedCluster(data, brokers=brokers)
    try:
        cluster.start()
    except (GazetteError, OSError) as error:
        pipe.send(("", explain(error)))
        return
    try:
        pipe.send((cluster.address, ""))
        with suppress(EOFError):
            pipe.recv()
    finally:
        cluster.stop()
