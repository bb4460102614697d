"""Comparison of the messages that were read with those that were acknowledged.

Message *n* goes to journal *n* modulo the number of journals, and *n* determines its content. So
a reader knows the next message of each journal, and keeps no earlier ones. In addition, a running
hash over each journal is compared: two of these hash chains are equal only if they ran over the
same messages in the same order.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from gazette_sdk.cli.bench.site import Messages
from gazette_sdk.cli.program import CommandFailedError
from gazette_sdk.message.uuid import Envelope

KINDS = ("lost", "duplicated", "reordered", "changed")

NAMED_MAX = 10
"""Number of defects of a kind which are named; further ones are only counted."""

GAPS_MAX = 10_000
"""Limit of gaps per journal, whose messages may still arrive. Further ones count as lost."""

_CHAIN_BYTES = 16
_CHAIN_BLOCK = 4096


def journal_of(number: int, journals: Sequence[str]) -> str:
    """Return the journal of a message."""
    return journals[number % len(journals)]


class Chain:
    """Hash chain over messages. It does not depend on how many are added at once."""

    def __init__(self) -> None:
        # Separate hashes of numbers and texts need no loop over messages.
        self._numbers = hashlib.blake2b(digest_size=_CHAIN_BYTES)
        self._texts = hashlib.blake2b(digest_size=_CHAIN_BYTES)

    def add(self, numbers: Iterable[int], texts: Iterable[str]) -> None:
        """Add messages.

        Raises:
            TypeError: a number is no integer, or a text no string.
        """
        self._numbers.update(array("q", numbers))
        self._texts.update("\n".join([*texts, ""]).encode(errors="surrogatepass"))

    @property
    def end(self) -> str:
        """State after the last message."""
        both = self._numbers.digest() + self._texts.digest()
        return hashlib.blake2b(both, digest_size=_CHAIN_BYTES).hexdigest()


class Ledger:
    """Acknowledged messages, by journal.

    Args:
        journals: names of the journals, in the order of their messages' numbers.

    Attributes:
        journals: the names.
        next_number: number of the next message to publish.
        ends: offset after the last acknowledged message, by journal.
    """

    def __init__(self, journals: Sequence[str]) -> None:
        self.journals = tuple(journals)
        self.next_number = 0
        self.ends = dict.fromkeys(self.journals, 0)
        self._acknowledged = 0

    def take(self, count: int) -> range:
        """Return the numbers of the next messages."""
        begin = self.next_number
        self.next_number += count
        return range(begin, self.next_number)

    def acknowledge(self, numbers: range, ends: Iterable[tuple[str, int]]) -> None:
        """Record acknowledged messages.

        Args:
            numbers: the messages, which follow those acknowledged before.
            ends: pairs of a journal and the offset after its last of these messages.

        Raises:
            CommandFailedError: an offset does not lie after the earlier messages.
        """
        assert numbers.start == self._acknowledged, "messages are acknowledged in order"
        self._acknowledged = numbers.stop
        for journal, end in ends:
            if end <= self.ends[journal]:
                raise CommandFailedError(
                    f"{journal}: messages {numbers.start} to {numbers.stop - 1} were acknowledged "
                    f"up to offset {end}, before earlier ones at {self.ends[journal]}"
                )
            self.ends[journal] = end

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged messages."""
        return self._acknowledged

    @property
    def length_bytes(self) -> int:
        """Length of all journals in bytes."""
        return sum(self.ends.values())

    def chains(self, messages: Messages) -> dict[str, str]:
        """Return the hash chains over the acknowledged messages, in journal order."""
        return {
            journal: _chain_over(range(index, self._acknowledged, len(self.journals)), messages)
            for index, journal in enumerate(self.journals)
        }


def _chain_over(numbers: range, messages: Messages) -> str:
    chain = Chain()
    for begin in range(0, len(numbers), _CHAIN_BLOCK):
        block = numbers[begin : begin + _CHAIN_BLOCK]
        chain.add(block, map(messages.text, block))
    return chain.end


@dataclass
class Defects:
    """Messages with one kind of defect.

    Attributes:
        count: number of messages.
        named: the first of them, such as ``bench/part-000: message 17 at offset 4100``.
    """

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, journal: str, what: object, offset: int | None = None, count: int = 1) -> None:
        """Add messages."""
        self.count += count
        if len(self.named) < NAMED_MAX:
            place = "" if offset is None else f" at offset {offset}"
            self.named.append(f"{journal}: {what}{place}")


