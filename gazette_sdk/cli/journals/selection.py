"""The journals that a command is about."""

from __future__ import annotations

from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.selectors import parse_selector
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_journals

__all__ = ["CALLS_MAX", "is_fully_suspended", "list_some", "select", "selector_of"]

CALLS_MAX = 64
"""Calls under way at once of commands that ask something of each journal."""


def selector_of(text: str) -> pb.LabelSelector:
    """The label selector of an option.

    Raises:
        ValidationError: it is malformed.
    """
    return parse_selector(text)


def is_fully_suspended(spec: pb.JournalSpec) -> bool:
    """Whether a journal has no replica at all: calls would resume it, or be refused."""
    return bool(spec.suspend.level == pb.JournalSpec.Suspend.FULL)


async def list_some(transport: Transport, selector: str) -> pb.ListResponse:
    """The matching journals, of which there has to be one at least.

    Raises:
        CommandFailedError: there is none.
        ValidationError: the selector is malformed.
        GazetteError: the listing failed.
    """
    listing = await list_journals(transport, selector_of(selector))
    if not listing.journals:
        raise CommandFailedError(
            f"no journals match the selector {selector!r}; `gazctl journals list` shows all"
        )
    return listing


async def select(transport: Transport, selector: str) -> list[pb.ListResponse.Journal]:
    """The matching journals which have replicas, in listing order.

    Raises:
        ValidationError: the selector is malformed.
        GazetteError: the listing failed.
    """
    listing = await list_journals(transport, selector_of(selector))
    return [each for each in listing.journals if not is_fully_suspended(each.spec)]
