"""Files of offsets, at which a read begins and ended (cli section 5, read)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import orjson

from gazette_sdk.errors import ConfigurationError

__all__ = ["load_offsets", "store_offsets"]


def load_offsets(path: Path, *, replaced: bool) -> dict[str, int]:
    """Return the offsets in a file: a JSON object of journals' names and their offsets.

    Args:
        path: the file.
        replaced: the same file is written at the end. It is renamed to ``<path>.previous``, so
            that it is missing after a crash in between.

    Raises:
        ConfigurationError: the file does not exist, or is malformed.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the offsets in {path}: {error.strerror}; to begin with no offsets, "
            "write {} to it"
        ) from error
    try:
        offsets = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"the offsets in {path} are not JSON: {error}") from error
    if not isinstance(offsets, dict):
        raise ConfigurationError(
            f'{path} is no JSON object of journals and offsets, such as {{"a/journal": 1234}}'
        )
    for journal, offset in offsets.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or not -1 <= offset < 1 << 63:
            raise ConfigurationError(f"{path}: the offset of {journal} is not valid: {offset!r}")
    if replaced:
        path.rename(f"{path}.previous")
    return offsets


def store_offsets(path: Path, offsets: Mapping[str, int]) -> None:
    """Replace a file of offsets atomically."""
    temporary = Path(f"{path}.temp")
    with temporary.open("wb") as file:
        file.write(orjson.dumps(dict(offsets), option=orjson.OPT_SORT_KEYS) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
