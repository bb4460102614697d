"""Secrets from files: an option ``auth-keys`` may be given as a file by ``auth-keys-file``.

The environment variable of such an option ends with ``_FILE``, as for many container images. So a
secret that an orchestrator mounts as a file appears in no command line and no environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError as PydanticValidationError

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Group, Settings

__all__ = ["with_secrets"]

SECRET_BYTES_MAX = 1 << 20
"""Greatest length of a secret: a larger file is certainly not one."""

_FILE = "_file"

S = TypeVar("S", bound=Settings)


def with_secrets(group: Group[S], settings: S) -> S:
    """Return settings with the content of the files that hold secrets.

    White space at the end of a file is no part of the secret.

    Raises:
        ConfigurationError: a file cannot be read or is empty, its content is refused, or the same
            secret is given in two ways.
    """
    options = {bound.field: bound.long for bound in group.options}
    secrets: dict[str, str] = {}
    for name in options.keys() & {field + _FILE for field in options}:
        path, secret = getattr(settings, name), name.removesuffix(_FILE)
        if not path:
            continue
        if getattr(settings, secret):
            raise ConfigurationError(
                f"--{options[secret]} and --{options[name]} are both given; leave one out"
            )
        secrets[secret] = _read(path, f"--{options[name]}")
    if not secrets:
        return settings
    try:
        return type(settings).model_validate(settings.model_dump() | secrets)
    except PydanticValidationError as error:
        reasons = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
        raise ConfigurationError("; ".join(reasons)) from None


def _read(path: str, option: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
        text = content.decode().rstrip()
    except OSError as error:
        raise ConfigurationError(
            f"{option}: {path} cannot be read ({error.strerror}); check its path and permissions"
        ) from error
    except UnicodeDecodeError:
        text = ""
    if not text or len(content) > SECRET_BYTES_MAX:
        raise ConfigurationError(
            f"{option}: {path} is empty or holds no text; write the secret into it"
        )
    return text
