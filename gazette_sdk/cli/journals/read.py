"""``gazctl journals read``."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from gazette_sdk.cli.client import BROKER_CLIENT, open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import TimedOutError
from gazette_sdk.cli.journals.offsets import load_offsets, store_offsets
from gazette_sdk.cli.journals.reads import ConcurrentReads, Output, ReadOptions
from gazette_sdk.cli.journals.selection import file_root_of, selection_of
from gazette_sdk.cli.journals.settings import READ, ReadSettings
from gazette_sdk.cli.progress import open_progress
from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.message.uuid import clock_of_time
from gazette_sdk.protocol.durations import parse_duration
from gazette_sdk.server.process import StopSignal
from gazette_sdk.transport.journal_reader import begin_mod_time_of
from gazette_sdk.transport.listing import WatchedList

__all__ = ["run"]


async def run(invocation: Invocation) -> None:
    """Read journals to their write heads or until a signal, then save the offsets.

    Raises:
        TimedOutError: the time was up. What was read is written, and the offsets are saved.
        GazetteError: a journal that was named does not exist, or reading failed.
    """
    settings, timeout_s = invocation.settings(READ), invocation.timeout_s
    selection = selection_of(invocation, settings)
    options = _options(settings, do_not_proxy=invocation.settings(BROKER_CLIENT).cache_size > 0)
    begun = asyncio.get_running_loop().time()
    with StopSignal() as stop:
        async with (
            open_broker(invocation) as transport,
            WatchedList(transport, selection.selector) as watched,
        ):
            try:
                async with asyncio.timeout(timeout_s or None):
                    listing = await watched.first_snapshot()  # before any file is touched
            except TimeoutError:
                raise TimedOutError("journals read", timeout_s, "nothing was read") from None
            selection.check(listing)
            offsets = _offsets(settings)
            is_late = False

            async def stopped() -> None:
                nonlocal is_late
                try:
                    async with asyncio.timeout_at(begun + timeout_s if timeout_s else None):
                        await stop.wait()
                except TimeoutError:
                    is_late = True

            with _open_output(settings.output) as file:
                output = Output(file)
                with open_progress("bytes", is_shown=not file.isatty()) as progress:
                    progress.begin("Reading")
                    reads = ConcurrentReads(transport, options, output, offsets, progress)
                    await reads.run(watched, stopped)
                output.sync()
        if settings.offsets_out:
            store_offsets(Path(settings.offsets_out), offsets)
    if is_late:
        counted = f"{reads.messages} messages were read" if settings.messages_max else ""
        raise TimedOutError("journals read", timeout_s, counted)


def _options(settings: ReadSettings, *, do_not_proxy: bool) -> ReadOptions:
    """Return the options of the reads.

    Raises:
        ConfigurationError: options exclude each other, or the time is malformed.
    """
    begin_mod_time, since_clock = settings.from_time, 0
    if settings.since:
        for name, is_given in (("--tail", settings.tail), ("--from", settings.from_time)):
            if is_given:
                raise ConfigurationError(f"--since and {name} exclude each other; give one of them")
        since = _time_of(settings.since)
        begin_mod_time = begin_mod_time_of(since)
        since_clock = clock_of_time(since)
    return ReadOptions(
        block=settings.block,
        tail=settings.tail,
        do_not_proxy=do_not_proxy,
        begin_mod_time=begin_mod_time,
        since_clock=since_clock,
        messages_max=settings.messages_max or None,
        file_root=file_root_of(settings.file_root),
    )


def _time_of(text: str) -> datetime:
    """Return the time of ``--since``.

    Raises:
        ConfigurationError: it is neither a duration nor a time with its zone.
    """
    try:
        return datetime.now(UTC) - timedelta(microseconds=parse_duration(text) // 1000)
    except (ValidationError, OverflowError):
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        problem = "is no time" if time is None else "has no time zone"
        raise ConfigurationError(
            f"--since: {text!r} {problem}; write 2026-01-31T12:00:00Z, 2026-01-31T13:00:00+01:00, "
            "or 2h for two hours ago"
        )
    return time


def _offsets(settings: ReadSettings) -> dict[str, int]:
    if not settings.offsets:
        return {}
    path, out = Path(settings.offsets), settings.offsets_out
    return load_offsets(path, replaced=bool(out) and path.resolve() == Path(out).resolve())


def _open_output(path: str) -> BinaryIO:
    if path != "-":
        return Path(path).open("wb")
    return open(sys.stdout.fileno(), "wb", closefd=False)
