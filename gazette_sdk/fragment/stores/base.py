"""Interface of fragment stores (broker section 15).

:class:`ObjectStore` is the base of stores over a network, with time limits, retries and listings by
pages.
"""

from __future__ import annotations

import asyncio
import io
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final, TypeVar

from fsspec.asyn import get_loop
from prometheus_client import Counter, Gauge, Histogram

from gazette_sdk.errors import (
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
    ValidationError,
)
from gazette_sdk.protocol.names import StoreURL, without_queries

OPERATION_TIMEOUT_S: Final = 60.0
"""Longest time of one request to a store, its retries included: no operation hangs."""

PUT_TIMEOUT_S: Final = 300.0
"""Longest time of one upload, which may move gigabytes."""


# ------------------------------------------------------------------ metrics (broker section 19)

STORE_ACTIVE = Gauge("gazette_store_active", "Fragment stores which are open.")

STORE_OPERATIONS = Counter(
    "gazette_store_operation_total",
    "Operations of fragment stores.",
    ["store", "operation", "status"],
)

STORE_OPERATION_SECONDS = Histogram(
    "gazette_store_operation_duration_seconds",
    "Duration of operations of fragment stores.",
    ["store", "operation", "status"],
    buckets=[0.01 * 4**i for i in range(6)],
)

STORE_PUT_BYTES = Counter(
    "gazette_store_put_bytes_total",
    "Bytes put into fragment stores, as stored.",
    ["store", "encoding"],
)

STORE_LIST_ITEMS = Histogram(
    "gazette_store_list_items_count",
    "Objects found by one listing of a fragment store.",
    ["store"],
    buckets=[10 * 4**i for i in range(6)],
)

STORE_HEALTH_CHECKS = Counter(
    "gazette_store_health_check_total",
    "Health checks of fragment stores.",
    ["store", "status"],
)


def remove_store(url: str) -> None:
    """Remove the series of a store."""
    for metric in (
        STORE_OPERATIONS,
        STORE_OPERATION_SECONDS,
        STORE_PUT_BYTES,
        STORE_LIST_ITEMS,
        STORE_HEALTH_CHECKS,
    ):
        metric.remove_by_labels({"store": url})


