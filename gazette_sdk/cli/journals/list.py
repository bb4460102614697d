"""``gazctl journals list``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.formats import NONE, iec_bytes, listing_text, write_table
from gazette_sdk.cli.journals.extents import Extent, extents_of
from gazette_sdk.cli.journals.selection import selection_of
from gazette_sdk.cli.journals.settings import LIST, ListSettings
from gazette_sdk.cli.journals.unstored import Unstored, unstored_of
from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.journals.changes import warn_without_spare
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol.journal_spec import is_suspended
from gazette_sdk.protocol.labels import values_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import WatchedList, list_journals

__all__ = ["run", "yaml_of"]


async def run(invocation: Invocation) -> None:
    """List journals: once, or with ``--watch`` until interrupted.

    Raises:
        CommandFailedError: a journal that was named does not exist.
    """
    settings = invocation.settings(LIST)
    for option, is_wanted in (("heads", settings.heads), ("unstored", settings.unstored)):
        if is_wanted and settings.format not in {"table", "wide"}:
            raise ConfigurationError(
                f"--{option} needs -o table or wide: other formats are of specs alone"
            )
    selection = selection_of(invocation, settings, is_required=False)
    async with open_broker(invocation) as transport:
        if not settings.watch:
            listing = await list_journals(transport, selection.selector, count_brokers=True)
            brokers = listing.brokers
            listing.ClearField("brokers")
            if listing.journals or not selection.names:
                await show(transport, listing, settings)
                warn_without_spare((journal.spec for journal in listing.journals), brokers)
            selection.check(listing)
            return
        async with WatchedList(transport, selection.selector) as watched:
            shown = await watched.first_snapshot()
            selection.check(shown)
            await show(transport, shown, settings)
            while True:
                try:
                    await watched.changed()
                except GazetteError:
                    continue  # the watch logs the reason and begins again
                assert watched.snapshot is not None
                if watched.snapshot is not shown:
                    shown = watched.snapshot
                    await show(transport, shown, settings)


async def show(transport: Transport, listing: pb.ListResponse, settings: ListSettings) -> None:
    """Write a listing to standard output."""
    match settings.format:
        case "table" | "wide":
            has_extents = settings.heads or settings.format == "wide"
            extents = await extents_of(transport, listing) if has_extents else {}
            unstored = await unstored_of(transport, listing) if settings.unstored else {}
            write_table(*_table(listing, settings, extents, unstored))
        case form:
            sys.stdout.write(listing_text(listing, form, yaml_of))
    sys.stdout.flush()


def yaml_of(listing: pb.ListResponse) -> str:
    """Return listed journals as YAML for ``apply``."""
    root = journalspace.from_list_response(listing.journals)
    journalspace.hoist(root)
    return journalspace.dump(root)


def _table(
    listing: pb.ListResponse,
    settings: ListSettings,
    extents: Mapping[str, Extent],
    unstored: Mapping[str, Unstored],
) -> tuple[list[str], Iterator[list[str]]]:
    is_wide = settings.format == "wide"
    wanted = {
        "Name": True,
        "RF": settings.rf or is_wide,
        "Primary": settings.primary or is_wide,
        "Replicas": settings.replicas or is_wide,
        "Stores": settings.stores or is_wide,
        "Head": settings.heads or is_wide,
        "Size": settings.heads or is_wide,
        "Waits For": any(journal.HasField("waiting") for journal in listing.journals),
        "Unstored": settings.unstored,
        "Holders": settings.unstored,
    }
    columns = [name for name, is_wanted in wanted.items() if is_wanted]
    rows = (
        [
            _unstored_cell(column, unstored[journal.spec.name])
            if column in {"Unstored", "Holders"}
            else _cell(journal, column, extents)
            for column in columns
        ]
        + [_label(journal.spec, name) for name in settings.label_columns]
        for journal in listing.journals
    )
    return [*columns, *settings.label_columns], rows


def _cell(journal: pb.ListResponse.Journal, column: str, extents: Mapping[str, Extent]) -> str:
    spec, route = journal.spec, journal.route
    match column:
        case "RF":
            return str(spec.replication)
        case "Primary":
            has_primary = 0 <= route.primary < len(route.members)
            primary = route.members[route.primary].suffix if has_primary else NONE
            return f"{primary} <S>" if is_suspended(spec) else primary
        case "Replicas":
            return ",".join(
                member.suffix
                for index, member in enumerate(route.members)
                if index != route.primary
            )
        case "Stores":
            return spec.fragment.stores[0] if spec.fragment.stores else NONE
        case "Head" | "Size":
            extent = extents[spec.name]
            value = extent.head if column == "Head" else extent.size_bytes
            text = str if column == "Head" else iec_bytes
            return NONE if value is None else text(value)
        case _:
            return _absent(journal) if column == "Waits For" else spec.name


def _absent(journal: pb.ListResponse.Journal) -> str:
    brokers = (f"{broker.zone}/{broker.suffix}" for broker in journal.waiting.brokers)
    return ",".join(brokers) or NONE


def _unstored_cell(column: str, unstored: Unstored) -> str:
    value = unstored.length_bytes if column == "Unstored" else unstored.holders
    if value is None:
        return NONE
    return iec_bytes(value) if column == "Unstored" else str(value)


def _label(spec: pb.JournalSpec, name: str) -> str:
    values = values_of(spec.labels, name)
    return ",".join(values) if values else NONE
