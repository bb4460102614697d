"""Messages whose content follows from their number."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

__all__ = ["Messages"]

_STEP = 7919
"""Distance between the texts of consecutive numbers; a prime."""

_SLACK_CHARS = 1 << 17
"""Least number of different texts."""

_JSON_CHARS = len('{"n":,"text":""}')


class Messages:
    """Messages of one size, by their numbers.

    A message is a dict of its number ``n`` and a ``text``: a piece of English prose, which
    compresses like text.

    Args:
        size: length of the message as compact JSON, in bytes.
    """

    def __init__(self, size: int) -> None:
        prose = "".join(
            character if character.isascii() and character.isprintable() else " "
            for character in "".join(topics.values()).translate({ord('"'): "'", ord("\\"): "/"})
        )
        repeats = -(-(size + _SLACK_CHARS) // len(prose))
        self._prose = prose * max(repeats, 1)
        self._chars = size - _JSON_CHARS
        self._places = len(self._prose) - size

    def text(self, number: int) -> str:
        """Return the text of a message."""
        place = number * _STEP % self._places
        return self._prose[place : place + self._chars - len(str(number))]

    def message(self, number: int) -> dict[str, Any]:
        """Return a message."""
        return {"n": number, "text": self.text(number)}
