"""Selection of the journals that a command works on, and of their fragment files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_journals

__all__ = [
    "Selection",
    "file_root_of",
    "is_fully_suspended",
    "list_some",
    "missing_file_root",
    "select",
    "selection_of",
]


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


def file_root_of(path: str, option: str = "--file-root") -> Path | None:
    """Return the directory of an option, or None if it is not given.

    Args:
        path: the option's value.
        option: its name.

    Raises:
        ConfigurationError: it is no directory.
    """
    if path and not Path(path).is_dir():
        raise ConfigurationError(f"{option}: {path} is no directory")
    return Path(path) if path else None


def missing_file_root(journal: str, alternative: str = "") -> ConfigurationError:
    """Return the error of a command that needs ``--file-root`` for a journal's fragments."""
    return ConfigurationError(
        f"{journal}: its fragments are files of the brokers; name the directory of their file:// "
        f"stores with --file-root{alternative}"
    )
