"""Counters of the client side; names are those of client section 9.

Prometheus appends ``_total`` to the name of every counter.
"""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import Counter

__all__ = [
    "APPEND_BYTES",
    "DISCARD_FRAGMENT_BYTES",
    "FRAGMENT_OPEN",
    "FRAGMENT_OPEN_BYTES",
    "FRAGMENT_OPEN_CONTENT_LENGTH",
    "READ_BYTES",
    "READ_FRAGMENT_BYTES",
    "count_appended",
]

APPEND_BYTES = Counter(
    "gazette_append_bytes", "Bytes written to appends; retries count again.", ["journal"]
)
READ_BYTES = Counter("gazette_read_bytes", "Bytes of journals delivered.", ["journal"])

FRAGMENT_OPEN = Counter("gazette_fragment_open", "Fragments opened directly.", ["journal", "codec"])
FRAGMENT_OPEN_BYTES = Counter(
    "gazette_fragment_open_bytes",
    "Uncompressed length of fragments opened directly.",
    ["journal", "codec"],
)
FRAGMENT_OPEN_CONTENT_LENGTH = Counter(
    "gazette_fragment_open_content_length",
    "Content length of fragments opened directly, where the store told it.",
    ["journal", "codec"],
)
READ_FRAGMENT_BYTES = Counter(
    "gazette_read_fragment_bytes",
    "Uncompressed bytes read of fragments opened directly, without skipped ones.",
    ["journal", "codec"],
)
DISCARD_FRAGMENT_BYTES = Counter(
    "gazette_discard_fragment_bytes",
    "Uncompressed bytes skipped in fragments opened directly, while seeking.",
    ["journal", "codec"],
)


@lru_cache(maxsize=1024)
def _appended_to(journal: str) -> Counter:
    return APPEND_BYTES.labels(journal)


def count_appended(journal: str, length_bytes: int) -> None:
    """Count what is written to an append of a journal."""
    _appended_to(journal).inc(length_bytes)
