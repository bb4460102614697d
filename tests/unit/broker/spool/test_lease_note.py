from __future__ import annotations

import pytest

from gazette_sdk.broker.spool.directory import LeaseNote, NotedLease

NOTED = NotedLease(0xC1, b"/gazette/cluster/members/a zone#broker-1", 0x7F00)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "lock").touch()
    return tmp_path


def test_a_note_is_read_by_the_next_process(root):
    assert LeaseNote(root).read() is None
    LeaseNote(root).write(NotedLease(1, b"/k", 2))
    LeaseNote(root).write(NOTED)
    assert LeaseNote(root).read() == NOTED


def test_a_copy_of_the_directory_has_no_note(root, tmp_path):
    LeaseNote(root).write(NOTED)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "lock").touch()
    (copy / "lease").write_bytes((root / "lease").read_bytes())
    assert LeaseNote(copy).read() is None


@pytest.mark.parametrize("content", [b"", b"c1 7f00", b"x y z k\n", b"\xff \xff 1 k\n"])
def test_a_damaged_note_is_none(root, content, caplog):
    (root / "lease").write_bytes(content)
    assert LeaseNote(root).read() is None
    assert "cannot be used, and is written anew" in caplog.text


def test_a_note_that_cannot_be_written_is_warned_of(root, caplog):
    (root / "lease.new").mkdir()
    LeaseNote(root).write(NOTED)
    assert "the lease cannot be noted in" in caplog.text
