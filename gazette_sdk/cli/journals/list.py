"""``gazctl journals list``, and what the commands of journals share.

That is the selection of the journals that a command works on (:class:`Selection`), their write
heads and sizes (:class:`Extent`), content that is in no store and how many brokers have it
(:class:`Unstored`), outcomes of changes as tables for people and JSON for programs
(:func:`show_outcomes`, :func:`show_moves`), and files of offsets (cli section 5, read).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, TypeAlias

import orjson

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.formats import NONE, iec_bytes, listing_text, write_table
from gazette_sdk.cli.journals.commands import LIST, ListSettings
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.errors import (
    STATUS_NAMES,
    CallError,
    ConfigurationError,
    GazetteError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.journals.changes import AppliedChange, warn_without_spare
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol.journal_spec import is_suspended
from gazette_sdk.protocol.labels import parse_selector, values_of
from gazette_sdk.protocol.names import StoreURL, parse_store_url, validate_journal
from gazette_sdk.protocol.rules import HEADS_RPC
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.listing import WatchedList, list_journals
from gazette_sdk.transport.loop import for_each
from gazette_sdk.transport.wire import Target


@dataclass(frozen=True, slots=True)
class Selection:
    """Journals that a command line selects: by names, or by labels.

    Attributes:
        text: the selector's text; empty for all journals.
        names: names of journals, each of which must exist.
    """

    text: str
    names: tuple[str, ...] = ()

    @property
    def selector(self) -> pb.LabelSelector:
        """Label selector of the journals."""
        return parse_selector(self.text)

    def check(self, listing: pb.ListResponse) -> None:
        """Check that a listing has all journals that were named.

        Raises:
            CommandFailedError: it lacks one.
        """
        listed = {journal.spec.name for journal in listing.journals}
        missing = [name for name in self.names if name not in listed]
        if missing:
            raise CommandFailedError(
                f"no such journal: {', '.join(missing)}; {_topic_remedy(missing[0])}"
                "`gazctl journals list` shows all"
            )


def _topic_remedy(name: str) -> str:
    """Return how to select the journals of a topic that was given instead of a journal."""
    if "/" in name:
        return ""
    return f"`-l {name if '=' in name else f'topic={name}'}` selects the journals of a topic; "


class _Selects(Protocol):
    """Options of a command that selects journals."""

    @property
    def selector(self) -> str: ...

    @property
    def name(self) -> Sequence[str]: ...


def selection_of(
    invocation: Invocation, settings: _Selects, *, is_required: bool = True
) -> Selection:
    """Return the journals that a command line selects.

    They are named by arguments and by ``--name``, or selected by ``--selector``. Names on the
    command line precede a selector of the INI file.

    Args:
        invocation: the call of the command.
        settings: its options.
        is_required: False if no names and no selector select all journals.

    Raises:
        ConfigurationError: there are both names and a selector, or neither.
        ValidationError: the selector or a name is malformed.
    """
    names = tuple(dict.fromkeys((*invocation.arguments, *settings.name)))
    if names and "selector" in invocation.sources.arguments:
        raise ConfigurationError(
            "journals are selected twice: give either names of journals or --selector, not both"
        )
    for name in names:
        validate_journal(name)
    if names:
        return Selection(f"name in ({','.join(names)})", names)
    if is_required and not settings.selector:
        raise ConfigurationError(
            "the required option --selector was not given; name journals, or select them with it"
        )
    parse_selector(settings.selector)  # reports a malformed one before any call
    return Selection(settings.selector)


def is_fully_suspended(spec: pb.JournalSpec) -> bool:
    """Return True if a journal has no replica: calls would resume it, or fail."""
    return bool(spec.suspend.level == pb.JournalSpec.Suspend.FULL)


async def list_some(transport: Transport, selection: Selection | str) -> pb.ListResponse:
    """Return the selected journals, at least one.

    Raises:
        CommandFailedError: no journal matches, or one that was named does not exist.
        GazetteError: the listing failed.
    """
    if isinstance(selection, str):
        selection = Selection(selection)
    listing = await list_journals(transport, selection.selector)
    selection.check(listing)
    if not listing.journals:
        raise CommandFailedError(
            f"no journals match the selector {selection.text!r}; `gazctl journals list` shows all"
        )
    return listing


async def select(transport: Transport, selection: Selection) -> list[pb.ListResponse.Journal]:
    """Return the selected journals which have replicas, in listing order.

    Raises:
        CommandFailedError: a journal that was named does not exist.
        GazetteError: the listing failed.
    """
    listing = await list_journals(transport, selection.selector)
    selection.check(listing)
    return [each for each in listing.journals if not is_fully_suspended(each.spec)]


def missing_file_root(journal: str, alternative: str = "") -> ConfigurationError:
    """Return the error of a command that needs ``--file-root`` for a journal's fragments."""
    return ConfigurationError(
        f"{journal}: its fragments are files of the brokers; name the directory of their file:// "
        f"stores with --file-root{alternative}"
    )


