"""``gazctl attach-uuids``."""

from __future__ import annotations

import os

import pytest

from gazette_sdk.cli.journals.append import INPUT_BLOCK_BYTES, Template
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.uuid import parse_uuid, uuid_of_text


def test_uuids_ascend_and_have_one_producer_across_files(gazctl):
    (gazctl.directory / "a").write_bytes(b"header\none\r\ntwo\n")
    (gazctl.directory / "b").write_bytes(b"header\nthree")
    text = gazctl.ok("attach-uuids", "--skip-header", "a", "b").text
    rows = [line.split(",") for line in text.splitlines()]
    assert [line for _, line in rows] == ["one", "two", "three"]
    parts = [parse_uuid(uuid_of_text(uuid)) for uuid, _ in rows]
    assert len({part.producer for part in parts}) == 1
    assert {part.flags for part in parts} == {0}
    clocks = [part.clock for part in parts]
    assert clocks == sorted(set(clocks))


def test_standard_input_is_read_without_files(gazctl):
    text = gazctl.ok("attach-uuids", "--template=[{{ .Line }}]\n", stdin=b"one\n\ntwo").text
    assert text == "[one]\n[]\n[two]\n"


def test_lines_longer_than_a_block_are_whole(gazctl):
    line = b"x" * (INPUT_BLOCK_BYTES + 10)
    assert gazctl.ok("attach-uuids", "--template={{.Line}}\n", stdin=line + b"\nend\n").stdout == (
        line + b"\nend\n"
    )


def test_a_line_of_exactly_the_greatest_length_is_fine(gazctl):
    gazctl.ok("attach-uuids", "--max-length=3", stdin=b"abc\r\nabc")
    outcome = gazctl("attach-uuids", "--max-length=3", stdin=b"abc\nabcd\n")
    assert outcome.status == 1
    assert "line 2 is longer than 3 bytes" in outcome.stderr


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\nmore\n"])
def test_lines_before_one_that_is_too_long_are_written(gazctl, end):
    count = INPUT_BLOCK_BYTES // 8  # more than a block
    lines = b"xxxxxxxx\n" * count + b"y\n" + b"z" * 9
    arguments = ["attach-uuids", "--max-length=8", "--template={{.Line}}\n"]
    outcome = gazctl(*arguments, stdin=lines + end)
    assert outcome.status == 1
    assert outcome.stdout == b"xxxxxxxx\n" * count + b"y\n"
    assert f"standard input: line {count + 2} is longer than 8 bytes" in outcome.stderr


def test_a_line_without_end_is_not_collected_for_ever(gazctl):
    outcome = gazctl("attach-uuids", "--max-length=10", stdin=b"x" * (3 * INPUT_BLOCK_BYTES))
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert "line 1 is longer than 10 bytes" in outcome.stderr


def test_headers_are_dropped_of_files_of_any_kind(gazctl):
    for name, content in {"empty": b"", "only": b"header", "two": b"header\nrow\n"}.items():
        (gazctl.directory / name).write_bytes(content)
    arguments = ["attach-uuids", "--skip-header", "--template={{.Line}}\n"]
    assert gazctl.ok(*arguments, "empty", "only", "two", "empty").text == "row\n"


def test_bytes_which_are_no_utf_8_pass_unchanged(gazctl):
    template = os.fsdecode(b"\xff{{.Line}}\n")
    outcome = gazctl.ok("attach-uuids", f"--template={template}", stdin=b"\x80\xfe\n")
    assert outcome.stdout == b"\xff\x80\xfe\n"


def test_every_uuid_of_a_line_is_the_same(gazctl):
    text = gazctl.ok("attach-uuids", "--template={{.UUID}} {{ .UUID }}\n", stdin=b"a\nb\n").text
    pairs = [line.split() for line in text.splitlines()]
    assert all(one == other for one, other in pairs)
    assert pairs[0] != pairs[1]


def test_all_files_are_opened_before_any_output(gazctl):
    (gazctl.directory / "a").write_bytes(b"one\n")
    outcome = gazctl("attach-uuids", "a", "absent")
    assert (outcome.status, outcome.stdout) == (1, b"")


@pytest.mark.parametrize("text", ["{{.Foo}}", "{{.UUID", "{{}}", "a{{ .Line | upper }}b"])
def test_a_template_holds_nothing_else(text):
    with pytest.raises(ConfigurationError, match="neither"):
        Template(text)


def test_a_template_is_used_as_it_is():
    assert Template("{a}{{.UUID}}{{ .Line}}é").render(b"U", b"L") == "{a}ULé".encode()
