"""Journals which other publishers wrote, read as another committed reader read them."""

from __future__ import annotations

import base64

import pytest

from gazette_sdk import Reader
from gazette_sdk.message.checkpoint import Checkpoint
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram
from support.sequencing import states
from support.vectors import golden

JOURNALS = [each for each in golden("consumer/messages/journals.json") if each["messages"]]
CLASSES = {
    "application/x-ndjson": dict,
    "application/x-protobuf-fixed": Gram,
    "text/csv": list,
}


def served(recorded, chunk_bytes: int) -> MemoryTransport:
    transport = MemoryTransport(chunk_bytes=chunk_bytes)
    journal = transport.create(recorded["journal"], content_type=recorded["content_type"])
    journal.content += base64.b64decode(recorded["bytes_b64"])
    return transport


@pytest.mark.parametrize("chunk_bytes", [77, 1 << 20])
@pytest.mark.parametrize(
    ("recorded", "ring"),
    [
        pytest.param(recorded, ring, id=f"{recorded['journal']}, {ring}")
        for recorded in JOURNALS
        for ring in recorded["sequencer"]
    ],
)
def test_journals_are_read_as_recorded(recorded, ring, chunk_bytes):
    expected = recorded["sequencer"][ring]
    begins = [begin for sequence in expected["dequeued"].values() for begin in sequence]
    transport = served(recorded, chunk_bytes)
    options = {"name": recorded["journal"], "transport": transport, "ring_size": int(ring[5:])}
    message_type = CLASSES[recorded["content_type"]]
    reader = Reader(message_type, acknowledgements=True, **options)
    envelopes = list(reader)
    assert [envelope.begin for envelope in envelopes] == begins
    known = {message["begin"]: message for message in recorded["messages"]}
    for envelope in envelopes:
        assert envelope.end == known[envelope.begin]["end"]
        assert str(envelope.uuid) == known[envelope.begin]["uuid"]
    checkpoint = reader.checkpoint(horizon_s=0)
    assert checkpoint.offsets == expected["final"]["offsets"]
    assert states(checkpoint) == {
        (state["journal"], bytes.fromhex(state["producer"]), int(state["last_ack"]), state["begin"])
        for state in expected["final"]["producers"]
    }
    assert isinstance(checkpoint, Checkpoint)
