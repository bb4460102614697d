"""Appends that may stand somewhere in a journal: finding them in its content. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Final

_KEY_BYTES: Final = 32
"""Appends whose outcome is unknown are looked up by so many of their first bytes."""


@dataclass(frozen=True, slots=True)
class AppendPiece:
    """Append, by its sum.

    Attributes:
        length: in bytes.
        sha1: of its content.
        key: its first bytes, if its content is known.
        client: who appended it, in words.
    """

    length: int
    sha1: bytes
    key: bytes
    client: str


class AppendPieces:
    """Appends that may stand somewhere, each so many times, by their first bytes."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[AppendPiece]] = {}
        self._key_lengths: set[int] = set()
        self._left: Counter[tuple[int, bytes]] = Counter()

    def add(self, piece: AppendPiece, count: int) -> None:
        """Allow an append ``count`` times more."""
        if not piece.key:
            return  # it is empty, or only its sum is known
        if (piece.length, piece.sha1) not in self._left:
            self._by_key.setdefault(piece.key, []).append(piece)
            self._key_lengths.add(len(piece.key))
        self._left[piece.length, piece.sha1] += count

    def take(self, piece: AppendPiece) -> None:
        """Use one of an append."""
        self._left[piece.length, piece.sha1] -= 1

    def starting_at(
        self, content: memoryview, at: int, *, used_up: bool = False
    ) -> list[AppendPiece]:
        """Return the appends whose content begins at a place, the longest one first.

        Args:
            content: the content.
            at: the place.
            used_up: True for those, too, that may not stand there any more.
        """
        found = [
            piece
            for length in self._key_lengths
            for piece in self._by_key.get(bytes(content[at : at + length]), ())
            if at + piece.length <= len(content)
            and (used_up or self._left[piece.length, piece.sha1] > 0)
            and sha1_of(content[at : at + piece.length]) == piece.sha1
        ]
        return sorted(found, key=lambda each: each.length, reverse=True)

    def take_all(self, content: memoryview) -> bool:
        """Use appends that make up some content, without a rest.

        Returns:
            False if there are none; then nothing is used.
        """
        path: list[tuple[list[AppendPiece], AppendPiece]] = []
        choices = self.starting_at(content, 0) if content else []
        at = 0
        while at < len(content):
            while not choices:
                if not path:
                    return False
                choices, last = path.pop()
                self._left[last.length, last.sha1] += 1
                at -= last.length
            piece, *rest = choices
            self.take(piece)
            path.append((rest, piece))
            at += piece.length
            choices = self.starting_at(content, at) if at < len(content) else []
        return True


def piece_of(content: bytes, client: str) -> AppendPiece:
    """Return the piece of an append's content."""
    return AppendPiece(len(content), sha1_of(content), bytes(content[:_KEY_BYTES]), client)


def sha1_of(content: bytes | memoryview) -> bytes:
    """Return the SHA-1 sum of some content, 20 bytes."""
    return hashlib.sha1(content, usedforsecurity=False).digest()
