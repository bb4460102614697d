"""Changes of a store's local files, in the order in which they are to be recorded.

A store returns them with each commit. Paths are relative to the store's directory and begin with
``/``. The recorder numbers them; see `recovery log` 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "CreateFile",
    "FileChange",
    "RemoveFile",
    "RenameFile",
    "SetProperty",
    "WriteFile",
]


@dataclass(frozen=True, slots=True)
class CreateFile:
    """A new file, in place of one of the same path.

    Attributes:
        path: of the file.
        content: its first bytes; may be empty.
    """

    path: str
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Bytes written to a file that exists.

    Attributes:
        path: of the file.
        offset: of the first byte.
        content: the bytes.
    """

    path: str
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RenameFile:
    """A file's new path; a file of that path is replaced.

    Attributes:
        source: the path until now.
        target: the path from now on.
    """

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """A file that was removed.

    Attributes:
        path: of the file.
    """

    path: str


@dataclass(frozen=True, slots=True)
class SetProperty:
    """A small file whose whole content stands in hints.

    Attributes:
        path: of the file.
        content: all of it.
    """

    path: str
    content: str


FileChange: TypeAlias = CreateFile | WriteFile | RenameFile | RemoveFile | SetProperty
"""Change of one file."""
