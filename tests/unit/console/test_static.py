"""The files of the console: nothing in them makes code or markup of text, and they are small."""

from __future__ import annotations

import hashlib
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from gazette_sdk.console.mount import STATIC, load_files, without_comments

ROOT = Path(__file__).parents[3]
OWN = sorted(path for path in STATIC.iterdir() if path.suffix in {".js", ".html", ".css"})
FORBIDDEN = (
    "dangerouslySetInnerHTML",
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "srcdoc",
    "javascript:",
    "document.cookie",
    "setAttribute(",
)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_file_makes_code_or_markup_of_text(path):
    text = path.read_text()
    assert [word for word in FORBIDDEN if word in text] == []
    assert not re.search(r"[\s\"']style\s*=", text), "the policy forbids styles in markup"
    assert not re.search(r"<script(?![^>]*\bsrc=)", text), "the policy forbids inline scripts"
    assert not re.search(r"[\s\"']on[a-z]+=\"", text), "no handler is in markup"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_all_addresses_are_relative(path):
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(?:href|src)=["']/|(?:from|import\() ?["']/""", text)
    assert not re.search(r"[\"'`(]https?://", text), "nothing is loaded from another origin"


def test_the_libraries_are_those_that_were_reviewed():
    lines = (STATIC / "libraries.sha256").read_text().splitlines()
    assert [line.split()[1] for line in lines] == [
        "vendor/hooks.js",
        "vendor/htm.js",
        "vendor/preact.js",
    ]
    for line in lines:
        digest, name = line.split()
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (STATIC / "vendor" / "LICENSES.txt").read_text()


def test_the_whole_console_has_at_most_60_kb_as_gzip():
    files = load_files()
    compressed = sum(len(file.compressed) for file in files.files.values())
    assert compressed + len(files.page_of("broker").compressed) <= 60_000


def test_comments_are_not_served_and_lines_keep_their_numbers():
    served = load_files().files
    for path in OWN:
        if path.suffix != ".js":
            continue
        whole, sent = path.read_text().splitlines(), served[path.name].content.decode().splitlines()
        assert len(whole) == len(sent)
        changed = [old for old, new in zip(whole, sent, strict=True) if old != new]
        assert all(line.lstrip().startswith(("//", "/*", "*")) for line in changed)
        assert not any(line.lstrip().startswith(("//", "/*", "* ")) for line in sent), path.name
    script = b"const a = 1; // one\n  // two\n/** three\n * four */\nconst b = `\n//${a}`;\n"
    assert without_comments(script).startswith(b"const a = 1; // one\n\n\n\nconst b")


def test_a_wheel_is_refused_without_the_libraries(tmp_path, monkeypatch):
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = SimpleNamespace  # the builder is not installed here
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(ROOT / "scripts" / "check_libraries.py"))["LibrariesHook"]

    hook(root=str(ROOT)).initialize("standard", {})
    static = tmp_path / "gazette_sdk" / "console" / "static"
    static.mkdir(parents=True)
    (static / "libraries.sha256").write_text((STATIC / "libraries.sha256").read_text())
    hook(root=str(tmp_path)).initialize("editable", {})
    with pytest.raises(SystemExit, match="scripts/console-libraries"):
        hook(root=str(tmp_path)).initialize("standard", {})
