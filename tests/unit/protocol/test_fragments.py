from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import fragments
from support.vectors import cases, fragment, normal, refuses

SUM = "0102030405060708090a0b0c0d0e0f1011121314"


@pytest.mark.parametrize("case", cases("broker", "fragment_content_name"))
def test_content_names_follow_the_vectors(case):
    assert fragments.content_name(fragment(case["fragment"])) == case["expect"]


@pytest.mark.parametrize("case", cases("broker", "fragment_content_path"))
def test_content_paths_follow_the_vectors(case):
    assert fragments.content_path(fragment(case["fragment"])) == case["expect"]


@pytest.mark.parametrize("case", cases("broker", "fragment_validate"))
def test_fragments_follow_the_vectors(case):
    with refuses(case["expect"]):
        fragments.validate_fragment(fragment(case["fragment"]))


@pytest.mark.parametrize("case", cases("broker", "fragment_parse"))
def test_parsing_follows_the_vectors(case):
    with refuses(case["expect"]):
        parsed = fragments.parse_content_path(case["journal"], case["name"])
        assert normal(parsed) == normal(fragment(case["expect"]["fragment"]))


@pytest.mark.parametrize("case", cases("broker", "sha1_packing"))
def test_sums_are_packed_as_the_vectors_say(case):
    if "text" in case:
        digest = hashlib.sha1(case["text"].encode()).digest()
        assert digest.hex() == case.get("digest", digest.hex())
    else:
        digest = bytes.fromhex(case["digest"])
    packed = fragments.sum_of(digest)
    assert (packed.part1, packed.part2, packed.part3) == (
        case["part1"],
        case["part2"],
        case["part3"],
    )
    assert fragments.digest_of(packed) == digest
    if "is_zero" in case:
        assert fragments.is_zero_sum(packed) == case["is_zero"]


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        (f"0-1-{SUM[2:]}.raw", "invalid_sum_length", "Sum"),
        (f"0-1-{SUM}00.raw", "invalid_sum_length", "Sum"),
        (f"0-1-{SUM[1:]}.raw", "invalid_hex", "Sum"),
        ("0-1-.raw", "invalid_sum_length", "Sum"),
        (f"-1-{SUM}.raw", "invalid_hex", "Begin"),
        (f"0x1-2-{SUM}.raw", "invalid_hex", "Begin"),
        (f"1_0-20-{SUM}.raw", "invalid_hex", "Begin"),
        (f" 1-20-{SUM}.raw", "invalid_hex", "Begin"),
        (f"0-8000000000000000-{SUM}.raw", "invalid_hex", "End"),
        (f"0-1-{SUM}.raw.gz", "invalid_hex", "Sum"),
        (f"a//b/0-1-{SUM}.raw", "not_clean", "PathPostfix"),
        (f"a b/0-1-{SUM}.raw", "invalid_token", "PathPostfix"),
        ("", "wrong_format", ""),
        ("x/", "wrong_format", ""),
    ],
)
def test_foreign_files_are_told_apart(name, kind, path):
    with pytest.raises(ValidationError) as caught:
        fragments.parse_content_path("a/journal", name)
    assert (caught.value.kind, caught.value.path) == (kind, path)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        (f"0-1-{SUM}", pb.CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION),
        (f"0-1-{SUM.upper()}.GZ", pb.CompressionCodec.GZIP),
        (f"+0-1-{SUM}.Zstandard", pb.CompressionCodec.ZSTANDARD),
        (f"0-1-{SUM}.SNAPPY", pb.CompressionCodec.SNAPPY),
    ],
)
def test_extensions_are_accepted_in_any_case(name, codec):
    assert fragments.parse_content_path("a/journal", name).compression_codec == codec


@pytest.mark.parametrize("codec", [0, 6, -1])
def test_an_unknown_codec_has_no_extension(codec):
    with pytest.raises(ValidationError) as caught:
        fragments.codec_extension(codec)
    assert caught.value.kind == "invalid_codec"


made = st.builds(
    lambda bounds, digest, codec, postfix: pb.Fragment(
        journal="a/journal",
        begin=min(bounds),
        end=max(bounds),
        sum=fragments.sum_of(digest),
        compression_codec=codec,
        path_postfix=postfix,
    ),
    st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
    st.binary(min_size=20, max_size=20),
    st.integers(1, 5),
    st.sampled_from(["", "x", "date=2026-01-01/hour=05", "a.b/c-d", "é"]),
)


@given(made)
def test_names_survive_formatting_and_parsing(given_fragment):
    path = fragments.content_path(given_fragment)
    relative = path.removeprefix("a/journal/")
    assert normal(fragments.parse_content_path("a/journal", relative)) == normal(given_fragment)
    assert fragments.length_of(given_fragment) == given_fragment.end - given_fragment.begin


@given(st.binary(min_size=20, max_size=20))
def test_sums_survive_packing(digest):
    assert fragments.digest_of(fragments.sum_of(digest)) == digest


@given(st.text(st.sampled_from("0123456789abcdefx-./zg "), max_size=80))
def test_any_name_parses_or_is_refused(name):
    try:
        fragments.validate_fragment(fragments.parse_content_path("a/journal", name))
    except ValidationError as error:
        assert error.kind  # noqa: PT017 - both outcomes are fine
