"""Errors of fragment stores."""

from __future__ import annotations

from gazette_sdk.errors.base import GazetteError


class StoreError(GazetteError):
    """A fragment store failed.

    Remedy: check the store with ``gazctl journals store-health URL``, and its URL and network. The
    broker tries uploads again by itself, and keeps the content in its spools.

    Args:
        message: the failure, and its remedy.
        store: URL of the store.
    """

    def __init__(
        self,
        message: str,
        *,
        store: str | None = None,
        journal: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, journal=journal, offset=offset)
        self.store = store


class StoreAuthorizationError(StoreError):
    """The store refuses access, or its bucket or directory does not exist.

    Remedy: check the credentials of the process that uses the store, its rights, and the name of
    the bucket. Create the directory of a ``file://`` store.
    """


class FragmentNotFoundError(StoreError):
    """A fragment is not in its store.

    Remedy: if it was removed on purpose, read on through the broker: readers continue after the
    gap. Otherwise put the file back under its name.
    """


class CorruptFragmentError(StoreError):
    """A stored fragment's content does not match its name.

    Remedy: put a good copy of the file in its place, from a backup or another store, or remove it.
    Readers continue after the gap when the content after it is six hours old.
    """
