"""INI files (cli section 1.3).

``[Section]``, ``Key = value``, comments behind ``;`` or ``#`` on lines of their own, values
optionally in double quotes with escapes, keys repeated for lists. Sections are compared without
regard to case; unknown sections and keys are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gazette_sdk.errors import ConfigurationError

__all__ = ["IniFile", "find_ini", "ini_value", "parse_ini"]


@dataclass(frozen=True, slots=True)
class IniFile:
    """Entries of an INI file.

    Attributes:
        path: the file.
        entries: section in lower case, key, value; in the file's order.
    """

    path: Path
    entries: list[tuple[str, str, str]] = field(default_factory=list)

    def values_of(self, section: str, names: Sequence[str]) -> list[str]:
        """Return all values in a section under any of ``names``."""
        section = section.lower()
        return [value for where, key, value in self.entries if where == section and key in names]


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
            ini.entries.append((section, key.strip(), _unquoted(value.strip())))
        except ValueError as error:
            raise ConfigurationError(f"{path}:{number}: the quoted value is malformed") from error
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
