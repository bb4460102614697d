"""Fragments as files below a directory (broker section 15).

:class:`MemoryStore` is in this process, on fsspec's file system in memory: for tests and notebooks.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import quote

from fsspec.implementations.memory import MemoryFileSystem

from gazette_sdk.errors import StoreAuthorizationError, StoreError
from gazette_sdk.fragment.stores.base import (
    ObjectStatus,
    Store,
    StoredContent,
    StoredObject,
    read_exactly,
)
from gazette_sdk.protocol.names import StoreURL

PARTIAL_PREFIX: Final = ".partial-"
"""Prefix of the names of files that are being written; listings omit them."""

_DIRECTORY_MODE: Final = 0o750
_COPY_BYTES: Final = 1 << 20


class FileStore(Store):
    """A fragment store in a directory.

    A put returns when the object's bytes, its name and its directories are synced to disk: a stored
    fragment survives a power cut.

    Args:
        parsed: the store's URL, whose prefix is a directory below the root.
        root: the process's file root.

    Raises:
        StoreError: the root is no directory.
    """

    remedy = "check the disk and the directory below the file root"
    authorization_remedy = (
        "create the store's directory below the file root, and let this process write to it"
    )

    def __init__(self, parsed: StoreURL, root: Path) -> None:
        super().__init__(parsed)
        if not root.is_dir():
            raise StoreError(
                f"file root {str(root)!r} is not a directory; create it, or give another one",
                store=self.url,
            )
        self._root = root

    def _sign_get(self, key: str, ttl_s: float) -> str:  # noqa: ARG002 - a file has no expiry
        self._path(key)
        return "file:///" + quote(key, safe="/$&+,:;=@-_.~")

    def _status_of(self, key: str) -> ObjectStatus | None:
        try:
            found = self._path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return ObjectStatus(found.st_size) if stat.S_ISREG(found.st_mode) else None

    def _open(self, key: str) -> StoredContent:
        raw = self._path(key).open("rb", buffering=0)
        try:
            return StoredContent(raw, os.fstat(raw.fileno()).st_size)
        except OSError:
            raw.close()
            raise

    def _put(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,  # noqa: ARG002 - files have no place for it
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        base = resolve_below(self._root, self._parsed.prefix, self.url)
        target = self._path(key)
        try:
            _make_directories(target.parent, base)
        except FileNotFoundError as error:
            raise StoreAuthorizationError(
                f"store {self.url}: directory {str(base)!r} does not exist; create it: stores do "
                "not create their own directory, so that a disk that is not mounted is an error",
                store=self.url,
            ) from error
        partial = target.with_name(f"{PARTIAL_PREFIX}{target.name[:150]}-{uuid.uuid4().hex}")
        try:
            _write(partial, content, length)
            if overwrite:
                partial.replace(target)
            else:
                _rename_exclusively(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        _sync_directory(target.parent)

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        stack = [(self._resolve(prefix), "")]
        while stack:
            directory, base = stack.pop()
            try:
                with os.scandir(directory) as entries:
                    found = list(entries)
            except (FileNotFoundError, NotADirectoryError):
                continue  # no object was stored there yet, or it was removed meanwhile
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    stack.append((entry.path, f"{base}{entry.name}/"))
                elif not entry.name.startswith(PARTIAL_PREFIX):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue  # removed meanwhile, or a dangling link
                    except OSError as error:
                        if error.errno == errno.ELOOP:
                            continue  # a link to itself
                        raise
                    if not stat.S_ISREG(status.st_mode):
                        continue  # a socket, a pipe, or a link to a directory
                    yield StoredObject(base + entry.name, int(status.st_mtime), status.st_size)

    def _remove(self, key: str) -> None:
        self._path(key).unlink()

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, PermissionError)

    def _path(self, key: str) -> Path:
        """Return the file of an object key.

        Raises:
            StoreError: it would not lie below the store's directory.
        """
        return Path(self._resolve(key))

    def _resolve(self, key: str) -> str:
        prefix = self._parsed.prefix
        base = _resolve_below(os.path.realpath(self._root), prefix, self.url)
        return _resolve_below(base, key.removeprefix(prefix), self.url)


def resolve_below(root: Path, relative: str, url: str) -> Path:
    """Return a path below a directory, and refuse one that leaves it, also by symbolic links.

    Args:
        root: the directory.
        relative: a path with ``/`` between its parts.
        url: the store or fragment, for the error.

    Raises:
        StoreError: it leaves the directory.
    """
    return Path(_resolve_below(os.path.realpath(root), relative, url))


def _resolve_below(root: str, relative: str, url: str) -> str:
    """Return :func:`resolve_below` of a directory without links. Each listing calls it."""
    final = os.path.realpath(os.path.join(root, relative.lstrip("/")))  # noqa: PTH118 - fast
    if final != root and not final.startswith(root.rstrip("/") + "/"):
        raise StoreError(
            f"{url}: path {relative!r} leads out of the directory {root!r}; "
            "paths with `..` and links to elsewhere are refused",
            store=url,
        )
    return final


def _write(path: Path, content: BinaryIO, length: int) -> None:
    """Write a new file, private to this user, and sync it to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        left = length
        while left:
            data = content.read(min(left, _COPY_BYTES))
            if not data:
                raise ValueError(f"content to store ends {left} bytes too early")
            left -= len(data)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        _sync(file.fileno())


