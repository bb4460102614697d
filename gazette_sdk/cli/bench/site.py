"""Site of a run: a cluster, and journals that exist for the run.

The content of each message follows from its number (:class:`Messages`), so that a reader can verify
it. Child processes of a run are one that tails, and the embedded cluster where there is no other.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pydoc_data.topics import topics
from typing import Any

from gazette_sdk.cli.client import CONNECT_TIMEOUT_S, ConnectionSettings, check_address
from gazette_sdk.cli.program import CommandFailedError, explain
from gazette_sdk.cli.settings import BenchSettings
from gazette_sdk.errors import (
    ConfigurationError,
    EtcdTransactionFailedError,
    GazetteError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol.durations import SECOND_NS, from_ns
from gazette_sdk.protocol.journal_spec import validate_journal_spec
from gazette_sdk.server.logging import configure_logging
from gazette_sdk.server.settings import LoggingSettings
from gazette_sdk.transport.append.append import TRANSIENT, append_once
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import apply_journals, list_journals, store_health
from gazette_sdk.transport.loop import for_each, run

_STEP = 7919
"""Distance between the texts of consecutive numbers; a prime."""

_SLACK_CHARS = 1 << 17
"""Least number of different texts."""

_JSON_CHARS = len('{"n":,"text":""}')


class Messages:
    """Messages of one size, by their numbers.

    A message is a dict of its number ``n`` and a ``text``: a piece of English prose, which
    compresses like text.

    Args:
        size: length of the message as compact JSON, in bytes.
    """

    def __init__(self, size: int) -> None:
        prose = "".join(
            character if character.isascii() and character.isprintable() else " "
            for character in "".join(topics.values()).translate({ord('"'): "'", ord("\\"): "/"})
        )
        repeats = -(-(size + _SLACK_CHARS) // len(prose))
        self._prose = prose * max(repeats, 1)
        self._chars = size - _JSON_CHARS
        self._places = len(self._prose) - size

    def text(self, number: int) -> str:
        """Return the text of a message."""
        place = number * _STEP % self._places
        return self._prose[place : place + self._chars - len(str(number))]

    def message(self, number: int) -> dict[str, Any]:
        """Return a message."""
        return {"n": number, "text": self.text(number)}


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


_log = logging.getLogger(__name__)

SERVED_TIMEOUT_S = 30.0
"""Limit of waiting until brokers serve the journals."""

DELETION_TIMEOUT_S = 20.0
"""Limit of deleting the journals, which signals do not interrupt."""

RETRY_S = 0.05
CHANGES_MAX = 100
"""Journals per transaction; Etcd's default limit is 128 operations."""

FRAGMENT_BYTES = 256 << 20
REMEDY = "with --address or in GAZETTE_ADDRESS, or use --embedded"
"""Remedy of a wrong address."""


@dataclass(frozen=True)
class Site:
    """Cluster and journals of one run.

    Attributes:
        address: URL of a broker.
        options: arguments of :func:`~gazette_sdk.transport.connect.connect`, for other processes.
        transport: transport to the cluster.
        prefix: prefix of the journals' names, and of no other journal's.
        journals: their names.
    """

    address: str
    options: Mapping[str, Any]
    transport: Transport
    prefix: str
    journals: Sequence[str]

    @property
    def selector(self) -> str:
        """Label selector of the journals."""
        return f"prefix={self.prefix}"


@contextmanager
def open_site(
    settings: BenchSettings, cluster: ConnectionSettings, logs: LoggingSettings
) -> Iterator[Site]:
    """Connect to the cluster, or start one, and create journals for the time of the context.

    Raises:
        ConfigurationError: the address or an option of the connection is invalid.
        CommandFailedError: the journals cannot be created, or are not served.
        GazetteError: a call failed.
    """
    if settings.embedded:
        place: AbstractContextManager[str] = running_cluster(settings.replication, logs)
        options: dict[str, Any] = {}
    else:
        place = nullcontext(check_address(cluster.address, REMEDY))
        options = cluster.connect_options()
    options["connect_timeout_s"] = CONNECT_TIMEOUT_S
    with place as address:
        transport = connect(address, **options)
        prefix = settings.prefix or f"bench/{secrets.token_hex(4)}/"
        names = [f"{prefix}part-{index:03d}" for index in range(settings.journals)]
        try:
            with _journals(transport, settings, prefix, names):
                yield Site(address, options, transport, prefix, names)
        finally:
            run(transport.aclose())


