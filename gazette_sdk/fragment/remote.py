"""Reading a fragment by the URL that a broker sent (client section 5, "Direct fragment reads")."""

from __future__ import annotations

import http.client
import io
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO, Final, cast
from urllib.parse import unquote, urlsplit

from gazette_sdk.errors import (
    ConfigurationError,
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
)
from gazette_sdk.fragment.content import FragmentReader, decode_fragment
from gazette_sdk.fragment.stores.base import StoredContent, describe
from gazette_sdk.fragment.stores.file import resolve_below
from gazette_sdk.fragment.url_fetch import open_without_redirects
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_name

__all__ = ["URL_TIMEOUT_S", "open_url"]

URL_TIMEOUT_S: Final = 30.0
"""Longest time without data from a host that serves a fragment."""


def open_url(
    url: str,
    fragment: pb.Fragment,
    offset: int,
    *,
    file_root: Path | None = None,
) -> FragmentReader:
    """Open a fragment by its URL, to read its content from an offset on. It blocks.

    Signed URLs are valid for about a minute: open them at once. Reading may take longer, up to
    the limit of the host.

    Args:
        url: the ``http``, ``https`` or ``file`` URL that a broker sent.
        fragment: its name.
        offset: journal offset of the first byte to read, within the fragment.
        file_root: local directory of ``file`` URLs: the brokers' file root, as mounted here.

    Returns:
        A blocking reader of the decompressed content up to the fragment's end, to be closed.

    Raises:
        FragmentNotFoundError: there is no fragment at the URL.
        StoreAuthorizationError: the URL is not valid (any more), or the file is not readable.
        ConfigurationError: a ``file`` URL without ``file_root``, or another scheme.
        StoreError: the host failed.
        CorruptFragmentError: here or while reading: its content does not match its name.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    public = f"{parts.scheme}://{host}{parts.path}"  # without password and signature
    match parts.scheme:
        case "http" | "https":
            content = _get(url, public, fragment)
        case "file":
            content = _open_file(unquote(parts.path), public, fragment, file_root)
        case _:
            raise ConfigurationError(
                f"{fragment.journal}: cannot read a fragment from {public}: its scheme is not "
                "http, https or file; read through the broker",
                journal=fragment.journal,
            )
    return decode_fragment(content, fragment, offset, source=public)


def _get(url: str, public: str, fragment: pb.Fragment) -> StoredContent:
    # Accepting gzip prevents proxies from decompressing a gzip fragment; everything else is
    # requested as it is stored.
    encoding = "gzip" if fragment.compression_codec == pb.GZIP else "identity"
    request = urllib.request.Request(url, headers={"Accept-Encoding": encoding})  # noqa: S310
    journal = fragment.journal
    what = f"{journal}: GET of fragment {content_name(fragment)} from {public}"
    try:
        answer = open_without_redirects(request, URL_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        text = f"{what}: HTTP status {error.code} {error.reason}"
        error.close()
        if 300 <= error.code < 400:
            raise StoreError(
                f"{text}; redirects are not followed, because they may lead anywhere: give the "
                "store's own host in its URL, or read through the broker",
                store=public,
                journal=journal,
            ) from None
        if error.code in {404, 410}:
            raise FragmentNotFoundError(
                f"{text}; it was removed: read on through the broker", store=public, journal=journal
            ) from None
        if error.code in {401, 403}:
            raise StoreAuthorizationError(
                f"{text}; the URL's signature may have run out: ask the broker for another",
                store=public,
                journal=journal,
            ) from None
        raise StoreError(f"{text}; try again", store=public, journal=journal) from None
    except (OSError, http.client.HTTPException) as error:
        raise StoreError(
            f"{what}: {describe(error)}; check that this host can reach the store, or read "
            "through the broker",
            store=public,
            journal=journal,
        ) from error
    if answer.status != 200:
        answer.close()
        raise StoreError(
            f"{what}: HTTP status {answer.status}, expected 200", store=public, journal=journal
        )
    length = answer.length
    return StoredContent(
        cast("BinaryIO", _Body(answer, length, what)),
        -1 if length is None else length,
        answer.headers.get("Content-Encoding", ""),
    )


def _open_file(
    path: str, public: str, fragment: pb.Fragment, file_root: Path | None
) -> StoredContent:
    if file_root is None:
        raise ConfigurationError(
            f"{fragment.journal}: fragment {public} is a file of the brokers' file root; name the "
            "directory where that is mounted here (file_root), or read through the broker",
            journal=fragment.journal,
        )
    try:
        raw = resolve_below(file_root, path, public).open("rb", buffering=0)
    except FileNotFoundError as error:
        raise FragmentNotFoundError(
            f"{fragment.journal}: fragment {public} is not below {str(file_root)!r}; check that "
            "this is the brokers' file root",
            store=public,
            journal=fragment.journal,
        ) from error
    except PermissionError as error:
        raise StoreAuthorizationError(
            f"{fragment.journal}: fragment {public} below {str(file_root)!r} may not be read: "
            f"{describe(error)}; let this process read the brokers' files",
            store=public,
            journal=fragment.journal,
        ) from error
    except OSError as error:
        raise StoreError(
            f"{fragment.journal}: fragment {public} below {str(file_root)!r}: {describe(error)}",
            store=public,
            journal=fragment.journal,
        ) from error
    return StoredContent(cast("BinaryIO", raw), os.fstat(raw.fileno()).st_size)


class _Body(io.RawIOBase):
    """Body of a response, which raises when the connection breaks before the content's end."""

    def __init__(self, answer: http.client.HTTPResponse, length: int | None, what: str) -> None:
        super().__init__()
        self._answer = answer
        self._left = length
        self._what = what

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            count = self._answer.readinto(buffer)
        except (OSError, http.client.HTTPException) as error:
            raise StoreError(f"{self._what}: {describe(error)}; try again") from error
        if self._left is not None:
            self._left -= count
            if count == 0 and len(buffer) and self._left > 0:
                raise StoreError(
                    f"{self._what}: the connection ended {self._left} bytes too early; try again"
                )
        return count

    def close(self) -> None:
        self._answer.close()
        super().close()
