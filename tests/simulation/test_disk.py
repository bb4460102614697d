"""Disks: a power failure may lose all that was not forced to disk, and nothing that was."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from simulation.disk import Disks


def force(disks: Disks, path: Path) -> None:
    """Force a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    disks.synced(fd)
    os.close(fd)


@pytest.mark.parametrize("seed", range(20))
def test_forced_content_survives_and_other_content_may_be_lost(tmp_path: Path, seed: int) -> None:
    disks = Disks(random.Random(seed))
    directory = tmp_path / "journals" / "journal"
    directory.mkdir(parents=True)
    forced, unforced = directory / "forced", directory / "unforced"
    for path in (forced, unforced):
        path.write_bytes(b"forced")
    for path in (forced, directory, directory.parent):
        force(disks, path)
    with forced.open("ab") as file:
        file.write(b" and not")

    disks.fail(tmp_path)

    assert forced.read_bytes() in (b"forced", b"forced and not", b"forced" + bytes(8))
    assert unforced.read_bytes() in (b"forced", b"", bytes(6))


def test_names_that_were_not_forced_may_be_lost(tmp_path: Path) -> None:
    outcomes = set()
    for seed in range(20):
        directory = tmp_path / str(seed) / "journals" / "journal"
        directory.mkdir(parents=True)
        (directory / "content").write_bytes(b"bytes")
        Disks(random.Random(seed)).fail(tmp_path / str(seed))
        outcomes.add((directory / "content").exists())
    assert outcomes == {True, False}


def test_a_file_that_was_replaced_without_forcing_its_name_may_be_the_former_one(
    tmp_path: Path,
) -> None:
    outcomes = set()
    for seed in range(20):
        directory = tmp_path / str(seed) / "journals" / "journal"
        directory.mkdir(parents=True)
        disks = Disks(random.Random(seed))
        head, fresh = directory / "head", directory / "fresh"
        head.write_bytes(b"former")
        for path in (head, directory, directory.parent):
            force(disks, path)
        fresh.write_bytes(b"new")
        force(disks, fresh)
        fresh.rename(head)
        disks.fail(tmp_path / str(seed))
        outcomes.add(head.read_bytes())
    assert outcomes == {b"former", b"new"}
