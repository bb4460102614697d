"""Messages which are none, and journals which cannot hold any."""

import pytest

from gazette_sdk import Publisher, Reader, connect
from gazette_sdk.errors import DecodeError, DesyncError, FramingError, TornFrameError
from integration.failures.journals import append, run, spec, wait_until_stored, within
from integration.failures.reading import messages
from support.protobuf_messages import Gram

FIXED = "application/x-protobuf-fixed"


@pytest.fixture
def published(cluster, name):
    """A journal with two messages, and what appends raw bytes to it."""
    cluster.apply(spec(name))
    with Publisher(lambda _: name, transport=cluster.transport) as publisher:
        for number in range(2):
            publisher.publish({"number": number})
    return lambda content: append(cluster.transport, name, content).commit


@pytest.mark.parametrize(
    "poison", [b"this is no JSON\n", b'{"half": \n', b"\xff\xfe\n", b"[1, 2]\n"]
)
def test_a_poisoned_record_is_named_and_its_neighbours_can_be_read(
    cluster, name, published, poison
):
    commit = published(poison)
    published(b'{"number": 2}\n')
    with within(5), Reader(dict, name=name, transport=cluster.transport) as reader:
        found, error = messages(reader)
    assert [message["number"] for message in found] == [0, 1]
    assert type(error) is DecodeError
    assert (error.journal, error.offset) == (name, commit.begin)
    assert f"{name}: the message at offset {commit.begin} cannot be decoded as dict" in str(error)
    assert "mend its writer, and read with on_error='skip' or from an offset behind" in str(error)
    assert reader.offsets == {name: commit.begin}
    with Reader(dict, name=name, transport=cluster.transport, offsets={name: commit.end}) as reader:
        found, error = messages(reader)
    assert error is None
    assert [message["number"] for message in found] == [2]


def test_a_torn_record_is_reported_at_the_head_and_waited_for_by_a_reader_that_blocks(
    cluster, name, published
):
    commit = published(b'{"number": ')
    with within(5), Reader(dict, name=name, transport=cluster.transport) as reader:
        found, error = messages(reader)
    assert len(found) == 2
    assert type(error) is TornFrameError
    assert (error.journal, error.offset) == (name, commit.begin)
    with Reader(dict, name=name, transport=cluster.transport, block=True) as reader:
        envelopes = iter(reader)
        assert [next(envelopes).message["number"] for _ in range(2)] == [0, 1]
        published(b"2}\n")
        assert next(envelopes).message["number"] == 2


@pytest.mark.parametrize("content_type", ["", "text/plain"])
def test_a_journal_without_framing_is_reported_to_readers_and_publishers(
    cluster, name, content_type
):
    cluster.apply(spec(name, content_type=content_type))
    append(cluster.transport, name, b"a,b\n")
    with within(5), Reader(dict, name=name, transport=cluster.transport) as reader:
        found, error = messages(reader)
    assert found == []
    assert type(error) is FramingError
    for told in (name, "content-type label", content_type):
        assert told in str(error)
    with (
        Publisher(lambda _: name, transport=cluster.transport) as publisher,
        within(5),
        pytest.raises(FramingError, match="content-type label") as caught,
    ):
        publisher.publish({"number": 1})
    assert name in str(caught.value)


def test_a_store_read_directly_needs_its_content_type(cluster, name):
    cluster.apply(spec(name, length=1024))
    for _ in range(2):
        append(cluster.transport, name, b"{}\n" * 512)
    wait_until_stored(cluster, name)
    store = connect(f"file://{cluster.fragments}")
    with within(5), Reader(dict, name=name, transport=store) as reader:
        found, error = messages(reader)
    run(store.aclose())
    assert found == []
    assert isinstance(error, FramingError)
    assert "content-type" in str(error)


def test_bytes_which_are_no_frames_are_told(cluster, name):
    cluster.apply(spec(name, content_type=FIXED))
    append(cluster.transport, name, b"these are no frames of a fixed header and a message")
    with within(5), Reader(Gram, name=name, transport=cluster.transport) as reader:
        found, error = messages(reader)
    assert found == []
    assert isinstance(error, DesyncError | TornFrameError | DecodeError)
    assert error.journal == name
