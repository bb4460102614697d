"""Keys and values of one column family: what is committed, under what a transaction put."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

from rocksdict import Rdict, ReadOptions

from gazette_sdk.errors import DecodeError, ShardStoreError
from gazette_sdk.shard.stores.codec import Codec, checked

__all__ = ["Family", "FamilyView", "prefix_end"]

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_MISSING: Any = object()

RESERVED = (b"\x00\x12checkpoint\x00\x01", b"\x00\x12mark\x00\x01")
"""Keys that begin with these are the store's own."""


class FamilyView(Generic[K, V]):
    """Committed keys and values of one family; read-only, for any thread.

    Args:
        source: the database's family.
        keys: codec of keys.
        values: codec of values.
    """

    def __init__(self, source: Rdict, keys: Codec[K], values: Codec[V]) -> None:
        self._attach(source, keys, values)

    def _attach(self, source: Rdict, keys: Codec[K], values: Codec[V]) -> None:
        self._source = source
        self._keys = keys
        self._encode_key, self._decode_value = keys.encode, values.decode

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of a key, or ``default``.

        Raises:
            DecodeError: the stored value is not of the declared type.
            ShardStoreError: the database cannot be read.
        """
        found = self._find(self._encode_key(key))
        if found is None:
            return default
        try:
            return self._decode_value(found)
        except Exception as error:
            raise DecodeError(
                f"the value of {key!r} is not of the declared type ({error}); declare the type"
                " that wrote it"
            ) from error

    def __getitem__(self, key: K) -> V:
        found = self.get(key, _MISSING)
        if found is _MISSING:
            raise KeyError(key)
        value: V = found
        return value

    def __contains__(self, key: K) -> bool:
        return self._find(self._encode_key(key)) is not None

    def items(
        self, *, prefix: K | None = None, start: K | None = None, stop: K | None = None
    ) -> Iterator[tuple[K, V]]:
        """Yield keys and values in the order of keys, as they are when the iteration begins.

        The iteration keeps the database's files until it ends, or is dropped.

        Args:
            prefix: only keys that begin with it. Of tuples, a shorter tuple.
            start: the least key.
            stop: the first key that is left out.

        Raises:
            TypeError: keys of this type have no prefixes.
            DecodeError: a row is not of the declared types.
            ShardStoreError: the database cannot be read.
        """
        lower, upper = b"", None
        if prefix is not None:
            if self._keys.encode_prefix is None:
                raise TypeError("keys of this type have no prefixes; pass start and stop")
            lower = self._keys.encode_prefix(prefix)
            stop_at = self._keys.prefix_stop
            upper = lower + stop_at if stop_at and lower else prefix_end(lower)
        if start is not None:
            lower = max(lower, self._keys.encode(start))
        if stop is not None:
            encoded = self._keys.encode(stop)
            upper = encoded if upper is None else min(upper, encoded)
        decode_key, decode_value = self._keys.decode, self._decode_value
        for key, value in self._rows(lower, upper):
            try:
                row = decode_key(key), decode_value(value)
            except Exception as error:
                raise DecodeError(
                    f"the row of key {key!r} is not of the declared types ({error}); declare the"
                    " types that wrote it"
                ) from error
            yield row

    def _find(self, key: bytes) -> bytes | None:
        try:
            found: bytes | None = self._source.get(key)
        except Exception as error:
            raise ShardStoreError(f"the database cannot be read: {error}") from error
        return found

    def _rows(self, lower: bytes, upper: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        for row in self._stored(lower, upper):
            if not row[0].startswith(RESERVED):
                yield row

    def _stored(self, lower: bytes, upper: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield committed rows, all of one commit: an iterator does not see later ones."""
        options = ReadOptions()
        if upper is not None:
            options.set_iterate_upper_bound(upper)
        try:
            found = self._source.iter(options)
            found.seek(lower)
            while found.valid():
                yield found.key(), found.value()
                found.next()
            found.status()
        except Exception as error:
            raise ShardStoreError(f"the database cannot be read: {error}") from error


class Family(FamilyView[K, V]):
    """Keys and values of one family, with the open transaction's changes over the committed ones.

    Args:
        source: the database's family.
        keys: codec of keys.
        values: codec of values.
    """

    def _attach(self, source: Rdict, keys: Codec[K], values: Codec[V]) -> None:
        super()._attach(source, keys, values)
        self._encode_put_key, self._encode_value = checked(keys).encode, checked(values).encode
        self.drop_puts()

    def drop_puts(self) -> None:
        """Forget the changes of the open transaction."""
        # By key: the value, or None for a removed key.
        self.puts: dict[bytes, bytes | None] = {}
        self.put_bytes = 0

    def __setitem__(self, key: K, value: V) -> None:
        """Put a value.

        Raises:
            UnreadableStateError: it would not be read again as it is.
        """
        encoded = self._checked(key)
        content = self._encode_value(value)
        self.puts[encoded] = content
        self.put_bytes += len(encoded) + len(content)

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self.discard(key)

    def discard(self, key: K) -> None:
        """Remove a key if it is there; faster than ``del``, which has to read."""
        encoded = self._checked(key)
        self.puts[encoded] = None
        self.put_bytes += len(encoded)

    def _checked(self, key: K) -> bytes:
        encoded = self._encode_put_key(key)
        if encoded.startswith(RESERVED):
            raise ValueError(f"{key!r} is a key of the store's own; choose another one")
        return encoded

    def _find(self, key: bytes) -> bytes | None:
        found: bytes | None = self.puts.get(key, _MISSING)
        return super()._find(key) if found is _MISSING else found

    def _rows(self, lower: bytes, upper: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        puts = dict(self.puts)
        inside = sorted(key for key in puts if key >= lower and (upper is None or key < upper))
        changed = ((key, puts[key]) for key in inside)
        stored: Iterator[tuple[bytes, bytes | None]] = (
            row for row in super()._rows(lower, upper) if row[0] not in puts
        )
        by_key: Callable[[tuple[bytes, bytes | None]], bytes] = lambda row: row[0]  # noqa: E731
        for key, value in heapq.merge(changed, stored, key=by_key):
            if value is not None:
                yield key, value


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the least bytes above all that begin with a prefix; None if there are none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
