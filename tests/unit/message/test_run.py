"""Runs, and UUIDs in bulk: as one by one."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.message.runs import (
    InvalidUuidError,
    Message,
    Run,
    ShortRun,
    Stamps,
    parse_raw_uuids,
    parse_text_uuids,
    stamps_of,
)
from gazette_sdk.message.uuid import ZERO_UUID, parse_raw_uuid, parse_uuid
from support.sequencing import run_of
from support.vectors import group

UUIDS = st.lists(st.uuids() | st.just(ZERO_UUID), min_size=1, max_size=50)
ONE = uuid.UUID("9f32c9cc-1a2b-11ef-8401-010203040506")


def matrix(rows: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)


def assert_says(stamps: Stamps | None, values: list[uuid.UUID]) -> None:
    assert stamps is not None
    producers, clocks, flags = stamps
    assert (producers.dtype, clocks.dtype, flags.dtype) == (np.uint64, np.uint64, np.uint16)
    expected = [parse_uuid(value) for value in values]
    assert producers.tolist() == [int.from_bytes(parts.producer, "big") for parts in expected]
    assert clocks.tolist() == [parts.clock for parts in expected]
    assert flags.tolist() == [parts.flags for parts in expected]


# --------------------------------------------------------------------- laws


@given(UUIDS)
def test_uuids_in_bulk_say_what_they_say_one_by_one(values):
    assert_says(parse_text_uuids(matrix([str(value).encode() for value in values])), values)
    assert_says(parse_text_uuids(matrix([str(v).upper().encode() for v in values])), values)
    assert_says(parse_raw_uuids(matrix([value.bytes for value in values])), values)


@given(UUIDS)
def test_uuids_of_messages_are_parsed_in_all_their_forms(values):
    assert_says(stamps_of([str(value) for value in values]), values)
    assert_says(stamps_of([str(value).encode() for value in values]), values)
    assert_says(stamps_of([value.bytes for value in values]), values)
    assert_says(stamps_of(values), values)
    assert_says(stamps_of([value.hex for value in values]), values)
    assert_says(stamps_of([f"urn:uuid:{value}" for value in values]), values)
    forms = [str, lambda v: v.bytes, lambda v: v.hex, lambda v: v, lambda v: f"{{{v}}}"]
    assert_says(stamps_of([forms[i % 5](value) for i, value in enumerate(values)]), values)


@given(st.lists(st.uuids(), min_size=1, max_size=9), st.data())
def test_one_wrong_character_is_found_wherever_it_stands(values, data):
    rows = [bytearray(str(value).encode()) for value in values]
    row = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.integers(0, 35))
    wrong = data.draw(st.integers(0, 255))
    is_hyphen = column in {8, 13, 18, 23}
    is_legal = wrong == ord("-") if is_hyphen else chr(wrong) in "0123456789abcdefABCDEF"
    rows[row][column] = wrong
    found = parse_text_uuids(matrix([bytes(line) for line in rows]))
    assert (found is None) == (not is_legal)
    if not is_legal:
        with pytest.raises(InvalidUuidError) as caught:
            stamps_of([bytes(line) for line in rows])
        assert caught.value.index == row


# -------------------------------------------------------------------- cases


@pytest.mark.parametrize("case", group("message", "uuid_build_and_parse"))
def test_recorded_uuids(case):
    value = uuid.UUID(case["uuid"])
    stamps = parse_raw_uuids(matrix([bytes.fromhex(case["bytes"])]))
    assert_says(stamps, [value])
    assert stamps.producers.tolist() == [int(case["producer"], 16)]
    assert stamps.clocks.tolist() == [case["clock"]]
    assert stamps.flags.tolist() == [case["flags"]]


@pytest.mark.parametrize("nothing", [None, "", b"", ZERO_UUID])
def test_nothing_is_the_zero_uuid(nothing):
    assert_says(stamps_of([nothing] * 3), [ZERO_UUID] * 3)
    assert_says(stamps_of([str(ONE), nothing]), [ONE, ZERO_UUID])


def test_bytes_of_another_length_are_cut_or_filled():
    assert_says(
        stamps_of([ONE.bytes[:3], ONE.bytes + b"more"]),
        [uuid.UUID(bytes=ONE.bytes[:3].ljust(16, b"\0")), ONE],
    )


def test_texts_of_other_lengths_do_not_pass_for_each_other():
    one = str(ONE)
    # Joined, these two are two UUIDs; each of them is none.
    with pytest.raises(InvalidUuidError, match="length") as caught:
        stamps_of([one[:-1], one[-1] + one])
    assert caught.value.index == 0


@pytest.mark.parametrize("wrong", ["x", str(ONE)[:-1] + "g", str(ONE)[:-1] + "é", "é" * 36])
def test_what_is_no_uuid_is_named_by_its_index(wrong):
    for good in (str(ONE), ONE.bytes, None):
        with pytest.raises(InvalidUuidError) as caught:
            stamps_of([good, good, wrong, good, wrong])
        assert caught.value.index == 2


def test_no_uuids_are_no_stamps():
    assert [len(part) for part in stamps_of([])] == [0, 0, 0]
    assert_says(parse_text_uuids(np.empty((0, 36), np.uint8)), [])


def test_matrices_of_another_width_are_refused():
    with pytest.raises(ValueError, match="36"):
        parse_text_uuids(np.empty((1, 35), np.uint8))
    with pytest.raises(ValueError, match="16"):
        parse_raw_uuids(np.empty((1, 15), np.uint8))


def test_a_matrix_may_be_part_of_another():
    rows = [f'{{"UUID":"{ONE}"}}'.encode()] * 4
    wide = matrix(rows)
    assert_says(parse_text_uuids(wide[::2, 9:45]), [ONE] * 2)
    raw = matrix([ONE.bytes + b"tail"] * 4)
    assert_says(parse_raw_uuids(raw[1:, :16]), [ONE] * 3)


def test_a_run_gives_its_messages():
    run = Run(
        "a/journal",
        np.array([0, 10, 25]),
        np.array([10, 20, 30]),
        *Stamps(
            np.array([1, 2, (1 << 48) - 1], np.uint64),
            np.array([1, 2, (1 << 64) - 1], np.uint64),
            np.array([0, 1, 2], np.uint16),
        ),
        items=["a", "b", "c"],
    )
    messages = run.messages()
    assert len(run) == 3
    assert messages[1] == Message("a/journal", 10, 20, 2, 2, 1, "b")
    assert messages[2].clock == (1 << 64) - 1
    assert all(type(message) is Message for message in messages)
    assert {type(value) for value in messages[2][1:6]} == {int}
    assert run.messages(1) == messages[1:]
    assert run.messages(0, 2) == messages[:2]
    assert run.messages(3) == []


@given(UUIDS)
def test_one_uuid_says_what_it_says_among_many(values):
    for value in values:
        parts = parse_uuid(value)
        expected = (int.from_bytes(parts.producer, "big"), parts.clock, parts.flags)
        for raw in (value, value.bytes, str(value), str(value).encode(), f"urn:uuid:{value}"):
            assert parse_raw_uuid(raw) == expected


@pytest.mark.parametrize("nothing", [None, "", b""])
def test_nothing_by_itself_is_the_zero_uuid(nothing):
    assert parse_raw_uuid(nothing) == (0, 0, 0)


@pytest.mark.parametrize("wrong", ["x", b"x" * 36, b"\xff" * 36, "é" * 36])
def test_what_is_no_uuid_by_itself_is_refused(wrong):
    with pytest.raises(ValueError, match=r"."):
        parse_raw_uuid(wrong)


def test_a_short_run_says_what_a_long_one_says():
    messages = [
        Message("a/journal", 10 * i, 10 * i + 7, (1 << 48) - 1 - i, (1 << 64) - 1 - i, i, f"m{i}")
        for i in range(3)
    ]
    short, long = ShortRun("a/journal", messages), run_of(messages)
    assert (len(short), short.journal, short.end) == (len(long), long.journal, long.end)
    for start, stop in ((0, None), (1, None), (0, 2), (2, 9), (3, None)):
        assert short.messages(start, stop) == long.messages(start, stop) == messages[start:stop]
    for name in ("begins", "ends", "producers", "clocks", "flags"):
        column, expected = getattr(short, name), getattr(long, name)
        assert column.dtype == expected.dtype
        assert column.tolist() == expected.tolist()
        assert getattr(short, name) is column
    assert list(short.items) == list(long.items)
    with pytest.raises(AttributeError, match="colour"):
        _ = short.colour
