"""Hints: their encodings, and their slots."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.hints import choose, from_bytes, rotate, to_json, validate
from support.recovery_logs import NAMES, hints, recording
from support.vectors import group

LOG = "a/log"


def hints_of(number: int) -> pb.FSMHints:
    """Hints of one file, as the vectors number them."""
    node = pb.FnodeSegments(
        fnode=number,
        segments=[pb.Segment(author=1, first_seq_no=number, last_seq_no=number)],
    )
    return pb.FSMHints(log=LOG, live_nodes=[node])


def test_json_is_that_of_the_vector() -> None:
    text = group("message", "hints_json")["text"].encode()
    assert to_json(from_bytes(text)) == text
    assert MessageToDict(from_bytes(text))["liveNodes"][0]["fnode"] == "1018"


@pytest.mark.parametrize("name", NAMES)
def test_recorded_hints_are_read_and_written_byte_for_byte(name: str) -> None:
    found = 0
    for mark in recording(name)["marks"]:
        for value in mark["hints"].values():
            text = value["value"].encode()
            assert to_json(from_bytes(text)) == text
            validate(from_bytes(text), recording(name)["log"])
            found += 1
    assert found


def test_protobuf_is_read_too() -> None:
    assert from_bytes(hints_of(5).SerializeToString()) == hints_of(5)


@pytest.mark.parametrize(
    "value",
    [b"invalid hints", b"{", b"{]", b'{"live_nodes":7}', b'{"log":7}', b'{"live_nodes":[7]}'],
)
def test_malformed_hints_are_refused(value: bytes) -> None:
    with pytest.raises(ValidationError, match="cannot be decoded"):
        from_bytes(value)


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_property_survives_json(path: str, content: str) -> None:
    given_hints = pb.FSMHints(log=LOG, properties=[pb.Property(path=path, content=content)])
    text = to_json(given_hints)
    assert from_bytes(text) == given_hints
    assert not set(text) & set(b"<>&")


def test_hints_of_another_log_are_refused() -> None:
    validate(hints_of(5), LOG)
    with pytest.raises(ValidationError, match="other/log"):
        validate(hints_of(5), "other/log")


def test_hints_that_repeat_their_log_are_refused() -> None:
    repeated = hints_of(5)
    repeated.live_nodes[0].segments[0].log = LOG
    with pytest.raises(ValidationError, match="repeats"):
        validate(repeated)


def test_hints_rotate_as_the_vector_says() -> None:
    case = group("message", "hints_rotation")
    primary: bytes | None = None
    backups: list[bytes | None] = [None] * case["hint_backups"]

    def number(value: bytes | None) -> int:
        return 0 if value is None else from_bytes(value).live_nodes[0].fnode

    def decoded(value: bytes | None) -> pb.FSMHints | None:
        return None if value is None else from_bytes(value)

    for step in case["steps"]:
        if step.get("store") == "recorded":
            primary = to_json(hints_of(step["id"]))
        elif step.get("store") == "recovered":
            values: list[bytes | None] = list(rotate(to_json(hints_of(step["id"])), backups))
            backups[: len(values)] = values
        elif step["delete"] == "primary":
            primary = None
        else:
            backups[int(step["delete"].removeprefix("backup."))] = None
        assert [number(primary), *map(number, backups)] == step["expect"]
        if "pick" in step:
            picked = choose(decoded(primary), [decoded(each) for each in backups], LOG)
            expected: Any = step["pick"]
            wanted = hints_of(expected) if isinstance(expected, int) else pb.FSMHints(log=LOG)
            assert picked == wanted


def test_hints_move_only_up_to_an_empty_slot() -> None:
    assert rotate(b"new", [b"a", None, b"c"]) == [b"new", b"a"]
    assert rotate(b"new", [b"a", b"b", b"c"]) == [b"new", b"a", b"b"]
    assert rotate(b"new", [None, b"b"]) == [b"new"]
    assert rotate(b"new", []) == []


def test_hints_of_recordings_are_equal_as_json_and_protobuf() -> None:
    for name in NAMES:
        for played in recording(name)["played"].values():
            found = hints(played["hints"])
            assert from_bytes(to_json(found)) == from_bytes(found.SerializeToString()) == found
