"""UUIDs of messages, by the conformance vectors, golden values and laws."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.message.uuid import (
    ZERO_UUID,
    Stamp,
    build_uuid,
    flags_text,
    new_producer_id,
    parse_uuid,
    unix_100ns_of_clock,
    uuid_of_bytes,
    uuid_of_text,
)
from support.vectors import golden, group

PRODUCERS = st.binary(min_size=6, max_size=6)
CLOCKS = st.integers(min_value=0, max_value=(1 << 64) - 1)
FLAGS = st.integers(min_value=0, max_value=0x3FF)


@pytest.mark.parametrize("case", group("message", "uuid_build_and_parse"))
def test_uuids_are_built_and_parsed_as_recorded(case):
    producer = bytes.fromhex(case["producer"])
    built = build_uuid(producer, case["clock"], case["flags"])
    assert str(built) == case["uuid"]
    assert built.bytes == bytes.fromhex(case["bytes"])
    assert parse_uuid(built) == (producer, case["clock"], case["flags"])
    if "expect_version" in case:
        assert built.version == case["expect_version"]
        assert built.variant == uuid.RFC_4122
        seconds, nanoseconds = case["expect_uuid_time_unix"]
        expected = seconds * 10**7 + nanoseconds // 100
        assert built.time - 122192928000000000 == expected


@pytest.mark.parametrize("case", group("message", "uuid_parse"))
def test_uuids_of_earlier_releases_are_parsed(case):
    parts = parse_uuid(uuid_of_text(case["uuid"]))
    assert parts.producer.hex() == case["expect_producer"]
    assert parts.clock == case["expect_clock"]
    assert parts.clock & 0xF == case["expect_clock_sequence_bits"]
    assert parts.flags == case["expect_flags"]
    assert unix_100ns_of_clock(parts.clock) == case["expect_unix_100ns"]


@pytest.mark.parametrize(
    "case", golden("consumer/messages/uuids.json")["uuids"], ids=lambda c: c["uuid"]
)
def test_golden_uuids_are_built_and_parsed(case):
    parts = parse_uuid(uuid_of_text(case["uuid"]))
    assert parts == (bytes.fromhex(case["producer"]), int(case["clock"]), case["flags"])
    assert str(build_uuid(*parts)) == case["uuid"]
    assert flags_text(parts.flags) == case["flags_text"]
    assert str(unix_100ns_of_clock(parts.clock)) == case["time_unix_100ns"]


@pytest.mark.parametrize(
    ("producer", "clock", "flags"),
    [(bytes(6), 0, 0x400), (bytes(6), 0, -1), (bytes(5), 0, 0), (bytes(6), 1 << 64, 0)],
)
def test_what_does_not_fit_is_refused(producer, clock, flags):
    with pytest.raises(ValueError, match=r"bits|bytes"):
        build_uuid(producer, clock, flags)


@given(PRODUCERS, CLOCKS, FLAGS)
def test_parsing_undoes_building(producer, clock, flags):
    built = build_uuid(producer, clock, flags)
    assert parse_uuid(built) == (producer, clock, flags)
    assert built.version == 1
    assert built.variant == uuid.RFC_4122


@given(st.uuids())
def test_parsing_takes_any_uuid(value):
    parts = parse_uuid(value)
    assert parse_uuid(build_uuid(*parts)) == parts


@given(PRODUCERS, st.lists(st.tuples(CLOCKS, FLAGS), max_size=20))
def test_a_stamp_writes_the_uuids_that_are_built(producer, values):
    stamp = Stamp(producer)
    for clock, flags in values:
        stamp.clock, stamp.flags = clock, flags
        built = build_uuid(producer, clock, flags)
        assert stamp.text() == str(built).encode()
        assert stamp.raw() == built.bytes


def test_the_zero_uuid_says_nothing():
    assert parse_uuid(ZERO_UUID) == (bytes(6), 0, 0)
    assert build_uuid(bytes(6), 0, 0) != ZERO_UUID


@pytest.mark.parametrize("form", ["{}", "urn:uuid:{}", "URN:UUID:{}", "{{{}}}"])
@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_texts_of_any_form_are_read(form, case):
    text = "83fc2f95-cc5f-11e9-82aa-010203040506"
    assert str(uuid_of_text(form.format(case(text)))) == text
    assert str(uuid_of_text(case(text.replace("-", "")))) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "83fc2f95",
        "83fc2f95-cc5f-11e9-82aa-01020304050",
        "83fc2f95-cc5f-11e9-82aa-0102030405067",
        "83fc2f95xcc5f-11e9-82aa-010203040506",
        "83fc2f9-5cc5f-11e9-82aa-010203040506",
        "g3fc2f95-cc5f-11e9-82aa-010203040506",
        "83fc2f95-cc5f-11e9-82aa-0102 0304 06",
        "{83fc2f95cc5f11e982aa010203040506}",
        "é3fc2f95-cc5f-11e9-82aa-010203040506",
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="invalid UUID"):
        uuid_of_text(text)


def test_binary_uuids_of_other_lengths_are_cut_and_filled():
    assert uuid_of_bytes(b"") == ZERO_UUID
    assert uuid_of_bytes(b"\x01") == uuid.UUID(int=1 << 120)
    assert uuid_of_bytes(bytes(range(20))) == uuid.UUID(bytes=bytes(range(16)))


def test_producer_ids_are_distinct_and_multicast():
    ids = {new_producer_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(each) == 6 and each[0] & 0x01 for each in ids)
