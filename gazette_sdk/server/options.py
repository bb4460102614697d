"""Tables of options, and the sources of their values (cli sections 1.1, 1.2 and 1.5).

A group of options is a pydantic model whose fields are annotated with an :class:`Option`; the
:class:`Group` adds the names' prefixes and the INI section. From that one table follow the command
line, the INI file, the environment, the checks of values and ``print-config``::

    class Etcd(Settings):
        address: Annotated[str, Option("Address", "Etcd service address")] = "http://localhost:2379"

    ETCD = Group("Etcd", Etcd, prefix="etcd.", env_prefix="ETCD_")
    arguments = parse_arguments([ETCD], sys.argv[1:])
    etcd = load(ETCD, Sources(arguments.values, find_ini("gazette.ini"), os.environ))

The first source that has an option is used: command line, INI file, environment, default.

INI files (cli section 1.3) have ``[Section]``, ``Key = value``, comments after ``;`` or ``#`` on
lines of their own, values optionally in double quotes with escapes, keys repeated for lists.
Sections are compared without regard to case.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic import ValidationError as PydanticValidationError

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol.durations import SECOND_NS, format_duration, parse_duration
from gazette_sdk.server.logging import is_secret_name

_SECTION_RATIO_MIN = 0.85
"""Least similarity of an unknown section to a known one that makes it a typing error."""


class IniEntry(NamedTuple):
    """Entry of an INI file.

    Attributes:
        section: its section, in lower case.
        key: its key, as it is written.
        value: its value, without quotes.
        line: number of its line, from 1.
    """

    section: str
    key: str
    value: str
    line: int


@dataclass(frozen=True, slots=True)
class IniFile:
    """Entries of an INI file.

    Attributes:
        path: the file.
        entries: its entries, in the file's order.
    """

    path: Path
    entries: list[IniEntry] = field(default_factory=list)

    def values_of(self, section: str, names: Sequence[str]) -> list[str]:
        """Return all values in a section under any of ``names``."""
        section = section.lower()
        return [
            entry.value for entry in self.entries if entry.section == section and entry.key in names
        ]

    def check(self, known: Mapping[str, Collection[str]]) -> None:
        """Refuse keys that a known section does not have.

        Other programs have sections of their own in the file. So an unknown section is refused
        only if its name is nearly that of a known one.

        Args:
            known: keys of each section.

        Raises:
            ConfigurationError: an entry is unknown; it has the line, and the nearest known name.
        """
        keys_of = {title.lower(): keys for title, keys in known.items()}
        title_of = {title.lower(): title for title in known}
        for entry in self.entries:
            where = f"{self.path}:{entry.line}"
            keys = keys_of.get(entry.section)
            if keys is None:
                if found := nearest(entry.section, known, ratio_min=_SECTION_RATIO_MIN):
                    raise ConfigurationError(
                        f"{where}: unknown section [{entry.section}]; did you mean [{found}]?"
                    )
            elif entry.key not in keys:
                found = nearest(entry.key, keys)
                hint = f"did you mean {found}?" if found else "`print-config` shows all keys"
                raise ConfigurationError(
                    f"{where}: [{title_of[entry.section]}] has no key {entry.key!r}; {hint}"
                )


def nearest(name: str, known: Iterable[str], *, ratio_min: float = 0.6) -> str:
    """Return the known name that is most like an unknown one; empty if none is.

    Args:
        name: the unknown name. Case makes no difference.
        known: the known names.
        ratio_min: least similarity, from 0 to 1.
    """
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, 1, ratio_min)
    return by_lower[found[0]] if found else ""


def find_ini(name: str, directories: Iterable[Path] | None = None) -> IniFile | None:
    """Read the first existing file ``name`` in a list of directories.

    Args:
        name: such as ``gazette.ini``.
        directories: the list; by default ``.``, ``$HOME/.config/gazette`` and
            ``%UserProfile%/.config/gazette``.

    Raises:
        ConfigurationError: a file exists but cannot be read, or is no INI file.
    """
    for directory in _directories() if directories is None else directories:
        path = directory / name
        try:
            # Editors of Windows write a byte order mark.
            text = path.read_text(encoding="utf-8-sig")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        return parse_ini(text, path)
    return None


def _directories() -> list[Path]:
    homes = [os.environ.get(name) for name in ("HOME", "UserProfile")]
    return [Path(), *(Path(home) / ".config" / "gazette" for home in homes if home)]


def parse_ini(text: str, path: Path) -> IniFile:
    """Parse the text of an INI file.

    Raises:
        ConfigurationError: a line is none of section, entry and comment; it has the line.
    """
    ini = IniFile(path)
    section = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in ";#":
            continue
        if line[0] == "[":
            if line[-1] != "]":
                raise ConfigurationError(f"{path}:{number}: a section ends in ']'")
            section = line[1:-1].strip().lower()
            continue
        key, equals, value = line.partition("=")
        if not equals:
            raise ConfigurationError(f"{path}:{number}: write `Key = value`, not {line!r}")
        try:
            text = _unquoted(value.strip())
        except ValueError as error:
            raise ConfigurationError(f"{path}:{number}: the quoted value is malformed") from error
        ini.entries.append(IniEntry(section, key.strip(), text, number))
    return ini


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return str(json.loads(value, strict=False))
    return value


def ini_value(text: str) -> str:
    """Return ``text`` as a value in an INI file, quoted where needed."""
    if text != text.strip() or text[:1] == '"' or not text.isprintable():
        return json.dumps(text)
    return text


class Settings(BaseModel):
    """Base of a group's values: immutable, without undeclared fields. Its repr has no secrets."""

    # Built when it is first used: a program has dozens of groups, and a command needs few.
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, "…" if name and is_secret_name(name) and value else value


