"""State of a shard as it is shown to people: by a call of its primary, or from its recovery log.

It is read without the types that an application declares. Keys and values of unknown types are
shown as what they most likely are: JSON, text, integers, or bytes in base64.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.rules import STATE_RPC
from gazette_sdk.shard.application.application import Method, Query
from gazette_sdk.shard.stores.base import Entry, ShownView, prefix_end, recovered_files, stores_of
from gazette_sdk.shard.stores.codec import shown_key, shown_value
from gazette_sdk.shard.stores.json_store import JsonStore
from gazette_sdk.shard.stores.sqlite_store import SqliteStore
from gazette_sdk.shard.transaction import tables
from gazette_sdk.shard.transaction.timers import SECOND_US, ExpiryTimer, Timer, timer_of_row
from gazette_sdk.shard.transaction.windows import window_of_row, window_rows

LIMIT = 100
"""Entries that are shown, unless another number is asked for."""

LIMIT_MAX = 10_000
"""Greatest number of entries of one answer."""

ANSWER_BYTES_MAX = 8 << 20
"""Bytes of keys and values from which on an answer has no further entry."""

_BASE64 = "base64:"
_INT64 = 1 << 63


def read_state(
    view: object, request: cpb.StateRequest, topics: Collection[str] = ()
) -> cpb.StateResponse:
    """Return a part of what a view of a store has.

    Args:
        view: the view.
        request: what is asked for; its shard does not count.
        topics: topics of tables, as far as they are known.

    Raises:
        ConfigurationError: the request is malformed, or the store cannot be shown.
        ShardStoreError: the store failed.
    """
    read = _READERS.get(request.what or "state")
    if read is None:
        raise ConfigurationError(
            f"{request.what!r} is no part of a state; use {', '.join(_READERS)}"
        )
    limit = request.limit or LIMIT
    if not 0 < limit <= LIMIT_MAX:
        raise ConfigurationError(f"the limit {limit} is not between 1 and {LIMIT_MAX}")
    if not isinstance(view, ShownView):
        raise ConfigurationError(
            f"{type(view).__name__} cannot be shown: its state is in a database or a form of its"
            " own; ask there, or declare an endpoint of the application"
        )
    keys = keys_of(request.key) if request.HasField("key") else None
    response = cpb.StateResponse()
    size = 0
    for entry in read(view, keys, limit + 1, topics):
        if len(response.entries) == limit or size >= ANSWER_BYTES_MAX:
            response.more = True
            break
        added = response.entries.add(
            place=entry.place,
            key=_json(entry.key, shown_key),
            value=_json(entry.value, shown_value),
        )
        size += len(added.key) + len(added.value)
    return response


def keys_of(text: str) -> list[Any]:
    """Return the keys that a text may stand for, of each type of keys.

    It is a text; it may also be an integer or a list of texts and integers in JSON, or bytes after
    ``base64:``.

    Raises:
        ConfigurationError: what follows ``base64:`` is none.
    """
    if text.startswith(_BASE64):
        try:
            return [base64.b64decode(text.removeprefix(_BASE64), validate=True)]
        except ValueError as error:
            raise ConfigurationError(f"the key {text!r} is not base64: {error}") from error
    found: list[Any] = [text]
    try:
        decoded = msgspec.json.decode(text)
    except ValueError:
        return found
    parts = decoded if isinstance(decoded, list) else [decoded]
    if all(_is_part(each) for each in parts) and decoded != text:
        found.append(tuple(parts) if isinstance(decoded, list) else decoded)
    return found


def _is_part(value: object) -> bool:
    """Return True if a value may be a key, or an element of one."""
    return isinstance(value, str) or (type(value) is int and -_INT64 <= value < _INT64)


def _json(value: Any, shown: Callable[[bytes], Any]) -> str:
    if isinstance(value, bytes):
        value = shown(value)
    return msgspec.json.encode(_without_bytes(value)).decode()


def _without_bytes(value: Any) -> Any:
    """Return a value with texts in place of bytes, by which :func:`keys_of` finds them."""
    if isinstance(value, bytes):
        return _BASE64 + base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _without_bytes(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_bytes(each) for each in value]
    return value


# ---------------------------------------------------------------- parts


def _state(
    view: ShownView, keys: Sequence[Any] | None, limit: int, _: Collection[str]
) -> Iterable[Entry]:
    return view.entries(keys, limit)


def _tables(
    view: ShownView, keys: Sequence[Any] | None, limit: int, topics: Collection[str]
) -> Iterator[Entry]:
    names = {
        tables.prefix_of(topic, is_broadcast=is_broadcast): topic
        for topic in topics
        for is_broadcast in (False, True)
    }
    for row, encoded in _table_rows(view, limit) if keys is None else _rows_of(view, keys):
        prefix, key = tables.parse_row(row)
        message = tables.message_of(row, encoded)
        if message is not None:
            yield Entry(names.get(prefix, prefix[1:].hex()), key, shown_value(message))


def _table_rows(view: ShownView, count: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of all tables, which are read so many at a time."""
    lower = tables.ROWS
    while rows := view.rows_from(lower, count):
        yield from rows
        lower = rows[-1][0] + b"\x00"


