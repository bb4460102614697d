"""INI files (cli section 1.3).

``[Section]``, ``Key = value``, comments behind ``;`` or ``#`` on lines of their own, values
optionally in double quotes with escapes, keys repeated for lists. Sections are compared without
regard to case.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gazette_sdk.errors import ConfigurationError

__all__ = ["IniEntry", "IniFile", "find_ini", "ini_value", "nearest", "parse_ini"]

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
            text = path.read_text(encoding="utf-8")
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
