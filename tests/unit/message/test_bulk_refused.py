"""Batches are published as a whole or not at all."""

from __future__ import annotations

from operator import itemgetter

import msgspec
import pytest

from gazette_sdk import Publisher
from gazette_sdk.errors import (
    FramingError,
    MappingError,
    ValidationError,
)
from support.published import TO, WAIT_S, Own, bare


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ([{"n": n} for n in range(5000)] + [{"bad": object()}], ValidationError,
         "message 5000 of the batch: dict cannot be encoded"),
        ([{"n": 1}, {"raw": msgspec.Raw(b"[\n]")}], FramingError,
         "message 1 of the batch: a JSON line cannot hold a line break"),
        ([Own(1), Own(object())], ValidationError, "message 1 of the batch"),
        ([{"n": 1}, "text"], ValidationError, "str can carry no message UUID"),
        ([{"n": 1}, None], ValidationError, "NoneType"),
        ({"n": 1}, ValidationError, "not one dict"),
        ("text", ValidationError, "not one str; publish"),
        (Own(1), ValidationError, "not one Own"),
    ],
)  # fmt: skip
def test_if_one_message_is_refused_none_is_published(transport, messages, error, text):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(error, match=text):
            publisher.publish_batch(messages)
        publisher.publish_batch([{"good": 1}]).result(WAIT_S)
    assert bare(transport, "a/journal") == [{"good": 1}]


def test_a_message_that_fails_its_validation_refuses_the_batch(transport):
    class Checked(msgspec.Struct):
        n: int

        def validate(self):
            if self.n == 2:
                raise ValueError("two is bad")

    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(ValueError, match="two is bad"):
            publisher.publish_batch([Checked(1), Checked(2)])
        publisher.publish_batch([Checked(3)])
    assert bare(transport, "a/journal") == [{"n": 3}]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"to": "a/journal"}, {"to": None}], "a journal's name"),
        ([{"to": "a/journal"}, {"to": "no/journal"}], r"'no/journal'.*does not exist"),
    ],
)
def test_a_message_that_maps_to_no_journal_refuses_the_batch(transport, messages, text):
    transport.create("a/journal")
    with Publisher(itemgetter("to"), transport=transport) as publisher:
        with pytest.raises(MappingError, match=rf"message 1 of the batch: .*{text}"):
            publisher.publish_batch(messages)
        with pytest.raises(KeyError):
            publisher.publish_batch([{}])
        with pytest.raises(MappingError, match="there is no mapping"):
            Publisher(transport=transport).publish_batch([{"n": 1}])
    assert transport.content_of("a/journal") == b""


def test_a_batch_is_refused_by_journals_without_framing(transport):
    transport.create("a/journal", content_type="text/plain")
    with (
        Publisher(TO, transport=transport) as publisher,
        pytest.raises(FramingError, match="a/journal: unrecognized"),
    ):
        publisher.publish_batch([{"n": 1}])
