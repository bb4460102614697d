"""Transactions whose fate is known, and a checker of what committed readers must see of them.

Messages say of themselves which transaction they belong to, which attempt at it, and which of its
messages they are. Of a transaction a history knows that it was *decided* (its intents are stored)
and perhaps that it was *acknowledged* (its producer was told that it is over). A committed reader
sees the decided ones, each message once, in the producer's order; and nothing of attempts that
were never decided, because their process was killed or their block failed.

A message that is published by itself is a transaction of one message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Delivered", "History", "Message", "Transaction", "check_uninterrupted"]


class Message(NamedTuple):
    """What a message says of itself."""

    producer: str
    number: int  # of the transaction
    attempt: int
    index: int  # within the transaction, over all its journals

    @property
    def transaction(self) -> str:
        return f"transaction {self.number} of {self.producer}"


Delivered = Mapping[str, Sequence[Message]]
"""What a reader was given, in that order, by journal."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """One attempt at a transaction.

    Attributes:
        number: counts the producer's transactions, without gaps.
        attempt: tells attempts at one number apart.
        journals: of each message, in the order in which they are published.
    """

    producer: str
    number: int
    attempt: int
    journals: tuple[str, ...]

    def messages_of(self, journal: str) -> list[Message]:
        return [
            Message(self.producer, self.number, self.attempt, index)
            for index, name in enumerate(self.journals)
            if name == journal
        ]


@dataclass
class History:
    """What became of the transactions of any number of producers."""

    decided: dict[str, list[Transaction]] = field(default_factory=dict)
    acknowledged: set[tuple[str, int]] = field(default_factory=set)

    def decide(self, transaction: Transaction) -> None:
        """Its intents are stored. Telling the last one again is telling it once."""
        known = self.decided.setdefault(transaction.producer, [])
        if known and known[-1] == transaction:
            return
        assert transaction.number == len(known), (
            f"{transaction.producer} decided transaction {transaction.number} behind"
            f" {len(known)} others"
        )
        known.append(transaction)

    def acknowledge(self, producer: str, number: int) -> None:
        """The producer was told that it is over."""
        assert number < len(self.decided.get(producer, [])), (
            f"transaction {number} of {producer} was acknowledged before it was decided"
        )
        self.acknowledged.add((producer, number))

    @property
    def decided_count(self) -> int:
        return sum(map(len, self.decided.values()))

    def messages_of(self, journal: str) -> dict[str, list[Message]]:
        """What must be delivered of a journal, by producer, in order."""
        return {
            producer: [m for transaction in known for m in transaction.messages_of(journal)]
            for producer, known in self.decided.items()
        }

    def check(self, delivered: Delivered) -> None:
        """Hold what a reader was given against what is known.

        Raises:
            AssertionError: a message is missing, stands there twice or out of order, or belongs
                to an attempt that was never decided.
        """
        journals = {j for known in self.decided.values() for t in known for j in t.journals}
        for journal in sorted(journals | set(delivered)):
            found: dict[str, list[Message]] = {}
            for message in delivered.get(journal, ()):
                found.setdefault(message.producer, []).append(message)
            wanted = self.messages_of(journal)
            for producer in sorted(wanted.keys() | found.keys()):
                self._compare(journal, wanted.get(producer, []), found.get(producer, []))

    def _compare(self, journal: str, wanted: list[Message], found: list[Message]) -> None:
        if found == wanted:
            return
        for message, count in Counter(found).items():
            assert count == 1, f"{journal}: {message} was delivered {count} times"
        known = set(wanted)
        missing = known - set(found)
        for message in found:
            assert message in known, f"{journal}: {message} was never decided"
        for message in wanted:
            if message not in missing:
                continue
            of_it = [m for m in wanted if m.number == message.number]
            lost = [m for m in of_it if m in missing]
            fate = (
                "acknowledged"
                if (message.producer, message.number) in self.acknowledged
                else "decided"
            )
            assert len(lost) < len(of_it), (
                f"{journal}: {message.transaction}, which was {fate}, was lost:"
                f" none of its {len(of_it)} messages was delivered"
            )
            raise AssertionError(
                f"{journal}: {message.transaction}, which was {fate}, was delivered in part:"
                f" {len(lost)} of its {len(of_it)} messages are missing, the first is {lost[0]}"
            )
        for one, other in zip(found, wanted, strict=True):
            assert one == other, f"{journal}: {one} was delivered where {other} is due"


def check_uninterrupted(delivered: Delivered) -> None:
    """A committed transaction is delivered in one piece per journal, nobody else's between.

    Raises:
        AssertionError: another message stands within a transaction.
    """
    for journal, messages in delivered.items():
        over: set[tuple[str, int, int]] = set()
        last: tuple[str, int, int] | None = None
        for message in messages:
            transaction = message[:3]
            if transaction == last:
                continue
            if last is not None:
                over.add(last)
            assert transaction not in over, (
                f"{journal}: {message.transaction} was interrupted before message {message.index}"
            )
            last = transaction
