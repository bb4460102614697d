"""Specs in an editor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gazette_sdk.cli.journals.specs import edit, header, without_generated
from gazette_sdk.cli.program import CommandFailedError
from gazette_sdk.errors import UnavailableError


@pytest.mark.parametrize("problem", ["", "one line", "two\nlines"])
def test_the_header_says_how_long_it_is_and_is_never_read_back(problem):
    text = header(problem)
    assert f"({text.count(chr(10))} lines)" in text
    assert without_generated(text + "name: a\n") == "name: a\n"


def test_edits_survive_a_failing_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    editor = tmp_path / "editor"
    editor.write_text('echo "# mine" >> "$1"\n')
    applied = []

    async def apply(text):
        applied.append(text)
        if len(applied) < 3:
            raise UnavailableError("nobody there")

    environ = {"EDITOR": f"sh {editor}"}
    asyncio.run(edit("name: a\n", prefix="edit-", environ=environ, apply=apply))
    assert applied == ["name: a\n" + "# mine\n" * count for count in (1, 2, 3)]
    assert list(tmp_path.glob("edit-*")) == []


def test_an_editor_that_fails_later_leaves_the_edits(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    editor = tmp_path / "editor"
    editor.write_text('[ -e tried ] && exit 3; touch tried; echo "# mine" >> "$1"\n')
    monkeypatch.chdir(tmp_path)

    async def apply(text):
        raise UnavailableError("nobody there")

    environ = {"GAZ_EDITOR": f"sh {editor}", "EDITOR": "false"}
    with pytest.raises(CommandFailedError, match=r"status 3.*saved to") as failure:
        asyncio.run(edit("name: a\n", prefix="edit-", environ=environ, apply=apply))
    kept = Path(str(failure.value).split("saved to ")[1])
    assert "# mine" in kept.read_text()
