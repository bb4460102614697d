"""Errors as Spark shows them: the last line of the driver's exception is one clear message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gazette_sdk.errors import GazetteError, UnauthenticatedError


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Raise errors of the SDK without their causes, and with notes and lines joined to one line.

    Spark appends the traceback to its own message, so the error's text is the last line.
    """
    try:
        yield
    except GazetteError as error:
        if isinstance(error, UnauthenticatedError):
            error.add_note(
                "in Spark set BROKER_AUTH_TOKEN or BROKER_AUTH_KEYS in the environment of driver"
                " and executors"
            )
        notes: list[str] = getattr(error, "__notes__", [])
        lines = [line.strip() for part in (str(error), *notes) for line in part.splitlines()]
        notes.clear()
        error.args = ("; ".join(filter(None, lines)),)
        raise error.with_traceback(None) from None
