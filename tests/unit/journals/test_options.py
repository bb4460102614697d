"""Values of journals, given and compared."""

from __future__ import annotations

import pytest

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.journals.journal import (
    CODEC_NAMES,
    apply_options,
    check_options,
    default_spec,
    differences,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import validate_journal_spec
from gazette_sdk.protocol.labels import label_set, pairs_of


def spec(**labels):
    made = default_spec(["file:///"], 3)
    made.name = "rides/part-000"
    made.labels.CopyFrom(label_set(**labels))
    return made


def test_the_default_spec_is_valid():
    validate_journal_spec(spec())


def test_values_that_are_not_given_stay():
    changed, before = spec(region="eu"), spec(region="eu")
    apply_options(changed, {"replication": None, "labels": {}, "stores": None})
    assert changed == before
    apply_options(changed, {})
    assert changed == before


@pytest.mark.parametrize("name", [*CODEC_NAMES, "GZIP", "zstd", "gzip-offload-decompression"])
def test_codecs_are_named_as_people_write_them(name):
    changed = spec()
    apply_options(changed, {"codec": name})
    assert pb.CompressionCodec.Name(changed.fragment.compression_codec).lower() in CODEC_NAMES


def test_labels_replace_the_values_of_their_name_in_order():
    changed = spec(region="eu", tier="hot", topic="rides")
    apply_options(changed, {"labels": {"region": ["us", "ap"], "tier": []}, "content_type": "a/b"})
    assert list(pairs_of(changed.labels)) == [
        ("content-type", "a/b"),
        ("region", "ap"),
        ("region", "us"),
        ("topic", "rides"),
    ]
    apply_options(changed, {"content_type": ""})
    assert "content-type" not in dict(pairs_of(changed.labels))


@pytest.mark.parametrize(
    "options", [{"length": "1"}, {"replication": 1.5}, {"stores": [1]}, {"retention_s": "1h"}]
)
def test_values_of_a_wrong_type_are_named(options):
    with pytest.raises(ValidationError, match=f"{next(iter(options))}=.* cannot be used"):
        apply_options(spec(), options)


def test_a_content_type_is_given_once():
    with pytest.raises(ConfigurationError, match="leave one out"):
        check_options({"content_type": "a/b", "labels": {"content-type": "a/b"}})


def test_differences_name_each_value_with_both_sides():
    wanted, found = spec(topic="rides"), spec(region="eu")
    apply_options(wanted, {"stores": ["s3://a/", "s3://b/"], "retention_s": 60})
    assert differences(wanted, found) == [
        "label region is eu, not missing",
        "label topic is missing, not rides",
        "stores is file:///, not s3://a/, s3://b/",
        "retention_s is 0, not 60",
    ]
    assert differences(found, found) == []
