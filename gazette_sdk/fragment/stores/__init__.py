"""Fragment stores: one class per kind of store, constructed from its URL.

In reading order: :mod:`~.base` (operations and errors of a store), :mod:`~.file` (a directory),
:mod:`~.memory`, :mod:`~.objects` (base of stores over a network), the backends :mod:`~.s3`,
:mod:`~.gs` and :mod:`~.azure`, then :mod:`~.hadoop` (base of Hadoop's stores), :mod:`~.webhdfs` and
:mod:`~.hdfs`. Backends are imported when first used, since each needs an extra of the package.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gazette_sdk.errors import StoreError, install_text
from gazette_sdk.fragment.stores.base import ObjectStatus, Store, StoredContent, StoredObject
from gazette_sdk.fragment.stores.file import FileStore, MemoryStore
from gazette_sdk.protocol.names import StoreURL, parse_store_url

__all__ = [
    "FileStore",
    "MemoryStore",
    "ObjectStatus",
    "Store",
    "StoredContent",
    "StoredObject",
    "open_store",
    "wrap_stores",
]

_AZURE: Final = ("gazette_sdk.fragment.stores.azure:AzureStore", "azure")
_BACKENDS: Final = {
    "s3": ("gazette_sdk.fragment.stores.s3:S3Store", "s3"),
    "gs": ("gazette_sdk.fragment.stores.gs:GCSStore", "gcs"),
    "azure": _AZURE,
    "az": _AZURE,
    "abfs": _AZURE,
    "azure-ad": ("gazette_sdk.fragment.stores.azure:AzureADStore", "azure"),
    "webhdfs": ("gazette_sdk.fragment.stores.hadoop:WebHdfsStore", "hdfs"),
    "hdfs": ("gazette_sdk.fragment.stores.hadoop:HdfsStore", "hdfs"),
}
"""Class of each scheme over a network, and the extra of this package that it needs."""

_wrappers: list[Callable[[Store], Store]] = []


@contextmanager
def wrap_stores(wrap: Callable[[Store], Store]) -> Iterator[None]:
    """Wrap every store that :func:`open_store` opens in this process while the context is open.

    For tests: :mod:`gazette_sdk.testing.store_faults` puts its stores in place with it. A store
    that is open already stays as it is.

    Args:
        wrap: returns the store to use, given the one that was opened.
    """
    _wrappers.append(wrap)
    try:
        yield
    finally:
        _wrappers.remove(wrap)


def open_store(url: str, *, file_root: Path | None = None, file_only: bool = False) -> Store:
    """Return the store of a URL. No request is sent yet.

    The first store of a kind may take a second, for imports: call this in a thread.

    Args:
        url: the store's URL (protocol section 8).
        file_root: directory below which ``file`` stores lie.
        file_only: True to store everything below ``file_root``, independent of the URL.

    Raises:
        ValidationError: no URL of a store.
        StoreError: an argument is unknown, the file root or credentials are missing, or the
            package's extra for this kind of store is not installed.
    """
    store = _open_plain(url, file_root=file_root, file_only=file_only)
    for wrap in _wrappers:
        store = wrap(store)
    return store


def _open_plain(url: str, *, file_root: Path | None, file_only: bool) -> Store:
    parsed = parse_store_url(url)
    if file_only:
        mapped = dataclasses.replace(parsed, prefix="", arguments={}, unknown_arguments=())
        return FileStore(mapped, _root(parsed, file_root))
    if parsed.unknown_arguments:
        raise StoreError(
            f"{parsed.public}: {parsed.scheme} stores have no argument "
            f"{', '.join(map(repr, parsed.unknown_arguments))}; remove it from the URL",
            store=url,
        )
    if parsed.scheme == "file":
        return FileStore(parsed, _root(parsed, file_root))
    if parsed.scheme == "memory":
        return MemoryStore(parsed)
    return _backend(parsed)


def _root(parsed: StoreURL, file_root: Path | None) -> Path:
    if file_root is None:
        raise StoreError(
            f"{parsed.public}: no file root is given; name the directory below which file stores "
            "lie: --broker.file-root of brokers, --file-root of other commands",
            store=parsed.url,
        )
    return file_root


def _backend(parsed: StoreURL) -> Store:
    target, extra = _BACKENDS[parsed.scheme]
    module, _, name = target.partition(":")
    try:
        backend: type[Store] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{parsed.public}: {install_text(error, extra, f'{parsed.scheme} stores')}",
            store=parsed.url,
        ) from error
    return backend(parsed)
