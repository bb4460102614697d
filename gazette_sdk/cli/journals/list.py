"""``gazctl journals list``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.formats import NONE, message_json, proto_text, write_table
from gazette_sdk.cli.journals.settings import LIST, ListSettings
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol.labels import values_of
from gazette_sdk.protocol.non_null_fields import complete
from gazette_sdk.protocol.selectors import parse_selector
from gazette_sdk.transport.listing import WatchedList, list_journals

__all__ = ["run", "yaml_of"]


async def run(invocation: Invocation) -> None:
    """List journals: once, or with ``--watch`` until interrupted."""
    settings = invocation.settings(LIST)
    selector = parse_selector(settings.selector)
    async with open_broker(invocation) as transport:
        if not settings.watch:
            show(await list_journals(transport, selector), settings)
            return
        async with WatchedList(transport, selector) as watched:
            shown = await watched.first_snapshot()
            show(shown, settings)
            while True:
                try:
                    await watched.changed()
                except GazetteError:
                    continue  # the watch logs the reason and begins again
                assert watched.snapshot is not None
                if watched.snapshot is not shown:
                    shown = watched.snapshot
                    show(shown, settings)


def show(listing: pb.ListResponse, settings: ListSettings) -> None:
    """Write a listing to standard output."""
    match settings.format:
        case "table":
            write_table(*_table(listing, settings))
        case "yaml":
            sys.stdout.write(yaml_of(listing))
        case "json":
            sys.stdout.write(message_json(complete(listing)).decode() + "\n")
        case "proto":
            sys.stdout.write(proto_text(listing))
    sys.stdout.flush()


def yaml_of(listing: pb.ListResponse) -> str:
    """Return listed journals as YAML for ``apply``."""
    root = journalspace.from_list_response(listing.journals)
    journalspace.hoist(root)
    return journalspace.dump(root)


def _table(
    listing: pb.ListResponse, settings: ListSettings
) -> tuple[list[str], Iterator[list[str]]]:
    wanted = {
        "Name": True,
        "RF": settings.rf,
        "Primary": settings.primary,
        "Replicas": settings.replicas,
        "Stores": settings.stores,
    }
    columns = [name for name, is_wanted in wanted.items() if is_wanted]
    rows = (
        [_cell(journal, column) for column in columns]
        + [_label(journal.spec, name) for name in settings.label_columns]
        for journal in listing.journals
    )
    return [*columns, *settings.label_columns], rows


def _cell(journal: pb.ListResponse.Journal, column: str) -> str:
    spec, route = journal.spec, journal.route
    match column:
        case "RF":
            return str(spec.replication)
        case "Primary":
            has_primary = 0 <= route.primary < len(route.members)
            primary = route.members[route.primary].suffix if has_primary else NONE
            is_suspended = spec.suspend.level != pb.JournalSpec.Suspend.NONE
            return f"{primary} <S>" if is_suspended else primary
        case "Replicas":
            return ",".join(
                member.suffix
                for index, member in enumerate(route.members)
                if index != route.primary
            )
        case "Stores":
            return spec.fragment.stores[0] if spec.fragment.stores else NONE
        case _:
            return spec.name


def _label(spec: pb.JournalSpec, name: str) -> str:
    values = values_of(spec.labels, name)
    return ",".join(values) if values else NONE
