"""``gazette allocator simulate``: a dry run of the allocator."""

from __future__ import annotations

import sys
from pathlib import Path

from gazette_sdk.cli.allocator.report import report_json, write_report
from gazette_sdk.cli.allocator.settings import SIMULATE, SimulateSettings
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.documents import load
from gazette_sdk.cli.journals.apply import request_of
from gazette_sdk.cluster.allocator.loop import (
    ClusterDescription,
    DescribedMember,
    MemberId,
    describe,
    dump_description,
    parse_description,
)
from gazette_sdk.cluster.allocator.simulation import ClusterChange, simulate
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalAllocation
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.protocol.rules import JOURNAL_LIMIT_MOST
from gazette_sdk.server.settings import ETCD, EtcdSettings
from gazette_sdk.server.tls import with_secrets

__all__ = ["change_of", "run"]

DEFAULT_LIMIT = 1024
"""Limit of a broker that joins a cluster without brokers: that of `gazette serve`."""


async def run(invocation: Invocation) -> None:
    """Simulate a change of a cluster, and show what would move.

    Raises:
        GazetteError: an option or a file cannot be used, or Etcd does not answer.
    """
    settings = invocation.settings(SIMULATE)
    if settings.cluster:
        description = load(settings.cluster, parse_description)
    else:
        etcd = with_secrets(ETCD, invocation.settings(ETCD))
        description = await _live(etcd, settings.max_replication)
    change = change_of(settings, description)
    if settings.save == "-" and not change.is_empty:
        raise ConfigurationError(
            "--save - writes the description to standard output, where the report of a change "
            "stands: give a file, or leave the change out"
        )
    if settings.save:
        _write(settings.save, dump_description(description))
        if change.is_empty:
            return
    simulation = simulate(description, change)
    if settings.format == "json":
        sys.stdout.write(report_json(simulation).decode() + "\n")
    else:
        write_report(simulation, sys.stdout, is_verbose=settings.verbose)


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


async def _live(settings: EtcdSettings, max_replication: int) -> ClusterDescription:
    """Return the description of a live cluster. It is only read."""
    etcd = await Etcd.connect(
        settings.address,
        cert_file=settings.cert_file or None,
        cert_key_file=settings.cert_key_file or None,
        trusted_ca_file=settings.trusted_ca_file or None,
        user=settings.user,
        password=settings.password,
    )
    try:
        keyspace = BrokerKeySpace(settings.prefix)
        await keyspace.load(etcd)
    finally:
        await etcd.aclose()
    description = describe(keyspace, JournalAllocation(max_replication))
    if not description.members and not description.items:
        raise ConfigurationError(
            f"there is no cluster below {settings.prefix} in the Etcd at {settings.address}: check "
            "--etcd.address and --etcd.prefix, or give a described cluster with --cluster"
        )
    return description


# ------------------------------------------------------------------ changes


def change_of(settings: SimulateSettings, description: ClusterDescription) -> ClusterChange:
    """Return the change that the options describe.

    Args:
        settings: the options.
        description: the cluster, whose greatest limit is that of brokers that join.

    Raises:
        ConfigurationError: an option, or the file of specs, is malformed.
    """
    limit = max((member.limit for member in description.members), default=DEFAULT_LIMIT)
    upserted: dict[str, int] = {}
    deleted: list[str] = []
    if settings.specs:
        for each in load(settings.specs, request_of).changes:
            if each.delete:
                deleted.append(each.delete)
            else:
                upserted[each.upsert.name] = desired_replication(
                    each.upsert, settings.max_replication
                )
    return ClusterChange(
        removed=tuple(_member("--remove", text) for text in settings.remove),
        removed_zones=settings.remove_zone,
        drained=tuple(_member("--drain", text) for text in settings.drain),
        added=tuple(_added(text, limit) for text in settings.add),
        replication=dict(
            _replication(text, settings.max_replication) for text in settings.replication
        ),
        upserted=upserted,
        deleted=tuple(deleted),
    )


def _member(option: str, text: str) -> MemberId:
    try:
        return MemberId.parse(text)
    except ValidationError as error:
        raise ConfigurationError(f"{option}: {error}") from None


def _added(text: str, limit: int) -> DescribedMember:
    name, colon, number = text.partition(":")
    if colon:
        limit = _number("--add", text, number, JOURNAL_LIMIT_MOST)
    return DescribedMember(_member("--add", name), limit)


def _replication(text: str, most: int) -> tuple[str, int]:
    name, _, number = text.rpartition("=")  # names of journals may hold a "=", too
    if not name:
        raise ConfigurationError(f"--replication: {text!r} is not written as JOURNAL=N")
    return name, min(most, _number("--replication", text, number, 1 << 31))


def _number(option: str, text: str, number: str, most: int) -> int:
    if not (number.isascii() and number.isdecimal() and int(number[:12]) <= most):
        raise ConfigurationError(f"{option}: {text!r} does not end with a number up to {most}")
    return int(number)