def _rows_of(view: ShownView, keys: Sequence[Any]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of some keys, of each table."""
    lower: bytes | None = tables.ROWS
    while lower is not None and (rows := view.rows_from(lower, 1)):
        prefix, _ = tables.parse_row(rows[0][0])
        for key in keys:
            wanted = tables.row_of(prefix, key)
            yield from (each for each in view.rows_from(wanted, 1) if each[0] == wanted)
        lower = prefix_end(prefix)


def _windows(
    view: ShownView, keys: Sequence[Any] | None, limit: int, _: Collection[str]
) -> Iterator[Entry]:
    prefixes = [b""] if keys is None else [window_rows(key) for key in keys]
    for prefix in prefixes:
        for row, encoded in view.rows_from(prefix, limit):
            if row >= tables.ROWS or not row.startswith(prefix):
                break  # rows of tables are after all windows
            window = window_of_row(row, encoded)
            state = None if window.state is None else shown_value(window.state)
            value = {
                "begin": _time_text(window.begin_us),
                "end": _time_text(window.end_us),
                "count": window.count,
                "state": state,
            }
            yield Entry("", window.key, value)


def _timers(
    view: ShownView, keys: Sequence[Any] | None, limit: int, _: Collection[str]
) -> Iterator[Entry]:
    if keys is not None:
        raise ConfigurationError("timers are shown in the order of their times: leave the key out")
    for row in view.timers_after(None, limit):
        timer = timer_of_row(row)
        if isinstance(timer, Timer):
            yield Entry(timer.clock, timer.key, _time_text(round(timer.at * SECOND_US)))
        elif isinstance(timer, ExpiryTimer):
            family, _end, key = timer.entry.partition(b"\x00")
            name = f"end of a key of {family.decode(errors='replace')}"
            yield Entry(name, shown_key(key), _time_text(row.due_us))
        else:
            name = "end of a window" if timer.closes else "update of a window"
            yield Entry(name, shown_key(timer.row), _time_text(timer.due_us))


_READERS: dict[
    str, Callable[[ShownView, Sequence[Any] | None, int, Collection[str]], Iterable[Entry]]
] = {"state": _state, "tables": _tables, "windows": _windows, "timers": _timers}


def _time_text(us: int) -> str:
    try:
        return datetime.fromtimestamp(us / SECOND_US, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{us} µs"


# ---------------------------------------------------------------- of a primary, and of a log


def _serve(query: Query[Any]) -> cpb.StateResponse:
    """Answer a call of a shard's primary."""
    topics = [table.topic for table in query.tables]
    return read_state(query.store, cast("cpb.StateRequest", query.request), topics)


STATE = Method(
    STATE_RPC.path,
    cpb.StateRequest,
    cpb.StateResponse,
    _serve,
    shard_of=operator.attrgetter("shard"),
)
"""Call that shows the state of a shard, with the rights and bounds of a query."""


def open_recovered(directory: Path) -> tuple[Any, AbstractContextManager[Any]]:
    """Open the store of the files that were recovered from a log, and a view of it.

    Args:
        directory: of the files, which are the caller's copy.

    Returns:
        The store, to be destroyed, and the view.

    Raises:
        ConfigurationError: the files are of a store that cannot be shown.
        ShardStoreError: the store cannot be opened.
    """
    files = recovered_files(directory)
    if not files:
        raise ConfigurationError(
            "the recovery log has no files: its shard has committed nothing yet"
        )
    store: Any
    match stores_of(files):
        case ["RocksStore"]:
            from gazette_sdk.shard.stores.rocks_store import RocksStore  # noqa: PLC0415 - extra

            store = RocksStore.untyped(directory)
        case ["SqliteStore"]:
            store = SqliteStore(directory)
        case ["JsonStore"]:
            store = JsonStore(directory, cast("Any", Any))
        case found:
            known = " and ".join(found) or "no store that is known here"
            raise ConfigurationError(
                f"the recovery log has files of {known} ({', '.join(files[:5]) or 'none'}), which"
                " cannot be shown; `gazctl shards recover` writes them to a directory"
            )
    store.restore()
    return store, store.committed()
