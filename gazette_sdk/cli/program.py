"""Programs with commands: parsing of command lines, and exit statuses (cli section 1).

A :class:`Command` has options, help, and the function that runs it. An error is one line on
standard error, and an exit status (:func:`report`).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import inspect
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

import gazette_sdk
from gazette_sdk.adaptive_spin import new_loop
from gazette_sdk.cli.entry import INTERRUPTED
from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.server.options import (
    BoundOption,
    Group,
    IniFile,
    Option,
    Seconds,
    Settings,
    Sources,
    find_ini,
    ini_keys,
    load,
    nearest,
    parse_arguments,
    plain_arguments,
)
from gazette_sdk.server.settings import LoggingSettings

TERMINATION_LOG = Path("/dev/termination-log")
"""If this file exists, a supervisor (Kubernetes) reads from it why a process ended."""

FAILED = 1
"""Exit status of a command that failed, and of a wrong command line."""

TIMED_OUT = 124
"""Exit status of a command that ``--timeout`` ended, as of timeout(1)."""

MEMBER_VARIABLE = "GAZETTE_MEMBER"
"""Environment variable of one of several members on a machine: its id, which its log has."""

_log = logging.getLogger("gazette_sdk.cli")


class CommandFailedError(GazetteError):
    """Failure of a command, which ends with a status other than zero.

    Attributes:
        exit_status: exit status of the program.
    """

    exit_status = FAILED


class TimedOutError(CommandFailedError):
    """End of a command by ``--timeout``.

    Args:
        command: the command's name.
        timeout_s: its longest time.
        detail: what is known about its work; empty for nothing.
    """

    exit_status = TIMED_OUT

    def __init__(self, command: str, timeout_s: float, detail: str = "") -> None:
        limit = format_duration(round(timeout_s * SECOND_NS))
        text = f"`{command}` did not end within {limit} (--timeout)"
        super().__init__(f"{text}; {detail}" if detail else text)


def explain(error: BaseException) -> str:
    """Return the text of an error in one line."""
    if isinstance(error, BaseExceptionGroup):
        return explain(error.exceptions[0])
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename is not None:
            text = f"{error.filename}: {text}"
        elif error.errno == errno.EBADF:
            text = "standard input or output is closed; redirect it, for example to /dev/null"
    return "; ".join(line.strip() for line in text.splitlines() if line.strip()) or repr(error)


def report(program: str, error: BaseException, *, in_log: bool) -> None:
    """Report the error that ends a process.

    Args:
        program: name of the program.
        error: the error.
        in_log: write a log record of level fatal instead of a plain line.
    """
    text = explain(error)
    if TERMINATION_LOG.exists():
        try:
            TERMINATION_LOG.write_text(text + "\n", encoding="utf-8")
        except OSError as unwritable:
            _log.warning("cannot write to %s: %s", TERMINATION_LOG, unwritable)
    for handler in logging.getLogger().handlers:
        handler.flush()  # repeated records that were counted come before the error
    if not in_log:
        sys.stderr.write(f"{program}: {text}\n")
        return
    fields = {
        name: value
        for name in ("journal", "offset")
        if (value := getattr(error, name, None)) is not None
    }
    _log.critical("%s", text, extra=fields)


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


def command_help(program: str, command: Command, groups: Sequence[Group[Any]]) -> str:
    """Return the help of a command.

    Args:
        program: the program's name.
        command: the command.
        groups: options that it accepts.
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
    for group in groups:
        options = "\n".join(_option(group, bound) for bound in group.options)
        sections.append(f"Options [{group.title}]:\n{options}")
    sections.append(
        "An option's value is that of the command line, else of the INI file (section in "
        "brackets), else\nof the environment variable, else its default."
    )
    return "\n\n".join(sections) + "\n"


def _option(group: Group[Settings], bound: BoundOption) -> str:
    value = "|".join(bound.choices) or _VALUE_NAMES.get(bound.kind, "")
    names = f"  {', '.join(reversed(bound.names))}{f'={value}' if value else ''}"
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


S = TypeVar("S", bound=Settings)