def _seconds(value: Any) -> Any:
    """Return the seconds of a Go duration; a number is in seconds already."""
    if isinstance(value, str):
        try:
            return parse_duration(value) / SECOND_NS
        except ValidationError as error:
            raise ValueError(str(error)) from error
    return value


_DURATION = BeforeValidator(_seconds)

Seconds = Annotated[float, _DURATION]
"""Duration in seconds, written in Go's syntax (``1m30s``)."""

_UNITS: Final = {
    "": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b?)(?:/s)?\s*", re.IGNORECASE)


def parse_size(text: Any) -> Any:
    """Return the bytes of a size or a rate, such as ``50MB/s`` or ``64MiB``."""
    if not isinstance(text, str):
        return text
    found = _SIZE.fullmatch(text)
    unit = "" if found is None else found[2].lower()
    factor = _UNITS.get(unit if unit.endswith("b") or not unit else unit + "b")
    if unit == "b":
        factor = 1
    if found is None or factor is None:
        raise ValueError(f"{text!r} is no size; write it as 200, 64MiB or 50MB/s")
    return float(found[1]) * factor


Bytes = Annotated[float, BeforeValidator(parse_size), Field(ge=0)]
"""Size in bytes, or a rate in bytes per second, such as ``64MiB`` and ``50MB/s``."""


@dataclass(frozen=True, slots=True)
class Option:
    """Names and description of a group's field in the user interface.

    Attributes:
        key: its name in an INI file.
        description: one line of help.
        long: its long option, after the group's prefix; by default the field's name.
        env: its environment variable, after the group's prefix; by default the field's name.
        short: one letter, or empty.
        in_ini: True if an INI file may set it.
    """

    key: str
    description: str
    long: str = ""
    env: str = ""
    short: str = ""
    in_ini: bool = True


S = TypeVar("S", bound=Settings)

Kind = Literal["text", "flag", "integer", "number", "duration", "choice", "list"]


@dataclass(frozen=True, slots=True)
class BoundOption:
    """Option of a group, with its full names.

    Attributes:
        field: name of the model's field.
        long: long option without its dashes, such as ``broker.zone``.
        env: environment variable; empty for none.
        kind: type of its values. A ``flag`` takes no value, a ``list`` may be repeated.
        choices: the values of a ``choice``.
        default: its default; ``None`` for a required one.
        required: True if it must be given.
        option: its other properties.
    """

    field: str
    long: str
    env: str
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    required: bool
    option: Option

    @property
    def names(self) -> tuple[str, ...]:
        """Its names on the command line, with their dashes."""
        return (f"--{self.long}", *([f"-{self.option.short}"] if self.option.short else []))

    @property
    def ini_names(self) -> list[str]:
        """Its names in an INI file."""
        return [name for name in (self.option.key, self.long, self.option.short) if name]

    @property
    def is_secret(self) -> bool:
        """Logs and ``print-config`` must not show its value."""
        return is_secret_name(self.long)


@dataclass(frozen=True)
class Group(Generic[S]):
    """Options under one INI section.

    Attributes:
        title: the INI section; for the group of a command with the command's path
            (``journals.list``).
        model: type of the values.
        prefix: prefix of long options, such as ``broker.``.
        env_prefix: prefix of environment variables; ``None`` if there are none.
    """

    title: str
    model: type[S]
    prefix: str = ""
    env_prefix: str | None = None

    @functools.cached_property
    def options(self) -> tuple[BoundOption, ...]:
        """Options in the order of the model's fields."""
        return tuple(self._options())

    def _options(self) -> Iterable[BoundOption]:
        for name, info in self.model.model_fields.items():
            option = next((item for item in info.metadata if isinstance(item, Option)), None)
            if option is None:
                continue
            kind, choices = _kind(info.annotation, info.metadata)
            env = option.env or name.removesuffix("_s").upper()
            yield BoundOption(
                field=name,
                long=self.prefix + (option.long or name.removesuffix("_s").replace("_", "-")),
                env=self.env_prefix + env if self.env_prefix is not None else "",
                kind=kind,
                choices=choices,
                default=None if info.is_required() else info.get_default(call_default_factory=True),
                required=info.is_required(),
                option=option,
            )