_log = logging.getLogger(__name__)

HeadOf = clpb.HeadsResponse.Head

MEMBER_TIMEOUT_S = 5.0
"""A broker that does not answer for this long counts as one that has nothing."""


@dataclass(frozen=True, slots=True)
class Unstored:
    """Content of a journal that is in no store.

    Attributes:
        length_bytes: of the content; None if it is unknown.
        holders: of each byte at least so many brokers have it; None without such content.
    """

    length_bytes: int | None = None
    holders: int | None = None


async def unstored_of(
    transport: Transport, listing: pb.ListResponse, heads: Heads | None = None
) -> dict[str, Unstored]:
    """Return the un-stored content of listed journals, by name.

    Where heads show that all brokers of a journal have the same, that is it. Of others the brokers
    are asked for their fragments.

    Args:
        transport: how to reach the brokers.
        listing: the journals.
        heads: their heads; ``None`` if they are not known.
    """
    found = {
        journal.spec.name: agreed
        for journal in listing.journals
        if heads and (agreed := _agreed(journal, heads.get(journal.spec.name))) is not None
    }
    others = [journal for journal in listing.journals if journal.spec.name not in found]
    asked = await for_each(others, partial(_unstored, transport))
    return found | {
        journal.spec.name: unstored for journal, unstored in zip(others, asked, strict=True)
    }


def _agreed(journal: pb.ListResponse.Journal, head: HeadOf | None) -> Unstored | None:
    """Return the un-stored content that all brokers of a journal have; None if they differ."""
    if head is None or not head.HasField("unstored"):
        return None
    members = {(member.zone, member.suffix) for member in journal.route.members}
    agreeing = {
        (each.member.zone, each.member.suffix)
        for each in head.replicas
        if each.synced and (each.head, each.unstored) == (head.head, head.unstored)
    }
    if members != agreeing:
        return None
    return Unstored(head.unstored, len(members) if head.unstored else None)


def unstored_spans(local: Sequence[CoverSet], stored: CoverSet) -> Unstored:
    """Return what is in no store, and how many brokers have each byte of it.

    Args:
        local: un-stored fragments of each broker.
        stored: fragments that some broker found in a store.
    """
    bounds = sorted(
        {bound for cover in (*local, stored) for each in cover for bound in (each.begin, each.end)}
    )
    length_bytes, holders = 0, None
    for begin, end in pairwise(bounds):
        count = sum(cover.covers(begin, end) for cover in local)
        if count and not stored.covers(begin, end):
            length_bytes += end - begin
            holders = count if holders is None else min(holders, count)
    return Unstored(length_bytes, holders)


async def _unstored(transport: Transport, journal: pb.ListResponse.Journal) -> Unstored:
    route = journal.route
    if is_fully_suspended(journal.spec):
        return Unstored(0)
    # The primary first: what is appended after its answer is left out.
    members = sorted(range(len(route.members)), key=lambda index: index != route.primary)
    local: list[CoverSet] = []
    end: int | None = None
    for index in members:
        found = await _fragments(transport, journal, index, unstored_only=True)
        if found is not None:
            end = max((each.end for each in found), default=0) if end is None else end
            local.append(CoverSet(_before(end, each) for each in found if not each.mod_time))
    if not local:
        return Unstored()
    stored = CoverSet()
    first = unstored_spans(local, stored)
    if first.length_bytes and (first.holders or 0) < len(route.members):
        # Brokers list the stores at different times: one may have seen what another has not.
        begin = min(each.begin for cover in local for each in cover)
        for index in members:
            found = await _fragments(transport, journal, index, token=begin)
            for each in found or ():
                if each.mod_time:
                    stored.add(each)
    return unstored_spans(local, stored)


def _before(end: int, fragment: pb.Fragment) -> pb.Fragment:
    fragment.end = min(fragment.end, max(end, fragment.begin))
    return fragment


async def _fragments(
    transport: Transport,
    journal: pb.ListResponse.Journal,
    index: int,
    *,
    token: int = 0,
    unstored_only: bool = False,
) -> list[pb.Fragment] | None:
    """Return the fragments of one broker; None if it does not answer."""
    name, member = journal.spec.name, journal.route.members[index]
    request = pb.FragmentsRequest(
        journal=name, do_not_proxy=True, next_page_token=token, unstored_only=unstored_only
    )
    target = Target(route=journal.route, member=member)
    found: list[pb.Fragment] = []
    try:
        async with asyncio.timeout(MEMBER_TIMEOUT_S):
            while True:
                response = await transport.list_fragments(request, target)
                if response.status != pb.OK:
                    raise UnavailableError(STATUS_NAMES[response.status], journal=name)
                found += [entry.spec for entry in response.fragments]
                request.next_page_token = response.next_page_token
                if not response.next_page_token:
                    return found
    except (GazetteError, TimeoutError) as error:
        reason = str(error) or f"no answer within {MEMBER_TIMEOUT_S:g} s"
        extra = {"journal": name, "broker": f"{member.zone}/{member.suffix}", "err": reason}
        _log.warning("a broker does not tell what it has", extra=extra)
        return None


