"""Listing of a journal's stored fragments (broker section 11).

A store may show an object of a fragment's name that does not have its content: one that a crash of
the store cut off. Its length contradicts its name. It counts as no content, but its offsets were
given: a journal never begins before them.

:func:`open_url` opens a fragment by the URL that a broker sent (client section 5, "Direct fragment
reads").
"""

from __future__ import annotations

import http.client
import io
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from gazette_sdk.errors import (
    ConfigurationError,
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
    ValidationError,
)
from gazette_sdk.fragment.content import (
    CoverSet,
    FragmentReader,
    decode_fragment,
    open_without_redirects,
)
from gazette_sdk.fragment.stores.base import Store, StoredContent, describe
from gazette_sdk.fragment.stores.file import resolve_below
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_name, length_of, parse_content_path

_log = logging.getLogger(__name__)

_NAMED_SKIPS: Final = 3
"""Number of foreign objects that a listing's log message names."""


class StoredFragment(NamedTuple):
    """Object of a listing that has a fragment's name.

    Attributes:
        fragment: its name, with ``mod_time`` and ``backing_store``.
        length: number of stored bytes; -1 if the listing does not have it.
    """

    fragment: pb.Fragment
    length: int

    @property
    def is_torn(self) -> bool:
        """True if its length contradicts its name."""
        return contradicts(self.fragment, self.length)


def contradicts(fragment: pb.Fragment, length: int) -> bool:
    """Return True if an object of this length cannot have a fragment's content.

    Args:
        fragment: its name.
        length: number of stored bytes; -1 if it is not known.
    """
    if length < 0:
        return False
    if fragment.compression_codec == pb.NONE:
        return length != length_of(fragment)
    return length == 0 < length_of(fragment)


def list_fragments(store: Store, journal: str) -> list[pb.Fragment]:
    """Return all fragments of a journal in one store, without torn ones.

    Objects that are no fragments are skipped, and logged. It blocks: call it in a thread.

    Returns:
        Fragments with ``mod_time`` and ``backing_store``, in the order of their offsets, by which
        cover sets are made in linear time.

    Raises:
        StoreError: the store failed.
    """
    return [stored.fragment for stored in list_stored(store, journal) if not stored.is_torn]


def readable(store: Store, journal: str) -> CoverSet:
    """Return the fragments of a journal in one store, as a reader without a broker finds them.

    A torn one stands where nothing else has its content: its reading fails, and says why. See
    :func:`list_fragments`.
    """
    listed = list_stored(store, journal)
    cover = CoverSet(each.fragment for each in listed if not each.is_torn)
    for fragment, _ in (each for each in listed if each.is_torn):
        if not cover.covers(fragment.begin, fragment.end):
            cover.add(fragment)
    return cover


def list_stored(store: Store, journal: str) -> list[StoredFragment]:
    """Return all objects of a journal in one store that have names of fragments, also torn ones.

    See :func:`list_fragments`.
    """
    found: list[StoredFragment] = []
    skipped = []
    for stored in store.list(journal + "/"):
        if stored.path.endswith("/"):
            continue
        try:
            fragment = parse_content_path(journal, stored.path)
        except ValidationError as error:
            skipped.append(f"{stored.path!r} ({error})")
            continue
        fragment.mod_time = stored.mod_time
        fragment.backing_store = store.url
        found.append(StoredFragment(fragment, stored.length))
    found.sort(key=lambda stored: (stored.fragment.begin, stored.fragment.end))
    _warn_of_torn(store, journal, [each for each in found if each.is_torn])
    if skipped:
        named = ", ".join(skipped[:_NAMED_SKIPS])
        more = ", …" if len(skipped) > _NAMED_SKIPS else ""
        _log.warning(
            "store %s: journal %s: skipped %d objects that are no fragments: %s%s",
            store.url,
            journal,
            len(skipped),
            named,
            more,
        )
    return found


def _warn_of_torn(store: Store, journal: str, torn: Sequence[StoredFragment]) -> None:
    if not torn:
        return
    named = ", ".join(
        f"{content_name(fragment)} ({length} bytes)" for fragment, length in torn[:_NAMED_SKIPS]
    )
    _log.error(
        "store %s: journal %s: %d objects do not have the length that their names state, and are "
        "not counted as stored: %s%s; a broker that has the content in its spool directory stores "
        "it again, otherwise put a good copy in its place",
        store.url, journal, len(torn), named, ", …" if len(torn) > _NAMED_SKIPS else "",
    )  # fmt: skip


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
