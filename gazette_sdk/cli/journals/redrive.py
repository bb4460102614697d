"""``gazctl journals redrive``: dead letters are published again, exactly once.

The records of a batch of letters are one transaction. Before it is acknowledged, a file gets the
position after the batch, with the acknowledgements that are to be written: a command that was
killed is run again, and writes those first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.formats import write_table
from gazette_sdk.cli.journals.commands import REDRIVE, RedriveSettings
from gazette_sdk.cli.journals.list import replace_file
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.errors import ConfigurationError, FramingError
from gazette_sdk.framing import framing_for
from gazette_sdk.message.mapping import direct, fnv1a32
from gazette_sdk.message.publisher import Publisher
from gazette_sdk.message.reader import Reader
from gazette_sdk.message.sender import AckIntents
from gazette_sdk.protocol.labels import CONTENT_TYPE, parse_selector, value_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_journals

BATCH_LETTERS = 1000
"""Letters of one transaction at most."""


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    """Content of the file.

    Attributes:
        letters: journal of dead letters.
        checkpoint: position in it.
        intents: acknowledgements of the last batch.
    """

    letters: str
    checkpoint: bytes
    intents: bytes


@dataclass
class _Counts:
    """Numbers of letters.

    Attributes:
        redriven: their records were published.
        filtered: they do not match.
        unreadable: they hold no message.
    """

    redriven: int = 0
    filtered: int = 0
    unreadable: int = 0


@dataclass
class _Batch:
    """Letters of one transaction.

    Attributes:
        records: their records, each with the journal that gets it.
        is_last: there are no more letters.
    """

    records: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    is_last: bool = False


async def run(invocation: Invocation) -> None:
    """Publish dead letters again, up to the present write head of their journal.

    Raises:
        ConfigurationError: an option is missing, or the file is of other letters.
        CommandFailedError: no journal of JSON messages matches.
        GazetteError: a journal cannot be read or written.
    """
    settings = invocation.settings(REDRIVE)
    (letters,) = invocation.arguments
    if not settings.to:
        raise ConfigurationError(
            "the required option --to was not given: a label selector of the journals that get the"
            " records, such as topic=orders"
        )
    if not settings.state and not settings.dry_run:
        raise ConfigurationError(
            "the required option --state was not given: a file for the position, so that nothing is"
            " published twice when the command is run again"
        )
    path = Path(settings.state)
    saved = _load(path, letters) if settings.state else None
    counts = _Counts()
    async with open_broker(invocation) as transport:
        targets = await _targets(transport, settings.to)
        if letters in targets:
            raise ConfigurationError(f"--to: {letters} would get its own letters")
        async with (
            Publisher(direct(letters), transport=transport) as publisher,
            Reader(
                dict,
                name=letters,
                transport=transport,
                checkpoint=None if saved is None else saved.checkpoint,
            ) as reader,
        ):
            if saved is not None and saved.intents and not settings.dry_run:
                await publisher.acknowledge(saved.intents)
            batch = _Batch()
            while not batch.is_last:
                batch = await _next_batch(reader, settings, targets, counts)
                if settings.dry_run:
                    continue
                position = reader.checkpoint().to_bytes()
                await _publish(publisher, batch, path, letters, position)
    _show(letters, settings, counts)


async def _next_batch(
    reader: Reader[dict[str, Any]],
    settings: RedriveSettings,
    targets: Sequence[str],
    counts: _Counts,
) -> _Batch:
    batch = _Batch()
    while len(batch.records) < BATCH_LETTERS:
        if settings.limit and counts.redriven >= settings.limit:
            batch.is_last = True
            return batch
        try:
            envelope = await anext(aiter(reader))
        except StopAsyncIteration:
            batch.is_last = True
            return batch
        letter = envelope.message
        if settings.filter not in str(letter.get("error", "")):
            counts.filtered += 1
        elif not isinstance(record := letter.get("record"), dict):
            counts.unreadable += 1
        else:
            counts.redriven += 1
            batch.records.append((record, _target(str(letter.get("journal", "")), targets)))
    return batch


async def _publish(
    publisher: Publisher, batch: _Batch, path: Path, letters: str, position: bytes
) -> None:
    """Publish a batch, and save the position after it."""

    def save(intents: AckIntents | None) -> None:
        _store(path, _Saved(letters, position, b"" if intents is None else intents.to_bytes()))

    if not batch.records:
        save(None)
        return
    async with publisher.transaction(save=save) as txn:
        for record, journal in batch.records:
            txn.publish(record, mapping=direct(journal))


async def _targets(transport: Transport, selector: str) -> list[str]:
    """Return the names of the journals that get records, in their order.

    Raises:
        CommandFailedError: there is none, or one has other messages than JSON.
    """
    listing = await list_journals(transport, parse_selector(selector))
    if not listing.journals:
        raise CommandFailedError(
            f"no journal matches --to {selector}; `gazctl journals list` shows all"
        )
    for journal in listing.journals:
        content_type = value_of(journal.spec.labels, CONTENT_TYPE)
        try:
            form = framing_for(content_type).form
        except FramingError:
            form = ""
        if form != "json":
            raise CommandFailedError(
                f"{journal.spec.name} has the content type {content_type!r}: records of dead"
                " letters are published as JSON; choose other journals"
            )
    return sorted(journal.spec.name for journal in listing.journals)


def _target(journal: str, targets: Sequence[str]) -> str:
    """Return the journal that gets a record: its own, or always the same one for its own."""
    if journal in targets:
        return journal
    return targets[fnv1a32(journal.encode()) % len(targets)]


def _load(path: Path, letters: str) -> _Saved | None:
    """Return what the file has; None if there is no file.

    Raises:
        ConfigurationError: it is no such file, or of another journal of dead letters.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        saved = msgspec.json.decode(content, type=_Saved)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"--state: {path} is no file of `gazctl journals redrive`: {error}; give another one"
        ) from error
    if saved.letters != letters:
        raise ConfigurationError(
            f"--state: {path} has the position in {saved.letters}; give another one for {letters}"
        )
    return saved


def _store(path: Path, saved: _Saved) -> None:
    replace_file(path, msgspec.json.encode(saved) + b"\n")


def _show(letters: str, settings: RedriveSettings, counts: _Counts) -> None:
    outcome = "to redrive" if settings.dry_run else "redriven"
    write_table(
        ["Letters", "Outcome", "Records", "Filtered", "No Message"],
        [[letters, outcome, *map(str, (counts.redriven, counts.filtered, counts.unreadable))]],
    )
    sys.stdout.flush()
