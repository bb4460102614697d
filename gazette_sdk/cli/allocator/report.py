"""Reports of a simulation: a table for people, JSON for programs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import orjson

from gazette_sdk.cli.formats import NONE, write_table
from gazette_sdk.cluster.allocator.loop import MemberId
from gazette_sdk.cluster.allocator.simulation import (
    ChangedItem,
    Load,
    MemberLoads,
    Simulation,
    Unplaced,
)

__all__ = ["report_json", "write_report"]

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
            f"Without the change: {_count(len(simulation.pending), 'journal')} would change, and "
            f"{_count(moves, 'replica')} would move. This is taken as done before."
        )
    yield (
        f"{_count(simulation.moves, 'replica')} would move (at least "
        f"{simulation.moves_min} must), and {_count(simulation.primaries_changed, 'journal')} "
        "would get another primary."
    )
    for reason, group in itertools.groupby(
        sorted(simulation.unplaced, key=lambda each: (each.reason, each.name)),
        lambda each: each.reason,
    ):
        yield _unplaced(reason, list(group), is_verbose=is_verbose)
    if simulation.single_zone:
        named = _some(simulation.single_zone, is_verbose=is_verbose)
        zones = {each.id.zone for each in simulation.members if each.after and each.limit}
        why = "there is no other" if len(zones) < 2 else "the others have no room"
        yield (
            f"{_count(len(simulation.single_zone), 'journal')} would have all replicas in one "
            f"zone ({why}): {named}"
        )
    held = {each.id: each.after.replicas for each in simulation.members if each.after}
    for member in simulation.staying:
        yield (
            f"{member} would not leave: without it, {_count(held[member], 'replica')} would have "
            "no place."
        )
    if not simulation.is_settled:
        yield f"The allocator is not done after {simulation.rounds} rounds."


def _unplaced(reason: str, group: Sequence[Unplaced], *, is_verbose: bool) -> str:
    missing = sum(each.missing for each in group)
    named = _some([each.name for each in group], is_verbose=is_verbose)
    return (
        f"{_count(missing, 'replica')} of {_count(len(group), 'journal')} would have no place "
        f"({reason}): {named}"
    )


def _some(names: Sequence[str], *, is_verbose: bool) -> str:
    shown = names if is_verbose else names[:NAMES_MAX]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
