"""Stores in Hadoop's file system: directories, and files that are renamed into place.

:class:`WebHdfsStore` uses WebHDFS, with the sessions of fsspec's ``webhdfs``. The NameNode
redirects reads and writes of content to a DataNode. The client of fsspec does not check the answers
of DataNodes, nor of renaming, and knows no time limits; so requests are sent here.

:class:`HdfsStore` uses the native protocol: fsspec's ``hdfs``, which is Arrow's over libhdfs.
"""

from __future__ import annotations

import os
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, Final
from urllib.parse import quote, urlsplit

import pyarrow.fs  # noqa: F401 - fsspec imports it, and names it less clearly if it is missing
import requests
from fsspec.implementations.arrow import HadoopFileSystem
from fsspec.implementations.webhdfs import WebHDFS
from requests.adapters import HTTPAdapter

from gazette_sdk.errors import StoreAuthorizationError, StoreError
from gazette_sdk.fragment.stores.base import (
    CONNECT_TIMEOUT_S,
    OPERATION_TIMEOUT_S,
    PUT_TIMEOUT_S,
    READ_TIMEOUT_S,
    ObjectStatus,
    RangedReader,
    Store,
    StoredContent,
    StoredObject,
)
from gazette_sdk.fragment.stores.file import PARTIAL_PREFIX
from gazette_sdk.protocol.names import StoreURL, without_queries

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


_DEFAULT_PORT: Final = {"": 9870, "true": 9871}
_TOKEN: Final = "WEBHDFS_DELEGATION_TOKEN"  # noqa: S105 - a variable's name
_TOKEN_HOSTS: Final = "WEBHDFS_TOKEN_HOSTS"  # noqa: S105 - the same
_REFUSALS: Final = frozenset({"AccessControlException", "AuthorizationException"})
_REPLACE_ATTEMPTS: Final = 3


class WebHdfsError(OSError):
    """Error response of a NameNode or a DataNode.

    Attributes:
        code: HTTP status.
        exception: name of the Java exception, or empty.
    """

    def __init__(self, code: int, exception: str, message: str) -> None:
        super().__init__(f"HTTP {code}: {exception} {message}".rstrip())
        self.code = code
        self.exception = exception


