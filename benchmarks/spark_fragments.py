"""Fragments of a Spark benchmark, and what readers must find in them.

Journals hold plain messages, some of them repeated, and transactions, some of them rolled back.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gazette_sdk.fragment import open_store
from gazette_sdk.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    Stamp,
    build_uuid,
    new_producer_id,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, sum_of

JOURNALS = 6
FRAGMENT_BYTES = 16 << 20
TRANSACTION = 1000
"""Number of messages of a transaction, and of those that are repeated."""

WORDS_PER_MESSAGE = 16
N_FIRST, N_ROLLED_BACK = 1_000_000_000, 2_000_000_000
"""Messages are numbered from here, so that all have the same length."""

LINE_BYTES = len(b'{"UUID":"","n":,"text":""}\n') + 36 + 10 + 8 * WORDS_PER_MESSAGE


def vocabulary() -> np.ndarray[Any, np.dtype[np.bytes_]]:
    """Return words of three to seven letters, each in eight bytes."""
    random = np.random.default_rng(0)
    letters = random.integers(ord("a"), ord("z") + 1, (1000, 8), dtype=np.uint8)
    letters[np.arange(8) >= random.integers(3, 8, 1000)[:, None]] = 0
    return np.unique(letters.view("S8").ravel())


VOCABULARY = vocabulary()


@dataclass
class Generated:
    """What readers must find.

    Attributes:
        prefix: prefix of the journals.
        content_bytes: length of all journals.
        stored_bytes: size of their fragments in the store.
        fragments: number of fragments.
        seconds: time it took to generate and to store them.
        words: number of each word of the vocabulary.
        numbers: by journal, count, sum and exclusive or of the numbers of its messages.
    """

    prefix: str
    content_bytes: int = 0
    stored_bytes: int = 0
    fragments: int = 0
    seconds: float = 0.0
    words: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, tuple[int, int, int]] = field(default_factory=dict)


class JournalWriter:
    """Writer of the fragments of one journal, by two producers: one uses transactions."""

    def __init__(self, journal: str, codec: pb.CompressionCodec, seed: int) -> None:
        self._journal, self._codec = journal, codec
        self._random = np.random.default_rng(seed)
        self._plain, self._transactional = Stamp(new_producer_id()), Stamp(new_producer_id())
        self._acknowledged = self._transactional.reserve(1)
        self._count = 0
        self._offset = 0
        self.counts = np.zeros(len(VOCABULARY), dtype=np.int64)

    def numbers(self) -> tuple[int, int, int]:
        """Return count, sum and exclusive or of the numbers of the messages that were written."""
        all_numbers = np.arange(N_FIRST, N_FIRST + self._count)
        return self._count, int(all_numbers.sum()), int(np.bitwise_xor.reduce(all_numbers))

    def fragment(self, length_bytes: int) -> tuple[pb.Fragment, bytes]:
        """Return the next fragment, of about this length, and its bytes as they are stored."""
        half = max(length_bytes // LINE_BYTES // 2, TRANSACTION)
        parts = [self._acknowledge()] if self._offset == 0 else []
        plain = self._messages(self._plain, OUTSIDE_TXN, half)
        rolled_back = self._messages(self._transactional, CONTINUE_TXN, TRANSACTION, N_ROLLED_BACK)
        parts += [plain, plain[-TRANSACTION:], rolled_back, self._acknowledge()]
        for _ in range(half // TRANSACTION):
            parts.append(self._messages(self._transactional, CONTINUE_TXN, TRANSACTION))
            self._acknowledged = self._transactional.reserve(1)
            parts.append(self._acknowledge())
        content = b"".join(part.tobytes() for part in parts)
        fragment = pb.Fragment(
            journal=self._journal,
            begin=self._offset,
            end=self._offset + len(content),
            sum=sum_of(hashlib.sha1(content).digest()),
            compression_codec=self._codec,
        )
        self._offset = fragment.end
        return fragment, gzip.compress(content, 1) if self._codec == pb.GZIP else content

    def _acknowledge(self) -> np.ndarray[Any, Any]:
        """Return an acknowledgement; of what is rolled back that of before, once more."""
        uuid = build_uuid(self._transactional.producer, self._acknowledged, ACK_TXN)
        return np.frombuffer(b'{"UUID":"%b"}\n' % str(uuid).encode(), dtype=np.uint8)

    def _messages(
        self, stamp: Stamp, flags: int, count: int, numbered_from: int = 0
    ) -> np.ndarray[Any, Any]:
        """Return messages, one in a row, and count them if they are not rolled back."""
        drawn = self._random.integers(0, len(VOCABULARY), (count, WORDS_PER_MESSAGE))
        stamp.flags = flags
        uuids = stamp.texts(stamp.reserve(count), count, b'{"UUID":"', b'","n":')
        first = numbered_from or N_FIRST + self._count
        numbers = np.arange(first, first + count)[:, None] // 10 ** np.arange(9, -1, -1) % 10
        text = VOCABULARY[drawn].view(np.uint8).reshape(count, -1)
        if not numbered_from:
            self._count += count
            self.counts += np.bincount(drawn.ravel(), minlength=len(VOCABULARY))
        return np.hstack(
            [
                uuids,
                numbers.astype(np.uint8) + ord("0"),
                np.tile(np.frombuffer(b',"text":"', dtype=np.uint8), (count, 1)),
                np.where(text == 0, ord(" "), text).astype(np.uint8),
                np.tile(np.frombuffer(b'"}\n', dtype=np.uint8), (count, 1)),
            ]
        )


def generate(store_url: str, prefix: str, length_bytes: int, seed: int) -> Generated:
    """Store fragments of journals of this length together."""
    found, begun = Generated(prefix), time.perf_counter()
    store = open_store(store_url)

    def write(number: int) -> tuple[str, JournalWriter, int, int, int]:
        journal, codec = f"{prefix}part-{number:03d}", (pb.NONE, pb.GZIP)[number % 2]
        writer = JournalWriter(journal, codec, seed * JOURNALS + number)
        left, stored_bytes, fragments = length_bytes // JOURNALS, 0, 0
        while left > 0:
            fragment, content = writer.fragment(min(left, FRAGMENT_BYTES))
            store.put(content_path(fragment), io.BytesIO(content), len(content), "")
            left -= fragment.end - fragment.begin
            stored_bytes += len(content)
            fragments += 1
        return journal, writer, fragment.end, stored_bytes, fragments

    with ThreadPoolExecutor(2) as threads:
        for journal, writer, end, stored_bytes, fragments in threads.map(write, range(JOURNALS)):
            found.content_bytes += end
            found.stored_bytes += stored_bytes
            found.fragments += fragments
            found.numbers[journal] = writer.numbers()
            for word, count in zip(VOCABULARY.tolist(), writer.counts.tolist(), strict=True):
                found.words[word.decode()] += count
    store.close()
    found.seconds = time.perf_counter() - begun
    return found
