"""Protobuf classes without a field of the UUID are read, and neither sequenced nor published."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest

from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import framing_for
from gazette_sdk.message.uuid import ZERO_UUID
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram, NoUuid, TextUuid

CONTENT_TYPE = "application/x-protobuf-fixed"
COUNT = 12
UUID = bytes(range(16))


@pytest.fixture
def journal(transport: MemoryTransport) -> MemoryTransport:
    """Return a journal of messages that have a UUID, of which the other classes know nothing."""
    journal = transport.create("a/journal", content_type=CONTENT_TYPE)
    for count in range(COUNT):
        payload = Gram(uuid=UUID, text="one", count=count).SerializeToString()
        framing_for(CONTENT_TYPE).encode(payload, journal.content)
    return transport


def test_they_are_read_as_uncommitted_without_their_uuids(journal):
    reader = Reader(NoUuid, name="a/journal", transport=journal, isolation="uncommitted")
    envelopes = list(reader)
    assert [each.message.count for each in envelopes] == list(range(COUNT))
    assert {each.uuid for each in envelopes} == {ZERO_UUID}
    assert envelopes[-1].end == reader.offsets["a/journal"]


def test_they_are_read_as_columns(journal):
    reader = Reader(NoUuid, name="a/journal", transport=journal, isolation="uncommitted")
    schema = [("count", pa.int64()), ("_uuid", pa.string()), ("_time", pa.timestamp("us", "UTC"))]
    rows = pa.Table.from_batches(reader.arrow(schema)).to_pylist()
    assert rows == [{"count": n, "_uuid": None, "_time": None} for n in range(COUNT)]


def test_a_field_of_that_name_which_is_no_uuid_is_a_column(transport):
    reader = Reader(TextUuid, name="a/journal", transport=transport, isolation="uncommitted")
    assert reader.arrow().schema.names == ["uuid", "text", "count"]
    reader = Reader(Gram, name="a/journal", transport=transport)
    assert reader.arrow().schema.names == ["text", "count"]


@pytest.mark.parametrize(
    "options",
    [{}, {"isolation": "uncommitted", "offsets": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)}],
    ids=["committed", "by time"],
)
def test_what_needs_uuids_is_refused_before_any_read(transport, options):
    with pytest.raises(ValidationError, match=r"tests\.NoUuid can carry no message UUID.*") as text:
        Reader(NoUuid, name="a/journal", transport=transport, **options)
    assert "isolation=uncommitted, and from offsets" in str(text.value)


def test_they_are_not_published(journal):
    with (
        Publisher(mapping=mapping.direct("a/journal"), transport=journal) as publisher,
        pytest.raises(ValidationError, match="give it a field `bytes uuid`"),
    ):
        publisher.publish(NoUuid(text="one"))