@contextmanager
def _journals(
    transport: Transport, settings: BenchSettings, prefix: str, names: Sequence[str]
) -> Iterator[None]:
    specs = [_spec(name, settings) for name in names]
    run(_check(transport, settings.store, prefix))
    created: list[str] = []
    failure: BaseException | None = None
    try:
        run(_create(transport, specs, created))
        run(_served(transport, names, settings.replication))
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        problem = "" if settings.keep else _clean_up(transport, prefix, created)
        if problem and failure is None:
            raise CommandFailedError(problem)
        if problem:
            _log.error("%s", problem)  # the first failure ends the run


def _clean_up(transport: Transport, prefix: str, created: Sequence[str]) -> str:
    """Delete the journals; return the reason of a failure, or an empty text."""
    with _uninterrupted():
        try:
            run(_delete(transport, prefix, created), DELETION_TIMEOUT_S)
        except (GazetteError, TimeoutError) as error:
            return (
                f"the journals below {prefix} are left behind, as removing them failed: "
                f"{explain(error)}; remove them with `gazctl journals apply`"
            )
    return ""


def _spec(name: str, settings: BenchSettings) -> pb.JournalSpec:
    spec = pb.JournalSpec(
        name=name,
        replication=settings.replication,
        labels=labels.label_set([(labels.CONTENT_TYPE, "application/x-ndjson")]),
        fragment=pb.JournalSpec.Fragment(
            length=FRAGMENT_BYTES,
            compression_codec=pb.SNAPPY,
            stores=[settings.store],
            refresh_interval=from_ns(60 * SECOND_NS),
        ),
    )
    try:
        validate_journal_spec(spec)
    except ValidationError as error:
        raise ConfigurationError(
            f"--prefix and --store make no valid journal: {error}", journal=name
        ) from error
    return spec


async def _check(transport: Transport, store: str, prefix: str) -> None:
    """Check that a broker answers, that the store works, and that the prefix is unused."""
    health = await store_health(transport, store)
    if health.status != pb.OK:
        raise CommandFailedError(
            f"brokers cannot use {store}: {health.store_health_error}; name another one with "
            "--store"
        )
    listing = await list_journals(transport, f"prefix={prefix}")
    if listing.journals:
        raise CommandFailedError(
            f"there are journals below {prefix} already, such as {listing.journals[0].spec.name}: "
            "remove them, or name another --prefix"
        )


async def _create(
    transport: Transport, specs: Sequence[pb.JournalSpec], created: list[str]
) -> None:
    """Create the journals; add the names of all that may exist to ``created``."""
    for begin in range(0, len(specs), CHANGES_MAX):
        batch = specs[begin : begin + CHANGES_MAX]
        created += [spec.name for spec in batch]
        changes = [pb.ApplyRequest.Change(upsert=spec) for spec in batch]
        try:
            await apply_journals(transport, pb.ApplyRequest(changes=changes))
        except EtcdTransactionFailedError as error:
            del created[-len(batch) :]
            raise CommandFailedError(
                f"another run has just created journals such as {batch[0].name}: name another "
                "--prefix"
            ) from error


async def _served(transport: Transport, names: Sequence[str], replication: int) -> None:
    """Wait until all journals take appends."""
    deadline = time.monotonic() + SERVED_TIMEOUT_S

    async def _no_content() -> AsyncIterator[bytes]:
        no_chunks: tuple[bytes, ...] = ()
        for chunk in no_chunks:
            yield chunk

    async def served(name: str) -> None:
        while True:
            try:
                await append_once(transport, pb.AppendRequest(journal=name), _no_content())
            except TRANSIENT as error:
                if time.monotonic() > deadline:
                    raise CommandFailedError(
                        f"the cluster does not serve {name} after {SERVED_TIMEOUT_S:g} s: {error}; "
                        f"--replication={replication} takes as many brokers",
                        journal=name,
                    ) from error
                await asyncio.sleep(RETRY_S)
            else:
                return

    await for_each(names, served)


async def _delete(transport: Transport, prefix: str, created: Sequence[str]) -> None:
    """Delete the created journals which exist."""
    if not created:
        return
    listing = await list_journals(transport, f"prefix={prefix}")
    ours = sorted({journal.spec.name for journal in listing.journals} & set(created))
    for begin in range(0, len(ours), CHANGES_MAX):
        changes = [
            pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1)
            for name in ours[begin : begin + CHANGES_MAX]
        ]
        await apply_journals(transport, pb.ApplyRequest(changes=changes))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
