"""Interface of fragment stores (broker section 15)."""

from __future__ import annotations

import io
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final

from gazette_sdk.errors import (
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
    ValidationError,
)
from gazette_sdk.fragment import metrics
from gazette_sdk.protocol.names import StoreURL, without_queries

__all__ = [
    "ObjectStatus",
    "PositionedReader",
    "RangedReader",
    "Store",
    "StoredContent",
    "StoredObject",
]

OPERATION_TIMEOUT_S: Final = 60.0
"""Longest time of one request to a store, its retries included: no operation hangs."""

PUT_TIMEOUT_S: Final = 300.0
"""Longest time of one upload, which may move gigabytes."""


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
        metrics.STORE_PUT_BYTES.labels(self.url, content_encoding or "none").inc(length)

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
        metrics.STORE_LIST_ITEMS.labels(self.url).observe(count)

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
            metrics.STORE_OPERATIONS.labels(self.url, name, status).inc()
            metrics.STORE_OPERATION_SECONDS.labels(self.url, name, status).observe(
                time.monotonic() - began
            )

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
        """Move to a position, which may be behind the end."""
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
