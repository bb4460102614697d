"""Histogram of latencies with logarithmic buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Histogram"]

_PRECISION_BITS = 8
"""Values in one bucket differ by less than one in 2 ** 7, which is below 0.8 %."""

_VALUE_BITS = 44
"""The greatest value is 2 ** 44 ns, which is five hours; greater ones count as that."""

_HALF = 1 << (_PRECISION_BITS - 1)
_VALUE_MAX = (1 << _VALUE_BITS) - 1
_BUCKETS = (_VALUE_BITS - _PRECISION_BITS + 2) * _HALF


class Histogram:
    """Histogram of integers, such as nanoseconds.

    Small values and the greatest one are exact, the others within 0.8 %. It takes about 40 KB
    for any number of values.

    Attributes:
        count: number of values.
        max: greatest value.
        total: sum of the values.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max = 0
        self.total = 0
        self._counts = [0] * _BUCKETS

    def record(self, value: int) -> None:
        """Record a value. A negative value counts as zero."""
        value = max(value, 0)
        self.count += 1
        self.total += value
        self.max = max(self.max, value)
        value = min(value, _VALUE_MAX)
        shift = max(value.bit_length() - _PRECISION_BITS, 0)
        self._counts[shift * _HALF + (value >> shift)] += 1

    @property
    def mean(self) -> float:
        """Mean of the values; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def quantiles(self, shares: Sequence[float]) -> list[int]:
        """Return quantiles: the greatest value of each quantile's bucket, or 0 without values.

        Args:
            shares: shares of all values such as 0.99, ascending.
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
    """Return the greatest value of a bucket."""
    shift = max(bucket // _HALF - 1, 0)
    return ((bucket - shift * _HALF + 1) << shift) - 1