class WebHdfsStore(HadoopStore):
    """A directory of Hadoop's file system, over WebHDFS or an HttpFS gateway.

    The user is the URL's argument ``user``, else ``HADOOP_USER_NAME``; a delegation token comes
    from ``WEBHDFS_DELEGATION_TOKEN``, and with ``kerberos=true`` the ticket from Kerberos.

    A user who may name a store could name a host that collects tokens. So the token is sent over
    TLS only, or to the hosts of ``WEBHDFS_TOKEN_HOSTS``, and then to no others.

    Raises:
        StoreError: an argument is wrong, the token must not be sent to the host, or Kerberos is not
            supported by this installation.
    """

    def __init__(self, parsed: StoreURL) -> None:
        super().__init__(parsed)
        arguments = parsed.arguments
        for name in ("tls", "kerberos"):
            if arguments.get(name, "true") != "true":
                raise StoreError(
                    f"{parsed.public}: argument {name} must be `true`, or be left off",
                    store=parsed.url,
                )
        host, _, port = parsed.bucket.partition(":")
        has_kerberos = "kerberos" in arguments
        self._token_hosts = _token_hosts()
        token = self._token = self._sent_token(os.environ.get(_TOKEN) or None)
        user = arguments.get("user") or os.environ.get("HADOOP_USER_NAME") or None
        try:
            self._fs: Any = WebHDFS(
                host,
                port=int(port or _DEFAULT_PORT[arguments.get("tls", "")]),
                kerberos=has_kerberos,
                token=token,
                user=None if has_kerberos or token else user,
                use_https="tls" in arguments,
                skip_instance_cache=True,  # one session for each store, which closes it
            )
        except ModuleNotFoundError as error:
            raise StoreError(
                f"{parsed.public}: Kerberos needs the Python package {error.name!r}; "
                "run `pip install requests-kerberos`",
                store=parsed.url,
            ) from error
        self._session: requests.Session = self._fs.session
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _BoundedAdapter(self))

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def timeouts(self) -> tuple[float, float]:
        """Return the limits of connecting, and of waiting for data, in seconds."""
        remaining = self._remaining(OPERATION_TIMEOUT_S)
        return min(CONNECT_TIMEOUT_S, remaining), min(READ_TIMEOUT_S, remaining)

    def _status(self, path: str) -> FileStatus | None:
        try:
            found = self._call("GET", "GETFILESTATUS", path).json()["FileStatus"]
        except FileNotFoundError:
            return None
        return _status(found)

    def _children(self, path: str) -> list[FileStatus]:
        try:
            found = self._call("GET", "LISTSTATUS", path).json()["FileStatuses"]["FileStatus"]
        except FileNotFoundError:
            return []
        # The status of a file is listed without a name.
        return [_status(each) for each in found if each["pathSuffix"]]

    def _fetch(self, path: str, begin: int, end: int) -> bytes:
        response = self._call("GET", "OPEN", path, offset=begin, length=end - begin)
        content: bytes = response.content
        return content

    def _write(self, path: str, upload: Upload) -> None:
        self._call("PUT", "CREATE", path, upload=upload, overwrite="false")

    def _make_directories(self, path: str) -> None:
        if not self._call("PUT", "MKDIRS", path).json()["boolean"]:
            raise OSError(f"directory {path} could not be created")

    def _rename(self, source: str, target: str) -> bool:
        renamed: bool = self._call("PUT", "RENAME", source, destination=target).json()["boolean"]
        return renamed

    def _replace(self, source: str, target: str) -> None:
        response = self._call(
            "PUT", "RENAME", source, destination=target, renameoptions="OVERWRITE"
        )
        if not response.content or response.json().get("boolean", True):
            return
        for _ in range(_REPLACE_ATTEMPTS):  # a gateway without that option; others may write, too
            self._call("DELETE", "DELETE", target, recursive="false")
            if self._rename(source, target):
                return
        raise OSError(f"{target} could not be replaced; others write it, too")

    def _delete(self, path: str) -> None:
        if not self._call("DELETE", "DELETE", path, recursive="false").json()["boolean"]:
            raise FileNotFoundError(path)

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, WebHdfsError) and error.exception in _REFUSALS

    def _call(
        self, method: str, operation: str, path: str, *, upload: Upload | None = None, **more: Any
    ) -> requests.Response:
        """Send a request to the NameNode, and on to the DataNode that it names.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: no answer, or one with an error.
        """
        response = self._send(
            method,
            self._fs.url + quote(path, safe="/"),
            params={**more, **self._fs.pars, "op": operation},
        )
        if response.is_redirect:
            location = response.headers["Location"]
            self._check_redirect(location)
            response = self._send(
                method,
                location,
                data=upload if upload is None or len(upload) else b"",
                headers={"Content-Type": "application/octet-stream"} if upload is not None else {},
            )
        elif upload is not None and response.status_code < 300:
            raise WebHdfsError(
                response.status_code, "", "the NameNode names no DataNode for the content"
            )
        if response.status_code >= 300:
            raise _error_of(response, path, self._token)
        return response

    def _send(self, method: str, url: str, **options: Any) -> requests.Response:
        """Send a request. Errors have no query, which holds the token, in their texts.

        Raises:
            OSError: no answer.
        """
        try:
            return self._session.request(method, url, allow_redirects=False, **options)
        except requests.RequestException as error:
            is_late = isinstance(error, requests.Timeout)
            kind: type[OSError] = TimeoutError if is_late else ConnectionError
            # Not as its cause: a traceback would show the text of that.
            raise kind(without_queries(str(error))) from None

    def _sent_token(self, token: str | None) -> str | None:
        """Return the token, if the store's host may have it.

        Raises:
            StoreError: it would be sent in clear.
        """
        if token is None or self._parsed.bucket.lower() in self._token_hosts:
            return token
        if self._parsed.bucket.lower().partition(":")[0] in self._token_hosts:
            return token
        if self._token_hosts:
            return None
        if "tls" not in self._parsed.arguments:
            raise StoreError(
                f"{self._parsed.public}: the token of {_TOKEN} would be sent without TLS; add"
                f" tls=true to the URL, or name the host in {_TOKEN_HOSTS}",
                store=self.url,
            )
        return token

    def _check_redirect(self, location: str) -> None:
        """Check where the NameNode sends this process, with the token in the URL.

        Raises:
            OSError: from TLS to a host without it.
        """
        parts = urlsplit(location)
        hosts = {(parts.hostname or "").lower(), parts.netloc.rpartition("@")[2].lower()}
        is_clear = "tls" in self._parsed.arguments and parts.scheme != "https"
        if self._token is not None and is_clear and not hosts & self._token_hosts:
            raise ConnectionError(
                f"the NameNode redirects to {parts.scheme}://{parts.hostname}, where the token of"
                f" {_TOKEN} would be sent without TLS; let DataNodes use TLS, or name their hosts"
                f" in {_TOKEN_HOSTS}"
            )


def _token_hosts() -> frozenset[str]:
    """Return the hosts, each with a port or for any, that may have the token without TLS."""
    given = os.environ.get(_TOKEN_HOSTS, "").lower().replace(",", " ")
    return frozenset(given.split())


class _BoundedAdapter(HTTPAdapter):
    """Adapter with the time limits of a store."""

    def __init__(self, store: WebHdfsStore) -> None:
        super().__init__()
        self._store = store

    def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
        options["timeout"] = self._store.timeouts()
        return super().send(request, *arguments, **options)


def _status(found: dict[str, Any]) -> FileStatus:
    return FileStatus(
        name=found["pathSuffix"],
        length=found["length"],
        mod_time=found["modificationTime"] // 1000,
        is_directory=found["type"] == "DIRECTORY",
    )


def _error_of(response: requests.Response, path: str, token: str | None) -> OSError:
    try:
        remote = response.json()["RemoteException"]
        exception, message = str(remote["exception"]), str(remote["message"])
    except (ValueError, KeyError, TypeError):
        exception, message = "", " ".join(response.text.split())[:200]
    if exception == "FileNotFoundException":
        return FileNotFoundError(path)
    if token is not None:
        message = message.replace(token, "…")
    return WebHdfsError(response.status_code, exception, without_queries(message))


_RPC_PORT: Final = 8020
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
                port=int(port or _RPC_PORT),
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
            return _status_of_path(self._fs.info(path))
        except FileNotFoundError:
            return None

    def _children(self, path: str) -> list[FileStatus]:
        found = self._status(path)
        if found is None or not found.is_directory:
            return []
        return [_status_of_path(each) for each in self._fs.ls(path, detail=True)]

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


def _status_of_path(found: dict[str, Any]) -> FileStatus:
    modified = found["mtime"]
    return FileStatus(
        name=str(found["name"]).rpartition("/")[2],
        length=found["size"] or 0,
        mod_time=int(modified.timestamp()) if isinstance(modified, datetime) else 0,
        is_directory=found["type"] == "directory",
    )
