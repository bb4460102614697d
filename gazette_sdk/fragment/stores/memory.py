"""Store in this process, on fsspec's file system in memory: for tests and notebooks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import datetime
from typing import BinaryIO

from fsspec.implementations.memory import MemoryFileSystem

from gazette_sdk.fragment.stores.base import (
    ObjectStatus,
    Store,
    StoredContent,
    StoredObject,
    read_exactly,
)
from gazette_sdk.protocol.names import StoreURL

__all__ = ["MemoryStore"]


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
