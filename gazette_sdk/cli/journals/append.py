"""``gazctl journals append``."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.formats import Progress, open_progress
from gazette_sdk.cli.journals.commands import APPEND, AppendSettings
from gazette_sdk.cli.journals.list import Selection, selection_of
from gazette_sdk.cli.journals.read import Record, Records
from gazette_sdk.cli.journals.specs import BLOCK_BYTES, blocks, length_of, open_input
from gazette_sdk.cli.program import Invocation
from gazette_sdk.errors import (
    ConfigurationError,
    DeliveryTimeoutError,
    GazetteError,
    MappingError,
)
from gazette_sdk.message import mapping as mappings
from gazette_sdk.message.mapping import Partitions
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.append.queue import PendingAppend
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import WatchedList

_log = logging.getLogger(__name__)

INPUT_MEMORY_BYTES = 64 << 20
"""Memory for input of a pipe that becomes one append; the rest is buffered in a file. An open
append would block all others of its journal."""


async def run(invocation: Invocation) -> None:
    """Append the input as a whole, or record by record."""
    settings = invocation.settings(APPEND)
    _check(settings)
    selection = selection_of(invocation, settings)
    with open_input(settings.input) as file:
        async with (
            open_broker(invocation) as transport,
            WatchedList(transport, selection.selector) as watched,
        ):
            listing = await watched.first_snapshot()
            selection.check(listing)
            if not listing.journals:
                raise MappingError(
                    f"no journals match the selector {selection.text!r}; "
                    "`gazctl journals list` shows all"
                )
            with open_progress("bytes") as progress:
                progress.begin("Appending")
                mapper = _Mapper(settings, selection, watched)
                if settings.framing == "none":
                    await _append_whole(transport, mapper, settings, file, progress)
                else:
                    await _append_records(transport, mapper, settings, file, progress)


def _check(settings: AppendSettings) -> None:
    if settings.framing == "none" and settings.mapping != "random":
        raise ConfigurationError(
            f"--mapping={settings.mapping} needs keys, which only --framing=lines or fixed have"
        )
    if settings.base64 and (settings.framing != "lines" or settings.mapping == "random"):
        raise ConfigurationError(
            "--base64 is about keys in lines: it needs --framing=lines, and a --mapping other "
            "than random"
        )


# --------------------------------------------------------------------- whole


async def _append_whole(
    transport: Transport,
    mapper: _Mapper,
    settings: AppendSettings,
    file: BinaryIO,
    progress: Progress,
) -> None:
    """Append the whole input as one append, and retry until it succeeds, or brokers take nothing.

    Raises:
        DeliveryTimeoutError: an attempt has not moved for too long.
        GazetteError: the last failure of attempts that failed for too long, or another failure.
    """
    loop = asyncio.get_running_loop()
    timeout_s = settings.delivery_timeout_s or None
    journal = mapper.journal_of(b"")
    with tempfile.SpooledTemporaryFile(INPUT_MEMORY_BYTES) as spooled:
        length, source = length_of(file), file
        if length is None:
            source = spooled  # type: ignore[assignment] # it is a file
            length = 0
            async for block in blocks(file):
                await asyncio.to_thread(spooled.write, block)
                length += len(block)

        async def content() -> AsyncIterator[bytes]:
            done = await asyncio.to_thread(source.seek, 0)
            while block := await asyncio.to_thread(source.read, BLOCK_BYTES):
                yield block
                if timeout_s is not None:
                    scope.reschedule(loop.time() + timeout_s)
                done += len(block)
                progress.advance(done, length)

        request = pb.AppendRequest(journal=journal)
        try:
            async with asyncio.timeout(timeout_s) as scope:
                response = await append(transport, request, [content], patience_s=timeout_s)
        except TimeoutError:
            raise DeliveryTimeoutError(
                f"{journal}: brokers have taken nothing more of the append within"
                f" --delivery-timeout {timeout_s:g}s; it may be written nevertheless: check them"
                " with `gazctl journals list`",
                journal=journal,
            ) from None
    _log.debug(
        "appended",
        extra={
            "journal": journal,
            "begin": response.commit.begin,
            "end": response.commit.end,
            "broker": response.header.process_id.suffix,
        },
    )


# ------------------------------------------------------------------- records


async def _append_records(
    transport: Transport,
    mapper: _Mapper,
    settings: AppendSettings,
    file: BinaryIO,
    progress: Progress,
) -> None:
    """Append record by record. Records before a wrong one are appended."""
    assert settings.framing != "none"
    records = Records(
        settings.framing, has_keys=settings.mapping != "random", base64_keys=settings.base64
    )
    service = AppendService(transport, delivery_timeout_s=settings.delivery_timeout_s or None)
    length, done = length_of(file), 0
    failure: GazetteError | OSError | None = None
    try:
        try:
            async for block in blocks(file):
                found, failure = records.feed(block)
                failure = await _append_block(service, mapper, found) or failure
                if failure is not None:
                    break
                done += len(block)
                progress.advance(done, length)
            else:
                found, failure = records.feed(b"")
                failure = await _append_block(service, mapper, found) or failure
        except OSError as error:
            failure = error  # the input cannot be read further
        await service.flush()
    finally:
        await service.aclose()
    if failure is not None:
        raise failure
    if records.has_dangling_key:
        _log.warning("the input ends with a key without a record; the key is dropped")


async def _append_block(
    service: AppendService, mapper: _Mapper, records: list[Record]
) -> MappingError | None:
    """Append records, those of one journal as one write; stop at a record without a journal."""
    by_journal: dict[str, list[bytes]] = {}
    failure = None
    for key, record in records:
        try:
            journal = mapper.journal_of(key)
        except MappingError as error:
            failure = error
            break
        by_journal.setdefault(journal, []).append(record)
    for journal, found in by_journal.items():
        appended = await service.append(pb.AppendRequest(journal=journal), b"".join(found))
        _raise_if_failed(appended)
    return failure


def _raise_if_failed(appended: PendingAppend) -> None:
    """Raise the error of a journal that takes no further appends."""
    if (error := appended.exception()) is not None:
        raise error


class _Mapper:
    """Mapping from keys to journals of the current listing."""

    def __init__(
        self, settings: AppendSettings, selection: Selection, watched: WatchedList
    ) -> None:
        self._selector = selection.text
        self._watched = watched
        self._snapshot: pb.ListResponse | None = None
        self._partitions = Partitions(())
        self._names: frozenset[str] = frozenset()
        self._pick = self._picker(settings.mapping)
        self._logs_decisions = _log.isEnabledFor(logging.DEBUG)

    def journal_of(self, key: bytes) -> str:
        """Return the journal of a key.

        Raises:
            MappingError: no journal matches the selector, or the key names no such journal.
        """
        snapshot = self._watched.snapshot
        if snapshot is not self._snapshot:
            assert snapshot is not None
            self._snapshot = snapshot
            self._partitions = Partitions(journal.spec for journal in snapshot.journals)
            self._names = frozenset(self._partitions.names)
        journal = self._pick(key)
        if self._logs_decisions:
            shown = key.decode(errors="backslashreplace")
            _log.debug("mapped partition key to journal", extra={"journal": journal, "key": shown})
        return journal

    def _picker(self, kind: str) -> Callable[[bytes], str]:
        if kind == "direct":
            return self._direct
        selector = self._selector
        made = {
            "random": lambda: mappings.random(selector, source=random.SystemRandom()),
            "modulo": lambda: mappings.modulo(selector, key=bytes),
            "rendezvous": lambda: mappings.rendezvous(selector, key=bytes),
        }[kind]()
        return lambda key: made.pick(key, self._partitions)

    def _direct(self, key: bytes) -> str:
        journal = key.decode(errors="backslashreplace")
        if journal not in self._names:
            raise MappingError(
                f"the key {journal!r} is not the name of a journal that matches {self._selector!r}"
            )
        return journal
