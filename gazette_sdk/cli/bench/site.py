"""Where a run takes place: a cluster, and journals that are made for it and removed again."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from gazette_sdk.cli.bench.settings import BenchSettings, ClusterSettings
from gazette_sdk.cli.client import CONNECT_TIMEOUT_S, check_address
from gazette_sdk.cli.failure import CommandFailedError, explain
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
from gazette_sdk.server.settings import LoggingSettings
from gazette_sdk.transport.append.append import TRANSIENT, append_once
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import apply_journals, list_journals, store_health
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["Site", "open_site"]

_log = logging.getLogger(__name__)

SERVED_TIMEOUT_S = 30.0
"""What brokers may take until they serve the journals."""

REMOVAL_TIMEOUT_S = 20.0
"""What the removal of the journals may take. It cannot be interrupted meanwhile."""

RETRY_S = 0.05
CHANGES_MAX = 100
"""Journals of one transaction; Etcd takes 128 operations by default."""

CALLS_MAX = 64
FRAGMENT_BYTES = 256 << 20
REMEDY = "with --address or in GAZETTE_ADDRESS, or use --embedded"
"""What to do about an address that is none."""


@dataclass(frozen=True)
class Site:
    """A cluster, and journals of one run in it.

    Attributes:
        address: URL of a broker.
        options: of :func:`~gazette_sdk.transport.connect.connect`, for other processes.
        transport: to the cluster.
        prefix: what the journals' names begin with; nothing else does.
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
    settings: BenchSettings, cluster: ClusterSettings, logs: LoggingSettings
) -> Iterator[Site]:
    """Reach the cluster, or start one, and make journals; remove them, and stop it again.

    Raises:
        ConfigurationError: the address or an option of the connection cannot be used.
        CommandFailedError: the journals cannot be made, or are not served.
        GazetteError: a call failed.
    """
    if settings.embedded:
        from gazette_sdk.cli.bench.embedded import running_cluster  # noqa: PLC0415 - it is costly

        place: AbstractContextManager[str] = running_cluster(settings.replication, logs)
        options: dict[str, Any] = {}
    else:
        place = nullcontext(check_address(cluster.address, REMEDY))
        options = {
            "auth_keys": cluster.auth_keys,
            "auth_token": cluster.auth_token,
            "tls": Tls(
                trusted_ca_file=cluster.trusted_ca_file,
                cert_file=cluster.cert_file,
                cert_key_file=cluster.cert_key_file,
            ),
        }
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
    made: list[str] = []
    try:
        run(_make(transport, specs, made))
        run(_served(transport, names, settings.replication))
        yield
    except BaseException:
        if not settings.keep and (problem := _clean_up(transport, prefix, made)):
            _log.error("%s", problem)  # what failed before is what ends the run
        raise
    if not settings.keep and (problem := _clean_up(transport, prefix, made)):
        raise CommandFailedError(problem)


def _clean_up(transport: Transport, prefix: str, made: Sequence[str]) -> str:
    """Remove the journals; tells what is left behind if that fails. Nothing interrupts it."""
    with _undisturbed():
        try:
            run(_remove(transport, prefix, made), REMOVAL_TIMEOUT_S)
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
            f"--prefix and --store make no journal: {error}", journal=name
        ) from error
    return spec


async def _check(transport: Transport, store: str, prefix: str) -> None:
    """Before anything is made: is there a broker, a store, and no such journal?"""
    health = await store_health(transport, store)
    if health.status != pb.OK:
        raise CommandFailedError(
            f"brokers cannot use {store}: {health.store_health_error}; name another with --store"
        )
    listing = await list_journals(transport, f"prefix={prefix}")
    if listing.journals:
        raise CommandFailedError(
            f"there are journals below {prefix} already, such as {listing.journals[0].spec.name}: "
            "remove them, or name another --prefix"
        )


async def _make(transport: Transport, specs: Sequence[pb.JournalSpec], made: list[str]) -> None:
    """Make the journals; ``made`` holds those that may exist by now, whatever happens."""
    for begin in range(0, len(specs), CHANGES_MAX):
        batch = specs[begin : begin + CHANGES_MAX]
        made += [spec.name for spec in batch]
        changes = [pb.ApplyRequest.Change(upsert=spec) for spec in batch]
        try:
            await apply_journals(transport, pb.ApplyRequest(changes=changes))
        except EtcdTransactionFailedError as error:
            del made[-len(batch) :]
            raise CommandFailedError(
                f"somebody else made journals such as {batch[0].name} just now: name another "
                "--prefix"
            ) from error


async def _served(transport: Transport, names: Sequence[str], replication: int) -> None:
    """Wait until all journals take appends."""
    calls = asyncio.Semaphore(CALLS_MAX)
    deadline = time.monotonic() + SERVED_TIMEOUT_S

    async def served(name: str) -> None:
        while True:
            try:
                await append_once(transport, pb.AppendRequest(journal=name), _nothing())
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

    async def one(name: str) -> None:
        async with calls:
            await served(name)

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))


async def _nothing() -> AsyncIterator[bytes]:
    nothing: tuple[bytes, ...] = ()
    for chunk in nothing:
        yield chunk


async def _remove(transport: Transport, prefix: str, made: Sequence[str]) -> None:
    """Remove those of the made journals which exist."""
    if not made:
        return
    listing = await list_journals(transport, f"prefix={prefix}")
    ours = sorted({journal.spec.name for journal in listing.journals} & set(made))
    for begin in range(0, len(ours), CHANGES_MAX):
        changes = [
            pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1)
            for name in ours[begin : begin + CHANGES_MAX]
        ]
        await apply_journals(transport, pb.ApplyRequest(changes=changes))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What cleans up is not interrupted; it has a bound of its own."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
