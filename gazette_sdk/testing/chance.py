"""Random decisions of injected faults, all derived from one seed."""

from __future__ import annotations

import random
import threading
from collections import Counter

__all__ = ["Chance"]


class Chance:
    """Source of random decisions about subjects, such as an operation on an object.

    The nth decision about a subject depends only on the seed, the subject and n. So threads and
    tasks get the same decisions in every run, in whatever order they ask. Any thread may call.

    Args:
        seed: derives all decisions.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def about(self, subject: str) -> random.Random:
        """Return the random numbers of the next decision about a subject."""
        with self._lock:
            count = self._counts[subject]
            self._counts[subject] += 1
        return random.Random(f"{self.seed}/{subject}/{count}")  # noqa: S311 - no secret
