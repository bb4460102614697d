"""Programs with commands: parsing of command lines, and exit statuses (cli section 1)."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import gazette_sdk
from gazette_sdk.cli.command import Command, Invocation
from gazette_sdk.cli.entry import INTERRUPTED
from gazette_sdk.cli.failure import TimedOutError, report
from gazette_sdk.cli.usage import command_help, program_help
from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.server.options import (
    Group,
    IniFile,
    Sources,
    find_ini,
    first_positional,
    ini_keys,
    nearest,
    parse_arguments,
)
from gazette_sdk.server.settings import LoggingSettings
from gazette_sdk.server.spinning_selector import new_loop

__all__ = ["FAILED", "TIMED_OUT", "Program"]

FAILED = 1
"""Exit status of a command that failed, and of a wrong command line."""

TIMED_OUT = 124
"""Exit status of a command that ``--timeout`` ended, as of timeout(1)."""


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
            arguments: the arguments behind the program's name; by default this process's.

        Returns:
            The exit status.
        """
        in_log = False
        try:
            parsed = self._parse(list(sys.argv[1:] if arguments is None else arguments))
            if isinstance(parsed, int):
                return parsed
            command, invocation = parsed
            in_log = _configure_log(invocation) or command.is_service
            _run(command, invocation)
        except BrokenPipeError:
            # The reader of our output has closed it. Python must not flush to it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except ExceptionGroup as group:
            if group.split((GazetteError, OSError))[1] is not None:
                raise
            report(self.name, group, in_log=in_log)
            return FAILED
        except (GazetteError, OSError) as error:
            report(self.name, error, in_log=in_log)
            return TIMED_OUT if isinstance(error, TimedOutError) else FAILED
        except KeyboardInterrupt:
            return INTERRUPTED
        return 0

    @property
    def version(self) -> str:
        """Installed version of the package."""
        return gazette_sdk.__version__

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
        words, rest = self._words(arguments)
        command = next((each for each in self.commands if each.name == " ".join(words)), None)
        if command is None:
            return self._explain_commands(words, arguments)
        shared = self.shared.get(words[0], ())
        groups = (*command.groups, *shared)
        parsed = parse_arguments(groups, rest)
        if parsed.wants_help:
            self._print_help(command_help(self.name, command, shared))
            return 0
        self._check_count(command, parsed.positional)
        invocation = Invocation(
            self.name,
            self.version,
            Sources(parsed.values, self._ini() if groups else None, self._environ()),
            tuple(parsed.positional),
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
            groups = [group for command in self.commands for group in command.groups]
            shared = [group for each in self.shared.values() for group in each]
            ini.check(ini_keys([*groups, *shared, *self.ini_guests]))
        return ini

    def _words(self, arguments: list[str]) -> tuple[list[str], list[str]]:
        """Return the words that name a command, and the arguments without them."""
        rest, words = list(arguments), list[str]()
        while any(each.name.split()[: len(words)] == words for each in self.commands):
            exact = next((each for each in self.commands if each.name.split() == words), None)
            groups = self.shared.get(words[0], ()) if words else self.all_groups()
            place = first_positional((*exact.groups, *groups) if exact else groups, rest)
            if place is None:
                break
            longer = [*words, rest[place]]
            if exact and all(each.name.split()[: len(longer)] != longer for each in self.commands):
                break  # an argument of the command, and no word of a longer one
            words.append(rest.pop(place))
        return words, rest

    def _explain_commands(self, words: list[str], arguments: list[str]) -> int:
        """Print help if the command line names no command, or an unknown one."""
        listed = [each for each in self.commands if words and each.name.split()[0] == words[0]]
        parent = words[0] if listed else ""
        text = program_help(self.name, self.summary, listed or self.commands, parent)
        unknown = len(words) > 1 or (words and not listed)
        if not unknown and any(argument in {"-h", "--help"} for argument in arguments):
            self._print_help(text)
            return 0
        if not unknown and "--version" in arguments:
            sys.stdout.write(f"{self.name} version {self.version}\n")
            return 0
        problem = "a command must be given"
        if unknown:
            problem = f"unknown command `{' '.join(words)}`"
            behind = arguments[arguments.index(words[-1]) + 1 :]
            problem += self._meant([*words, *takewhile(_is_word, behind)])
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

    def _print_help(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        sys.stderr.write(self._version_line())

    def _version_line(self) -> str:
        return f"{self.name} version {self.version}, build date unknown\n"

    def _environ(self) -> dict[str, str]:
        environ = dict(os.environ)
        for name, alias in self.aliases.items():
            if name not in environ and environ.get(alias):
                environ[name] = environ[alias]
        return environ


def _is_word(argument: str) -> bool:
    return not argument.startswith("-")


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

            configure_logging(values.level, values.format)
            return values.format == "json"
    return False


def _run(command: Command, invocation: Invocation) -> None:
    module, _, name = command.run.partition(":")
    outcome = getattr(importlib.import_module(module), name)(invocation)
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
