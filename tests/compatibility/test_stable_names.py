"""Names that users' programs depend on: none goes undeprecated, and new ones are listed."""

from __future__ import annotations

import re
from functools import cache

import pytest

from support.pages import ROOT
from support.stable_names import names, new_small_numbers, promised, write

LISTS = ("commands", "metrics", "json", "etcd", "stores", "protobuf")
found = cache(names)


def gone(name: str, has: set[str], listed: set[str]) -> str:
    """Return what to do about names of a list that the code does not have; empty if it has all."""
    missing = sorted(listed - has)
    if not missing:
        return ""
    return (
        f"the code does not have these names of tests/compatibility/stable/{name}.txt any more: "
        f"{'; '.join(missing)}. Users' programs depend on them (docs/compatibility.md). Keep each "
        "of them beside its replacement, with a warning where it is used and a line under "
        "Deprecated in CHANGELOG.md. Two minor versions later remove it, with its line of the "
        "list. A name that no release had may go at once."
    )


@pytest.mark.parametrize("name", LISTS)
def test_no_promised_name_is_gone(name):
    text = gone(name, found()[name], promised(name))
    assert not text, text


@pytest.mark.parametrize("name", LISTS)
def test_new_names_are_listed(name):
    added = sorted(found()[name] - promised(name))
    assert not added, f"run `python tests/support/stable_names.py`, which lists {added}"


def test_fields_of_ours_in_messages_of_gazette_have_numbers_from_100_on():
    assert set(found()) == set(LISTS)
    added = found()["protobuf"] - promised("protobuf")
    assert new_small_numbers(added, promised("protobuf")) == []


def test_a_name_that_goes_fails_with_what_to_do():
    assert not gone("metrics", {"a", "b"}, {"a"})
    text = gone("metrics", {"a", "c"}, {"a", "b"})
    assert ": b. " in text
    assert "Two minor versions later" in text


def test_a_field_of_ours_with_a_number_of_gazette_is_found():
    known = {"protocol.Route.members = 1 protocol.ProcessSpec.ID", "consumer.StateRequest.id = 1"}
    added = {
        "protocol.Route.extra = 4 string",
        "protocol.Route.more = 104 string",
        "protocol.New.extra = 1 string",
        "consumer.StateRequest.more = 2 string",
        "rpc /protocol.Journal/New(protocol.New) returns (protocol.New)",
    }
    assert new_small_numbers(added, known) == ["protocol.Route.extra = 4 string"]


def test_the_script_adds_names_and_removes_none(tmp_path, monkeypatch):
    monkeypatch.setattr("support.stable_names.STABLE", tmp_path)
    write(tmp_path, {"metrics": ["b", "a"]})
    write(tmp_path, {"metrics": ["c"]})
    assert promised("metrics") == {"a", "b", "c"}


def test_the_page_of_promises_names_the_lists():
    text = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    assert set(re.findall(r"stable/(\w+)\.txt", text)) == set(LISTS)
