"""State of a shard as it is shown: keys, values, and what cannot be shown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ConfigurationError, ShardStoreError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer.state import ANSWER_BYTES_MAX, keys_of, open_recovered, read_state
from gazette_sdk.shard.stores.base import Entry
from gazette_sdk.shard.stores.codec import shown_key, shown_value, stored_key

WORDS = st.text(st.characters(exclude_categories=("Cs", "Cc")))
PARTS = st.one_of(WORDS, st.integers(-(1 << 63), (1 << 63) - 1))
COUNTS = st.integers(0, (1 << 62) - 1)


@given(st.one_of(WORDS, COUNTS, st.lists(PARTS, min_size=1, max_size=4).map(tuple)))
def test_keys_are_shown_as_they_were_put(key):
    assert shown_key(stored_key(key)) == key


@given(st.one_of(WORDS.filter(bool), COUNTS, st.lists(PARTS, min_size=1, max_size=4).map(tuple)))
def test_a_shown_key_finds_its_entry(key):
    text = key if isinstance(key, str) else json.dumps(key)
    if not text.startswith("base64:"):
        assert key in keys_of(text)


@given(st.binary())
def test_any_bytes_are_shown(encoded):
    shown_key(encoded)
    shown_value(encoded)
    response = read_state(View([Entry("", encoded, encoded)]), cpb.StateRequest())
    (entry,) = response.entries
    json.loads(entry.key)
    json.loads(entry.value)


def test_numbers_are_shown_with_all_of_their_digits():
    stored = b'{"a": 1180591620717411303424,\n "b": 1.0000000000000000001}'
    (entry,) = read_state(View([Entry("", b"k", stored)]), cpb.StateRequest()).entries
    assert entry.value == '{"a":1180591620717411303424,"b":1.0000000000000000001}'


class View:
    """View of given entries."""

    def __init__(self, entries):
        self._entries = entries

    def entries(self, keys, limit):
        return self._entries[:limit]

    def rows_from(self, lower, limit):
        return []

    def timers_after(self, row, limit):
        return []


def test_numbers_too_great_are_no_keys():
    assert keys_of(str(1 << 63)) == [str(1 << 63)]
    assert keys_of("true") == ["true"]
    assert keys_of("[1, true]") == ["[1, true]"]
    assert keys_of("base64:/w==") == [b"\xff"]


def test_an_answer_is_bounded():
    value = b"x" * (ANSWER_BYTES_MAX // 2 + 1)
    entries = [Entry("", b"%d" % number, value) for number in range(5)]
    response = read_state(View(entries), cpb.StateRequest())
    assert (len(response.entries), response.more) == (2, True)
    response = read_state(View(entries[:2]), cpb.StateRequest(limit=2))
    assert (len(response.entries), response.more) == (2, False)


def test_what_cannot_be_shown_is_refused(tmp_path):
    for view, request, words in (
        (object(), {}, "cannot be shown"),
        (View([]), {"what": "secrets"}, "no part of a state"),
        (View([]), {"limit": -1}, "not between 1 and 10000"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            read_state(view, cpb.StateRequest(**request))
    with pytest.raises(ConfigurationError, match="committed nothing yet"):
        open_recovered(tmp_path)
    (tmp_path / "other.file").touch()
    with pytest.raises(ConfigurationError, match="files of no store that is known"):
        open_recovered(tmp_path)
    (tmp_path / "state.json").write_text("{broken")
    with pytest.raises(ShardStoreError, match=r"state\.json"):
        open_recovered(tmp_path)
