"""A publisher refuses messages that their own class could not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import pydantic
import pytest

from gazette_sdk import Publisher, Reader
from gazette_sdk.errors import ValidationError
from gazette_sdk.message import CsvRecord, JsonMessage
from support.published import TO, WAIT_S, bare


@dataclass
class Reading(JsonMessage):
    name: str
    degrees: float = 0.0


class Bounded(msgspec.Struct):
    n: Annotated[int, msgspec.Meta(ge=0)]


class Renamed(pydantic.BaseModel):
    name: str = pydantic.Field(serialization_alias="Name", validation_alias="name")


class Computed(pydantic.BaseModel, extra="forbid"):
    n: int

    @pydantic.computed_field
    def twice(self) -> int:
        return 2 * self.n


class Own(pydantic.BaseModel):
    UUID: str = ""
    n: int = 0


NAN = float("nan")

UNREADABLE = [
    (Reading("a", NAN), "degrees"),
    (Reading(5), "name"),
    (Bounded(-1), ">= 0"),
    (Renamed(name="a"), "name: Field required"),
    (Computed(n=1), "twice: Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("message", "text"), UNREADABLE)
def test_the_first_message_of_a_class_must_be_readable(transport, message, text):
    transport.create("a/journal")
    name = type(message).__name__
    expected = rf"a Reader\({name}\) could not read this {name}: .*{text}"
    with Publisher(TO, transport=transport) as publisher:
        for _ in range(2):  # as it was refused, it is not known
            with pytest.raises(ValidationError, match=expected) as caught:
                publisher.publish(message)
            assert caught.value.kind == "unreadable"
            assert "\n" not in str(caught.value)
            with pytest.raises(ValidationError, match=expected):
                publisher.publish_batch([{"n": 1}, message])
            with publisher.transaction() as txn, pytest.raises(ValidationError, match=expected):
                txn.publish(message)
    assert bare(transport, "a/journal") == []


def test_later_messages_of_a_class_are_checked_on_request_alone(transport):
    transport.create("a/journal")
    good, bad = Reading("a", 1.0), Reading("b", NAN)
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish(good)
        publisher.publish(bad)
        publisher.publish_batch([bad, good])
    with Publisher(TO, transport=transport, validate=True) as publisher:
        publisher.publish(good)
        with pytest.raises(ValidationError, match="could not read this Reading"):
            publisher.publish(bad)
        with pytest.raises(ValidationError, match="could not read this Reading"):
            publisher.publish_batch([good, bad])
        publisher.publish_batch([good, good]).result(WAIT_S)
    with Publisher(TO, transport=transport, validate=False) as publisher:
        publisher.publish(bad)
        publisher.publish_batch([bad])
    degrees = [each["degrees"] for each in bare(transport, "a/journal")]
    assert degrees == [1.0, None, None, 1.0, 1.0, 1.0, 1.0, None, None]


def test_a_class_keeps_its_own_validation(transport):
    calls = []

    class Checked(msgspec.Struct):
        n: int

        def validate(self):
            calls.append(self.n)
            if self.n == 2:
                raise ValueError("two is bad")

    transport.create("a/journal")
    for validate in (None, True, False):
        calls.clear()
        with Publisher(TO, transport=transport, validate=validate) as publisher:
            publisher.publish(Checked(1))
            with pytest.raises(ValueError, match="two is bad"):
                publisher.publish(Checked(2))
            publisher.publish_batch([Checked(3), Checked(4)]).result(WAIT_S)
        assert calls == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "message",
    [{"n": NAN}, {}, Reading("a", 1.5), Bounded(0), Own(n=7), Reading("", -0.0)],
)
def test_what_is_published_is_read_by_its_class(transport, message):
    transport.create("a/journal")
    with Publisher(TO, transport=transport, validate=True) as publisher:
        publisher.publish(message).result(WAIT_S)
    with Reader(type(message), name="a/journal", transport=transport) as reader:
        found = next(iter(reader)).message
    assert type(found) is type(message)
    if not isinstance(message, dict | Own):
        assert found == message


def test_records_of_csv_need_no_check(transport):
    transport.create("a/csv", content_type="text/csv")
    with Publisher(lambda _: "a/csv", transport=transport, validate=True) as publisher:
        publisher.publish(CsvRecord(["", "1"])).result(WAIT_S)
