"""YAML documents that a command line names: a file, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gazette_sdk.errors import ConfigurationError, ValidationError

__all__ = ["load"]

T = TypeVar("T")


def load(path: str, parse: Callable[[bytes], T]) -> T:
    """Return what a document describes.

    Args:
        path: of the file; ``-`` for standard input.
        parse: makes it of the document's text.

    Raises:
        ConfigurationError: the document is malformed. The text begins with the file's name.
        OSError: the file cannot be read.
    """
    text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return parse(text)
    except ValidationError as error:
        name = "standard input" if path == "-" else path
        raise ConfigurationError(f"{name}: {error}") from error
