"""Text of the demo, its messages, and the word count."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

from gazette_sdk import JsonMessage

WORD = re.compile(r"[a-z]+")


@dataclass
class Line(JsonMessage):
    """Line of a topic of Python's own documentation."""

    topic: str
    text: str


def all_lines() -> Iterator[Line]:
    """Yield the lines of the text that every CPython ships for `help()`."""
    for topic, text in topics.items():
        for line in text.splitlines():
            if line.strip():
                yield Line(topic, line)


def words_of(text: str) -> list[str]:
    """Return the lower-case words of a text."""
    return WORD.findall(text.lower())


def count(texts: Iterable[str]) -> Counter[str]:
    """Count lower-case words."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(words_of(text))
    return words