# ------------------------------------------------------------------ interface


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a listing.

    Attributes:
        path: path relative to the listed prefix.
        mod_time: time of the last modification, in whole seconds since 1970.
        length: number of stored bytes; -1 if the listing does not have it.
    """

    path: str
    mod_time: int
    length: int = -1


@dataclass(frozen=True, slots=True)
class ObjectStatus:
    """Status of an object, as its store gives it without its content.

    Attributes:
        length: number of stored bytes.
        content_encoding: encoding that the store declares (``gzip``), else empty.
        md5: MD5 sum of the stored bytes; empty if the store has none.
    """

    length: int
    content_encoding: str = ""
    md5: bytes = b""


@dataclass(frozen=True, slots=True)
class StoredContent:
    """An opened object.

    Attributes:
        raw: its bytes as they are stored, seekable; to be closed by the caller.
        length: number of bytes.
        content_encoding: encoding that the store declares (``gzip``), else empty.
    """

    raw: BinaryIO
    length: int
    content_encoding: str = ""


class Store(ABC):
    """A fragment store. Its operations block: call them in threads.

    Paths are content paths, as :func:`gazette_sdk.protocol.fragments.content_path` makes them; the
    URL's prefix and its ``find`` and ``replace`` are applied here. Every operation is bounded in
    time, counted, and raises a :class:`~gazette_sdk.errors.StoreError` that names the store,
    the object and the remedy.

    Args:
        parsed: the store's URL.

    Attributes:
        url: the store's URL, which is its identity.
    """

    remedy = "check that the store can be reached and that its URL is right"
    """Remedy of a failure of unknown kind; backends have more exact ones."""

    authorization_remedy = "check that it exists and that this process may read and write it"
    """Remedy when the store refuses access."""

    def __init__(self, parsed: StoreURL) -> None:
        self.url = parsed.url
        self._parsed = parsed
        self._bound = threading.local()

    # ---------------------------------------------------------- operations

    def sign_get(self, path: str, ttl_s: float) -> str:
        """Return a URL with which any client can GET the object for a limited time.

        Args:
            path: content path; the object need not exist.
            ttl_s: validity of the URL, in seconds.
        """
        with self._operation("signget", path):
            return self._sign_get(self._parsed.key(path), ttl_s)

    def exists(self, path: str) -> bool:
        """Return True if an object exists at ``path``."""
        return self.status(path) is not None

    def status(self, path: str) -> ObjectStatus | None:
        """Return length and sum of the object at ``path``, or ``None`` if there is none."""
        with self._operation("exists", path):
            return self._status_of(self._parsed.key(path))

    def open(self, path: str) -> StoredContent:
        """Open an object to read its bytes as they are stored.

        Raises:
            FragmentNotFoundError: it does not exist.
        """
        with self._operation("get", path):
            return self._open(self._parsed.key(path))

    def put(
        self,
        path: str,
        content: BinaryIO,
        length: int,
        content_encoding: str = "",
        *,
        overwrite: bool = False,
    ) -> None:
        """Store an object: wholly, or not at all.

        Args:
            path: content path.
            content: read from its current position.
            length: number of bytes to read; fewer are an error.
            content_encoding: ``gzip`` if the store shall decompress for its readers.
            overwrite: True to replace an existing object. Otherwise that one stays, which is
                success: fragments are named by their content.
        """
        with self._operation("put", path):
            self._put(self._parsed.key(path), content, length, content_encoding, overwrite)
        STORE_PUT_BYTES.labels(self.url, content_encoding or "none").inc(length)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all objects below a directory, in no order. There may be none.

        Args:
            prefix: content path of the directory; the empty one lists the whole store.
        """
        if prefix and not prefix.endswith("/"):
            prefix += "/"
        count = 0
        with self._operation("list", prefix):
            for found in self._list(self._parsed.key(prefix)):
                count += 1
                yield found
        STORE_LIST_ITEMS.labels(self.url).observe(count)

    def remove(self, path: str) -> None:
        """Remove an object. A missing one is an error only where the store reports it."""
        with self._operation("remove", path):
            self._remove(self._parsed.key(path))

    def is_authorization_error(self, error: BaseException) -> bool:
        """Return True if the store refused permanently: no permission, bucket or directory.

        Unknown or expired credentials do not count: they may be replaced in time.
        """
        seen: set[int] = set()
        cause: BaseException | None = error
        while cause is not None and id(cause) not in seen:
            if isinstance(cause, StoreAuthorizationError) or self._is_refusal(cause):
                return True
            seen.add(id(cause))
            cause = cause.__cause__
        return False

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the connections. A closed store is not used again."""

    @contextmanager
    def bounded(self, seconds: float) -> Iterator[None]:
        """Bound the total time of operations in this thread and context to ``seconds``."""
        outer = getattr(self._bound, "deadline", None)
        deadline = time.monotonic() + seconds
        self._bound.deadline = deadline if outer is None else min(outer, deadline)
        try:
            yield
        finally:
            self._bound.deadline = outer

    # ------------------------------------------------ operations of backends

    @abstractmethod
    def _sign_get(self, key: str, ttl_s: float) -> str: ...

    @abstractmethod
    def _status_of(self, key: str) -> ObjectStatus | None: ...

    @abstractmethod
    def _open(self, key: str) -> StoredContent: ...

    @abstractmethod
    def _put(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,
        overwrite: bool,  # noqa: FBT001
    ) -> None: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[StoredObject]: ...

    @abstractmethod
    def _remove(self, key: str) -> None: ...

    @abstractmethod
    def _is_refusal(self, error: BaseException) -> bool:
        """Return True if this error, not its causes, is an authorization error."""

    def _is_missing(self, error: BaseException) -> bool:
        """Return True if this error means that the object does not exist."""
        return isinstance(error, FileNotFoundError)

    # -------------------------------------------------------------- shared

    def _remaining(self, limit_s: float) -> float:
        """Return the seconds that remain for an operation, at most ``limit_s``."""
        deadline = getattr(self._bound, "deadline", None)
        if deadline is None:
            return limit_s
        remaining: float = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the time for it ran out")
        return min(limit_s, remaining)

    @contextmanager
    def _new_bound(self, seconds: float) -> Iterator[None]:
        """Give a clean-up its own time, even if the operation's has run out."""
        outer = getattr(self._bound, "deadline", None)
        self._bound.deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._bound.deadline = outer

    @contextmanager
    def _operation(self, name: str, path: str) -> Iterator[None]:
        """Measure one operation, count it, and translate its errors."""
        began = time.monotonic()
        status = "error"
        try:
            yield
            status = "success"
        except GeneratorExit:  # the consumer of a listing stopped early
            status = "success"
            raise
        except StoreError as error:
            error.store = error.store or self.url
            raise
        except ValidationError as error:
            raise StoreError(f"{self._parsed.public}: {error}", store=self.url) from error
        except Exception as error:
            raise self._translate(name, path, error) from error
        finally:
            STORE_OPERATIONS.labels(self.url, name, status).inc()
            STORE_OPERATION_SECONDS.labels(self.url, name, status).observe(time.monotonic() - began)

    def _translate(self, operation: str, path: str, error: Exception) -> StoreError:
        what = f"{operation} {path!r} in store {self._parsed.public}: {describe(error)}"
        if self.is_authorization_error(error):
            return StoreAuthorizationError(f"{what}; {self.authorization_remedy}", store=self.url)
        if self._is_missing(error):
            return FragmentNotFoundError(f"{what}; it is not in the store", store=self.url)
        return StoreError(f"{what}; {self.remedy}", store=self.url)