@dataclass
class Findings:
    """Defects of the messages that were read.

    Attributes:
        count: number of messages that were read.
        lost: messages that were acknowledged, and not read.
        duplicated: messages that were read more than once.
        reordered: messages that were read after later ones.
        changed: messages with another content, or never published.
    """

    count: int = 0
    lost: Defects = field(default_factory=Defects)
    duplicated: Defects = field(default_factory=Defects)
    reordered: Defects = field(default_factory=Defects)
    changed: Defects = field(default_factory=Defects)

    @property
    def by_kind(self) -> dict[str, Defects]:
        """Defects by the names of their kinds."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def is_flawless(self) -> bool:
        """True if there is no defect."""
        return not any(defects.count for defects in self.by_kind.values())

    def add(self, others: Findings) -> None:
        """Add the findings of another reader."""
        self.count += others.count
        for kind, defects in self.by_kind.items():
            more = others.by_kind[kind]
            defects.count += more.count
            defects.named += more.named

    def __str__(self) -> str:
        return "; ".join(
            f"{defects.count} {kind} ({', '.join(defects.named)}"
            f"{', …' if len(defects.named) >= NAMED_MAX else ''})"
            for kind, defects in self.by_kind.items()
            if defects.count
        )


class _Gaps:
    """Ranges of numbers that have not arrived yet."""

    def __init__(self) -> None:
        self._gaps: list[range] = []
        self.forgotten = 0

    def open(self, gap: range) -> None:
        if len(self._gaps) < GAPS_MAX:
            self._gaps.append(gap)
        else:
            self.forgotten += len(gap)

    def fill(self, number: int) -> bool:
        """Remove a number that arrived; return True if it was missing."""
        place = bisect_right(self._gaps, number, key=lambda gap: gap.start) - 1
        if place < 0 or number not in self._gaps[place]:
            return False
        gap = self._gaps[place]
        before = range(gap.start, number, gap.step)
        behind = range(number + gap.step, gap.stop, gap.step)
        self._gaps[place : place + 1] = [part for part in (before, behind) if part]
        return True

    def __iter__(self) -> Iterator[range]:
        return iter(self._gaps)


class Reading:
    """Verification of the messages that are read from the journals of a ledger.

    Args:
        journals: names of the journals, in the ledger's order.
        messages: content of the messages.
        begin: number of the first message.

    Attributes:
        findings: defects so far; :meth:`finish` completes them.
    """

    def __init__(self, journals: Sequence[str], messages: Messages, begin: int = 0) -> None:
        self.findings = Findings()
        self._messages = messages
        self._step = len(journals)
        self._chains = {journal: Chain() for journal in journals}
        self._gaps = {journal: _Gaps() for journal in journals}
        self._next = {
            journal: begin + (index - begin) % self._step for index, journal in enumerate(journals)
        }

    def feed(self, envelopes: Iterable[Envelope[dict[str, Any]]]) -> None:
        """Verify messages, in the order in which they were read."""
        for journal, group in groupby(envelopes, attrgetter("journal")):
            found = list(group)
            self.findings.count += len(found)
            self._feed_journal(journal, found)

    def _feed_journal(self, journal: str, found: list[Envelope[dict[str, Any]]]) -> None:
        messages = [envelope.message for envelope in found]
        numbers = [message.get("n") for message in messages]
        texts = [message.get("text") for message in messages]
        begin = self._next[journal]
        wanted = range(begin, begin + len(found) * self._step, self._step)
        if numbers == list(wanted):
            self._next[journal] = wanted.stop
            if texts == list(map(self._messages.text, wanted)):
                self._chains[journal].add(numbers, texts)
                return
            for envelope, expected in zip(found, wanted, strict=True):
                self._check_content(envelope, expected)
            return
        for envelope, number in zip(found, numbers, strict=True):
            self._check(envelope, number)

    def _check(self, envelope: Envelope[dict[str, Any]], number: Any) -> None:
        """Verify one message of a block with a defect."""
        journal = envelope.journal
        wanted, step = self._next[journal], self._step
        if type(number) is not int or number < 0 or (number - wanted) % step:
            foreign = f"a foreign message (n = {number!r})"
            self.findings.changed.add(journal, foreign, envelope.begin)
            return
        if number == wanted:
            self._next[journal] += step
        elif number > wanted:
            self._gaps[journal].open(range(wanted, number, step))
            self._next[journal] = number + step
        elif self._gaps[journal].fill(number):
            self.findings.reordered.add(journal, f"message {number}", envelope.begin)
        else:
            self.findings.duplicated.add(journal, f"message {number}", envelope.begin)
        self._check_content(envelope, number)

    def _check_content(self, envelope: Envelope[dict[str, Any]], number: int) -> None:
        if envelope.message.get("text") != self._messages.text(number):
            self.findings.changed.add(envelope.journal, f"message {number}", envelope.begin)

    def finish(self, count: int, chains: Mapping[str, str] | None = None) -> Findings:
        """Add the missing messages, and return all findings.

        Args:
            count: number of acknowledged messages.
            chains: by journal, over the acknowledged messages; ``None`` compares no chains.
        """
        for journal, gaps in self._gaps.items():
            if self._next[journal] < count:
                gaps.open(range(self._next[journal], count, self._step))
            elif self._next[journal] >= count + self._step:
                last = self._next[journal] - self._step
                self.findings.changed.add(journal, f"message {last}, which was not acknowledged")
            for gap in gaps:
                self.findings.lost.add(journal, _numbers(gap), count=len(gap))
            self.findings.lost.count += gaps.forgotten
        if chains is not None and self.findings.is_flawless:
            for journal, chain in chains.items():
                if self._chains[journal].end != chain:
                    self.findings.changed.add(journal, "the chain over all its messages")
        return self.findings


def _numbers(gap: range) -> str:
    if len(gap) == 1:
        return f"message {gap[0]}"
    return f"{len(gap)} messages from {gap[0]} to {gap[-1]}"
