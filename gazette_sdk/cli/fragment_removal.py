"""Removal of fragments from their stores, with the operator's own credentials."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

import orjson

from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.cli.formats import iec_bytes, write_table
from gazette_sdk.cli.journals.selection import file_root_of, missing_file_root
from gazette_sdk.errors import (
    ConfigurationError,
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
)
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, length_of

__all__ = ["FragmentRemoval", "Pruned"]

_log = logging.getLogger(__name__)

REMOVALS_MAX = 32
"""Concurrent removals of one journal's fragments."""


class _Removes(Protocol):
    """Options of a command that removes fragments."""

    @property
    def yes(self) -> bool: ...

    @property
    def dry_run(self) -> bool: ...

    @property
    def format(self) -> Literal["table", "json"]: ...

    @property
    def file_root(self) -> str: ...


@dataclass(slots=True)
class Pruned:
    """Numbers and sizes of a journal's fragments: all, removed (or to remove), and failed."""

    fragments: int = 0
    bytes: int = 0
    pruned_fragments: int = 0
    pruned_bytes: int = 0
    failed: int = 0

    def add(self, other: Pruned) -> None:
        """Add the numbers of another journal."""
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)


class FragmentRemoval:
    """Removal of fragments by a command, or a look at what it would remove.

    It is used by ``async with``, and shows at the end what was, or would be, removed: after an
    error, too.

    Args:
        settings: options of the command.
        column: what a row is about, as ``Journal``.
        goes_on: True if a fragment that cannot be removed is counted and logged; otherwise the
            first one ends the removal.

    Raises:
        ConfigurationError: it is told both to remove fragments and not to.
    """

    _stores: StoreRegistry

    def __init__(self, settings: _Removes, column: str, *, goes_on: bool = False) -> None:
        if settings.yes and settings.dry_run:
            raise ConfigurationError(
                "--yes removes fragments, and --dry-run does not: give one of them"
            )
        self._settings = settings
        self._column = column
        self._goes_on = goes_on
        self._root = file_root_of(settings.file_root)
        self._found: dict[str, Pruned] = {}

    @property
    def total(self) -> Pruned:
        """Numbers of all journals."""
        total = Pruned()
        for each in self._found.values():
            total.add(each)
        return total

    def count(self, journal: str, fragments: Sequence[pb.Fragment]) -> None:
        """Count the fragments of a journal, of which some may be removed next."""
        self._found[journal] = Pruned(len(fragments), sum(map(length_of, fragments)))

    async def remove(self, journal: str, fragments: Sequence[pb.Fragment]) -> Pruned:
        """Remove stored fragments of a journal. One that is not there any more counts as removed.

        Args:
            journal: the journal, whose fragments were counted.
            fragments: fragments, each of which names its store.

        Returns:
            The numbers of the journal.

        Raises:
            ConfigurationError: a store is in files whose directory is not known.
            ExceptionGroup: of the first error, unless it goes on.
        """
        pruned = self._found[journal]
        if self._settings.yes and self._root is None:
            _check_not_in_files(fragments)

        async def remove(fragment: pb.Fragment) -> None:
            try:
                await self._remove(fragment)
            except (StoreError, OSError) as error:
                if not self._goes_on:
                    raise
                pruned.failed += not isinstance(error, StoreAuthorizationError | PermissionError)
                _log.warning(
                    "failed to remove a fragment",
                    extra={**_fields(fragment), "err": str(error)},
                )
                return
            pruned.pruned_fragments += 1
            pruned.pruned_bytes += length_of(fragment)

        await for_each(fragments, remove, REMOVALS_MAX)
        return pruned

    async def _remove(self, fragment: pb.Fragment) -> None:
        path, fields = content_path(fragment), _fields(fragment)
        _log.info("pruning fragment", extra={**fields, "size": length_of(fragment)})
        if not self._settings.yes:
            return
        try:
            store = await self._stores.aget(fragment.backing_store)
            await asyncio.to_thread(store.remove, path)
        except FragmentNotFoundError:
            _log.info("the fragment has already been removed", extra=fields)

    async def __aenter__(self) -> Self:
        self._stores = StoreRegistry(self._root)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stores.aclose()
        self._show()
        settings = self._settings
        if error is None and not (settings.yes or settings.dry_run) and self.total.pruned_fragments:
            _log.warning("nothing was removed; add --yes to remove these fragments")

    def _show(self) -> None:
        """Write what was, or would be, removed to standard output."""
        dry_run = not self._settings.yes
        if self._settings.format == "json":
            for journal, pruned in self._found.items():
                numbers = asdict(pruned)
                if not self._goes_on:
                    del numbers["failed"]
                line = {self._column.lower(): journal, **numbers, "dry_run": dry_run}
                sys.stdout.write(orjson.dumps(line).decode() + "\n")
        elif self._found:
            verb = "To Remove" if dry_run else "Removed"
            rows = (
                [
                    journal,
                    str(pruned.fragments),
                    iec_bytes(pruned.bytes),
                    str(pruned.pruned_fragments),
                    iec_bytes(pruned.pruned_bytes),
                ]
                for journal, pruned in (*self._found.items(), ("TOTAL", self.total))
            )
            write_table([self._column, "Fragments", "Size", verb, f"{verb} Size"], rows)
        sys.stdout.flush()


def _fields(fragment: pb.Fragment) -> dict[str, object]:
    """Return what a log says of a fragment."""
    path = content_path(fragment)
    return {"journal": fragment.journal, "path": path, "mod": fragment.mod_time}


def _check_not_in_files(fragments: Iterable[pb.Fragment]) -> None:
    """Refuse fragments of ``file://`` stores.

    Raises:
        ConfigurationError: one is.
    """
    for fragment in fragments:
        if fragment.backing_store.startswith("file:"):
            raise missing_file_root(fragment.journal)
