"""Scripts with which shells complete command lines, run by the shells."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gazette_sdk.cli.completion import script
from gazette_sdk.cli.gazctl import GAZCTL
from gazette_sdk.cli.gazette import GAZETTE

PROGRAMS = {"gazctl": GAZCTL, "gazette": GAZETTE}

COMPLETED = [
    (
        ["gazctl", ""],
        [
            *("attach-uuids", "backup", "brokers", "completion", "console", "consumers"),
            *("journals", "keys", "print-config", "report", "restore", "shards", "token"),
            "topics",
        ],
    ),
    (["gazctl", "--v"], ["--version"]),
    (["gazctl", "journals", "re"], ["read", "redrive", "reset-head"]),
    (["gazctl", "journals", "--zone", "a", "lis"], ["list"]),
    (["gazctl", "journals", "--zone", "=", "a", "lis"], ["list"]),
    (["gazctl", "journals", "list", "--for"], ["--format"]),
    (["gazctl", "journals", "list", "--format", "w"], ["wide"]),
    (["gazctl", "journals", "list", "--format", "=", "w"], ["wide"]),
    (["gazctl", "journals", "list", "--format", "="], ["json", "proto", "table", "wide", "yaml"]),
    (["gazctl", "journals", "list", "--format=w"], ["--format=wide"]),  # as zsh has it
    (["gazctl", "journals", "list", "-o", "j"], ["json"]),
    (["gazctl", "journals", "fragments", "-o", "w"], []),
    (["gazctl", "journals", "list", "--log.level", "w"], ["warn"]),
    (["gazctl", "journals", "read", "-n", ""], []),
    (["gazctl", "journals", "read", "--block", "ord"], ["orders/a", "orders/b"]),
    (["gazctl", "journals", "read", "--name", "oth"], ["other/c"]),
    (["gazctl", "journals", "read", "orders/a", "--bl"], ["--block"]),
    (["gazctl", "print-config", ""], []),
    (["gazctl", "completion", ""], ["bash", "fish", "zsh"]),
    (["gazette", "se"], ["serve"]),
    (["gazette", "dev", "--po"], ["--port"]),
    (["gazette", "dev", "kil"], ["kill"]),
    (["gazette", "spark", "trans"], ["transactions"]),
    (["gazette", "spark", "transactions", "cr"], ["create"]),
    (["gazette", "serve", "--broker.dur"], ["--broker.durability"]),
    (["gazette", "serve", "--broker.durability", "p"], ["persisted"]),
]


@pytest.mark.parametrize(("words", "wanted"), COMPLETED, ids=" ".join)
def test_bash_completes_commands_options_values_and_journals(tmp_path, words, wanted):
    quoted = " ".join(f"'{word}'" for word in words)
    program = f"""
        gazctl() {{ printf 'NAME  HEAD\\norders/a  1\\norders/b  2\\nother/c  3\\n'; }}
        {script(PROGRAMS[words[0]], "bash")}
        COMP_WORDS=({quoted})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _{words[0]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert sorted(done.stdout.split()) == wanted


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_all_commands_and_options(program, shell):
    text = script(program, shell)
    for command in program.commands:
        assert command.name in text
        for group in command.groups:
            for bound in group.options:
                assert f"--{bound.long}" in text or f"-l {bound.long} " in text
    if installed := shutil.which(shell):
        subprocess.run([installed, "-n"], input=text.encode(), check=True)


def test_the_command_prints_the_script_and_refuses_other_shells(gazctl, gazette):
    for tool, name in ((gazctl, "gazctl"), (gazette, "gazette")):
        (tool.directory / f"{name}.ini").write_text("nonsense")  # a shell may start anywhere
        for shell in ("bash", "zsh", "fish"):
            assert tool.ok("completion", shell).text == script(PROGRAMS[name], shell)
        outcome = tool("completion", "tcsh")
        assert (outcome.status, outcome.stdout) == (1, b"")
        assert "no completion for 'tcsh'; use one of: bash, zsh, fish" in outcome.stderr
