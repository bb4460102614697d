"""A handler of keys and values runs over a RocksStore and over a JsonStore alike."""

from __future__ import annotations

import random

import pytest

from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.stores.json_store import JsonStore
from gazette_sdk.shard.stores.rocks_store import RocksStore

STORES = [RocksStore[str, int], JsonStore[dict[str, int]]]
KEYS = ["", "a", "a/1", "a/2", "b", "ä", "\U0001f600", "z"]


@pytest.fixture(params=STORES, ids=["RocksStore", "JsonStore"])
def store(request, tmp_path):
    """Yields a restored store, and destroys it."""
    made = request.param(tmp_path)
    made.restore()
    yield made
    made.destroy()


def same(reader, model) -> None:
    """Check all ways to read keys and values."""
    rows = sorted(model.items())
    assert list(reader.items()) == rows
    for key in KEYS:
        assert (key in reader) == (key in model)
        assert reader.get(key) == model.get(key)
        assert reader.get(key, 7) == model.get(key, 7)
        if key in model:
            assert reader[key] == model[key]
        else:
            with pytest.raises(KeyError):
                reader[key]
        assert list(reader.items(prefix=key)) == [row for row in rows if row[0].startswith(key)]
        assert list(reader.items(start=key)) == [row for row in rows if row[0] >= key]
        assert list(reader.items(start="a", stop=key)) == [
            row for row in rows if "a" <= row[0] < key
        ]


def test_reads_and_changes_are_those_of_a_dict(store):
    chance, model = random.Random(1), {}
    with pytest.raises(KeyError):
        del store["a"]
    for _ in range(20):
        store.begin()
        committed = dict(model)
        for _ in range(chance.randrange(6)):
            key, value = chance.choice(KEYS), chance.randrange(100)
            match chance.randrange(3):
                case 0:
                    store.discard(key)
                    model.pop(key, None)
                case 1 if key in model:
                    del store[key]
                    del model[key]
                case _:
                    store[key] = value
                    model[key] = value
        same(store, model)
        with store.committed() as view:
            same(view, committed)
        store.start_commit(Checkpoint())
        store.finish_commit()


def test_a_state_without_keys_says_so(tmp_path):
    store = JsonStore[list[int]](tmp_path)
    store.restore()
    with pytest.raises(TypeError, match=r"of the type list, which has no keys; use store\.state"):
        store["a"] = 1
    numbers = JsonStore[dict[int, int]](tmp_path / "other")
    numbers.restore()
    numbers[2], numbers[10] = 1, 2
    assert list(numbers.items(start=2, stop=10)) == [(2, 1)]
    with pytest.raises(TypeError, match="no prefixes; pass start and stop"):
        list(numbers.items(prefix="1"))