def _kind(annotation: Any, metadata: Sequence[Any]) -> tuple[Kind, tuple[str, ...]]:
    if _DURATION in metadata:
        return "duration", ()
    origin = get_origin(annotation)
    if origin is Literal:
        return "choice", get_args(annotation)
    if origin in {list, tuple}:
        return "list", ()
    kinds: dict[Any, Kind] = {
        bool: "flag",
        int: "integer",
        float: "number",
        str: "text",
        str | None: "text",
    }
    return kinds[annotation], ()


# ------------------------------------------------------------------ sources


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of values.

    Attributes:
        arguments: texts from the command line, by long option.
        ini: the INI file, if there is one.
        environ: the environment.
    """

    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ini: IniFile | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


def load(group: Group[S], sources: Sources, *, partial: bool = False) -> S:
    """Return a group's values.

    Args:
        group: the options.
        sources: sources of their values.
        partial: allow required options to be missing; they are ``None`` then.

    Raises:
        ConfigurationError: a value cannot be used, or a required one is missing; it has the
            source.
    """
    texts: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for bound in group.options:
        found = _find(group, bound, sources)
        if found is not None:
            given, origins[bound.field] = found
            texts[bound.field] = given if bound.kind == "list" else given[-1]
            if bound.kind == "flag":
                texts[bound.field] = given[-1] or "true"
    missing: dict[str, str] = {}
    if partial:
        missing = {
            bound.field: "0" if bound.kind in {"integer", "number"} else ""
            for bound in group.options
            if bound.required and bound.field not in texts
        }
    try:
        values = group.model.model_validate(texts | missing)
        return values.model_copy(update=dict.fromkeys(missing)) if missing else values
    except PydanticValidationError as error:
        raise ConfigurationError(_explain(group, error, origins)) from error


def ini_keys(groups: Iterable[Group[Any]]) -> dict[str, list[str]]:
    """Return the names that options have in an INI file, by section."""
    found: dict[str, list[str]] = {}
    for group in groups:
        keys = found.setdefault(group.title, [])
        for bound in group.options:
            keys += bound.ini_names
    return found


def _find(
    group: Group[Any], bound: BoundOption, sources: Sources
) -> tuple[Sequence[str], str] | None:
    """Return the texts of the first source that has the option, and its description."""
    if bound.long in sources.arguments:
        return sources.arguments[bound.long], f"--{bound.long}"
    if sources.ini is not None and bound.option.in_ini:
        values = sources.ini.values_of(group.title, bound.ini_names)
        if values:
            return values, f"{sources.ini.path} [{group.title}] {bound.option.key}"
    if bound.env and bound.env in sources.environ:
        return [sources.environ[bound.env]], f"environment variable {bound.env}"
    return None


def _explain(group: Group[Any], error: PydanticValidationError, origins: Mapping[str, str]) -> str:
    by_field = {bound.field: bound for bound in group.options}
    problems: list[str] = []
    for problem in error.errors(include_url=False):
        bound = by_field.get(str(problem["loc"][0])) if problem["loc"] else None
        reason = problem["msg"].removeprefix("Value error, ")
        if bound is None:
            problems.append(reason)
        elif problem["type"] == "missing":
            problems.append(f"the required option --{bound.long} was not given")
        else:
            where = origins.get(bound.field, f"--{bound.long}")
            hint = f" (one of: {', '.join(bound.choices)})" if bound.choices else ""
            problems.append(f"{where}: {_mistake(bound, problem) or reason}{hint}")
    return "; ".join(problems)


def _mistake(bound: BoundOption, problem: Mapping[str, Any]) -> str:
    """Return what is wrong with a value; empty if only pydantic can say it."""
    if (text := _MISTAKES.get(problem["type"])) is not None:
        return text.format(problem["input"])
    for limit, text in _LIMITS.items():
        if limit in problem.get("ctx", {}):
            return text.format(problem["input"], _texts(bound, problem["ctx"][limit])[0])
    return ""


_MISTAKES = {
    "bool_parsing": "{!r} is no boolean; write true or false",
    "float_parsing": "{!r} is no number",
    "int_parsing": "{!r} is no integer",
    "literal_error": "{!r} is not allowed",
}
"""Texts about values of another type, by the type of the problem in pydantic."""

_LIMITS = {
    "le": "{} is more than {}, the greatest allowed",
    "ge": "{} is less than {}, the least allowed",
    "lt": "{} is not allowed: give less than {}",
    "gt": "{} is not allowed: give more than {}",
}
"""Texts about values that exceed limits, by the limit's name in pydantic."""


