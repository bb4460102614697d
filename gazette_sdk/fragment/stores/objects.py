"""Base of stores over a network: time limits, retries, listings by pages."""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, BinaryIO, Final, TypeVar

from fsspec.asyn import get_loop

from gazette_sdk.fragment.stores.base import (
    OPERATION_TIMEOUT_S,
    PUT_TIMEOUT_S,
    ObjectStatus,
    RangedReader,
    Store,
    StoredContent,
    StoredObject,
)

__all__ = ["ATTEMPTS", "CONNECT_TIMEOUT_S", "READ_TIMEOUT_S", "ObjectStore"]

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 5.0
"""Longest time to reach a store's host."""

READ_TIMEOUT_S: Final = 20.0
"""Longest time without data in the middle of an answer."""

ATTEMPTS: Final = 3
"""Number of attempts of a request that may be repeated: the callers retry as well."""

_FIRST_PAUSE_S: Final = 0.2


class ObjectStore(Store):
    """A store of objects under keys, over a network.

    The clients are asynchronous and run on fsspec's own thread and loop; requests are posted
    there, with a time limit after which they are cancelled. So operations may be called from any
    thread, many at once, and none of them hangs.
    """

    # ------------------------------------------------ operations of backends

    @abstractmethod
    async def _head(self, key: str) -> ObjectStatus | None:
        """Return the status of an object, or None if it does not exist."""

    @abstractmethod
    async def _fetch(self, key: str, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)`` of an object, as they are stored."""

    @abstractmethod
    async def _page(self, prefix: str, token: str | None) -> tuple[list[StoredObject], str | None]:
        """Return the objects of a page, whose paths are keys, and the next page's token."""

    @abstractmethod
    async def _delete(self, key: str) -> None:
        """Delete an object."""

    @abstractmethod
    def _upload(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        """Store an object, wholly or not at all."""

    @abstractmethod
    def _is_transient(self, error: BaseException) -> bool:
        """Return True if the same request may succeed when it is repeated at once."""

    # ---------------------------------------------------------- operations

    def _status_of(self, key: str) -> ObjectStatus | None:
        return self._call(lambda: self._head(key))

    def _open(self, key: str) -> StoredContent:
        found = self._call(lambda: self._head(key))
        if found is None:
            raise FileNotFoundError(key)

        def fetch(begin: int, end: int) -> bytes:
            with self._operation("get", key):
                return self._call(lambda: self._fetch(key, begin, end))

        return StoredContent(
            RangedReader(fetch, found.length),  # type: ignore[arg-type]  # a RawIOBase is one
            found.length,
            found.content_encoding,
        )

    def _put(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        with self.bounded(PUT_TIMEOUT_S):
            self._upload(key, content, length, content_encoding, overwrite)

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        token: str | None = None
        while True:
            page, token = self._call(lambda token=token: self._page(prefix, token))  # type: ignore[misc]
            for found in page:
                if not found.path.endswith("/"):  # a directory marker of some other tool
                    yield replace(found, path=found.path.removeprefix(prefix))
            if token is None:
                return

    def _remove(self, key: str) -> None:
        self._call(lambda: self._delete(key))

    # -------------------------------------------------------------- shared

    def _call(
        self,
        request: Callable[[], Coroutine[Any, Any, T]],
        *,
        limit_s: float = OPERATION_TIMEOUT_S,
        attempts: int = ATTEMPTS,
    ) -> T:
        """Send a request, repeat it after transient errors, and wait for its answer.

        Raises:
            TimeoutError: the answer did not come in time; the request was cancelled.
        """
        limit_s = self._remaining(limit_s)
        future = asyncio.run_coroutine_threadsafe(self._attempts(request, attempts), get_loop())
        try:
            return future.result(limit_s)
        except TimeoutError:
            if future.cancel():
                raise TimeoutError(f"no answer within {limit_s:.0f} s") from None
            raise  # the request itself timed out, before the limit

    async def _attempts(self, request: Callable[[], Coroutine[Any, Any, T]], attempts: int) -> T:
        for attempt in range(1, attempts):
            try:
                return await request()
            except Exception as error:
                if not self._is_transient(error):
                    raise
            pause_s = _FIRST_PAUSE_S * 4 ** (attempt - 1)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
        return await request()
