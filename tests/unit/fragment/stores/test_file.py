from __future__ import annotations

import io
import os
import stat
import threading
from pathlib import Path

import pytest

from gazette_sdk.errors import (
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
    ValidationError,
)
from gazette_sdk.fragment import open_store
from support.stores import put_bytes
from support.vectors import cases


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    (path / "sub").mkdir(parents=True)
    (path / "file.txt").write_text("content")
    (path / "sub" / "nested.txt").write_text("nested")
    return path


@pytest.fixture
def store(root):
    return open_store("file:///", file_root=root)


def read(store, path):
    with store.open(path).raw as raw:
        return raw.read()


@pytest.mark.parametrize("case", cases("broker", "file_store"))
def test_file_stores_follow_the_vectors(case, root):
    expect = case.get("expect")
    if case["op"] == "construct":
        with pytest.raises(StoreError, match="invalid"):
            open_store(case["url"], file_root=root)
        return
    store = open_store(case["url"], file_root=root)
    match case["op"]:
        case "sign_get":
            assert store.sign_get(case["path"], 60) == expect
        case "exists":
            assert store.exists(case["path"]) == expect
        case "get":
            assert read(store, case["path"]) == expect.encode()
        case "list":
            found = [each.path for each in store.list(case["prefix"])]
            assert sorted(found) == sorted(case["expect_any_order"])
        case "remove":
            with pytest.raises(FragmentNotFoundError):
                store.remove(case["path"])
        case "put":
            with pytest.raises(StoreAuthorizationError, match="does not exist; create it"):
                put_bytes(store, case["path"], b"x")
            assert not (root / "nonexistent").exists()
        case "put-over-open-reader":
            put_bytes(store, case["path"], case["first"].encode())
            with store.open(case["path"]).raw as raw:
                put_bytes(store, case["path"], case["second"].encode(), overwrite=True)
                assert raw.read() == case["first"].encode()
            assert read(store, case["path"]) == case["second"].encode()
        case other:
            pytest.fail(f"no test of {other}")


@pytest.mark.parametrize("case", cases("broker", "path_rewrite"))
def test_object_paths_follow_the_vectors(case, tmp_path):
    prefix = case["prefix"] if case["prefix"].startswith("/") else "/" + case["prefix"]
    (tmp_path / prefix.lstrip("/")).mkdir(parents=True, exist_ok=True)
    store = open_store(f"file://{prefix}{case['query']}", file_root=tmp_path)
    put_bytes(store, case["path"], b"here")
    assert (tmp_path / case["expect"].lstrip("/")).read_bytes() == b"here"
    assert store.sign_get(case["path"], 60) == "file:///" + case["expect"].lstrip("/")


