"""Tables: the newest message of each key of a topic, which is joined.

A table is made of the messages of a topic, in the shard that reads the same partition of the topics
of the handler; of a topic that is broadcast, in every shard. It is a part of the shard's state:
rows of the store, which are committed with the rest. A row has the topic, shortened to a digest,
and the key.

The messages of a key are in one partition, and the last one is the newest. Of a topic that is
broadcast they may be in several, after it has grown, and these are read in any order. So its rows
have the time of publication, also those of keys that were removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

from gazette_sdk.errors import ConfigurationError, DecodeError, ShardStoreError, ValidationError
from gazette_sdk.message.kinds import known_kind
from gazette_sdk.shard.application.sources import Broadcast
from gazette_sdk.shard.stores.base import (
    TIMER_KEY_BYTES_MAX,
    UNCOMMITTED_BYTES_MAX,
    UNCOMMITTED_PUTS_MAX,
    RowStore,
)
from gazette_sdk.shard.stores.codec import any_key, checked, value_codec
from gazette_sdk.user_code import call

V = TypeVar("V")
D = TypeVar("D")

_PREFIX, _BROADCAST = b"\xfe", b"\xff"  # the rows of windows begin with other bytes
_DIGEST_BYTES = 8
_CLOCK_BYTES = 8
_END = b"\x00"
_MISSING: Any = object()


class Table(Generic[V]):
    """Declaration of a table.

    Attributes:
        source: the topic as it was declared.
        is_broadcast: every shard has the whole table.
        topic: label selector of its journals.
        key: returns the key of a message.
        message: class of the messages.
        prefix: prefix of its rows.
        removes: returns True for a message that removes its key.
        bootstrap: read the table through before the first message of the sources.

    Raises:
        ConfigurationError: the key is no function, or objects of the class cannot be kept.
    """

    __slots__ = (
        "bootstrap",
        "codec",
        "is_broadcast",
        "key",
        "message",
        "prefix",
        "removes",
        "source",
        "topic",
    )

    def __init__(
        self,
        source: str | Broadcast,
        *,
        key: Callable[[V], Any],
        message: type[V],
        removes: Callable[[V], bool] | None = None,
        bootstrap: bool = False,
    ) -> None:
        if not callable(key) or not (removes is None or callable(removes)):
            raise ConfigurationError(
                f"the key of a table is a function, as attrgetter('driver'), and not {key!r}"
                if not callable(key)
                else f"`removes` of a table is a function of a message, and not {removes!r}"
            )
        topic = source.topic if isinstance(source, Broadcast) else source
        check_message(f"the table of {topic}", message)
        self.source = source
        self.is_broadcast = isinstance(source, Broadcast)
        self.topic = topic
        self.key = key
        self.message = message
        self.removes = removes
        self.bootstrap = bootstrap
        try:
            self.codec = checked(value_codec(message))
        except ConfigurationError as error:
            raise ConfigurationError(f"the table of {topic}: {error}") from error
        self.prefix = prefix_of(topic, is_broadcast=self.is_broadcast)

    def __repr__(self) -> str:
        return f"<table of {self.topic}>"

    def row_of(self, key: Any) -> bytes:
        """Return the key of a row.

        Raises:
            ValidationError: it cannot be the key of a table.
        """
        try:
            row = row_of(self.prefix, key)
        except (TypeError, OverflowError, UnicodeError) as error:
            raise ValidationError(f"{key!r} cannot be a key of {self!r}: {error}") from error
        if len(row) >= TIMER_KEY_BYTES_MAX:
            raise ValidationError(
                f"a key of {self!r}, {str(key)[:40]!r}…, has {len(row)} bytes; use one of less than"
                f" {TIMER_KEY_BYTES_MAX - len(self.prefix) - 2} bytes"
            )
        return row

    def decode(self, encoded: bytes) -> V:
        """Return the message of a row.

        Raises:
            ShardStoreError: it is not of the declared class.
        """
        try:
            found: V = self.codec.decode(encoded)
        except Exception as error:
            raise ShardStoreError(
                f"a message in {self!r} is not of the declared class ({error}); declare the class"
                " that wrote it"
            ) from error
        return found


def table(
    topic: str | Broadcast,
    *,
    key: Callable[[V], Any],
    message: type[V],
    removes: Callable[[V], bool] | None = None,
    bootstrap: bool = False,
) -> Table[V]:
    """Return a table of the newest message of each key of a topic.

    ::

        drivers = shard.table("topic=drivers", key=attrgetter("driver"), message=Driver)

        @shard.handler(
            message=Ride, sources="topic=rides", tables=[drivers], store=shard.RocksStore
        )
        def rides(txn: shard.Transaction, ride: Ride) -> None:
            driver = txn.table(drivers).get(ride.driver)

    The topic is joined with the sources, as by ``shard.partitions``: it needs as many partitions,
    by the same key. Of a ``shard.broadcast`` each shard has the whole table.

    Args:
        topic: label selector of its journals, or a ``shard.broadcast`` of it.
        key: returns the key of a message: a str, bytes, an int or a tuple of them.
        message: class of the messages: a dataclass, a Struct, a dict or a protobuf class.
        removes: returns True for a message that removes its key from the table.
        bootstrap: where a shard starts, read the tables of its application through, up to what
            there is by then, before the first message of the sources.

    Raises:
        ConfigurationError: the key is no function, or objects of the class cannot be kept.
    """
    return Table(topic, key=key, message=message, removes=removes, bootstrap=bootstrap)


def check_message(declarer: str, message: object) -> None:
    """Refuse what is no class of messages.

    Args:
        declarer: what declares the class, for the error.
        message: what is declared.

    Raises:
        ConfigurationError: it is none.
    """
    declared: Any = message
    try:
        known_kind(declared)
    except ValidationError as error:
        raise ConfigurationError(f"{declarer}: message={message!r}: {error}") from error


class _Rows(Protocol):
    """Store, or view of one, as far as tables are read from it."""

    def row(self, key: bytes) -> bytes | None:
        """Return a row; None if there is none of the key."""


class OpenTable(Generic[V]):
    """Table of one shard: a mapping from keys to messages, for reading.

    Args:
        declared: the declaration.
        rows: where it is read.
        changes: rows that the open transaction has changed; None for those it has removed.

    Attributes:
        declared: the declaration.
    """

    __slots__ = ("_changes", "_rows", "declared")

    def __init__(
        self, declared: Table[V], rows: _Rows, changes: Mapping[bytes, bytes | None]
    ) -> None:
        self.declared = declared
        self._rows = rows
        self._changes = changes

    @overload
    def get(self, key: Any) -> V | None: ...
    @overload
    def get(self, key: Any, default: D) -> V | D: ...
    def get(self, key: Any, default: Any = None) -> Any:
        """Return the newest message of a key, or ``default``.

        Raises:
            ValidationError: it cannot be a key of a table.
            ShardStoreError: the store failed, or the message is not of the declared class.
        """
        row = self.declared.row_of(key)
        encoded = self.row(row)
        if encoded is not None and self.declared.is_broadcast:
            encoded = message_of(row, encoded)
        return default if encoded is None else self.declared.decode(encoded)

    def row(self, key: bytes) -> bytes | None:
        """Return a row as it is kept; None if there is none of the key.

        Raises:
            ShardStoreError: the store failed.
        """
        found = self._changes.get(key, _MISSING)
        return self._rows.row(key) if found is _MISSING else found

    def __getitem__(self, key: Any) -> V:
        found: V = self.get(key, _MISSING)
        if found is _MISSING:
            raise KeyError(key)
        return found

    def __contains__(self, key: Any) -> bool:
        return self.get(key, _MISSING) is not _MISSING


class Tables:
    """Tables of one shard, and their changes in the open transaction.

    Args:
        declared: the declarations.
        store: the shard's store.
        topics: topics of the shard's journals, as they are known.
    """

    def __init__(
        self, declared: Sequence[Table[Any]], store: object, topics: Mapping[str, str]
    ) -> None:
        self._declared = {each.topic: each for each in declared}
        self._given_store = store
        self._topics = topics
        self._open: dict[str, OpenTable[Any]] = {}
        self._changes: dict[bytes, bytes | None] = {}
        self._changed_bytes = 0

    def restore(self) -> None:
        """Begin with the rows of the store, which was just restored.

        Raises:
            ConfigurationError: the store keeps no tables.
            ShardStoreError: the store failed.
        """
        store = self._given_store
        if not isinstance(store, RowStore):
            raise ConfigurationError(
                f"{type(store).__name__} keeps no tables; use shard.RocksStore, shard.SqliteStore,"
                " shard.JsonStore or shard.SqlStore, or define the methods of `RowStore`"
            )
        store.open_rows()
        self._open = {
            topic: OpenTable(declared, store, self._changes)
            for topic, declared in self._declared.items()
        }
        self.committed()

    def open(self, declared: Table[V]) -> OpenTable[V]:
        """Return a table, for reading.

        Raises:
            ConfigurationError: the application does not declare it.
        """
        found = self._open.get(declared.topic)
        if found is None or found.declared is not declared:
            raise undeclared(declared)
        return found

    def of(self, journal: str) -> Table[Any] | None:
        """Return the table that is made of a journal; None if none is."""
        return self._declared.get(self._topics.get(journal, ""))

    def put(self, declared: Table[Any], message: Any, clock: int = 0) -> None:
        """Put a message into its table, or remove its key.

        Args:
            declared: the table.
            message: the message.
            clock: clock of its UUID.

        Raises:
            ValidationError: its key cannot be the key of a table.
            UnreadableStateError: it would not be read again as it is.
            BaseException: that of the application's functions.
        """
        row = declared.row_of(call(declared.key, message))
        value = None
        if declared.removes is None or not call(declared.removes, message):
            value = declared.codec.encode(message)
        if declared.is_broadcast:
            known = self._open[declared.topic].row(row)
            if known is not None and clock < int.from_bytes(known[:_CLOCK_BYTES], "big"):
                return
            value = clock.to_bytes(_CLOCK_BYTES, "big") + (b"" if value is None else b"\1" + value)
        self._changes[row] = value
        self._changed_bytes += len(row) + len(value or b"")

    @property
    def is_full(self) -> bool:
        """The open transaction has ``UNCOMMITTED_PUTS_MAX`` changes, or so many bytes."""
        return (
            len(self._changes) >= UNCOMMITTED_PUTS_MAX
            or self._changed_bytes >= UNCOMMITTED_BYTES_MAX
        )

    @property
    def changes(self) -> Mapping[bytes, bytes | None]:
        """Rows that the open transaction has changed; None removes one."""
        return self._changes

    def committed(self) -> None:
        """Note that the store has committed the changes, or has dropped them."""
        self._changes.clear()
        self._changed_bytes = 0


def undeclared(declared: Table[Any]) -> ConfigurationError:
    """Return the error of a table that an application does not declare."""
    return ConfigurationError(f"the application does not declare {declared!r}: add it to `tables=`")


ROWS = _PREFIX
"""Least row of a table; all rows after it are of tables."""


def prefix_of(topic: str, *, is_broadcast: bool) -> bytes:
    """Return the prefix of the rows of a topic's table."""
    digest = hashlib.blake2b(topic.encode(), digest_size=_DIGEST_BYTES).digest()
    return (_BROADCAST if is_broadcast else _PREFIX) + digest


def row_of(prefix: bytes, key: Any) -> bytes:
    """Return the key of a row of the table of a prefix."""
    return prefix + any_key.encode(key) + _END


def parse_row(row: bytes) -> tuple[bytes, Any]:
    """Return the prefix of a row's table, and its key.

    Raises:
        ShardStoreError: the row is of no table.
    """
    at = len(_PREFIX) + _DIGEST_BYTES
    try:
        return row[:at], any_key.decode(row[at : -len(_END)])
    except (DecodeError, ValueError) as error:
        raise ShardStoreError(f"the row {row!r} is of no table: {error}") from error


def message_of(row: bytes, encoded: bytes) -> bytes | None:
    """Return the encoded message of a row; None if its key was removed."""
    if not row.startswith(_BROADCAST):
        return encoded
    return encoded[_CLOCK_BYTES + 1 :] if len(encoded) > _CLOCK_BYTES else None
