"""State that would not be read again as it is: each store refuses it before the commit."""

from __future__ import annotations

import datetime as dt
import enum
import math
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import shard
from gazette_sdk.errors import ShardStoreError, UnreadableStateError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.stores import codec


class Color(enum.Enum):
    RED = "red"


@dataclass
class Row:
    total: float = 0.0
    names: list[str] | None = None


@dataclass(eq=False)
class Uncompared:
    total: float = 0.0


class Renamed(msgspec.Struct, rename="camel", tag=True, omit_defaults=True):
    cents_total: Annotated[int, msgspec.Meta(ge=0)] = 0
    seen: set[int] = msgspec.field(default_factory=set)
    at: dt.datetime | None = None


class Pair(NamedTuple):
    left: int
    right: int


class Keyed(TypedDict):
    a: int


UTC = dt.UTC

READABLE: list[tuple[Any, Any]] = [
    (float, 1.5),
    (float, 3),
    (float, -0.0),
    (float | None, None),
    (Row, Row(1.0, ["a"])),
    (Uncompared, Uncompared(2.0)),
    (Renamed, Renamed(3, {1, 2}, dt.datetime(2026, 1, 2, tzinfo=UTC))),
    (Renamed, Renamed()),
    (set[int], {3, 1, 2}),
    (frozenset[str], frozenset("ab")),
    (list[set[int | str]], ({1, "a"},)),
    (list[int], (1, 2)),
    (dict[int, float], {1: 2.0}),
    (dict[str, Row], {"a": Row(2.0)}),
    (dt.datetime, dt.datetime(2026, 1, 2, 3, 4, 5, 6, UTC)),
    (dt.timedelta, dt.timedelta(microseconds=1)),
    (Decimal, Decimal("1.10")),
    (Decimal, Decimal("NaN")),
    (Color, Color.RED),
    (UUID, UUID(int=1)),
    (Pair, Pair(1, 2)),
    (Keyed, {"a": 1}),
    (object, {"a": [None, 1.5, {"b": (1, 2)}]}),
    (object, 2**70),
]
UNREADABLE: list[tuple[Any, Any]] = [
    (float, math.nan),
    (float, -math.inf),
    (float, "1.5"),
    (float, True),
    (float, 10**400),
    (float | None, math.nan),
    (object, math.nan),
    (object, {"a": [1, math.inf]}),
    (object, {1: "a", "1": "b"}),
    (list[float], [1.0, math.nan]),
    (list[int], [1.5]),
    (dict[str, int], {"a": "1"}),
    (Row, Row(math.nan)),
    (Row, Row("n/a")),
    (Row, Row(names=[1])),
    (Row, {"total": 1.0, "other": 2}),
    (Uncompared, Uncompared(math.nan)),
    (Renamed, Renamed(-1)),
    (Renamed, Renamed(seen=[1, 1])),
    (Renamed, Row()),
    (set[int], [1, 1]),
    (Keyed, {"a": 1, "b": 2}),
    (Color, "blue"),
    (dt.datetime, "yesterday"),
    (Decimal, "1.x"),
    (Pair, (1,)),
    (int | None, 1.5),
    (str | None, 1),
]
NOT_ENCODED: list[tuple[Any, Any]] = [(str, "\ud800"), (object, deque()), (object, {(1,): 2})]


@pytest.mark.parametrize(("of", "value"), READABLE)
def test_a_value_that_comes_back_is_taken(tmp_path, of, value) -> None:
    store = shard.RocksStore[str, of](tmp_path)
    store.restore()
    store.begin()
    store["k"] = value
    read = store["k"]
    store.destroy()
    assert codec.is_same(value, read)

    if of in (dict[int, float], list[set[int | str]]):
        return  # the file is written in a fixed order, of which msgspec has none for these
    state = shard.JsonStore(tmp_path, lambda: None)
    state._state_type = of  # most of these types have no first value
    state.state = value
    state.start_commit(Checkpoint())
    state.restore()
    assert codec.is_same(value, state.state)


@pytest.mark.parametrize(("of", "value"), UNREADABLE)
def test_a_value_that_does_not_come_back_is_refused_and_nothing_changes(
    tmp_path, of, value
) -> None:
    store = shard.RocksStore[str, of](tmp_path)
    store.restore()
    store.begin()
    with pytest.raises(UnreadableStateError, match="put"):
        store["k"] = value
    assert "k" not in store
    store.destroy()

    state = shard.JsonStore(tmp_path, lambda: None)
    state._state_type = of
    state.state = value
    for check in (state.validate_state, lambda: state.start_commit(Checkpoint())):
        with pytest.raises(UnreadableStateError, match="declare"):
            check()
    assert not (tmp_path / "state.json").exists()


@pytest.mark.parametrize(("of", "value"), NOT_ENCODED)
def test_a_value_without_an_encoding_is_refused(tmp_path, of, value) -> None:
    with pytest.raises((TypeError, ValueError)):
        codec.value_codec(of).encode(value)


