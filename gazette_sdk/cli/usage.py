"""Help texts of programs and commands."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from gazette_sdk.cli.command import Command
from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.server.options import BoundOption, Group, Settings

__all__ = ["command_help", "program_help"]

_NAMES_WIDTH = 30
_VALUE_NAMES = {
    "text": "VALUE",
    "integer": "N",
    "number": "N",
    "duration": "DURATION",
    "list": "VALUE",
}


def program_help(program: str, summary: str, commands: Sequence[Command], parent: str = "") -> str:
    """Return the help of a program, or of its commands below a word.

    Args:
        program: the program's name.
        summary: one line about the program.
        commands: the commands to list.
        parent: first word of the listed commands; empty for all commands.
    """
    called = f"{program} {parent}".rstrip()
    width = max(len(command.name) for command in commands) + 2
    lines = [summary, "", f"Usage: {called} COMMAND [OPTION...]", "", "Commands:"]
    lines += [f"  {command.name:{width}}{command.summary}" for command in commands]
    lines += ["", f"`{called} COMMAND --help` shows a command's options, with examples."]
    lines += ["Exit status: 0 for success, 1 for a failure, 124 after --timeout, 130 after Ctrl-C."]
    return "\n".join(lines) + "\n"


def command_help(
    program: str,
    command: Command,
    shared: Sequence[Group[Settings]],
) -> str:
    """Return the help of a command.

    Args:
        program: the program's name.
        command: the command.
        shared: options of its parent command, which it takes, too.
    """
    called = f"{program} {command.name}"
    arguments = f" {command.arguments}" if command.arguments else ""
    sections = [f"{command.summary}.", f"Usage: {called} [OPTION...]{arguments}"]
    sections += [
        _wrapped(paragraph, "") for paragraph in command.details.split("\n\n") if paragraph
    ]
    if command.examples:
        examples = [f"  # {what}\n  {line}" for line, what in command.examples]
        sections.append("Examples:\n" + "\n".join(examples))
    for group in (*command.groups, *shared):
        options = "\n".join(_option(group, bound) for bound in group.options)
        sections.append(f"Options [{group.title}]:\n{options}")
    sections.append(
        "An option's value is that of the command line, else of the INI file (section in "
        "brackets), else\nof the environment variable, else its default."
    )
    return "\n\n".join(sections) + "\n"


def _option(group: Group[Settings], bound: BoundOption) -> str:
    short = f"-{bound.option.short}, " if bound.option.short else ""
    value = "|".join(bound.choices) or _VALUE_NAMES.get(bound.kind, "")
    names = f"  {short}--{bound.long}{f'={value}' if value else ''}"
    text = " ".join([bound.option.description, *_notes(group, bound)])
    described = _wrapped(text, " " * _NAMES_WIDTH)
    if len(names) < _NAMES_WIDTH - 1:
        return f"{names:{_NAMES_WIDTH}}{described.lstrip()}"
    return f"{names}\n{described}"


def _notes(group: Group[Settings], bound: BoundOption) -> Iterator[str]:
    if bound.required:
        yield "(required)"
    elif bound.default not in ("", (), False, None):
        default = bound.default
        if bound.kind == "duration":
            default = format_duration(round(default * SECOND_NS))
        yield f"(default: {default})"
    if bound.kind == "list":
        yield "(repeatable)"
    if group.env_prefix is not None:
        yield f"[${bound.env}]"


def _wrapped(text: str, indent: str) -> str:
    width = min(shutil.get_terminal_size((100, 0)).columns, 100)
    if text.startswith("  "):  # a preformatted block
        return text
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