# ------------------------------------------------------------- command line


@dataclass(frozen=True, slots=True)
class Arguments:
    """Parsed command line.

    Attributes:
        values: texts of options, by long option; a flag's text is ``true``.
        positional: other arguments.
        wants_help: True if ``-h`` or ``--help`` was given.
    """

    values: dict[str, list[str]]
    positional: list[str]
    wants_help: bool = False


def parse_arguments(groups: Sequence[Group[Any]], arguments: Sequence[str]) -> Arguments:
    """Parse a command line: ``--name=value``, ``--name value``, ``-n value``, ``-nvalue``.

    Flags take no value. ``--`` ends options.

    Raises:
        ConfigurationError: an option is unknown, has no value, or is a flag with a value.
    """
    values: dict[str, list[str]] = {}
    positional: list[str] = []
    wants_help = False
    for name, option, text in _scan(groups, arguments):
        if not name:
            positional.append(text or "")
        elif name in {"-h", "--help"}:
            wants_help = True
        elif option is None:
            names = [each for group in groups for bound in group.options for each in bound.names]
            found = nearest(name, names, ratio_min=0.75)
            hint = f"did you mean {found}?" if found else "--help shows all options"
            raise ConfigurationError(f"unknown option {name}; {hint}")
        elif option.kind == "flag" and text is not None:
            raise ConfigurationError(f"{name} is a flag: it takes no value")
        elif option.kind != "flag" and text is None:
            raise ConfigurationError(f"{name} needs a value")
        else:
            values.setdefault(option.long, []).append("true" if text is None else text)
    return Arguments(values, positional, wants_help)


def plain_arguments(groups: Sequence[Group[Any]], arguments: Sequence[str]) -> list[str]:
    """Return the arguments before ``--`` that are neither options nor values of options.

    Unknown options are assumed to have no value.
    """
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return [text or "" for name, _, text in _scan(groups, before) if not name]


def _scan(
    groups: Sequence[Group[Any]], arguments: Sequence[str]
) -> Iterator[tuple[str, BoundOption | None, str | None]]:
    """Yield each argument: name of an option, the option if it is known, and text.

    The name of other arguments is empty.
    """
    by_name = {name: bound for group in groups for bound in group.options for name in bound.names}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield from (("", None, each) for each in rest)
        elif argument == "-" or not argument.startswith("-"):
            yield "", None, argument
        else:
            name, text = _split(argument)
            option = by_name.get(name)
            if option is not None and option.kind != "flag" and text is None:
                text = next(rest, None)
            yield name, option, text


def _split(argument: str) -> tuple[str, str | None]:
    if argument.startswith("--"):
        name, equals, value = argument.partition("=")
        return name, value if equals else None
    return argument[:2], argument[2:].removeprefix("=") or None


# -------------------------------------------------------------- print-config


def print_config(
    groups: Iterable[tuple[Group[Any], Settings]], *, show_secrets: bool = False
) -> str:
    """Return effective values as an INI file, with comments for defaults.

    Args:
        groups: groups with their values.
        show_secrets: write keys and tokens instead of a comment.
    """
    lines: list[str] = []
    title = ""
    for group, values in groups:
        if group.title != title:
            lines.append(f"[{group.title}]")
        title = group.title
        for bound in group.options:
            if not bound.option.in_ini:
                continue
            value = getattr(values, bound.field)
            texts = [ini_value(text) for text in _texts(bound, value)]
            comment = "; " if value == bound.default else ""
            if bound.is_secret and value and not show_secrets:
                texts, comment = ["(not shown)"], "; "
            lines.append(f"; {bound.option.description}")
            lines += [f"{comment}{bound.option.key} = {text}".rstrip() for text in texts]
            if not texts:
                lines.append(f"; {bound.option.key} =")
            lines.append("")
    return "\n".join([*lines, ""])


def public_values(group: Group[Any], values: Settings) -> dict[str, Any]:
    """Return values by INI key, without secrets, for logs."""
    return {
        bound.option.key: "…"
        if bound.is_secret and getattr(values, bound.field)
        else _texts(bound, getattr(values, bound.field))
        if bound.kind == "list"
        else getattr(values, bound.field)
        for bound in group.options
    }


def _texts(bound: BoundOption, value: Any) -> list[str]:
    if bound.kind == "list":
        return [str(item) for item in value]
    if bound.kind == "duration":
        return [format_duration(round(value * SECOND_NS))]
    if bound.kind == "flag":
        return ["true" if value else "false"]
    return ["" if value is None else str(value)]
