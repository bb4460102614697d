"""What a reader raises, of which content and which arguments."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from gazette_sdk import JsonMessage, Publisher, Reader, mapping
from gazette_sdk.errors import (
    ConfigurationError,
    DecodeError,
    DesyncError,
    JournalNotFoundError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.framing import framing_for
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.uuid import ACK_TXN, Stamp
from gazette_sdk.protocol import broker_pb2 as pb
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram
from support.readers import Order, fill, line


@pytest.mark.parametrize("count", [2, 40])
def test_a_bad_message_is_named_and_what_stood_before_is_delivered(transport, count):
    journal = fill(transport, "a/journal", *range(count))
    bad_at = journal.end
    journal.content += b'{"n":\n' + line(99)
    reader = Reader(dict, name="a/journal", transport=transport)
    found = []
    with pytest.raises(DecodeError, match=f"a/journal: the message at offset {bad_at}") as caught:
        found.extend(e.message["n"] for e in _collect(reader, found))
    assert len(found) == count
    assert (caught.value.journal, caught.value.offset) == ("a/journal", bad_at)
    assert reader.offsets == {"a/journal": bad_at}
    with pytest.raises(DecodeError):
        next(iter(reader))


def _collect(reader, found):
    for envelope in reader:
        found.append(envelope.message["n"])
    return []


def test_a_typed_read_names_the_field_that_is_wrong(transport):
    journal = transport.create("a/journal")
    journal.content += b'{"customer":"ada","cents":"many"}\n'
    with pytest.raises(DecodeError, match=r"as Order: .*cents"):
        list(Reader(Order, name="a/journal", transport=transport))


def test_junk_between_fixed_frames_is_an_error_that_says_how_much(transport):
    journal = transport.create("a/journal", content_type="application/x-protobuf-fixed")
    framing = framing_for("application/x-protobuf-fixed")
    framing.encode(Gram(text="one").SerializeToString(), journal.content)
    begin = journal.end
    journal.content += b"some junk here"
    framing.encode(Gram(text="two").SerializeToString(), journal.content)
    reader = Reader(Gram, name="a/journal", transport=transport)
    iterator = iter(reader)
    assert next(iterator).message.text == "one"
    with pytest.raises(DesyncError) as caught:
        next(iterator)
    assert (caught.value.journal, caught.value.offset, caught.value.skipped) == (
        "a/journal",
        begin,
        14,
    )


def test_a_class_of_another_form_is_refused_by_the_journal(transport):
    transport.create("a/journal", content_type="application/x-protobuf-fixed")
    with pytest.raises(ValidationError, match="protobuf class") as caught:
        list(Reader(Order, name="a/journal", transport=transport))
    assert caught.value.journal == "a/journal"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"selector": "topic=none"}, r"topic=none'\)"),
        ({"selector": "none"}, "'none'; .* selected by 'topic=none'"),
        ({"name": "no/journal"}, "no/journal"),
    ],
)
def test_where_no_journal_matches_there_is_an_error(transport, arguments, text):
    with pytest.raises(JournalNotFoundError, match=text):
        list(Reader(dict, transport=transport, **arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"selector": "topic in ("}, ValidationError, "topic in"),
        ({"selector": "a", "name": "b"}, ConfigurationError, "either"),
        ({}, ConfigurationError, "either"),
        ({"name": "/bad"}, ValidationError, "journal"),
        ({"selector": "topic", "offsets": "middle"}, ConfigurationError, "'begin', 'end'"),
        ({"selector": "topic", "offsets": {"a/b": -2}}, ConfigurationError, "byte offset"),
        ({"selector": "topic", "offsets": {"a/b": "0"}}, ConfigurationError, "byte offset"),
        ({"selector": "topic", "on_error": "ignore"}, ConfigurationError, "'skip' or a function"),
        (
            {"selector": "topic", "isolation": "uncommitted", "checkpoint": Checkpoint()},
            ConfigurationError,
            "takes no checkpoint",
        ),
        (
            {"selector": "topic", "isolation": "uncommitted", "acknowledgements": True},
            ConfigurationError,
            "delivers acknowledgements anyway",
        ),
        (
            {"selector": "topic", "offsets": {"a/b": 1}, "checkpoint": Checkpoint({"a/b": 2})},
            ConfigurationError,
            "both checkpoint= and offsets=",
        ),
        ({"selector": "topic", "checkpoint": b"\xff"}, DecodeError, "heckpoint"),
        ({"selector": "topic", "checkpoint": "text"}, ConfigurationError, "to_bytes"),
        ({"selector": "topic", "offsets": 0}, ConfigurationError, "offsets=0: use 'begin'"),
        ({"selector": dict}, ConfigurationError, "give the class of messages first"),
        ({"selector": "topic", "isolation": "snapshot"}, ConfigurationError, "'uncommitted'"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once(transport, arguments, error, text):
    with pytest.raises(error, match=text):
        Reader(dict, transport=transport, **arguments)


def test_a_class_that_is_no_message_is_refused_at_once(transport):
    with pytest.raises(ValidationError, match="JsonMessage"):
        Reader(str, "topic=t", transport=transport)


@pytest.mark.parametrize("block", [False, True])
def test_an_unanswered_listing_is_waited_for_within_a_bound(monkeypatch, block):
    monkeypatch.setattr("gazette_sdk.message.fetcher.LISTING_TIMEOUT_S", 0.05)

    class Unreachable(MemoryTransport):
        async def list(self, request):
            await asyncio.Event().wait()
            yield pb.ListResponse()

    with pytest.raises(UnavailableError, match=r"within 0\.05 s.*GAZETTE_ADDRESS"):
        list(Reader(dict, "topic=t", transport=Unreachable(), block=block))


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(
    "error", [UnauthenticatedError("the token lacks LIST"), UnavailableError("refused")]
)
def test_a_refused_listing_is_an_error_at_once(block, error):
    class Refusing(MemoryTransport):
        async def list(self, request):
            raise error
            yield pb.ListResponse()

    with pytest.raises(type(error), match=str(error)):
        list(Reader(dict, "topic=t", transport=Refusing(), block=block))


def test_a_suspended_journal_has_nothing_to_read():
    class Suspended(MemoryTransport):
        async def read(self, request, target=None):
            yield pb.ReadResponse(status=pb.SUSPENDED, header=self._header())

    transport = Suspended()
    transport.create("a/journal")
    assert list(Reader(dict, name="a/journal", transport=transport)) == []


def test_acknowledgements_are_delivered_as_empty_messages(transport):
    journal = transport.create("a/journal")
    stamp = Stamp(bytes(6))
    stamp.clock, stamp.flags = 160, ACK_TXN
    journal.content += b'{"UUID":"%b"}\n' % stamp.text()
    for message_type, empty in ((dict, {}), (Order, Order("", 0))):
        reader = Reader(
            message_type, name="a/journal", transport=transport, isolation="uncommitted"
        )
        (envelope,) = reader
        assert (envelope.message, envelope.flags, envelope.clock) == (empty, ACK_TXN, 160)


def test_a_uuid_that_is_none_is_an_error_when_it_is_looked_at(transport):
    journal = transport.create("a/journal")
    journal.content += b'{"UUID":"not a uuid","n":1}\n'
    (envelope,) = Reader(dict, name="a/journal", transport=transport, isolation="uncommitted")
    assert envelope.message == {"n": 1}
    with pytest.raises(DecodeError, match="has no valid UUID") as caught:
        _ = envelope.flags
    assert (caught.value.journal, caught.value.offset) == ("a/journal", 0)


# ------------------------------------------- messages of transactions that are not committed


@dataclass
class Counted(JsonMessage):
    n: int


def transact(publisher, *values, fails=False):
    with contextlib.suppress(LookupError), publisher.transaction() as txn:
        for value in values:
            txn.publish({"n": value})
        if fails:
            raise LookupError


def counts(transport, **options):
    reader = Reader(Counted, name="a/journal", transport=transport, **options)
    return reader, [each.message.n for each in reader]


def columns(transport):
    reader = Reader(Counted, name="a/journal", transport=transport)
    return [row for batch in reader.arrow() for row in batch.column("n").to_pylist()]


@pytest.mark.parametrize("on_error", ["raise", "skip", "function"])
@pytest.mark.parametrize("values", [("text",), (1, "text", 2), (*range(50), "text", *range(50))])
def test_a_message_that_was_rolled_back_is_no_error(transport, values, on_error, caplog):
    transport.create("a/journal")
    with Publisher(mapping.direct("a/journal"), transport=transport) as publisher:
        publisher.publish({"n": 7})
        transact(publisher, *values, fails=True)
        transact(publisher, 8, 9)
        publisher.publish({"n": 10})
    errors = []
    on_error = errors.append if on_error == "function" else on_error
    assert counts(transport, on_error=on_error)[1] == columns(transport) == [7, 8, 9, 10]
    assert not errors
    assert "passed over" not in caplog.text


@pytest.mark.parametrize("on_error", ["raise", "function"])
def test_a_message_of_another_open_transaction_is_no_error_of_one_that_is_read_again(
    transport, on_error
):
    transport.create("a/journal")
    seen = []
    options = {} if on_error == "raise" else {"on_error": seen.append}
    to = mapping.direct("a/journal")
    reader = Reader(Counted, name="a/journal", transport=transport, ring_size=1, **options)

    def read():
        for envelope in reader:
            seen.append(envelope.message.n)  # noqa: PERF401 - the order is that of the errors

    with Publisher(to, transport=transport) as one, Publisher(to, transport=transport) as other:
        with other.transaction() as second:
            with one.transaction() as first:
                for txn, value in ((first, 1), (second, 5), (second, "text"), (second, 6)):
                    txn.publish({"n": value}).result(10)
                for value in (2, 3, 4):
                    first.publish({"n": value}).result(10)
            read()
            assert seen == [1, 2, 3, 4]
        if on_error == "raise":
            with pytest.raises(DecodeError, match="cannot be decoded"):
                read()
            assert seen == [1, 2, 3, 4, 5]
        else:
            read()
            error = seen.pop(5)
            assert isinstance(error, DecodeError)
            assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("values", [("text",), (1, "text", 2), (*range(50), "text", *range(50))])
def test_a_message_that_is_committed_is_an_error_once_it_is(transport, values):
    transport.create("a/journal")
    with Publisher(mapping.direct("a/journal"), transport=transport) as publisher:
        publisher.publish({"n": 7}).result(10)
        with publisher.transaction() as txn:
            for value in values:
                txn.publish({"n": value})
            publisher.publish({"n": 8}).result(10)
            reader, found = counts(transport)
            assert found == columns(transport) == [7, 8]
            checkpoint = reader.checkpoint().to_bytes()
        publisher.publish({"n": 9})
    bad = next(
        each.begin
        for each in Reader(dict, name="a/journal", transport=transport)
        if each.message == {"n": "text"}
    )
    for read in (
        lambda: list(reader),
        lambda: counts(transport),
        lambda: columns(transport),
        lambda: counts(transport, checkpoint=checkpoint),
    ):
        with pytest.raises(DecodeError, match="cannot be decoded") as caught:
            read()
        assert caught.value.offset == bad
    errors = []
    _, found = counts(transport, checkpoint=checkpoint, on_error=errors.append)
    assert found == [*[each for each in values if each != "text"], 9]
    assert [each.offset for each in errors] == [bad]
    _, found = counts(transport, on_error=errors.append, ring_size=1)
    assert [each.offset for each in errors] == [bad, bad]
    assert found == [7, 8, *[each for each in values if each != "text"], 9]
