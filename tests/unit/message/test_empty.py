"""Empty messages of every class that fields may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from gazette_sdk.message.kinds.base import JsonMessage, empty_instance


class Inner(msgspec.Struct):
    x: int
    y: list[int]


class InnerModel(pydantic.BaseModel):
    name: str


@dataclass
class Node(JsonMessage):
    child: Node


@dataclass(frozen=True, slots=True)
class Everything(JsonMessage):
    text: str
    number: int
    real: float
    flag: bool
    raw: bytes
    many: list[str]
    by_name: dict[str, int]
    pair: tuple[int, ...]
    maybe: int | None
    either: int | str
    word: Literal["first", "second"]
    noted: Annotated[int, "a note"]
    inner: Inner
    model: InnerModel
    anything: Any
    given: int = 7
    made: list[int] = field(default_factory=lambda: [1])

    def __post_init__(self):
        raise AssertionError("must not run")


def test_every_field_is_empty_or_its_default():
    made = empty_instance(Everything)
    assert {name: getattr(made, name) for name in Everything.__dataclass_fields__} == {
        "text": "",
        "number": 0,
        "real": 0.0,
        "flag": False,
        "raw": b"",
        "many": [],
        "by_name": {},
        "pair": (),
        "maybe": None,
        "either": 0,
        "word": "first",
        "noted": 0,
        "inner": Inner(0, []),
        "model": InnerModel(name=""),
        "anything": None,
        "given": 7,
        "made": [1],
    }


class Checked(msgspec.Struct, frozen=True):
    name: str
    given: int = 3

    def __post_init__(self):
        if not self.name:
            raise ValueError("a name is needed")


class Strict(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=1)
    tags: list[str] = pydantic.Field(default_factory=list)


@pytest.mark.parametrize("message_type", [Checked, Strict])
def test_no_check_of_the_class_runs(message_type):
    assert empty_instance(message_type).name == ""


def test_a_class_that_nests_in_itself_ends():
    depth, node = 0, empty_instance(Node)
    while node is not None:
        node, depth = node.child, depth + 1
    assert depth == 8


def test_what_is_no_record_is_none():
    assert empty_instance(object) is None
