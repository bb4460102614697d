"""Latencies in bounded memory: counts in buckets whose widths grow with their values."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Histogram"]

_PRECISION_BITS = 8
"""Values share a bucket with others that differ by less than one in 2 ** 7: under 0.8 %."""

_VALUE_BITS = 44
"""Greatest value is 2 ** 44 ns, which is five hours; beyond it counts as that."""

_HALF = 1 << (_PRECISION_BITS - 1)
_VALUE_MAX = (1 << _VALUE_BITS) - 1
_BUCKETS = (_VALUE_BITS - _PRECISION_BITS + 2) * _HALF


class Histogram:
    """How often which value was recorded.

    Values are integers, such as nanoseconds. The smaller ones are exact. The greater ones are
    known to 0.8 %; the greatest one is exact. It takes some forty kilobytes, however many values
    it has seen.

    Attributes:
        count: how many values were recorded.
        max: the greatest one.
        total: their sum.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max = 0
        self.total = 0
        self._counts = [0] * _BUCKETS

    def record(self, value: int) -> None:
        """Count a value. What is below zero counts as zero."""
        value = max(value, 0)
        self.count += 1
        self.total += value
        self.max = max(self.max, value)
        value = min(value, _VALUE_MAX)
        shift = max(value.bit_length() - _PRECISION_BITS, 0)
        self._counts[shift * _HALF + (value >> shift)] += 1

    @property
    def mean(self) -> float:
        """The values' mean; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def quantiles(self, shares: Sequence[float]) -> list[int]:
        """For each share: the least value which so large a share of all values does not exceed.

        Args:
            shares: such as 0.99, ascending.

        Returns:
            The greatest value of the bucket that holds it; 0 without values.
        """
        found: list[int] = []
        seen, bucket = 0, -1
        for share in shares:
            wanted = max(1, math.ceil(share * self.count - 1e-9))
            while self.count and seen < wanted:
                bucket += 1
                seen += self._counts[bucket]
            found.append(min(_greatest(bucket), self.max) if self.count else 0)
        return found


def _greatest(bucket: int) -> int:
    """The greatest value of a bucket."""
    shift = max(bucket // _HALF - 1, 0)
    return ((bucket - shift * _HALF + 1) << shift) - 1
