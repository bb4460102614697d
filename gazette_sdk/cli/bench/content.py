"""Message number *n*: anybody can tell what it holds."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

__all__ = ["Messages"]

_STEP = 7919
"""A prime: texts of neighbours begin at unrelated places."""

_SLACK_CHARS = 1 << 17
"""There are at least so many places where a text may begin."""

_JSON_CHARS = len('{"n":,"text":""}')


class Messages:
    """Messages of one size, by their numbers.

    A message is a dict: its number ``n``, and ``text``, a piece of English prose that follows
    from the number. It compresses as text does.

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
        """The text of a message."""
        place = number * _STEP % self._places
        return self._prose[place : place + self._chars - len(str(number))]

    def message(self, number: int) -> dict[str, Any]:
        """A message."""
        return {"n": number, "text": self.text(number)}
