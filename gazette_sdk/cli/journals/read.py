"""``gazctl journals read``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from gazette_sdk.cli.client import BROKER_CLIENT, open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.journals.offsets import load_offsets, store_offsets
from gazette_sdk.cli.journals.reads import ConcurrentReads, Output, ReadOptions
from gazette_sdk.cli.journals.selection import file_root_of
from gazette_sdk.cli.journals.settings import READ, ReadSettings
from gazette_sdk.cli.progress import open_progress
from gazette_sdk.protocol.selectors import parse_selector
from gazette_sdk.server.signals import StopSignal
from gazette_sdk.transport.listing import WatchedList

__all__ = ["run"]


async def run(invocation: Invocation) -> None:
    """Read journals to their write heads or until a signal, then save the offsets."""
    settings = invocation.settings(READ)
    selector = parse_selector(settings.selector)
    options = ReadOptions(
        block=settings.block,
        tail=settings.tail,
        do_not_proxy=invocation.settings(BROKER_CLIENT).cache_size > 0,
        begin_mod_time=settings.from_time,
        file_root=file_root_of(settings.file_root),
    )
    with StopSignal() as stop:
        async with (
            open_broker(invocation) as transport,
            WatchedList(transport, selector) as watched,
        ):
            await watched.first_snapshot()  # before any file is touched
            offsets = _offsets(settings)
            with _open_output(settings.output) as file:
                output = Output(file)
                with open_progress("bytes", is_shown=not file.isatty()) as progress:
                    progress.begin("Reading")
                    reads = ConcurrentReads(transport, options, output, offsets, progress)
                    await reads.run(watched, stop.wait)
                output.sync()
        if settings.offsets_out:
            store_offsets(Path(settings.offsets_out), offsets)


def _offsets(settings: ReadSettings) -> dict[str, int]:
    if not settings.offsets:
        return {}
    path, out = Path(settings.offsets), settings.offsets_out
    return load_offsets(path, replaced=bool(out) and path.resolve() == Path(out).resolve())


def _open_output(path: str) -> BinaryIO:
    if path != "-":
        return Path(path).open("wb")
    return open(sys.stdout.fileno(), "wb", closefd=False)