def _rename_exclusively(partial: Path, target: Path) -> None:
    """Rename a file, unless the target exists: fragments are named by their content."""
    try:
        os.link(partial, target)
    except FileExistsError:
        pass
    except OSError:
        # This file system has no links. Two concurrent writers write the same bytes.
        if not target.exists():
            partial.rename(target)


def _make_directories(directory: Path, base: Path) -> None:
    """Make missing directories below ``base``, and sync their names to disk.

    Raises:
        FileNotFoundError: ``base`` does not exist, or was removed meanwhile.
    """
    missing = []
    while directory != base and not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    if not base.is_dir():
        raise FileNotFoundError(str(base))
    for path in reversed(missing):
        path.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Sync a directory's names to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    """Sync a file to the disk itself; on macOS fsync alone leaves it in the disk's cache."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:
        fcntl.fcntl(descriptor, full_sync)


class MemoryStore(Store):
    """A fragment store in the memory of this process, shared by all stores of one URL.

    Args:
        parsed: a ``memory`` URL; its host serves as the bucket's name.
    """

    def __init__(self, parsed: StoreURL) -> None:
        super().__init__(parsed)
        self._fs = MemoryFileSystem()

    def _sign_get(self, key: str, ttl_s: float) -> str:  # noqa: ARG002 - nothing expires here
        return f"memory://{self._parsed.bucket}/{key}"

    def _status_of(self, key: str) -> ObjectStatus | None:
        try:
            found = self._fs.info(self._path(key))
        except FileNotFoundError:
            return None
        return ObjectStatus(found["size"]) if found["type"] == "file" else None

    def _open(self, key: str) -> StoredContent:
        data: bytes = self._fs.cat_file(self._path(key))
        return StoredContent(io.BytesIO(data), len(data))

    def _put(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,  # noqa: ARG002 - there is no place for it
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        data = read_exactly(content, length)
        if overwrite or self._status_of(key) is None:
            self._fs.pipe_file(self._path(key), data)

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        top = self._path(prefix).rstrip("/") + "/"
        for path, found in self._fs.find(top, detail=True).items():
            created = int(_seconds(found["created"]))
            yield StoredObject(path.removeprefix(top), created, found["size"])

    def _remove(self, key: str) -> None:
        self._fs.rm_file(self._path(key))

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, PermissionError)

    def _path(self, key: str) -> str:
        return f"/{self._parsed.bucket}/{key}"


def _seconds(created: datetime | float) -> float:
    """Return the time of a file; older and newer releases of fsspec represent it differently."""
    return created.timestamp() if isinstance(created, datetime) else created
