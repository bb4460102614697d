"""Bugs to plant: each has to be found by the checker within a thousand seeds."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["PLANTS"]

PLANTS: dict[str, Callable[[], None]] = {}
