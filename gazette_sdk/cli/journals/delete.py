"""``gazctl journals delete``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.journals.apply import apply_and_show
from gazette_sdk.cli.journals.input import blocks
from gazette_sdk.cli.journals.selection import list_some
from gazette_sdk.cli.journals.settings import DELETE
from gazette_sdk.errors import ConfigurationError, JournalNotFoundError
from gazette_sdk.journals.changes import TXN_CHANGES_MAX, list_named
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport

__all__ = ["run"]

_KEPT = (
    "Fragments that are stored stay in their stores: a new journal of the same name has them, and "
    "takes appends after `gazctl journals reset-head`. Content that brokers have not stored yet is "
    "lost."
)


async def run(invocation: Invocation) -> None:
    """Delete journals by name or selector. On a terminal it asks first."""
    settings = invocation.settings(DELETE)
    names = sorted(set(invocation.arguments))
    if bool(names) == bool(settings.selector):
        raise ConfigurationError(
            "`journals delete` needs either names of journals, or a label selector (-l): give one"
        )
    async with open_broker(invocation) as transport:
        found = await _select(transport, names, settings.selector)
    asks = not settings.yes and sys.stdin.isatty()
    if asks:
        await _confirm(found)
    changes = [
        pb.ApplyRequest.Change(delete=each.spec.name, expect_mod_revision=each.mod_revision)
        for each in found
    ]
    # Opened again: the connection may not survive a long time of thinking.
    async with open_broker(invocation) as transport:
        await apply_and_show(transport, changes, TXN_CHANGES_MAX, settings.format)
    if not asks:
        sys.stderr.write(f"{_KEPT}\n")


async def _select(
    transport: Transport, names: Sequence[str], selector: str
) -> Sequence[pb.ListResponse.Journal]:
    """Return the journals to delete.

    Raises:
        JournalNotFoundError: a named journal does not exist.
        CommandFailedError: no journal matches the selector.
    """
    if selector:
        return (await list_some(transport, selector)).journals
    found = await list_named(transport, names)
    for name in names:
        if name not in found:
            raise JournalNotFoundError("nothing was deleted", journal=name)
    return [found[name] for name in names]


async def _confirm(found: Sequence[pb.ListResponse.Journal]) -> None:
    """Ask on the terminal.

    Raises:
        CommandFailedError: the answer is no.
    """
    for each in found:
        sys.stderr.write(f"  {each.spec.name}\n")
    count = "this journal" if len(found) == 1 else f"these {len(found)} journals"
    sys.stderr.write(f"{_KEPT}\nDelete {count}? [y/N] ")
    sys.stderr.flush()
    answer = b""
    async for block in blocks(sys.stdin.buffer):
        answer += block
        if b"\n" in block:
            break
    if answer.strip().lower() not in {b"y", b"yes"}:
        raise CommandFailedError("cancelled; nothing was deleted")
