"""Application of `shard_words.py`, in a module that its process can import."""

from __future__ import annotations

from dataclasses import dataclass

from gazette_sdk import JsonMessage, shard

__all__ = ["Word", "counter"]


@dataclass
class Word(JsonMessage):
    """One word of a text."""

    word: str


@shard.handler(
    message=Word, store=shard.RocksStore[str, int], sources="topic=words", hot_standbys=0
)
def counter(txn: shard.Transaction, word: Word) -> None:
    """Count a word."""
    txn.store[word.word] = txn.store.get(word.word, 0) + 1