@pytest.mark.parametrize(
    "value", [{1, 2}, dt.date(2026, 1, 2), b"a", Color.RED, Row(), Decimal(1), UUID(int=1)]
)
def test_without_a_type_rows_are_read_as_json_and_a_state_is_refused(tmp_path, value) -> None:
    store = shard.RocksStore(tmp_path)
    store.restore()
    store["k"] = {"a": value}
    assert store["k"] == {"a": msgspec.to_builtins(value)}
    store.destroy()

    # The handler has the set in its hands until a recovery makes it a list.
    state = shard.JsonStore(tmp_path / "json")
    state.restore()
    state.state["a"] = value
    with pytest.raises(UnreadableStateError, match=r"JsonStore\[Totals\]"):
        state.start_commit(Checkpoint())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(JSON)
def test_each_value_without_a_type_is_refused_or_comes_back(value) -> None:
    untyped = codec.value_codec(object)
    try:
        read = untyped.decode(untyped.encode(value))
    except UnreadableStateError:
        assert _repr_has_loss(value)
    else:
        assert msgspec.to_builtins(value, str_keys=True) == read


def _repr_has_loss(value: object) -> bool:
    return any(word in repr(value) for word in ("nan", "inf")) or _has_twin_keys(value)


def _has_twin_keys(value: object) -> bool:
    if isinstance(value, dict):
        return len({*map(str, value)}) < len(value) or any(map(_has_twin_keys, value.values()))
    return isinstance(value, list) and any(map(_has_twin_keys, value))


def test_a_protobuf_message_that_is_too_deep_to_be_parsed_is_refused(tmp_path) -> None:
    deep = inner = struct_pb2.Value()
    for _ in range(200):
        inner = inner.list_value.values.add()
    store = shard.RocksStore[str, struct_pb2.Value](tmp_path)
    store.restore()
    with pytest.raises(UnreadableStateError, match="would not be decoded"):
        store["k"] = deep
    store["k"] = struct_pb2.Value(number_value=math.nan)
    assert math.isnan(store["k"].number_value)
    store.destroy()


def test_a_codec_of_the_application_is_held_to_what_it_decodes(tmp_path) -> None:
    lossy = codec.Codec(lambda value: f"{value}".encode(), int)
    text = codec.Codec(lambda value: f"{value}", str)
    make = shard.RocksStore.of(
        key=lossy, value=lossy, families={"text": (str, text), "numbers": (int, codec.uvarint)}
    )
    store = make(tmp_path)
    store.restore()
    store[7] = 8
    with pytest.raises(UnreadableStateError, match="mend the codec"):
        store[7] = "eight"
    with pytest.raises(UnreadableStateError, match="mend the codec"):
        store["seven"] = 8
    with pytest.raises(UnreadableStateError, match="return bytes"):
        store.family("text")["k"] = "a"
    with pytest.raises(OverflowError):
        store.family("numbers")[1] = 2**63
    for key in (1.5, Decimal(1), "a"):
        with pytest.raises(TypeError):
            store.family("numbers")[key] = 1
    assert dict(store.items()) == {7: 8}
    store.destroy()


@pytest.mark.parametrize("sqlite", [True, False])
def test_sqlite_refuses_nan_which_it_would_keep_as_null(tmp_path, sqlite) -> None:
    schema = "CREATE TABLE t (k TEXT PRIMARY KEY, v REAL)"
    if sqlite:
        store: Any = shard.SqliteStore(tmp_path, schema=schema)
    else:
        store = shard.SqlStore(f"sqlite:///{tmp_path}/a.sqlite", "a/shard")
    store.restore()
    store.begin()
    if sqlite:
        insert, many = "INSERT INTO t VALUES (?, ?)", store.executemany
        rows: list[Any] = [("a", 1.5), ("b", math.inf), ("c", math.nan)]
    else:
        store.execute(schema)
        insert, many = "INSERT INTO t VALUES (:k, :v)", store.execute
        rows = [{"k": "a", "v": 1.5}, {"k": "b", "v": math.inf}, {"k": "c", "v": math.nan}]
    with pytest.raises(UnreadableStateError, match="NULL"):
        store.execute(insert, rows[2])
    with pytest.raises(UnreadableStateError, match="NULL"):
        many(insert, rows[1:])
    store.execute("DELETE FROM t")
    many(insert, rows[:2])
    store.execute("INSERT INTO t VALUES (:k, :v)", {"k": "d", "v": None})
    with pytest.raises(UnreadableStateError, match="NULL"):
        store.execute("INSERT INTO t VALUES (:k, :v)", {"k": "e", "v": math.nan})
    assert store.execute("SELECT count(*) FROM t").fetchone()[0] == 3
    store.destroy()


def test_the_error_is_of_the_record_and_of_the_store() -> None:
    assert issubclass(UnreadableStateError, ShardStoreError)
    assert issubclass(UnreadableStateError, TypeError)
