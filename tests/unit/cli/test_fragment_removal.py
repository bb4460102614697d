"""Removal of fragments: what is removed, shown, refused, and counted as failed."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from gazette_sdk.cli.journals.fragments import FragmentRemoval
from gazette_sdk.errors import ConfigurationError, StoreError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path


def settings(root, **given):
    values = {"yes": True, "dry_run": False, "format": "json", "file_root": str(root), **given}
    return SimpleNamespace(**values)


def fragments(root, count=2):
    """Stored fragments of 10 bytes; what stands in place of the last one cannot be removed."""
    made = [
        pb.Fragment(
            journal="a/log",
            begin=10 * number,
            end=10 * number + 10,
            compression_codec=pb.NONE,
            backing_store="file:///",
            mod_time=1,
        )
        for number in range(count)
    ]
    for fragment in made:
        path = root / content_path(fragment)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10))
    path.unlink()
    (path / "within").mkdir(parents=True)
    return made


def removed(root, found, **given):
    async def scenario():
        how = {"goes_on": given.pop("goes_on", False)}
        async with FragmentRemoval(settings(root, **given), "Log", **how) as removal:
            removal.count("a/log", found)
            return await removal.remove("a/log", found)

    return asyncio.run(scenario())


def test_a_failure_is_counted_where_the_removal_goes_on(tmp_path, capsys):
    found = fragments(tmp_path)
    pruned = removed(tmp_path, found, goes_on=True)
    assert (pruned.pruned_fragments, pruned.pruned_bytes, pruned.failed) == (1, 10, 1)
    assert not (tmp_path / content_path(found[0])).exists()
    assert json.loads(capsys.readouterr().out) == {
        "log": "a/log",
        "fragments": 2,
        "bytes": 20,
        "pruned_fragments": 1,
        "pruned_bytes": 10,
        "failed": 1,
        "dry_run": False,
    }


def test_a_failure_ends_a_removal_that_shows_what_was_done_before(tmp_path, capsys):
    with pytest.raises(StoreError):
        removed(tmp_path, fragments(tmp_path))
    assert json.loads(capsys.readouterr().out)["fragments"] == 2


def test_nothing_is_removed_without_yes(tmp_path, capsys, caplog):
    found = fragments(tmp_path)
    for dry_run in (False, True):
        removed(tmp_path, found, yes=False, dry_run=dry_run, format="table")
        assert "TO REMOVE" in capsys.readouterr().out
    assert (tmp_path / content_path(found[0])).exists()
    assert caplog.text.count("nothing was removed; add --yes") == 1  # who asks for it knows


def test_what_contradicts_itself_or_lacks_a_directory_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="give one of them"):
        FragmentRemoval(settings(tmp_path, dry_run=True), "Log")
    with pytest.raises(ConfigurationError, match="--file-root"):
        removed(tmp_path, fragments(tmp_path), file_root="")
