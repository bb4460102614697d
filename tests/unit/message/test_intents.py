"""Acknowledgement intents: kept in order, stored, read back."""

from __future__ import annotations

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.message.sender import AckIntents
from gazette_sdk.protocol import consumer_pb2


def test_intents_are_a_mapping_in_the_order_of_first_use():
    intents = AckIntents({"b/journal": b"one\n", "a/journal": b"two\n"})
    assert list(intents) == ["b/journal", "a/journal"]
    assert intents["a/journal"] == b"two\n"
    assert len(intents) == 2
    assert repr(intents) == "<AckIntents of b/journal, a/journal>"
    assert repr(AckIntents()) == "<AckIntents of no journal>"
    assert not AckIntents()


def test_stored_intents_are_a_checkpoint_and_read_back_equal():
    intents = AckIntents({"b/journal;meta": b"one\n", "a/journal": b"\x00\xff"})
    stored = intents.to_bytes()
    checkpoint = consumer_pb2.Checkpoint.FromString(stored)
    assert dict(checkpoint.ack_intents) == dict(intents)
    assert not checkpoint.sources
    found = AckIntents.from_bytes(stored)
    assert found == intents
    assert hash(found) == hash(intents)
    assert AckIntents.from_bytes(b"") == AckIntents()
    assert AckIntents.from_bytes(AckIntents().to_bytes()) == AckIntents()
    without = checkpoint.__class__(ack_intents=checkpoint.ack_intents).SerializeToString()
    assert AckIntents.from_bytes(without) == intents


def test_damaged_intents_are_refused():
    stored = AckIntents({"a/journal": b"one\n"}).to_bytes()
    for at in range(len(stored)):
        damaged = stored[:at] + bytes([stored[at] ^ 4]) + stored[at + 1 :]
        with pytest.raises(ValidationError, match="no stored acknowledgement intents"):
            AckIntents.from_bytes(damaged)


def test_what_is_no_checkpoint_is_refused():
    with pytest.raises(ValidationError, match="5 bytes are no stored acknowledgement intents"):
        AckIntents.from_bytes(b"\xff\xff\xff\xff\xff")
