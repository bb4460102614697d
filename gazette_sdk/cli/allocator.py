"""The commands of ``gazette allocator``.

``simulate`` is a dry run. Its report is a table for people, or JSON for programs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import orjson

from gazette_sdk.cli.formats import NONE, load, write_table
from gazette_sdk.cli.journals.specs import request_of
from gazette_sdk.cli.program import Invocation
from gazette_sdk.cli.settings import SIMULATE, SimulateSettings
from gazette_sdk.cluster.allocator.simulation import (
    ChangedItem,
    ClusterChange,
    ClusterDescription,
    DescribedMember,
    Load,
    MemberId,
    MemberLoads,
    Simulation,
    Unplaced,
    describe,
    dump_description,
    parse_description,
    simulate,
)
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalAllocation
from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.protocol.rules import JOURNAL_LIMIT_MOST
from gazette_sdk.server.settings import ETCD, EtcdSettings
from gazette_sdk.server.tls import check_files, with_secrets

NAMES_MAX = 3
"""Number of journals that a sentence names, unless all are wanted."""


def report_json(simulation: Simulation) -> bytes:
    """Return a simulation as one JSON object."""
    return orjson.dumps(
        {
            "members": [_member_json(each) for each in simulation.members],
            "moves": simulation.moves,
            "moves_min": simulation.moves_min,
            "primaries_changed": simulation.primaries_changed,
            "journals": [_item_json(each) for each in simulation.changed],
            "unplaced": [each._asdict() for each in simulation.unplaced],
            "single_zone": list(simulation.single_zone),
            "staying": [str(each) for each in simulation.staying],
            "pending": [_item_json(each) for each in simulation.pending],
            "rounds": simulation.rounds,
            "is_settled": simulation.is_settled,
        }
    )


def _member_json(member: MemberLoads) -> dict[str, Any]:
    return {
        "zone": member.id.zone,
        "id": member.id.id,
        "limit": member.limit,
        "before": member.before and member.before._asdict(),
        "after": member.after and member.after._asdict(),
    }


def _item_json(item: ChangedItem) -> dict[str, Any]:
    return {
        "name": item.name,
        "before": [str(each) for each in item.before],
        "after": [str(each) for each in item.after],
    }


def write_report(simulation: Simulation, file: TextIO, *, is_verbose: bool = False) -> None:
    """Write a simulation as tables and sentences.

    Args:
        simulation: the simulation.
        file: output file.
        is_verbose: True to list each journal that changes, and all that a sentence is about.
    """
    headers = ["Broker", "Limit", "Primaries", "After", "Replicas", "After", "Load", "After"]
    write_table(headers, (_row(each) for each in simulation.members), file)
    if is_verbose and simulation.changed:
        file.write("\n")
        rows = ([each.name, _names(each.before), _names(each.after)] for each in simulation.changed)
        write_table(["Journal", "Brokers", "After"], rows, file)
    file.write("\n")
    file.writelines(f"{line}\n" for line in _sentences(simulation, is_verbose=is_verbose))


def _row(member: MemberLoads) -> Sequence[str]:
    cells = [str(member.id), str(member.limit)]
    for before, after in zip(_cells(member.before), _cells(member.after), strict=True):
        cells += [before, after]
    return cells


def _cells(load: Load | None) -> Sequence[str]:
    if load is None:
        return [NONE] * 3
    return [str(load.primaries), str(load.replicas), f"{load.ratio:.1%}"]


def _names(members: Iterable[MemberId]) -> str:
    return ", ".join(map(str, members)) or NONE


# ---------------------------------------------------------------- sentences


def _sentences(simulation: Simulation, *, is_verbose: bool) -> Iterator[str]:
    if simulation.pending:
        moves = sum(each.added for each in simulation.pending)
        yield (
            f"Without the change: {counted(len(simulation.pending), 'journal')} would change, and "
            f"{counted(moves, 'replica')} would move. This is taken as done before."
        )
    yield (
        f"{counted(simulation.moves, 'replica')} would move (at least "
        f"{simulation.moves_min} must), and {counted(simulation.primaries_changed, 'journal')} "
        "would get another primary."
    )
    for reason, group in itertools.groupby(
        sorted(simulation.unplaced, key=lambda each: (each.reason, each.name)),
        lambda each: each.reason,
    ):
        yield _unplaced(reason, list(group), is_verbose=is_verbose)
    if simulation.single_zone:
        named = some_names(simulation.single_zone, is_verbose=is_verbose)
        zones = {each.id.zone for each in simulation.members if each.after and each.limit}
        why = "there is no other" if len(zones) < 2 else "the others have no room"
        yield (
            f"{counted(len(simulation.single_zone), 'journal')} would have all replicas in one "
            f"zone ({why}): {named}"
        )
    held = {each.id: each.after.replicas for each in simulation.members if each.after}
    for member in simulation.staying:
        yield (
            f"{member} would not leave: without it, {counted(held[member], 'replica')} would have "
            "no place."
        )
    if not simulation.is_settled:
        yield f"The allocator is not done after {simulation.rounds} rounds."


def _unplaced(reason: str, group: Sequence[Unplaced], *, is_verbose: bool) -> str:
    missing = sum(each.missing for each in group)
    named = some_names([each.name for each in group], is_verbose=is_verbose)
    return (
        f"{counted(missing, 'replica')} of {counted(len(group), 'journal')} would have no place "
        f"({reason}): {named}"
    )


def some_names(names: Sequence[str], *, is_verbose: bool = False) -> str:
    """Return names for a sentence: the first few, and the number of the rest.

    Args:
        names: all names.
        is_verbose: True to list all of them.
    """
    shown = names if is_verbose else names[:NAMES_MAX]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def counted(number: int, what: str) -> str:
    """Return a number with its noun, such as ``3 replicas``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


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
        check_files(ETCD, etcd)
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
    etcd = await settings.config().connect()
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
