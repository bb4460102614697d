"""Hadoop's file system by its native protocol: fsspec's ``hdfs``, which is Arrow's over libhdfs."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any, Final

import pyarrow.fs  # noqa: F401 - fsspec imports it, and names it less clearly if it is missing
from fsspec.implementations.arrow import HadoopFileSystem

from gazette_sdk.errors import StoreError
from gazette_sdk.fragment.stores.hadoop import FileStatus, HadoopStore, Upload
from gazette_sdk.protocol.names import StoreURL

__all__ = ["HdfsStore"]

_DEFAULT_PORT: Final = 8020
_COPIED_BYTES: Final = 1 << 20


class HdfsStore(HadoopStore):
    """A directory of Hadoop's file system, by its native protocol.

    The user is the URL's argument ``user``, else ``HADOOP_USER_NAME``. Time limits are those of
    Hadoop's client, which its configuration sets.

    Args:
        parsed: the store's URL.
        filesystem: a file system of fsspec over one of Arrow, instead of HDFS.

    Raises:
        StoreError: Hadoop's client library or Java is missing, or the NameNode cannot be reached.
    """

    def __init__(self, parsed: StoreURL, filesystem: Any = None) -> None:
        super().__init__(parsed)
        host, _, port = parsed.bucket.partition(":")
        try:
            self._fs = filesystem or HadoopFileSystem(
                host=host,
                port=int(port or _DEFAULT_PORT),
                user=parsed.arguments.get("user") or os.environ.get("HADOOP_USER_NAME") or None,
                skip_instance_cache=True,
            )
        except OSError as error:
            raise StoreError(
                f"{parsed.public}: Hadoop's client cannot be used ({error}); install Java and "
                "Hadoop, set JAVA_HOME, HADOOP_HOME and CLASSPATH (`hadoop classpath --glob`), and "
                "check the NameNode's address, or use a webhdfs URL, which needs neither",
                store=parsed.url,
            ) from error

    def _status(self, path: str) -> FileStatus | None:
        try:
            return _status(self._fs.info(path))
        except FileNotFoundError:
            return None

    def _children(self, path: str) -> list[FileStatus]:
        found = self._status(path)
        if found is None or not found.is_directory:
            return []
        return [_status(each) for each in self._fs.ls(path, detail=True)]

    def _fetch(self, path: str, begin: int, end: int) -> bytes:
        content: bytes = self._fs.cat_file(path, begin, end, seekable=True)
        return content

    def _write(self, path: str, upload: Upload) -> None:
        with self._fs.open(path, "wb") as file:
            while data := upload.read(_COPIED_BYTES):
                file.write(data)

    def _make_directories(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def _rename(self, source: str, target: str) -> bool:
        if self._status(target) is not None:
            return False
        try:
            self._fs.mv(source, target)  # HDFS refuses it if the target exists meanwhile
        except OSError:
            if self._status(target) is None:
                raise
            return False
        return True

    def _replace(self, source: str, target: str) -> None:
        # Not atomic: this protocol renames to no existing name.
        if self._status(target) is not None:
            self._fs.rm_file(target)
        self._fs.mv(source, target)

    def _delete(self, path: str) -> None:
        if self._status(path) is None:
            raise FileNotFoundError(path)
        self._fs.rm_file(path)

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, PermissionError)


def _status(found: dict[str, Any]) -> FileStatus:
    modified = found["mtime"]
    return FileStatus(
        name=str(found["name"]).rpartition("/")[2],
        length=found["size"] or 0,
        mod_time=int(modified.timestamp()) if isinstance(modified, datetime) else 0,
        is_directory=found["type"] == "directory",
    )
