"""Staged files, and how they get their paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from gazette_sdk.errors import RecoveryError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.fsm import FSM, LiveNode
from gazette_sdk.shard.recovery.player import (
    OPEN_FILES_MAX,
    CreateNode,
    RemoveNode,
    StagedFiles,
    WriteNode,
)
from support.recovery_logs import files_of
from support.vectors import group


def staged(directory: Path) -> StagedFiles:
    files = StagedFiles(directory)
    files.begin()
    return files


def history(properties: dict[str, str] | None = None, **links: str) -> FSM:
    """A history of live files, such as ``f1="/a /b"``."""
    fsm = FSM(pb.FSMHints(log="a/log"))
    for name, paths in links.items():
        fsm.live_nodes[int(name[1:])] = LiveNode(set(paths.split()))
    fsm.properties = properties or {}
    return fsm


def test_staging_paths_are_those_of_the_vector() -> None:
    case = group("message", "playback")[0]
    path = StagedFiles(Path(case["dir"])).path(case["fnode"])
    assert str(path) == case["expect_path"]


def test_writes_overlap_and_leave_holes(tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    files.apply([CreateNode(42), WriteNode(42, 5, b"over-write")])
    assert files.path(42).read_bytes() == b"\0" * 5 + b"over-write"
    files.apply([WriteNode(42, 0, b"abcde")])
    assert files.path(42).read_bytes() == b"abcdeover-write"
    files.apply([WriteNode(42, 5, b"0123456789"), WriteNode(42, 15, b"short")])
    assert files.path(42).read_bytes() == b"abcde0123456789short"
    files.close()


def test_a_file_that_is_there_already_is_an_error(tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    files.path(7).write_bytes(b"")
    with pytest.raises(FileExistsError):
        files.apply([CreateNode(7)])


def test_more_files_than_are_kept_open_are_written(tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    count = OPEN_FILES_MAX * 3
    files.apply([CreateNode(fnode) for fnode in range(1, count)])
    for offset in range(2):
        files.apply([WriteNode(fnode, offset, b"%d" % (fnode % 10)) for fnode in range(1, count)])
    files.apply([RemoveNode(1), RemoveNode(count - 1)])
    files.make_live(history(**{f"f{n}": f"/{n}" for n in range(2, count - 1)}))
    assert files_of(tmp_path / "store") == {
        f"/{n}": b"%d" % (n % 10) * 2 for n in range(2, count - 1)
    }


def test_files_get_all_their_paths_and_properties_are_written(tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    files.apply([CreateNode(1), WriteNode(1, 0, b"one"), CreateNode(2)])
    files.make_live(history({"/dir/P": "property"}, f1="/a /dir/b", f2="/dir/deep/c"))
    assert files_of(tmp_path / "store") == {
        "/a": b"one",
        "/dir/b": b"one",
        "/dir/deep/c": b"",
        "/dir/P": b"property",
    }
    assert sorted(entry.name for entry in (tmp_path / "store").iterdir()) == ["a", "dir"]


def test_no_path_leads_out_of_the_directory(tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    files.apply([CreateNode(1)])
    files.make_live(history(f1="/../../out"))
    assert files_of(tmp_path) == {"/store/out": b""}


@pytest.mark.parametrize("links", ["/.fnodes/2", "/.fnodes"])
def test_the_staging_directory_is_reserved(links: str, tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    files.apply([CreateNode(1)])
    with pytest.raises(RecoveryError, match="reserved"):
        files.make_live(history(f1=links))


def test_staged_files_must_be_the_live_ones(tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    files.apply([CreateNode(1)])
    with pytest.raises(RecoveryError, match=r"\[1\] are not the live ones \[2\]"):
        files.make_live(history(f2="/a"))


def test_a_property_does_not_replace_a_file(tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    files.apply([CreateNode(1)])
    with pytest.raises(FileExistsError):
        files.make_live(history({"/a": "x"}, f1="/a"))


def test_what_was_there_is_deleted(tmp_path: Path) -> None:
    files = staged(tmp_path / "store")
    files.apply([CreateNode(1)])
    files.close()
    again = staged(tmp_path / "store")
    again.make_live(history())
    assert files_of(tmp_path) == {}
    again.destroy()
    assert not (tmp_path / "store").exists()
