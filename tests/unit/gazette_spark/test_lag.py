"""Lag: heads minus offsets, of the sources that are journals."""

import json

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState
from gazette_spark import lag
from gazette_spark.stream import Position, StreamOffset


def text(**offsets: int) -> str:
    journals = {name: Position(offset) for name, offset in offsets.items()}
    return json.dumps(StreamOffset("committed", journals).to_json())


def test_lag_is_what_is_left_of_each_journal():
    ours = {"endOffset": text(a=70, gone=5), "latestOffset": text(a=100, b=30)}
    other = {"endOffset": '{"topic":{"0":5}}', "latestOffset": '{"topic":{"0":9}}'}
    nothing = {"endOffset": None, "latestOffset": None}
    assert lag({"sources": [ours, other, nothing]}) == {"a": 30, "b": 30}


def test_offsets_are_restored_from_their_text():
    journals = {"b": Position(5, 7, b""), "a": Position(1)}
    offset = StreamOffset("uncommitted", journals)
    stored = json.loads(json.dumps(offset.to_json()))
    assert list(stored["journals"]) == ["a", "b"]
    assert StreamOffset.from_json(stored, "uncommitted") == offset


def test_offsets_whose_state_is_damaged_are_refused():
    state = Checkpoint({"a": 7}, [ProducerState("a", b"\1bcdef", 1 << 60, 3)]).to_bytes()
    stored = StreamOffset("committed", {"a": Position(7, 1, state)}).to_json()
    restored = StreamOffset.from_json(stored, "committed").journals["a"]
    assert [producer.begin for producer in restored.producers] == [3]
    for at in range(len(state)):
        damaged = state[:at] + bytes([state[at] ^ 2]) + state[at + 1 :]
        offset = StreamOffset("committed", {"a": Position(7, 1, damaged)}).to_json()
        with pytest.raises(ConfigurationError, match="malformed offset"):
            StreamOffset.from_json(offset, "committed")
