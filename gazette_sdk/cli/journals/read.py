"""``gazctl journals read``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from gazette_sdk.cli.client import BROKER_CLIENT, open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.journals.offsets import load_offsets, store_offsets
from gazette_sdk.cli.journals.pump import Output, Pump, ReadOptions
from gazette_sdk.cli.journals.selection import selector_of
from gazette_sdk.cli.journals.settings import READ, ReadSettings
from gazette_sdk.cli.progress import progress_bar
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.signals import StopSignal
from gazette_sdk.transport.listing import WatchedList

__all__ = ["run"]


async def run(invocation: Invocation) -> None:
    """Read journals until all are at their heads, or until a signal; then note offsets."""
    settings = invocation.settings(READ)
    selector = selector_of(settings.selector)
    options = ReadOptions(
        block=settings.block,
        tail=settings.tail,
        do_not_proxy=invocation.settings(BROKER_CLIENT).cache_size > 0,
        begin_mod_time=settings.from_time,
        file_root=_file_root(settings.file_root),
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
                with progress_bar("Reading", output_is_terminal=file.isatty()) as progress:
                    pump = Pump(transport, options, output, offsets, progress)
                    await pump.run(watched, stop.wait)
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


def _file_root(text: str) -> Path | None:
    if text and not Path(text).is_dir():
        raise ConfigurationError(f"--file-root: {text} is no directory")
    return Path(text) if text else None
