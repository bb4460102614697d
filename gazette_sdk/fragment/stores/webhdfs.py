"""Hadoop's file system over WebHDFS, with the sessions of fsspec's ``webhdfs``.

The NameNode redirects reads and writes of content to a DataNode. The client of fsspec does not
check the answers of DataNodes, nor of renaming, and knows no time limits; so requests are sent
here.
"""

from __future__ import annotations

import os
from typing import Any, Final
from urllib.parse import quote, urlsplit

import requests
from fsspec.implementations.webhdfs import WebHDFS
from requests.adapters import HTTPAdapter

from gazette_sdk.errors import StoreError
from gazette_sdk.fragment.stores.base import OPERATION_TIMEOUT_S
from gazette_sdk.fragment.stores.hadoop import FileStatus, HadoopStore, Upload
from gazette_sdk.fragment.stores.objects import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from gazette_sdk.protocol.names import StoreURL, without_queries

__all__ = ["WebHdfsError", "WebHdfsStore"]

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
