"""Framings by content type, process-wide (message section 5)."""

from __future__ import annotations

from gazette_sdk.errors import FramingError
from gazette_sdk.framing.base import FixedProtobuf, Framing, JsonLines
from gazette_sdk.framing.csv import Csv

NO_FRAMING_REMEDY = (
    "give the journal a content type with a framing, as with Journals().update(NAME,"
    " content_type='application/x-ndjson') for JSON lines, or register a framing"
)
"""End of errors about a journal whose content type has no framing."""

_RECOVERY_LOG = "application/x-gazette-recoverylog"


def register(framing: Framing) -> None:
    """Register a framing under its content type, replacing an earlier one.

    Args:
        framing: the framing; its ``content_type`` is the value of the journal's label.

    Raises:
        FramingError: the content type is empty, or that of recovery logs, which hold operations
            on files and no messages.
    """
    if not framing.content_type or framing.content_type == _RECOVERY_LOG:
        raise FramingError(
            f"{type(framing).__name__} cannot be registered for the content type "
            f"{framing.content_type!r}"
        )
    _framings[framing.content_type] = framing


def framing_for(content_type: str) -> Framing:
    """Return the framing of a journal, by the first value of its ``content-type`` label.

    Args:
        content_type: the label's value, ``""`` for a journal without it.

    Raises:
        FramingError: ``unrecognized content-type (<value>)``.
    """
    framing = _framings.get(content_type)
    if framing is None:
        raise FramingError(f"unrecognized content-type ({content_type})")
    return framing


_framings: dict[str, Framing] = {}
for _framing in (JsonLines(), FixedProtobuf(), Csv()):
    register(_framing)
