"""From a command line to a command that runs, and its exit status (cli section 1)."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gazette_sdk.cli.command import Command, Invocation
from gazette_sdk.cli.failure import report
from gazette_sdk.cli.usage import command_help, program_help
from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.server.ini import find_ini
from gazette_sdk.server.options import (
    Group,
    Sources,
    first_positional,
    parse_arguments,
)
from gazette_sdk.server.settings import LoggingSettings
from gazette_sdk.server.spinning_selector import new_loop

__all__ = ["FAILED", "INTERRUPTED", "Program"]

FAILED = 1
"""Status of a command that failed, and of mistakes on the command line."""

INTERRUPTED = 130
"""Status of a command that Ctrl-C ended, as shells know it."""


@dataclass(frozen=True)
class Program:
    """A program with commands.

    Attributes:
        name: what it is called.
        summary: one line of help.
        commands: its commands.
        ini: name of its INI file.
        shared: options of all commands whose first word is the key. They may stand before the
            words that follow, or behind them.
        aliases: environment variables, each with one that stands in for it where it is not set.
    """

    name: str
    summary: str
    commands: tuple[Command, ...]
    ini: str
    shared: Mapping[str, tuple[Group[Any], ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run what a command line says.

        Args:
            arguments: those behind the program's name; by default this process's.

        Returns:
            The status to exit with.
        """
        in_log = False
        try:
            return self._main(list(sys.argv[1:] if arguments is None else arguments))
        except _FailureOfServiceError as failure:
            in_log, error = True, failure.error
        except ExceptionGroup as group:
            foreign = group.split((GazetteError, OSError))[1]
            if foreign is not None:
                raise
            error = group
        except BrokenPipeError:
            # Whoever read our output has seen enough. Python must not try to flush it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except (GazetteError, OSError) as failure:
            error = failure
        except KeyboardInterrupt:
            return INTERRUPTED
        report(self.name, error, in_log=in_log)
        return FAILED

    @property
    def version(self) -> str:
        """The version this program was installed as."""
        try:
            return importlib.metadata.version("gazette-sdk")
        except importlib.metadata.PackageNotFoundError:
            return "development"

    # ---------------------------------------------------------------- inside

    def _main(self, arguments: list[str]) -> int:
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
        _check_count(command, parsed.positional)
        invocation = Invocation(
            self.name,
            self.version,
            Sources(parsed.values, find_ini(self.ini), self._environ()),
            tuple(parsed.positional),
            known=self.all_groups() if command.name == "print-config" else groups,
        )
        for group in groups:
            invocation.settings(group)  # what is wrong is told before anything happens
        return self._run(command, invocation, groups)

    def _run(self, command: Command, invocation: Invocation, groups: Sequence[Group[Any]]) -> int:
        in_log = command.is_service
        for group in groups:
            values = invocation.settings(group)
            if isinstance(values, LoggingSettings):
                from gazette_sdk.server.logging import configure_logging  # noqa: PLC0415 - lazy

                configure_logging(values.level, values.format)
                in_log = in_log or values.format == "json"
        try:
            outcome = _resolve(command.run)(invocation)
            if inspect.isawaitable(outcome):
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    runner.run(_on_this_loop(outcome))
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except (GazetteError, OSError) as error:
            if in_log:
                raise _FailureOfServiceError(error) from error
            raise
        return 0

    def all_groups(self) -> tuple[Group[Any], ...]:
        """The options of all commands, those that commands share before their own."""
        found: dict[str, Group[Any]] = {}
        for command in self.commands:
            for group in (*self.shared.get(command.name.split()[0], ()), *command.groups):
                if any(bound.option.in_ini for bound in group.options):
                    found.setdefault(f"{group.title} {group.prefix}", group)
        return tuple(found.values())

    def _words(self, arguments: list[str]) -> tuple[list[str], list[str]]:
        """The words that name a command, and the arguments without them."""
        rest, words = list(arguments), list[str]()
        while any(each.name.split()[: len(words)] == words for each in self.commands):
            if any(each.name.split() == words for each in self.commands):
                break
            groups = self.shared.get(words[0], ()) if words else ()
            place = first_positional(groups, rest)
            if place is None:
                break
            words.append(rest.pop(place))
        return words, rest

    def _explain_commands(self, words: list[str], arguments: list[str]) -> int:
        """Help where no command was named, or one that does not exist."""
        listed = [each for each in self.commands if words and each.name.split()[0] == words[0]]
        within = words[0] if listed else ""
        text = program_help(self.name, self.summary, listed or self.commands, within)
        unknown = len(words) > 1 or (words and not listed)
        if not unknown and any(argument in {"-h", "--help"} for argument in arguments):
            self._print_help(text)
            return 0
        problem = "a command must be given"
        if unknown:
            problem = f"unknown command `{' '.join(words)}`"
        sys.stderr.write(f"{self.name}: {problem}\n\n{text}{self._version_line()}")
        return FAILED

    def _print_help(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        sys.stderr.write(self._version_line())

    def _version_line(self) -> str:
        return f"{self.name} version {self.version}, build date unknown\n"

    def _environ(self) -> dict[str, str]:
        environ = dict(os.environ)
        for name, stand_in in self.aliases.items():
            if name not in environ and environ.get(stand_in):
                environ[name] = environ[stand_in]
        return environ


class _FailureOfServiceError(Exception):
    """The error of a command whose failures belong into its log."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _check_count(command: Command, arguments: Sequence[str]) -> None:
    if len(arguments) < command.arguments_min:
        raise ConfigurationError(
            f"`{command.name}` needs {command.arguments}; --help shows how it is called"
        )
    if command.arguments_max is not None and len(arguments) > command.arguments_max:
        raise ConfigurationError(
            f"`{command.name}` takes no argument {arguments[command.arguments_max]!r}; "
            "--help shows how it is called"
        )


def _resolve(path: str) -> Callable[[Invocation], Any]:
    module, _, name = path.partition(":")
    return cast("Callable[[Invocation], Any]", getattr(importlib.import_module(module), name))


async def _on_this_loop(work: Any) -> None:
    """Run a command on the loop of the main thread, which is the only one then."""
    from gazette_sdk.transport.loop import adopt_running_loop  # noqa: PLC0415 - lazy

    adopt_running_loop()
    await work
