from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import names
from support.vectors import cases, refuses


@pytest.mark.parametrize("case", cases("broker", "journal_name"))
def test_journal_names_follow_the_vectors(case):
    with refuses(case["expect"]):
        names.validate_journal(case["input"], "")


@pytest.mark.parametrize("case", cases("broker", "journal_split_meta"))
def test_metadata_begins_at_the_first_semicolon(case):
    assert names.strip_meta(case["input"]) == case["name"]
    assert case["name"] + case["meta"] == case["input"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("é", "invalid_length"),  # two bytes
        ("é" * 256, None),  # 512 bytes
        ("é" * 256 + "a", "invalid_length"),
        ("a#b/c", "invalid_token"),
        ("a b/c", "invalid_token"),
        ("a:b/c", "invalid_token"),
        ("\ud800abc", "invalid_token"),
        ("a/b/..", "not_clean"),
        ("a/../b", "not_clean"),
        ("../../a", None),
        ("/a/..", "not_clean"),
        ("part=%20/a+b_c.d-e", None),
        ("日本語/ログ", None),
        ("a\u0301bc", "invalid_token"),  # a combining mark is neither letter nor number
    ],
)
def test_journal_names_count_bytes_and_classify_code_points(name, kind):
    if kind is None:
        names.validate_journal(name)
        return
    with pytest.raises(ValidationError) as caught:
        names.validate_journal(name)
    assert caught.value.kind == kind
    assert caught.value.path == "journal"


def test_every_letter_and_number_is_a_token_character_and_nothing_else():
    import unicodedata  # noqa: PLC0415 - the oracle of this test only

    for code in range(0x110000):
        character = chr(code)
        if 0xD800 <= code < 0xE000:
            continue
        expected = unicodedata.category(character)[0] in "LN" or character in "-_+/."
        assert bool(names._TOKEN(character)) == expected, hex(code)


def test_length_is_checked_before_characters():
    with pytest.raises(ValidationError, match="invalid length") as caught:
        names.validate_token("#" * 33, "Zone", 1, 32)
    assert (caught.value.kind, caught.value.path) == ("invalid_length", "Zone")


@pytest.mark.parametrize(
    ("path", "cleaned"),
    [
        ("", "."),
        (".", "."),
        ("/", "/"),
        ("//a//b/", "/a/b"),
        ("a/./b", "a/b"),
        ("a/../b", "b"),
        ("a/..", "."),
        ("../a", "../a"),
        ("../../a", "../../a"),
        ("../a/../..", "../.."),
        ("/../a", "/a"),
    ],
)
def test_paths_are_cleaned_lexically(path, cleaned):
    assert names.clean_path(path) == cleaned


@given(st.lists(st.sampled_from(["", ".", "..", "a", "b.c", "..."])).map("/".join))
def test_the_fast_check_of_clean_paths_agrees_with_cleaning(path):
    if path == "" or (names.clean_path(path) == path and not path.startswith("/")):
        names.validate_path_component(path, "", 0, 512)
    else:
        with pytest.raises(ValidationError):
            names.validate_path_component(path, "", 0, 512)


@given(st.lists(st.sampled_from(["", ".", "..", "a", "b"])).map("/".join))
def test_cleaning_is_idempotent(path):
    assert names.clean_path(names.clean_path(path)) == names.clean_path(path)


@pytest.mark.parametrize(
    ("path", "climbs"), [("a/../b", True), ("..", True), ("a..b/c", False), ("...", False)]
)
def test_only_a_whole_component_climbs(path, climbs):
    assert names.climbs(path) == climbs


def test_tokens_are_not_sent_from_tls_to_a_network_without_it():
    assert names.may_send_token("http://a:80", "http://b:80")
    assert names.may_send_token("https://a:80", "https://b:80")
    assert names.may_send_token("https://a:80", "http://localhost:80")
    assert names.may_send_token("https://a:80", "unix://a/path")
    assert not names.may_send_token("https://a:80", "http://b:80")
