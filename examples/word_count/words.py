"""The text, its messages, and how its words are counted."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

from gazette_sdk import JsonMessage

WORD = re.compile(r"[a-z]+")


@dataclass
class Line(JsonMessage):
    """One line of a topic of Python's own documentation."""

    topic: str
    text: str


def all_lines() -> Iterator[Line]:
    """The text that every CPython ships for `help()`, line by line."""
    for topic, text in topics.items():
        for line in text.splitlines():
            if line.strip():
                yield Line(topic, line)


def count(texts: Iterable[str]) -> Counter[str]:
    """How often each lower-case word occurs."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(WORD.findall(text.lower()))
    return words