def test_files_and_directories_are_private(store, root):
    put_bytes(store, "new/deep/x", b"x")
    assert stat.S_IMODE((root / "new" / "deep" / "x").stat().st_mode) == 0o600
    for directory in (root / "new", root / "new" / "deep"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o750


def test_bytes_then_names_reach_the_disk_before_a_put_ends(store, root, monkeypatch):
    seen = []
    fsync = os.fsync

    def watched(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        seen.append((path, (root / "a" / "b" / "x").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    put_bytes(store, "a/b/x", b"x")
    names = [(path.relative_to(root).as_posix(), there) for path, there in seen]
    assert names[0] == (".", False)  # that there is "a"
    assert names[1] == ("a", False)  # that there is "a/b"
    assert names[2][0].startswith("a/b/.partial-x-")
    assert not names[2][1]
    assert names[3:] == [("a/b", True)]


def test_a_put_that_fails_leaves_nothing_behind(store, root):
    class Broken(io.BytesIO):
        def read(self, size=-1):
            data = super().read(size)
            if not data:
                raise OSError("the source broke")
            return data

    with pytest.raises(StoreError, match="the source broke"):
        store.put("j/x", Broken(b"some bytes"), 100)
    with pytest.raises(StoreError, match="90 bytes too early"):
        store.put("j/x", io.BytesIO(b"some bytes"), 100)
    assert list((root / "j").iterdir()) == []


def test_partial_files_are_not_listed(store, root):
    (root / ".partial-x-123").write_text("half")
    (root / "sub" / ".partial-y").write_text("half")
    assert sorted(found.path for found in store.list("")) == ["file.txt", "sub/nested.txt"]


def test_a_listing_bears_what_is_removed_meanwhile(store, root):
    (root / "dangling").symlink_to(root / "nowhere")
    assert sorted(found.path for found in store.list("")) == ["file.txt", "sub/nested.txt"]
    assert list(store.list("file.txt")) == []


def test_links_without_an_end_pipes_and_links_to_directories_are_not_listed(store, root):
    (root / "loop").symlink_to("loop")
    (root / "directory").symlink_to(root / "sub")
    os.mkfifo(root / "pipe")
    assert sorted(found.path for found in store.list("")) == ["file.txt", "sub/nested.txt"]


def test_an_object_that_is_there_is_kept_where_links_are_not_known(store, root, monkeypatch):
    def no_links(*_args, **_kwargs):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    put_bytes(store, "x", b"first")
    put_bytes(store, "x", b"other")
    assert (root / "x").read_bytes() == b"first"
    assert sorted(path.name for path in root.iterdir()) == ["file.txt", "sub", "x"]


def test_readers_see_all_of_an_object_or_none(store):
    content = os.urandom(1 << 20)
    done = threading.Event()
    seen = []

    def watch():
        while not done.is_set():
            if store.exists("busy"):
                seen.append(read(store, "busy"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(20):
        put_bytes(store, "busy", content, overwrite=True)
    done.set()
    watcher.join()
    assert all(data == content for data in seen)


@pytest.mark.parametrize("path", ["link/x", "sub/../../x", "../x", "link/deep/x"])
def test_no_operation_leads_out_of_the_root(store, root, tmp_path, path):
    (root / "link").symlink_to(tmp_path)
    (tmp_path / "x").write_text("outside")
    for operate in (
        lambda: put_bytes(store, path, b"x"),
        lambda: store.open(path),
        lambda: store.exists(path),
        lambda: store.remove(path),
        lambda: list(store.list(path)),
        lambda: store.sign_get(path, 60),
    ):
        with pytest.raises(StoreError, match="leads out of the directory"):
            operate()
    assert (tmp_path / "x").read_text() == "outside"
    assert not (tmp_path / "deep").exists()


def test_a_link_that_stays_within_the_store_is_followed(store, root):
    (root / "link").symlink_to(root / "sub")
    assert read(store, "link/nested.txt") == b"nested"


def test_a_store_does_not_lead_out_of_its_own_prefix(root):
    store = open_store("file:///sub/", file_root=root)
    with pytest.raises(StoreError, match="leads out"):
        store.open("../file.txt")
    rewriting = open_store("file:///sub/?find=a&replace=../a", file_root=root)
    with pytest.raises(StoreError, match=r"`\.\.` component"):
        rewriting.open("a")
    (root / "out").symlink_to(root.parent)
    with pytest.raises(StoreError, match="leads out"):
        open_store("file:///out/", file_root=root).open("x")


def test_signed_urls_escape_what_a_url_must(root):
    store = open_store("file:///sub/", file_root=root)
    assert store.sign_get("day=1/a+b%20c/ü", 60) == "file:///sub/day=1/a+b%2520c/%C3%BC"


def test_a_store_needs_a_root_that_is_a_directory(root):
    with pytest.raises(StoreError, match=r"--broker\.file-root"):
        open_store("file:///")
    with pytest.raises(StoreError, match="is not a directory"):
        open_store("file:///", file_root=root / "file.txt")


def test_bad_urls_are_validation_errors():
    with pytest.raises(ValidationError):
        open_store("file://host/")