class TimeoutSettings(Settings):
    """Base of the options of commands that wait."""

    timeout_s: Annotated[
        Seconds,
        Option(
            "Timeout",
            "Longest time of the command: then it gives up, with exit status 124; 0s for no limit",
            env="GAZCTL_TIMEOUT",
        ),
        Field(ge=0),
    ] = 0.0


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a program.

    Attributes:
        name: its words, such as ``journals list``.
        summary: one line of help.
        run: import path ``package.module:function`` of a plain function or coroutine function
            of one :class:`Invocation`.
        groups: options of this command alone.
        details: further help; paragraphs separated by empty lines.
        examples: pairs of a command line and its description.
        arguments: positional arguments, as help shows them; empty for none.
        arguments_min: least number of positional arguments.
        arguments_max: greatest number of positional arguments; ``None`` for no limit.
        completes: what a shell completes arguments with.
        in_doubt: what may have happened in part if the command ends by its timeout; empty for
            nothing.
        keeps_time: True if its timeout does not cancel it: it ends by itself in time, or it waits
            for a person.
        is_service: True if it runs unattended. Its failure is then written to its log.
    """

    name: str
    summary: str
    run: str
    groups: tuple[Group[Any], ...] = ()
    details: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    arguments: str = ""
    arguments_min: int = 0
    arguments_max: int | None = 0
    completes: Literal["files", "journals", ""] = ""
    in_doubt: str = ""
    keeps_time: bool = False
    is_service: bool = False


@dataclass(frozen=True)
class Invocation:
    """Call of a command.

    Attributes:
        program: name of the program.
        version: version of the program.
        sources: sources of the options' values.
        arguments: positional arguments.
        groups: options that the command accepts.
        known: options that ``print-config`` prints; for other commands equal to ``groups``.
    """

    program: str
    version: str
    sources: Sources
    arguments: Sequence[str] = ()
    groups: Sequence[Group[Any]] = ()
    known: Sequence[Group[Any]] = ()
    _loaded: dict[Group[Any], Settings] = field(default_factory=dict)

    def settings(self, group: Group[S]) -> S:
        """Return the values of a group of options.

        Raises:
            ConfigurationError: a value is invalid, or a required value is missing.
        """
        values = self._loaded.get(group)
        if values is None:
            values = self._loaded[group] = load(group, self.sources)
        assert isinstance(values, group.model)
        return values

    @property
    def timeout_s(self) -> float:
        """Longest time of the command, in seconds; 0 for no limit."""
        return max(
            (
                values.timeout_s
                for values in map(self.settings, self.groups)
                if isinstance(values, TimeoutSettings)
            ),
            default=0.0,
        )

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment variables of the call."""
        return self.sources.environ