OutcomeFormat: TypeAlias = Literal["table", "json"]


def show_outcomes(
    changes: Iterable[AppliedChange], form: OutcomeFormat, file: TextIO | None = None
) -> None:
    """Write outcomes of changes.

    Args:
        changes: the changes.
        form: a table, or one JSON object per line and journal.
        file: output file; by default standard output.
    """
    file = file or sys.stdout
    if form == "table":
        rows = (
            [each.name, each.outcome, str(each.spec.replication or NONE), _stores(each)]
            for each in changes
        )
        write_table(["Journal", "Outcome", "RF", "Stores"], rows, file)
    else:
        for each in changes:
            shown: dict[str, Any] = {"journal": each.name, "outcome": each.outcome}
            if each.spec.replication:  # the name alone is known of an unknown journal
                shown |= {
                    "replication": each.spec.replication,
                    "stores": list(each.spec.fragment.stores),
                }
            file.write(orjson.dumps(shown).decode() + "\n")
    file.flush()


def _stores(change: AppliedChange) -> str:
    return ", ".join(change.spec.fragment.stores) or NONE


def public_of(url: str) -> str:
    """Return the URL of a store for texts, without what may be secret."""
    try:
        return parse_store_url(url).public
    except ValidationError:
        return url


MoveOutcome: TypeAlias = Literal[
    "planned", "copied", "moved", "unchanged", "refused", "failed", "unfinished"
]


@dataclass(slots=True)
class Move:
    """Move of one journal.

    Attributes:
        journal: its name.
        old: stores that it leaves.
        outcome: state of the move.
        fragments: number of fragments in old stores.
        bytes: their stored bytes.
        copied: number of fragments that were copied; in a dry run, that would be.
        copied_bytes: their stored bytes.
        error: why it is refused, failed, or not confirmed; empty otherwise.
        remove: commands that remove the old content.
        verified: content paths of fragments that were verified in the new store.
    """

    journal: str
    old: tuple[str, ...] = ()
    outcome: MoveOutcome = "unfinished"
    fragments: int = 0
    bytes: int = 0
    copied: int = 0
    copied_bytes: int = 0
    error: str = ""
    remove: list[str] = field(default_factory=list)
    verified: set[str] = field(default_factory=set)

    def fail(self, reason: str) -> None:
        """Note that the journal is not moved. Where it is, it stays readable and writable."""
        self.outcome, self.error = "failed", reason
        _log.error("failed to move", extra={"journal": self.journal, "err": reason})

    @property
    def is_open(self) -> bool:
        """True if there is work left."""
        return self.outcome == "unfinished"


def show_moves(moves: Sequence[Move], form: OutcomeFormat, to: StoreURL) -> None:
    """Write what came of each journal, and the commands that remove old content."""
    if form == "json":
        for move in moves:
            sys.stdout.write(orjson.dumps(_shown_move(move, to)).decode() + "\n")
    else:
        sizes = ["Fragments", "Size", "Copied", "Copied Size"]
        write_table(["Journal", "Outcome", *sizes, "From"], map(_move_row, moves))
        sys.stdout.writelines(_removal_lines(moves))
    sys.stdout.flush()


def _move_row(move: Move) -> list[str]:
    return [
        move.journal,
        move.outcome,
        str(move.fragments),
        iec_bytes(move.bytes),
        str(move.copied),
        iec_bytes(move.copied_bytes),
        ", ".join(map(public_of, move.old)) or NONE,
    ]


def _shown_move(move: Move, to: StoreURL) -> dict[str, object]:
    return {
        "journal": move.journal,
        "outcome": move.outcome,
        "from": list(map(public_of, move.old)),
        "to": to.public,
        "fragments": move.fragments,
        "bytes": move.bytes,
        "copied": move.copied,
        "copied_bytes": move.copied_bytes,
        "error": move.error,
        "remove": move.remove,
    }


def _removal_lines(moves: Iterable[Move]) -> Iterator[str]:
    commands = [command for move in moves for command in move.remove]
    if commands:
        yield "\nBrokers do not read the old content any more. To remove it:\n\n"
    for command in commands:
        yield f"  {command}\n"


