"""Names, tokens and path components (protocol section 4).

Lengths are counted in UTF-8 bytes, character classes are those of code points. No character at
or below ``#`` is in either class, because ``#`` separates the parts of Etcd keys.
"""

from __future__ import annotations

import functools
import re

from gazette_sdk.errors import ValidationError

__all__ = [
    "JOURNAL_LENGTH_BYTES",
    "METADATA_LENGTH_BYTES",
    "at",
    "clean_path",
    "climbs",
    "refuse_climbing",
    "strip_meta",
    "validate_journal",
    "validate_path_characters",
    "validate_path_component",
    "validate_token",
]

JOURNAL_LENGTH_BYTES = (4, 512)
"""Bounds of a journal's name."""
METADATA_LENGTH_BYTES = (1, 512)
"""Bounds of the metadata after a journal name's first ``;``."""

# `\w` is exactly the Unicode letters (L*), the Unicode numbers (N*) and the underscore.
TOKEN_CLASS = r"[\w\-+/.]"  # noqa: S105 - a class of characters, not a secret
PATH_CLASS = r"[\w\-+/.=%]"

_TOKEN = re.compile(f"{TOKEN_CLASS}*").fullmatch
_PATH = re.compile(f"{PATH_CLASS}*").fullmatch


@functools.lru_cache(maxsize=1024)  # the same few names stand in message after message
def validate_journal(name: str, path: str = "journal") -> None:
    """Check a journal's name, which may carry ``;metadata``.

    A leading ``../`` is lexically clean and passes here, as it does in other implementations;
    specs that are applied refuse it (see :func:`refuse_climbing`).

    Args:
        name: the name.
        path: dotted path of the field, for the error.

    Raises:
        ValidationError: kinds ``invalid_length``, ``invalid_token``, ``not_clean``,
            ``leading_slash``.
    """
    bare, separator, metadata = name.partition(";")
    validate_path_component(bare, path, *JOURNAL_LENGTH_BYTES)
    if separator:
        validate_path_component(metadata, at(path, "metadata"), *METADATA_LENGTH_BYTES)


def strip_meta(name: str) -> str:
    """Return a journal name without its metadata."""
    return name.partition(";")[0]


def validate_token(value: str, path: str, least: int, most: int) -> None:
    """Check a token: ``least`` to ``most`` bytes of letters, numbers and ``-_+/.``.

    Raises:
        ValidationError: kinds ``invalid_length`` (checked first), ``invalid_token``.
    """
    _validate_length(value, path, least, most)
    if not _TOKEN(value):
        raise ValidationError(
            f"not a valid token ({value!r}); use letters, numbers and -_+/.",
            kind="invalid_token",
            path=path,
        )


def validate_path_characters(value: str, path: str, least: int, most: int) -> None:
    """Check ``least`` to ``most`` bytes of a token's characters, ``=`` and ``%``.

    Raises:
        ValidationError: kinds ``invalid_length`` (checked first), ``invalid_token``.
    """
    _validate_length(value, path, least, most)
    if not _PATH(value):
        raise ValidationError(
            f"not made of path characters ({value!r}); use letters, numbers and -_+/.=%",
            kind="invalid_token",
            path=path,
        )


def validate_path_component(value: str, path: str, least: int, most: int) -> None:
    """Check a clean, relative path of ``least`` to ``most`` bytes.

    Raises:
        ValidationError: kinds in checking order ``invalid_length``, ``invalid_token``,
            ``not_clean``, ``leading_slash``.
    """
    validate_path_characters(value, path, least, most)
    if not value or (
        value[0] not in "./" and value[-1] != "/" and "//" not in value and "/." not in value
    ):
        return  # cleaning would change nothing
    if clean_path(value) != value:
        raise ValidationError(
            f"must be a clean path ({value!r}: no `//`, no `.`, no trailing `/`)",
            kind="not_clean",
            path=path,
        )
    if value[0] == "/":
        raise ValidationError(
            f"must not begin with `/` ({value!r})", kind="leading_slash", path=path
        )


def clean_path(value: str) -> str:
    """Return the shortest path that is lexically equal to a slash-separated path.

    Empty and ``.`` components are removed, ``..`` removes the component before it, and at the
    beginning of a rooted path it is removed too. The empty path is ``.``.
    """
    rooted = value.startswith("/")
    kept: list[str] = []
    for component in value.split("/"):
        if component in {"", "."}:
            continue
        if component != "..":
            kept.append(component)
        elif kept and kept[-1] != "..":
            kept.pop()
        elif not rooted:
            kept.append(component)
    cleaned = "/".join(kept)
    return "/" + cleaned if rooted else cleaned or "."


def climbs(value: str) -> bool:
    """Return True if a component of the path is ``..``."""
    return ".." in value and ".." in value.split("/")


def refuse_climbing(value: str, path: str) -> None:
    """Refuse a path that has a ``..`` component: it could leave the root it is joined to.

    Raises:
        ValidationError: kind ``traverses_outside``.
    """
    if climbs(value):
        raise ValidationError(
            f"must not have a `..` component ({value!r})", kind="traverses_outside", path=path
        )


def at(path: str, field: str) -> str:
    """Return the dotted path of a field of the value at ``path``."""
    return f"{path}.{field}" if path else field


def _validate_length(value: str, path: str, least: int, most: int) -> None:
    length = len(value)
    if not value.isascii():
        try:
            length = len(value.encode())
        except UnicodeEncodeError:
            raise ValidationError(
                f"not valid UTF-8 ({value!r})", kind="invalid_token", path=path
            ) from None
    if not least <= length <= most:
        raise ValidationError(
            f"invalid length ({length}; expected {least} <= length <= {most} bytes)",
            kind="invalid_length",
            path=path,
        )
