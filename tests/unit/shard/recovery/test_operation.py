"""Frames of recorded operations, and their checksums."""

from __future__ import annotations

from typing import Any

import pytest

from gazette_sdk.errors import DecodeError, ValidationError
from gazette_sdk.shard.recovery.log import (
    HEADER_BYTES,
    clean_path,
    crc32c,
    decode_operation,
    fence_of,
    frame_operation,
)
from support.recovery_logs import NAMES, content, operations, recording
from support.vectors import cases, group


@pytest.mark.parametrize("case", cases("message", "crc32c"))
def test_checksums_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    assert crc32c(case["data_utf8"].encode(), case.get("continue_from", 0)) == case["crc"]


@pytest.mark.parametrize("scenario", group("message", "recorded_op")["recorder_scenarios"])
def test_frames_are_those_of_the_vectors(scenario: dict[str, Any]) -> None:
    checksum = 0
    for expected in scenario["expect_ops"]:
        frame = bytes.fromhex(expected["frame_hex"])
        operation = decode_operation(frame[HEADER_BYTES:])
        assert frame_operation(operation) == frame
        assert operation.checksum == checksum == expected["checksum"]
        checksum = crc32c(frame[HEADER_BYTES:], checksum)
    assert checksum == scenario["expect_next_checksum"]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_logs_are_read_and_written_byte_for_byte(name: str) -> None:
    log = content(name)
    written = bytearray()
    checksum = 0
    found = operations(log)
    for each, expected in zip(found, recording(name)["ops"], strict=True):
        assert each.operation.checksum == checksum
        assert each.operation.seq_no == expected["seq_no"]
        written += frame_operation(each.operation) + each.payload
        checksum = crc32c(each.message, checksum)
        assert checksum == expected["next_checksum"]
    assert written == log


@pytest.mark.parametrize("case", group("message", "author_fence")["cases"])
def test_a_fence_is_the_author_in_base_32(case: dict[str, Any]) -> None:
    assert fence_of(case["author"]) == case["value"]


@pytest.mark.parametrize("author", [0, -1, 1 << 32])
def test_an_author_out_of_range_has_no_fence(author: int) -> None:
    with pytest.raises(ValidationError):
        fence_of(author)


@pytest.mark.parametrize(
    ("path", "cleaned"),
    [("/a", "/a"), ("//a//b", "/a/b"), ("/a/./b/../c", "/a/c"), ("/../../a", "/a"), ("/a/", "/a")],
)
def test_a_path_is_cleaned_and_cannot_leave_the_directory(path: str, cleaned: str) -> None:
    assert clean_path(path) == cleaned


@pytest.mark.parametrize("path", ["", "/", "a", "./a", "//", "/..", "/."])
def test_a_path_of_no_file_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        clean_path(path)


def test_a_frame_without_operation_is_refused() -> None:
    with pytest.raises(DecodeError):
        decode_operation(b"\xff\xff\xff")