@dataclass(frozen=True)
class Program:
    """A program with commands.

    Attributes:
        name: name of the program.
        summary: one line of help.
        commands: its commands.
        ini: name of its INI file.
        ini_guests: options that other programs read from the same INI file.
        shared: options of all commands whose first word is the key. They may stand anywhere.
        aliases: environment variables, each with the variable that replaces it if it is not set.
        sibling: import path ``package.module:PROGRAM`` of the other program, which may have a
            command that this one lacks; empty for none.
    """

    name: str
    summary: str
    commands: tuple[Command, ...]
    ini: str
    ini_guests: tuple[Group[Any], ...] = ()
    shared: Mapping[str, tuple[Group[Any], ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    sibling: str = ""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command that a command line names.

        Args:
            arguments: the arguments after the program's name; by default this process's.

        Returns:
            The exit status.
        """
        in_log = False
        try:
            parsed = self._parse(list(sys.argv[1:] if arguments is None else arguments))
            if isinstance(parsed, int):
                sys.stdout.flush()
                return parsed
            command, invocation = parsed
            in_log = _configure_log(invocation) or command.is_service
            function = _import(command.run, has_process=arguments is None)
            _run(function, command, invocation)
        except BrokenPipeError:
            _discard_output()
            return FAILED
        except ExceptionGroup as group:
            if group.split((GazetteError, OSError))[1] is not None:
                raise
            report(self.name, group, in_log=in_log)
            return FAILED
        except (GazetteError, OSError) as error:
            report(self.name, error, in_log=in_log)
            _discard_output()
            return error.exit_status if isinstance(error, CommandFailedError) else FAILED
        except KeyboardInterrupt:
            return INTERRUPTED
        return 0

    @property
    def version(self) -> str:
        """Installed version of the package."""
        return gazette_sdk.__version__

    def groups_of(self, command: Command) -> tuple[Group[Any], ...]:
        """Return the options that a command accepts."""
        return (*command.groups, *self.shared.get(command.name.split()[0], ()))

    def options_of(self, command: Command) -> list[BoundOption]:
        """Return the options that a command accepts, one by one."""
        return [option for group in self.groups_of(command) for option in group.options]

    def all_groups(self) -> tuple[Group[Any], ...]:
        """Return the options of all commands, shared options first."""
        found: dict[str, Group[Any]] = {}
        for command in self.commands:
            for group in (*self.shared.get(command.name.split()[0], ()), *command.groups):
                if any(bound.option.in_ini for bound in group.options):
                    found.setdefault(f"{group.title} {group.prefix}", group)
        return tuple(found.values())

    def _parse(self, arguments: list[str]) -> tuple[Command, Invocation] | int:
        """Return the command to run, or the exit status of a command line that only shows help."""
        words = self._words(arguments)
        command = next((each for each in self.commands if each.name == " ".join(words)), None)
        if command is None:
            return self._explain_commands(words, arguments)
        groups = self.groups_of(command)
        parsed = parse_arguments(groups, arguments)
        if parsed.wants_help:
            return self._print_help(command_help(self.name, command, groups))
        positional = parsed.positional[len(words) :]
        self._check_count(command, positional)
        invocation = Invocation(
            self.name,
            self.version,
            Sources(parsed.values, self._ini() if groups else None, self._environ()),
            tuple(positional),
            groups=groups,
            known=self.all_groups() if command.name == "print-config" else groups,
        )
        for group in groups:
            invocation.settings(group)  # report wrong values before the command does anything
        return command, invocation

    def _ini(self) -> IniFile | None:
        """Return the INI file, if there is one.

        Raises:
            ConfigurationError: it is malformed, or has an unknown key.
        """
        ini = find_ini(self.ini)
        if ini is not None:
            ini.check(ini_keys([*self._groups_below([]), *self.ini_guests]))
        return ini

    def _groups_below(self, words: list[str]) -> list[Group[Any]]:
        """Return the options of all commands whose names begin with some words."""
        below = [each for each in self.commands if each.name.split()[: len(words)] == words]
        return [group for command in below for group in self.groups_of(command)]

    def _words(self, arguments: list[str]) -> list[str]:
        """Return the words of the command line that name a command, or an unknown one."""
        names = [command.name.split() for command in self.commands]
        words: list[str] = []
        while any(name[: len(words)] == words for name in names):
            longer = plain_arguments(self._groups_below(words), arguments)[: len(words) + 1]
            if len(longer) == len(words):
                break
            if words in names and all(name[: len(longer)] != longer for name in names):
                break  # an argument of the command, and no word of a longer one
            words = longer
        return words

    def _explain_commands(self, words: list[str], arguments: list[str]) -> int:
        """Print help if the command line names no command, or an unknown one."""
        listed = [each for each in self.commands if words and each.name.split()[0] == words[0]]
        parent = words[0] if listed else ""
        text = program_help(self.name, self.summary, listed or self.commands, parent)
        unknown = len(words) > 1 or (words and not listed)
        if not unknown and any(argument in {"-h", "--help"} for argument in arguments):
            return self._print_help(text)
        if not unknown and "--version" in arguments:
            sys.stdout.write(f"{self.name} version {self.version}\n")
            return 0
        problem = "a command must be given"
        if unknown:
            problem = f"unknown command `{' '.join(words)}`"
            problem += self._meant(plain_arguments(self._groups_below([]), arguments))
        sys.stderr.write(f"{self.name}: {problem}\n\n{text}{self._version_line()}")
        return FAILED

    def _meant(self, typed: list[str]) -> str:
        """Return text that asks for a command like the words typed; empty if there is none."""
        found = _nearest_words(self.commands, typed)
        if not found and self.sibling:
            module, _, name = self.sibling.partition(":")
            other: Program = getattr(importlib.import_module(module), name)
            if words := _nearest_words(other.commands, typed):
                found = [other.name, *words]
        return "" if found == typed[: len(found)] else f"; did you mean `{' '.join(found)}`?"

    def _check_count(self, command: Command, arguments: Sequence[str]) -> None:
        if len(arguments) < command.arguments_min:
            raise ConfigurationError(
                f"`{command.name}` needs {command.arguments}; --help shows how it is called"
            )
        if command.arguments_max is not None and len(arguments) > command.arguments_max:
            meant = self._meant([*command.name.split(), *arguments])
            raise ConfigurationError(
                f"`{command.name}` takes no argument {arguments[command.arguments_max]!r}"
                f"{meant or '; --help shows how it is called'}"
            )

    def _print_help(self, text: str) -> int:
        sys.stdout.write(text)
        sys.stdout.flush()
        sys.stderr.write(self._version_line())
        return 0

    def _version_line(self) -> str:
        return f"{self.name} version {self.version}, build date unknown\n"

    def _environ(self) -> dict[str, str]:
        given = {name: os.environ.get(alias) for name, alias in self.aliases.items()}
        return {name: text for name, text in given.items() if text} | dict(os.environ)


def _discard_output() -> None:
    """Discard output that cannot be written: Python tries it again at exit, with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nearest_words(commands: Sequence[Command], typed: Sequence[str]) -> list[str]:
    """Return the words of a command's name that are most like the words typed, as far as any is."""
    names = [command.name.split() for command in commands]
    found: list[str] = []
    for word in typed:
        names = [name for name in names if name[: len(found)] == found and len(name) > len(found)]
        nearest_word = nearest(word, [name[len(found)] for name in names])
        if not nearest_word:
            break
        found.append(nearest_word)
    return found


def _configure_log(invocation: Invocation) -> bool:
    """Configure logging by the command's options; return True if it logs JSON."""
    for group in invocation.groups:
        values = invocation.settings(group)
        if isinstance(values, LoggingSettings):
            from gazette_sdk.server.logging import configure_logging  # noqa: PLC0415 - lazy

            member = invocation.environ.get(MEMBER_VARIABLE, "")
            configure_logging(values.level, values.format, member=member)
            return values.format == "json"
    return False


def _import(path: str, *, has_process: bool) -> Callable[[Invocation], Any]:
    """Return the function of a command, whose modules are imported without collecting garbage.

    What is imported stays. If the command has the process to itself, later collections, and that at
    the end of the process, leave it out: a third of the processor time of a short command.
    """
    module, _, name = path.partition(":")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        function: Callable[[Invocation], Any] = getattr(importlib.import_module(module), name)
    finally:
        if was_enabled:
            gc.enable()
    if has_process:
        gc.freeze()
    return function


def _run(function: Callable[[Invocation], Any], command: Command, invocation: Invocation) -> None:
    outcome = function(invocation)
    if inspect.isawaitable(outcome):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_adopt_loop(outcome, command, invocation.timeout_s))
    sys.stdout.flush()


async def _adopt_loop(work: Awaitable[None], command: Command, timeout_s: float) -> None:
    """Run a command on the main thread's loop, which becomes the SDK's loop.

    Raises:
        TimedOutError: the command did not end in time.
    """
    from gazette_sdk.transport.loop import adopt_running_loop  # noqa: PLC0415 - lazy

    adopt_running_loop()
    bound = asyncio.timeout(None if command.keeps_time else timeout_s or None)
    try:
        async with bound:
            await work
    except TimeoutError:
        if not bound.expired():
            raise
        raise TimedOutError(command.name, timeout_s, command.in_doubt) from None
