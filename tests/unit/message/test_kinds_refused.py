"""Bad messages, and classes that cannot be messages, are refused in one line that says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pydantic
import pytest

from gazette_sdk.errors import DecodeError, ValidationError
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import JsonMessage
from support.message_shapes import (
    FRAMINGS,
    Box,
    Model,
    Plain,
    Rich,
    StrictModel,
    StrictStruct,
    _has_form,
    read,
    stamp,
)
from support.protobuf_messages import Gram


class RefusalError(Exception):
    """An application's own error."""


@dataclass
class Refusing(JsonMessage):
    name: str

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise RefusalError("no name of ours")
        assert self.name != "worse"
        if self.name == "worst":
            raise KeyError("one line\n and another")


class RefusingModel(pydantic.BaseModel):
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def check(cls, name: str) -> str:
        if name == "bad":
            raise RefusalError("no name of ours")
        return name


@pytest.mark.parametrize(
    ("message_type", "good", "bad", "text"),
    [
        (Plain, b'{"name":"a","count":1}', b'{"name":"a"}', "missing required field `count`"),
        (Plain, b'{"name":"a","count":1}', b'{"name":"a","count":"1"}', "$.count"),
        (StrictStruct, b'{"name":"a","count":1}', b'{"name":"a","count":1,"x":1}', "field `x`"),
        (Model, b'{"name":"a"}', b'{"count":[]}', "name: Field required; count: Input should be"),
        (StrictModel, b'{"name":"a","count":1}', b'{"name":"a","count":1,"x":1}', "x: Extra"),
        (Refusing, b'{"name":"a"}', b'{"name":"bad"}', "no name of ours"),
        (Refusing, b'{"name":"a"}', b'{"name":"worse"}', "cannot be decoded as Refusing: "),
        (Refusing, b'{"name":"a"}', b'{"name":"worst"}', "one line"),
        (RefusingModel, b'{"name":"a"}', b'{"name":"bad"}', "no name of ours"),
        (Rich, None, b'{"when":"yesterday"}', "RFC3339"),
        (list, None, b"no-uuid,b", "no valid UUID: invalid UUID length: 7"),
        (Gram, None, b"\x0a\x99", "Gram"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("before", [0, 5])
def test_a_bad_message_is_one_error_in_one_line_that_names_its_class(
    message_type, good, bad, text, before
):
    form = next(form for form in FRAMINGS if _has_form(message_type, form))
    payloads = [*([good] * before if good else []), bad, *([good] if good else [])]
    envelopes, error = read(message_type, form, payloads)
    assert len(envelopes) == len(payloads) - (2 if good else 1)
    assert type(error) is DecodeError
    assert error.journal == "a/journal"
    assert error.offset == 1000 + (before * (len(good) + 1) if good else 0)
    assert text in str(error)
    assert form == "csv" or message_type.__qualname__ in str(error)
    assert "\n" not in str(error)


def test_what_a_class_raises_when_memory_is_short_is_no_bad_message():
    @dataclass
    class Huge(JsonMessage):
        name: str

        def __post_init__(self) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        read(Huge, "json", [b'{"name":"a"}'])


class Rooted(pydantic.RootModel[dict[str, int]]):
    pass


class Pair(NamedTuple):
    name: str


class ArrayLike(msgspec.Struct, array_like=True):
    name: str


@dataclass
class NoBase:
    name: str


@dataclass
class NumberOwn(JsonMessage):
    UUID: int


class Rewritten(pydantic.BaseModel):
    name: str

    @pydantic.model_serializer
    def serialize(self) -> list[str]:
        return [self.name]


@pytest.mark.parametrize(
    ("message_type", "remedy"),
    [
        (Rooted, "use a model with fields"),
        (Pair, "use a dataclass on JsonMessage"),
        (ArrayLike, "leave array_like off"),
        (NoBase, "derive the dataclass from JsonMessage"),
        (NumberOwn, "declare it as str"),
        (int, "use a dataclass on JsonMessage"),
        (Box[int], "derive a class from it, or use Box"),
        (dict[str, int], "or use dict"),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FRAMINGS)
def test_a_class_that_can_carry_no_uuid_is_refused_with_the_remedy(message_type, form, remedy):
    with pytest.raises(ValidationError, match=remedy) as caught:
        kind_of(message_type, form)
    assert "\n" not in str(caught.value)


def test_a_model_whose_serializer_makes_no_object_is_refused():
    with pytest.raises(ValidationError, match=r"Rewritten cannot be encoded .* no object"):
        kind_of(Rewritten, "json").encode(Rewritten(name="a"), stamp())
