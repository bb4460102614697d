"""Windows of one source over lists in memory, which tests compare with a shard's."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from gazette_sdk.shard.transaction.windows import Session

S = 1_000_000
"""A second in microseconds."""


@dataclass(frozen=True)
class Event:
    """A message: its key, publication and event time, in microseconds."""

    name: str
    key: str
    published: int
    event: int

    @property
    def at(self) -> float:
        return self.event / S


class Model:
    """The same, over lists in memory."""

    def __init__(self, declared, lateness_s=0.0):
        self.declared, self.lateness = declared, round(lateness_s * S)
        self.grace = round(declared.grace_s * S)
        self.greatest = 0
        # A session may be joined for so long after its end.
        self.joinable = round(declared.gap_s * S) if isinstance(declared, Session) else 0
        self.open: list[tuple[str, int, int, list[str]]] = []
        self.output = Counter()

    def close_passed(self):
        """Close what the watermark has passed; return the end up to which it has."""
        passed = self.greatest - self.lateness - self.grace
        self.close(passed)
        return passed

    def consume(self, event):
        passed = self.close_passed()
        for begin, end in self.spans(event.event):
            if end <= passed:
                self.output["late", event.key, begin, event.name] += 1
                continue
            joined = [
                each
                for each in self.open
                if each[0] == event.key and self.is_joined(each[1], each[2], begin, end)
            ]
            names = sorted(itertools.chain([event.name], *(each[3] for each in joined)))
            first = min([begin, *(each[1] for each in joined)])
            last = max([end, *(each[2] for each in joined)])
            self.open = [each for each in self.open if each not in joined]
            self.open.append((event.key, first, last, names))
        self.greatest = max(self.greatest, event.event)

    def is_joined(self, begin, end, other_begin, other_end):
        if isinstance(self.declared, Session):
            return begin < other_end and other_begin < end
        return (begin, end) == (other_begin, other_end)

    def spans(self, at):
        if isinstance(self.declared, Session):
            return [(at, at + round(self.declared.gap_s * S))]
        size, step = round(self.declared.size_s * S), round(self.declared.step_s * S)
        begins = range((at - size) // step * step, at + 1, step)
        return [(begin, begin + size) for begin in begins if begin + size > at]

    def close(self, passed=math.inf):
        passed -= self.joinable
        for key, begin, end, names in [each for each in self.open if each[2] <= passed]:
            self.output["closed", key, (begin, end), tuple(names)] += 1
        self.open = [each for each in self.open if each[2] > passed]


def merged(earlier, later):
    return sorted([*earlier, *later])