HEADS_OF_CALL = 500
"""Journals whose heads are asked for by one call: as many as it may name."""

JOURNAL_TIMEOUT_S = 8.0
"""The write head of a journal is unknown if its brokers do not answer for this long."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Span of a journal's content.

    Attributes:
        head: its write head; None if it is unknown.
        size_bytes: length from the first byte that can be read to the write head; None if it is
            unknown.
    """

    head: int | None = None
    size_bytes: int | None = None


Heads: TypeAlias = Mapping[str, HeadOf]
"""Heads of journals, by name."""


async def heads_of(transport: Transport, listing: pb.ListResponse) -> Heads | None:
    """Return the heads of listed journals, by one call for many of them.

    Returns:
        The heads, also of journals whose brokers did not answer; ``None`` where the called broker
        is of another implementation, or an older one: then each journal is asked for by itself.

    Raises:
        GazetteError: the call failed.
    """
    names = [journal.spec.name for journal in listing.journals]
    requests = [
        clpb.HeadsRequest(journals=names[begin : begin + HEADS_OF_CALL])
        for begin in range(0, len(names), HEADS_OF_CALL)
    ]
    heads: dict[str, HeadOf] = {}
    try:
        for request in requests:
            response: clpb.HeadsResponse = await transport.view(HEADS_RPC, request)
            heads.update((head.journal, head) for head in response.heads)
    except CallError as error:
        if error.code != "UNIMPLEMENTED":
            raise
        return None
    return heads


async def extents_of(
    transport: Transport, listing: pb.ListResponse, heads: Heads | None = None
) -> dict[str, Extent]:
    """Return the extents of listed journals, by name.

    Of their heads, or else one broker is asked for each journal, without reading content. A journal
    that does not answer has no extent, and is logged.

    Args:
        transport: how to reach the brokers.
        listing: the journals.
        heads: their heads; ``None`` if they are not known.
    """
    names = [journal.spec.name for journal in listing.journals]
    if heads is not None:
        return {name: _extent_of(name, heads.get(name)) for name in names}
    extents = await for_each(listing.journals, partial(_extent, transport))
    return dict(zip(names, extents, strict=True))


def _extent_of(name: str, head: HeadOf | None) -> Extent:
    if head is None or not head.HasField("head"):
        reason = "the token does not allow to read it" if head is None else head.error
        _log.warning("write head is unknown", extra={"journal": name, "err": reason})
        return Extent()
    return Extent(head.head, head.size if head.HasField("size") else None)


async def _extent(transport: Transport, journal: pb.ListResponse.Journal) -> Extent:
    spec = journal.spec
    if is_fully_suspended(spec):
        return Extent(spec.suspend.offset)
    try:
        async with asyncio.timeout(JOURNAL_TIMEOUT_S):
            first = await read_metadata(transport, spec.name, 0)
    except (GazetteError, TimeoutError) as error:
        reason = str(error) or f"no answer within {JOURNAL_TIMEOUT_S:g} s"
        _log.warning("write head is unknown", extra={"journal": spec.name, "err": reason})
        return Extent()
    if first.status == pb.OK:
        return Extent(first.write_head, first.write_head - first.offset)
    return Extent(first.write_head, None if first.write_head > first.offset else 0)


def load_offsets(path: Path, *, replaced: bool) -> dict[str, int]:
    """Return the offsets in a file: a JSON object of journals' names and their offsets.

    Args:
        path: the file.
        replaced: the same file is written at the end. It is renamed to ``<path>.previous``, so
            that it is missing after a crash in between.

    Raises:
        ConfigurationError: the file does not exist, or is malformed.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the offsets in {path}: {error.strerror}; to begin with no offsets, "
            "write {} to it"
        ) from error
    try:
        offsets = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"the offsets in {path} are not JSON: {error}") from error
    if not isinstance(offsets, dict):
        raise ConfigurationError(
            f'{path} is no JSON object of journals and offsets, such as {{"a/journal": 1234}}'
        )
    for journal, offset in offsets.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or not -1 <= offset < 1 << 63:
            raise ConfigurationError(f"{path}: the offset of {journal} is not valid: {offset!r}")
    if replaced:
        path.rename(f"{path}.previous")
    return offsets


def store_offsets(path: Path, offsets: Mapping[str, int]) -> None:
    """Replace a file of offsets atomically."""
    replace_file(path, orjson.dumps(dict(offsets), option=orjson.OPT_SORT_KEYS) + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of a file: after a crash it has the old or the new one, on disk."""
    temporary = Path(f"{path}.temp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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
            is_wanted = has_extents or settings.unstored
            heads = await heads_of(transport, listing) if is_wanted else None
            extents = await extents_of(transport, listing, heads) if has_extents else {}
            unstored = await unstored_of(transport, listing, heads) if settings.unstored else {}
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
