"""``gazctl journals append``, and ``gazctl attach-uuids``, which prepares what it appends."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.formats import Progress, open_progress
from gazette_sdk.cli.journals.commands import APPEND, AppendSettings
from gazette_sdk.cli.journals.list import Selection, selection_of
from gazette_sdk.cli.journals.read import Record, Records
from gazette_sdk.cli.journals.specs import BLOCK_BYTES, blocks, length_of, open_input
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.settings import ATTACH_UUIDS
from gazette_sdk.errors import (
    ConfigurationError,
    DeliveryTimeoutError,
    GazetteError,
    MappingError,
)
from gazette_sdk.message import mapping as mappings
from gazette_sdk.message.mapping import Partitions
from gazette_sdk.message.uuid import OUTSIDE_TXN, Stamp, new_producer_id
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


INPUT_BLOCK_BYTES = 1 << 20
"""Size of one read of a file."""

_FIELD = re.compile(r"(\{\{.*?(?:\}\}|\Z))", re.DOTALL)


class Template:
    """Text with fields for a UUID and a line.

    Args:
        text: literal text with ``{{.UUID}}`` and ``{{.Line}}``; blanks within braces are fine.

    Raises:
        ConfigurationError: a field has another name, or no end.
    """

    def __init__(self, text: str) -> None:
        # Literal texts and names of fields alternate. The command line need not be UTF-8.
        parts = _FIELD.split(text)
        self._literals = [part.encode(errors="surrogateescape") for part in parts[::2]]
        self._is_uuid = [self._field(part) == ".UUID" for part in parts[1::2]]

    def _field(self, part: str) -> str:
        name = part[2:-2].strip()
        if name not in {".UUID", ".Line"} or not part.endswith("}}"):
            raise ConfigurationError(
                f"--template: {part!r} is neither {{{{.UUID}}}} nor {{{{.Line}}}}"
            )
        return name

    def render(self, uuid: bytes, line: bytes) -> bytes:
        """Return the text of one line."""
        rendered = self._literals[0]
        for is_uuid, literal in zip(self._is_uuid, self._literals[1:], strict=True):
            rendered += (uuid if is_uuid else line) + literal
        return rendered


def run_attach(invocation: Invocation) -> None:
    """Write each line of the files, or of standard input, with a fresh UUID."""
    settings = invocation.settings(ATTACH_UUIDS)
    template = Template(settings.template)
    stamp = Stamp(new_producer_id())
    stamp.flags = OUTSIDE_TXN
    with ExitStack() as opened:
        files: list[tuple[str, BinaryIO]] = [
            (name, opened.enter_context(Path(name).open("rb", buffering=0)))
            for name in invocation.arguments
        ] or [("standard input", opened.enter_context(_standard_input()))]
        for name, file in files:
            is_header = settings.skip_header
            for lines in lines_of(file, name, settings.max_length):
                written = bytearray()
                for line in lines[1:] if is_header else lines:
                    stamp.tick_now()
                    written += template.render(stamp.text(), line)
                is_header = False
                sys.stdout.buffer.write(written)
                sys.stdout.buffer.flush()


def _standard_input() -> BinaryIO:
    return cast("BinaryIO", open(sys.stdin.fileno(), "rb", buffering=0, closefd=False))


def lines_of(file: BinaryIO, name: str, max_length: int) -> Iterator[list[bytes]]:
    """Yield lists of the lines of a file, without their terminators; never an empty list.

    Args:
        file: an unbuffered file.
        name: name of the file in errors.
        max_length: greatest length of a line, without its terminator.

    Raises:
        CommandFailedError: a line is longer. The lines before it were yielded.
    """
    rest, number = b"", 0
    while block := file.read(INPUT_BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        found = [line.removesuffix(b"\r") for line in lines]
        fitting = _count_fitting(found, max_length)
        if fitting:
            yield found[:fitting]
        number += fitting
        # The rest may end in a carriage return, which does not count.
        if fitting < len(found) or len(rest) > max_length + 1:
            raise _too_long(name, number, max_length)
    if rest:
        last = rest.removesuffix(b"\r")
        if len(last) > max_length:
            raise _too_long(name, number, max_length)
        yield [last]


def _count_fitting(lines: list[bytes], max_length: int) -> int:
    """Return the number of lines before the first one that is too long."""
    if not lines or max(map(len, lines)) <= max_length:
        return len(lines)
    return next(index for index, line in enumerate(lines) if len(line) > max_length)


def _too_long(name: str, before: int, max_length: int) -> CommandFailedError:
    return CommandFailedError(
        f"{name}: line {before + 1} is longer than {max_length} bytes; raise --max-length"
    )
