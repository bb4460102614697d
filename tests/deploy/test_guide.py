"""The guide to production: options, files and values of commands that cannot be run here."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from gazette_sdk.cli.gazctl import GAZCTL
from gazette_sdk.cli.gazette import GAZETTE
from support.deployments import DEPLOY, ROOT
from support.pages import blocks_of, commands_of
from support.tools import gazctl, gazette

__all__ = ["gazctl", "gazette"]

PAGE = ROOT / "docs" / "deployment.md"
PROGRAMS = {"gazctl": GAZCTL, "gazette": GAZETTE}


def commands():
    lines = [
        line
        for block in blocks_of(PAGE)
        if block.language == "console"
        for line in commands_of(block.text).splitlines()
    ]
    return [shlex.split(line.removesuffix("&"), comments=True) for line in lines]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_and_flag_of_the_programs_exists(program, request):
    tool = request.getfixturevalue(program)
    for name, *arguments in commands():
        if name != program:
            continue
        at = next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments))
        words = [each for each in arguments[:at] if each != "orders"]
        shown = tool.ok(*words, "--help").text
        for flag in (each.partition("=")[0] for each in arguments[at:] if each.startswith("--")):
            assert re.search(rf"{re.escape(flag)}\b", shown), (name, *arguments)


def test_every_file_of_the_repository_exists():
    for command in commands():
        for word in command:
            if re.match(r"(deploy|scripts)/|constraints", word):
                assert (ROOT / word).exists(), word
    text = PAGE.read_text()
    for path in re.findall(r"`((?:deploy|scripts)/[\w./@-]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_value_of_the_chart_exists():
    values = yaml.safe_load((DEPLOY / "helm" / "gazette" / "values.yaml").read_text())
    text = PAGE.read_text()
    named = re.findall(r"--set(?:-json)? '?([\w.]+)=", text)
    named += re.findall(r"`((?:brokers|networkPolicy|images|etcd)\.[\w.]+)[:`]", text)
    assert named
    for name in named:
        found = values
        for part in name.split("."):
            assert part in found, name
            found = found[part]


def test_the_sets_of_the_table_are_all_there_are():
    rows = re.findall(r"^\| `([\w-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert set(rows) == {path.stem for path in (DEPLOY / "helm" / "gazette" / "sets").glob("*")}
