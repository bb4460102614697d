"""Selection of the journals that a command works on, and of their fragment files."""

from __future__ import annotations

from pathlib import Path

from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_journals

__all__ = ["file_root_of", "is_fully_suspended", "list_some", "missing_file_root", "select"]


def is_fully_suspended(spec: pb.JournalSpec) -> bool:
    """Return True if a journal has no replica: calls would resume it, or fail."""
    return bool(spec.suspend.level == pb.JournalSpec.Suspend.FULL)


async def list_some(transport: Transport, selector: str) -> pb.ListResponse:
    """Return the matching journals, at least one.

    Raises:
        CommandFailedError: no journal matches.
        ValidationError: the selector is malformed.
        GazetteError: the listing failed.
    """
    listing = await list_journals(transport, selector)
    if not listing.journals:
        raise CommandFailedError(
            f"no journals match the selector {selector!r}; `gazctl journals list` shows all"
        )
    return listing


async def select(transport: Transport, selector: str) -> list[pb.ListResponse.Journal]:
    """Return the matching journals which have replicas, in listing order.

    Raises:
        ValidationError: the selector is malformed.
        GazetteError: the listing failed.
    """
    listing = await list_journals(transport, selector)
    return [each for each in listing.journals if not is_fully_suspended(each.spec)]


def file_root_of(path: str) -> Path | None:
    """Return the directory of the option ``--file-root``, or None if it is not given.

    Raises:
        ConfigurationError: it is no directory.
    """
    if path and not Path(path).is_dir():
        raise ConfigurationError(f"--file-root: {path} is no directory")
    return Path(path) if path else None


def missing_file_root(journal: str, alternative: str = "") -> ConfigurationError:
    """Return the error of a command that needs ``--file-root`` for a journal's fragments."""
    return ConfigurationError(
        f"{journal}: its fragments are files of the brokers; name the directory of their file:// "
        f"stores with --file-root{alternative}"
    )