def describe(error: BaseException) -> str:
    """Return the text of an error without queries of URLs, or its class if it has no text."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    text = without_queries(" ".join(str(error).split()))
    return text or type(error).__name__


def read_exactly(content: BinaryIO, length: int) -> bytes:
    """Read ``length`` bytes of content to upload.

    Raises:
        ValueError: there are fewer.
    """
    data = content.read(length)
    while len(data) < length:
        more = content.read(length - len(data))
        if not more:
            raise ValueError(f"content to upload ends {length - len(data)} bytes too early")
        data += more
    return data


class PositionedReader(io.RawIOBase):
    """Base of seekable readers of content of known length, each with its own position.

    Args:
        length: length of the content.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in the content."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, which may be after the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position


class RangedReader(PositionedReader):
    """Reader of an object by requests for ranges of it.

    A reader may pause for any time, and a broken connection costs one range, since no connection
    is held open between two requests. The first range is small, for readers of the beginning only;
    the next ones grow.

    Args:
        fetch: returns the bytes of ``[begin, end)``.
        length: length of the object.
    """

    FIRST_BYTES = 1 << 20
    MOST_BYTES = 8 << 20

    def __init__(self, fetch: Callable[[int, int], bytes], length: int) -> None:
        super().__init__(length)
        self._fetch = fetch
        self._range = memoryview(b"")  # fetched bytes from the position on
        self._next_bytes = self.FIRST_BYTES

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, without a request."""
        before = self._position
        ahead = super().seek(offset, whence) - before
        self._range = self._range[ahead:] if 0 <= ahead <= len(self._range) else memoryview(b"")
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill ``buffer`` from the current range, fetching the next one when that is used up."""
        if not self._range and self._position < self._length and len(buffer):
            end = min(self._length, self._position + self._next_bytes)
            fetched = self._fetch(self._position, end)
            if len(fetched) != end - self._position:
                raise StoreError(
                    f"asked for {end - self._position} bytes at {self._position}, "
                    f"got {len(fetched)}; the object was replaced or cut while it was read"
                )
            self._range = memoryview(fetched)
            self._next_bytes = min(self._next_bytes * 2, self.MOST_BYTES)
        count = min(len(buffer), len(self._range))
        buffer[:count] = self._range[:count]
        self._range = self._range[count:]
        self._position += count
        return count

    def close(self) -> None:
        """Release the fetched bytes."""
        self._range = memoryview(b"")
        super().close()


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
