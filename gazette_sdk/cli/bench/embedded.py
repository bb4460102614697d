"""A cluster in a process of its own, as users have it, for the time of a run."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from gazette_sdk.cli.bench.child import child_process
from gazette_sdk.cli.failure import CommandFailedError, explain
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import GazetteError
from gazette_sdk.server.settings import LoggingSettings

__all__ = ["running_cluster"]

STOP_TIMEOUT_S = 60.0
"""What an orderly stop may take; its directory is thrown away in any case."""


@contextmanager
def running_cluster(brokers: int, logging: LoggingSettings) -> Iterator[str]:
    """A cluster over a directory which is gone afterwards.

    Args:
        brokers: how many brokers.
        logging: how it logs.

    Yields:
        The address of its first broker.

    Raises:
        CommandFailedError: it does not start.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gazette-bench-", ignore_cleanup_errors=True) as data,
        child_process(functools.partial(_serve, data, brokers), logging, STOP_TIMEOUT_S) as pipe,
    ):
        try:
            address, problem = pipe.recv()
        except EOFError:
            address, problem = "", "its process ended"
        if problem:
            raise CommandFailedError(f"the embedded cluster does not start: {problem}")
        yield address


def _serve(data: str, brokers: int, pipe: Connection) -> None:
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
