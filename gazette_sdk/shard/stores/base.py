"""The protocol of stores, and what they share."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, runtime_checkable

from gazette_sdk.message.sequencing.checkpoint import Checkpoint
from gazette_sdk.shard.recovery.file_change import FileChange

__all__ = [
    "UNCOMMITTED_BYTES_MAX",
    "UNCOMMITTED_PUTS_MAX",
    "QueryableStore",
    "Store",
    "ValidatingStore",
    "type_arguments",
]

UNCOMMITTED_PUTS_MAX = 65_536
"""Changes of one transaction, from which on its store is full."""
UNCOMMITTED_BYTES_MAX = 16 << 20
"""Bytes of one transaction's changes, from which on its store is full."""


class Store(Protocol):
    """Durable state of one shard.

    A store with local files is made with a directory, in which a player has restored the files of
    the recovery log; all files in it count as recorded. The store alone changes the directory from
    then on. Calls come one at a time, from any thread::

        restore (begin … start_commit finish_commit)* destroy

    ``restore`` may come again at any time that no commit is under way. `shard` 9 has the formats
    that consumers of Gazette read, too.

    Attributes:
        overlaps_commit: the next transaction may read this one's state before it is durable.
    """

    overlaps_commit: ClassVar[bool]

    @property
    def is_full(self) -> bool:
        """The open transaction is to be committed before it reads another message."""

    def restore(self) -> Checkpoint:
        """Return the checkpoint of the last commit, and drop every change made since.

        Returns:
            The checkpoint; the empty one if nothing was ever committed.

        Raises:
            ShardStoreError: the state cannot be read.
            FencedError: another primary took the shard over.
        """

    def begin(self) -> None:
        """Begin a transaction, before its first message."""

    def start_commit(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """Commit changes and checkpoint to the local files, both or neither.

        Args:
            checkpoint: the position behind the transaction, with its intents.

        Returns:
            The changes of files since the last commit, to be recorded by one append.

        Raises:
            ShardStoreError: the commit failed; the shard has to be recovered.
        """

    def finish_commit(self) -> None:
        """End the commit, after its outputs and its file changes are durable.

        Remote stores commit here.

        Raises:
            FencedError: another primary took the shard over; nothing was committed.
        """

    def rerecord(self, path: str) -> Sequence[FileChange]:
        """Return changes that record a file anew, with the content it has in the log by now.

        They follow those of the last commit, before the next ``start_commit``. They let a reader
        skip the earlier operations of the file.

        Args:
            path: of a file in the log.

        Returns:
            Its removal and creation; nothing where the file is not the store's any more.
        """

    def destroy(self) -> None:
        """Close the store; the caller removes its directory. May be called twice."""


class QueryableStore(Store, Protocol):
    """Store that queries may read while its shard goes on."""

    def committed(self) -> AbstractContextManager[Any]:
        """Open a view of what is committed locally, without the open transaction.

        Any thread may call it and use the view, for no longer than a query takes.

        Returns:
            A context manager of the view, which has the reading methods of the store.

        Raises:
            ClosedError: the store is closed, or not restored yet.
        """


@runtime_checkable
class ValidatingStore(Protocol):
    """Store that learns only at the end of a transaction that its state cannot be committed."""

    def validate_state(self) -> None:
        """Check the open transaction's state, after the last hook that may change it.

        Where the application leaves out records that fail, a transaction that is refused is run
        again, with a check after each record.

        Raises:
            UnreadableStateError: the state would not be read again as it is.
        """


def type_arguments(store: object) -> tuple[Any, ...]:
    """Return the arguments that a generic store class was made with; none if it had none.

    They are those of ``RocksStore[str, int](directory)``, or of ``class Totals(RocksStore[str,
    int])``. The former are set after ``__init__`` returns.
    """
    made_with = getattr(store, "__orig_class__", None)
    for base in (made_with, *getattr(type(store), "__orig_bases__", ())):
        found = typing.get_args(base)
        if found and not any(isinstance(argument, typing.TypeVar) for argument in found):
            return found
    return ()
