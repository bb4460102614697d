"""Checkpoints: their stored form, by the conformance vectors and by laws."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import DecodeError
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState
from gazette_sdk.protocol import consumer_pb2
from support.vectors import group

SEAL_BYTES = 10
VECTORS = group("message", "checkpoint")

JOURNALS = st.sampled_from(["a", "b/c", "a;suffix", "ü"])
STATES = st.builds(
    ProducerState,
    JOURNALS,
    st.binary(min_size=6, max_size=6),
    st.integers(0, (1 << 64) - 1),
    st.integers(-1, (1 << 63) - 1),
)


def as_recorded(found: Checkpoint) -> dict:
    by_journal = {
        name: {"read_through": offset, "producers": []} for name, offset in found.offsets.items()
    }
    for state in found.producers:
        by_journal[state.journal]["producers"].append(
            {"id": state.producer.hex(), "last_ack": state.last_ack, "begin": state.begin}
        )
    intents = {name: framed.decode() for name, framed in found.ack_intents.items()}
    return {"sources": by_journal, "ack_intents": intents}


@pytest.mark.parametrize("case", VECTORS["decode"], ids=lambda case: case["source"][:40])
def test_stored_checkpoints_decode_as_recorded(case):
    stored = bytes.fromhex(case["hex"])
    found = Checkpoint.from_bytes(stored)
    assert as_recorded(found) == case["expect"]
    assert Checkpoint.from_bytes(found.to_bytes()) == found
    sealed = found.to_bytes()
    assert len(sealed) == len(stored) + SEAL_BYTES
    # Another consumer skips the seal, and reads the same.
    assert as_recorded(Checkpoint.from_bytes(reparsed(sealed))) == case["expect"]


def test_parts_are_stored_and_found_again_as_recorded():
    case = VECTORS["round_trip"]
    states = [
        ProducerState(s["journal"], bytes.fromhex(s["producer"]), s["last_ack"], s["begin"])
        for s in case["producer_states"]
    ]
    intents = {name: text.encode() for name, text in case["ack_intents_utf8"].items()}
    found = Checkpoint.from_bytes(Checkpoint(case["read_through"], states, intents).to_bytes())
    assert as_recorded(found) == case["expect_message"]
    assert found.offsets == case["read_through"]
    assert sorted(found.producers) == sorted(states)
    assert found.ack_intents == intents


@given(
    st.dictionaries(JOURNALS, st.integers(0, (1 << 63) - 1)),
    st.lists(STATES),
    st.dictionaries(JOURNALS, st.binary()),
)
def test_checkpoints_are_read_as_they_were_stored(offsets, states, intents):
    given_one = Checkpoint(offsets, states, intents)
    found = Checkpoint.from_bytes(given_one.to_bytes())
    # A journal which is known by its producers only is read from its beginning.
    assert found.offsets == dict.fromkeys((s.journal for s in states), 0) | offsets
    assert sorted(found.producers) == sorted(states)
    assert found.ack_intents == intents


def test_zeros_are_stored_though_they_are_absent():
    found = Checkpoint.from_bytes(
        Checkpoint({"a": 0}, [ProducerState("a", b"\1\2\3\4\5\6", 0, 0)]).to_bytes()
    )
    assert found.offsets == {"a": 0}
    assert found.producers == [ProducerState("a", b"\1\2\3\4\5\6", 0, 0)]
    message = consumer_pb2.Checkpoint.FromString(found.to_bytes())
    assert message.sources["a"].producers[0].HasField("state")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(b"\1\2", b"\1\2\0\0\0\0"), (b"\1\2\3\4\5\6\7\x08", b"\1\2\3\4\5\6"), (b"", b"\0" * 6)],
)
def test_ids_of_another_length_are_cut_or_filled(stored, expected):
    message = consumer_pb2.Checkpoint()
    message.sources["a"].producers.add(id=stored)
    found = Checkpoint.from_bytes(message.SerializeToString())
    assert found.producers == [ProducerState("a", expected, 0, 0)]


def reparsed(stored: bytes) -> bytes:
    """The known fields of a stored checkpoint, as another consumer reads and stores them."""
    message = consumer_pb2.Checkpoint.FromString(stored)
    message.DiscardUnknownFields()
    return message.SerializeToString()


def test_no_bytes_are_no_checkpoint_and_the_empty_one_has_some():
    with pytest.raises(DecodeError, match="read again from the begin; restore"):
        Checkpoint.from_bytes(b"")
    assert Checkpoint.from_bytes(Checkpoint().to_bytes()) == Checkpoint()
    assert reparsed(Checkpoint().to_bytes()) == b""


STORED = [
    Checkpoint(),
    Checkpoint({"a": 1}),
    Checkpoint({"a/journal": 7}, [ProducerState("a/journal", b"\1bcdef", 1 << 60, -1)]),
    Checkpoint({"a": 1, "b": 1 << 40}, [], {"a": b"ack"}, {"b": 3}),
    Checkpoint({"a": 1}, reset="3f"),
]


@pytest.mark.parametrize("checkpoint", STORED, ids=["empty", "one", "producer", "more", "reset"])
def test_damage_of_a_stored_checkpoint_is_found(checkpoint):
    stored = checkpoint.to_bytes()
    assert Checkpoint.from_bytes(stored) == checkpoint
    damaged = [stored[:length] for length in range(len(stored))]
    damaged += [stored + b"\0", stored + stored, b"\0" * len(stored)]
    for at in range(len(stored)):
        damaged += [
            stored[:at] + bytes([stored[at] ^ 1 << bit]) + stored[at + 1 :] for bit in range(8)
        ]
        damaged += [stored[:at] + b"\0" * len(stored[at:]), stored[:at] + stored[at + 1 :]]
    for found in damaged:
        if found != stored:
            with pytest.raises(DecodeError, match=r"restore them from a copy|to_bytes\(\)"):
                Checkpoint.from_bytes(found)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_checkpoint_or_refused(stored):
    try:
        Checkpoint.from_bytes(stored)
    except DecodeError:
        pass
    else:
        assert consumer_pb2.Checkpoint.FromString(stored) is not None


@given(st.dictionaries(JOURNALS, st.integers(0, (1 << 63) - 1), min_size=1), st.lists(STATES))
def test_checkpoints_without_a_checksum_are_read(offsets, states):
    given_one = Checkpoint(offsets, states)
    old = reparsed(given_one.to_bytes())
    assert Checkpoint.from_bytes(old) == Checkpoint.from_bytes(given_one.to_bytes())


def test_what_is_no_checkpoint_is_refused():
    with pytest.raises(DecodeError, match=r"3 bytes are no checkpoint .*to_bytes"):
        Checkpoint.from_bytes(b"\x0a\x7f\x01")


def test_equal_checkpoints_have_equal_bytes():
    one = Checkpoint({"a": 1, "b": 2}, [], {"x": b"1", "y": b"2"})
    two = Checkpoint({"b": 2, "a": 1}, [], {"y": b"2", "x": b"1"})
    assert one.to_bytes() == two.to_bytes()


def test_numbers_and_types_of_the_stored_form():
    def fields(message):
        return {field.name: (field.number, field.type) for field in message.DESCRIPTOR.fields}

    whole = consumer_pb2.Checkpoint
    kinds = FieldDescriptor
    assert whole.DESCRIPTOR.full_name == "consumer.Checkpoint"
    assert fields(whole) == {
        "sources": (1, kinds.TYPE_MESSAGE),
        "ack_intents": (2, kinds.TYPE_MESSAGE),
        "reset": (101, kinds.TYPE_STRING),  # our own: others skip it
    }
    assert fields(whole.Source) == {
        "read_through": (1, kinds.TYPE_INT64),
        "producers": (2, kinds.TYPE_MESSAGE),
        "create_revision": (100, kinds.TYPE_INT64),  # our own, as the next two: others skip them
        "watermark_us": (101, kinds.TYPE_INT64),
        "published_us": (102, kinds.TYPE_INT64),
    }
    assert fields(whole.Source.ProducerEntry) == {
        "id": (1, kinds.TYPE_BYTES),
        "state": (2, kinds.TYPE_MESSAGE),
    }
    assert fields(whole.ProducerState) == {
        "last_ack": (1, kinds.TYPE_FIXED64),
        "begin": (2, kinds.TYPE_INT64),
    }
