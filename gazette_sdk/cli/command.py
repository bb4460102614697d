"""Commands: their options, their help, and the function that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from gazette_sdk.server.options import Group, Option, Seconds, Settings, Sources, load

__all__ = ["Command", "Invocation", "TimeoutSettings"]

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
    _loaded: dict[str, Settings] = field(default_factory=dict)

    def settings(self, group: Group[S]) -> S:
        """Return the values of a group of options.

        Raises:
            ConfigurationError: a value is invalid, or a required value is missing.
        """
        key = f"{group.title} {group.prefix}"
        values = self._loaded.get(key)
        if values is None:
            values = self._loaded[key] = load(group, self.sources)
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
