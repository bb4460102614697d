"""Base of stores in Hadoop's file system: directories, and files that are renamed into place."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Final
from urllib.parse import quote

from gazette_sdk.errors import StoreAuthorizationError
from gazette_sdk.fragment.stores.base import (
    OPERATION_TIMEOUT_S,
    PUT_TIMEOUT_S,
    ObjectStatus,
    RangedReader,
    Store,
    StoredContent,
    StoredObject,
)
from gazette_sdk.fragment.stores.file import PARTIAL_PREFIX

__all__ = ["FileStatus", "HadoopStore", "Upload"]

_CLEAN_UP_TIMEOUT_S: Final = 10.0
"""Time to remove what a failed upload left, if the operation's own time has run out."""


@dataclass(frozen=True, slots=True)
class FileStatus:
    """Status of a file or directory.

    Attributes:
        name: last component of its path.
        length: length in bytes; 0 for directories.
        mod_time: time of the last modification, in whole seconds since 1970.
        is_directory: True for directories.
    """

    name: str
    length: int
    mod_time: int
    is_directory: bool


class Upload:
    """Content to upload, of which no byte may be missing.

    Args:
        content: read from its current position.
        length: number of bytes to read.
        store: bounds the time of the upload.
    """

    def __init__(self, content: BinaryIO, length: int, store: HadoopStore) -> None:
        self._content = content
        self._length = length
        self._left = length
        self._store = store

    def __len__(self) -> int:
        return self._length

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; none at the end.

        Raises:
            ValueError: the content ends too early.
            TimeoutError: the time of the operation has run out.
        """
        self._store.ensure_time()
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._content.read(wanted) if wanted else b""
        if wanted and not data:
            raise ValueError(f"content to upload ends {self._left} bytes too early")
        self._left -= len(data)
        return data


class HadoopStore(Store):
    """A fragment store in Hadoop's file system.

    An object is written to a temporary name beside its own, and renamed: a reader never sees a
    part of it. A store does not create its own directory, so that a wrong URL is an error.
    """

    remedy = "check that the NameNode and the DataNodes can be reached, and that the URL is right"
    authorization_remedy = (
        "create the store's directory (`hdfs dfs -mkdir -p`), and let the user of this process "
        "read and write it: the URL's argument `user`, or HADOOP_USER_NAME"
    )

    # ------------------------------------------------ operations of backends

    @abstractmethod
    def _status(self, path: str) -> FileStatus | None:
        """Return the status of a path, or None if there is nothing."""

    @abstractmethod
    def _children(self, path: str) -> list[FileStatus]:
        """Return what is in a directory; nothing if it does not exist."""

    @abstractmethod
    def _fetch(self, path: str, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)`` of a file."""

    @abstractmethod
    def _write(self, path: str, upload: Upload) -> None:
        """Write a new file."""

    @abstractmethod
    def _make_directories(self, path: str) -> None:
        """Create a directory and those above it; it may exist."""

    @abstractmethod
    def _rename(self, source: str, target: str) -> bool:
        """Rename a file. Return False if the target exists; then nothing has changed."""

    @abstractmethod
    def _replace(self, source: str, target: str) -> None:
        """Rename a file, and replace the target if it exists."""

    @abstractmethod
    def _delete(self, path: str) -> None:
        """Delete a file.

        Raises:
            FileNotFoundError: there is none.
        """

    # ---------------------------------------------------------- operations

    def ensure_time(self) -> None:
        """Raise an error if the time of the operation under way has run out.

        Raises:
            TimeoutError: it has.
        """
        self._remaining(OPERATION_TIMEOUT_S)

    def _sign_get(self, key: str, ttl_s: float) -> str:  # noqa: ARG002 - Hadoop signs no URLs
        """Return a URL that names the file. Clients read its content through brokers."""
        return f"{self._parsed.scheme}://{self._parsed.bucket}/{quote(key)}"

    def _status_of(self, key: str) -> ObjectStatus | None:
        found = self._status(_path(key))
        if found is None or found.is_directory:
            return None
        return ObjectStatus(found.length)

    def _open(self, key: str) -> StoredContent:
        path = _path(key)
        found = self._status(path)
        if found is None or found.is_directory:
            raise FileNotFoundError(key)

        def fetch(begin: int, end: int) -> bytes:
            with self._operation("get", key):
                return self._fetch(path, begin, end)

        return StoredContent(
            RangedReader(fetch, found.length),  # type: ignore[arg-type]  # a RawIOBase is one
            found.length,
        )

    def _put(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,  # noqa: ARG002 - files have no place for it
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        with self.bounded(PUT_TIMEOUT_S):
            self._require_directory()
            if not overwrite and self._status_of(key) is not None:
                return
            target = _path(key)
            directory, _, name = target.rpartition("/")
            self._make_directories(directory)
            partial = f"{directory}/{PARTIAL_PREFIX}{name[:150]}-{uuid.uuid4().hex}"
            is_renamed = False
            try:
                self._write(partial, Upload(content, length, self))
                written = self._status(partial)
                if written is None or written.length != length:
                    found = "nothing" if written is None else f"{written.length} bytes"
                    raise OSError(f"{length} bytes were written, and {found} is there")
                if overwrite:
                    self._replace(partial, target)
                    is_renamed = True
                else:
                    is_renamed = self._rename(partial, target)
                    if not is_renamed and self._status_of(key) is None:
                        raise OSError(f"{partial} could not be renamed to {target}")
            finally:
                if not is_renamed:
                    with self._new_bound(_CLEAN_UP_TIMEOUT_S), suppress(OSError):
                        self._delete(partial)

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        top = _path(prefix).rstrip("/")
        below = [""]
        while below:
            directory = below.pop()
            for found in self._children(f"{top}/{directory}".rstrip("/") or "/"):
                relative = f"{directory}{found.name}"
                if found.is_directory:
                    below.append(f"{relative}/")
                elif not found.name.startswith(PARTIAL_PREFIX):
                    yield StoredObject(relative, found.mod_time, found.length)

    def _remove(self, key: str) -> None:
        self._delete(_path(key))

    def _require_directory(self) -> None:
        directory = _path(self._parsed.prefix).rstrip("/") or "/"
        found = self._status(directory)
        if found is None or not found.is_directory:
            raise StoreAuthorizationError(
                f"store {self.url}: directory {directory!r} does not exist; create it "
                f"(`hdfs dfs -mkdir -p {directory}`): stores do not create their own directory",
                store=self.url,
            )


def _path(key: str) -> str:
    return f"/{key}"
