"""What a command is: its options, its help, and by which function it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gazette_sdk.server.options import Group, Settings, Sources, load

__all__ = ["Command", "Invocation"]

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a program.

    Attributes:
        name: its words, such as ``journals list``.
        summary: one line of help.
        run: import path of what runs it, ``package.module:function``: a function of an
            :class:`Invocation`, plain or a coroutine function, which raises what goes wrong.
        groups: its own options.
        details: help beyond the summary; paragraphs separated by empty lines.
        examples: command lines and what each of them does.
        arguments: what stands behind the options, as help shows it; empty for nothing.
        arguments_min: least number of such arguments.
        arguments_max: greatest number of them; ``None`` for any.
        is_service: whether it runs unattended, so that its failures belong into its log.
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
    is_service: bool = False


@dataclass(frozen=True)
class Invocation:
    """A command that was called.

    Attributes:
        program: name of the program.
        version: its version.
        sources: where the values of options come from.
        arguments: what stood behind the options.
        known: options that the call accepted, with those of the program's other commands where
            a command is about them.
    """

    program: str
    version: str
    sources: Sources
    arguments: Sequence[str] = ()
    known: Sequence[Group[Any]] = ()
    _loaded: dict[str, Settings] = field(default_factory=dict)

    def settings(self, group: Group[S]) -> S:
        """The values of a group of options.

        Raises:
            ConfigurationError: a value cannot be used, or a required one is missing.
        """
        key = f"{group.title} {group.prefix}"
        values = self._loaded.get(key)
        if values is None:
            values = self._loaded[key] = load(group, self.sources)
        assert isinstance(values, group.model)
        return values

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment it was called in."""
        return self.sources.environ
