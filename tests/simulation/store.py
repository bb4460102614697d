"""Fragment store of the simulation: one in memory for all brokers, which fails, lags and heals."""

from __future__ import annotations

import enum
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import BinaryIO

from gazette_sdk.fragment import registry
from gazette_sdk.fragment.stores.base import (
    ObjectStatus,
    Store,
    StoredContent,
    StoredObject,
    read_exactly,
)
from gazette_sdk.protocol.names import StoreURL, parse_store_url

__all__ = ["STORE_URL", "StoreFault", "StoredState", "use_store"]

STORE_URL = "memory://simulated/"


class StoreFault(enum.Enum):
    """Fault of a store."""

    NONE = "works"
    BEFORE = "fails before it does anything"
    AFTER = "fails after it did what was asked"
    SOMETIMES = "fails now and then, before or after"
    DENIED = "refuses access"


class StoredState:
    """Objects of the store, and its present fault.

    Args:
        now: Unix time in seconds.
        rng: decides which operations fail.
        lies: decides what the store does not keep, and does not show.

    Attributes:
        fault: its fault.
        list_lag_s: time after which a new object appears in listings.
        tears: rate of puts that leave a part of their content; most of them report success.
        stale_s: greatest age of what a listing shows; each shows another age.
        objects: content by key.
    """

    def __init__(
        self, now: Callable[[], float], rng: random.Random, lies: random.Random | None = None
    ) -> None:
        self.fault = StoreFault.NONE
        self.list_lag_s = 0.0
        self.tears = 0.0
        self.stale_s = 0.0
        self.objects: dict[str, bytes] = {}
        self._stored_at: dict[str, float] = {}
        self._listed_at: dict[str, float] = {}
        self._now = now
        self._rng = rng
        self._lies = lies or random.Random(0)

    def before(self) -> None:
        """Fail before an operation, if that is the fault."""
        if self.fault is StoreFault.DENIED:
            raise PermissionError("the simulated store refuses access")
        is_failing = self.fault is StoreFault.BEFORE or (
            self.fault is StoreFault.SOMETIMES and self._rng.random() < 0.4
        )
        if is_failing:
            raise OSError("the simulated store fails")

    def after(self) -> None:
        """Fail after an operation, if that is the fault."""
        is_failing = self.fault is StoreFault.AFTER or (
            self.fault is StoreFault.SOMETIMES and self._rng.random() < 0.4
        )
        if is_failing:
            raise OSError("the answer of the simulated store is lost")

    def put(self, key: str, data: bytes) -> None:
        """Store an object, or a part of it if the store tears."""
        lies = self._lies
        is_torn = bool(self.tears) and lies.random() < self.tears
        if is_torn:
            data = data[: int(lies.choice((0.0, lies.random())) * len(data))]
        self.objects[key] = data
        self._stored_at[key] = self._now()
        self._listed_at.setdefault(key, self._now() + self.list_lag_s)
        if is_torn and lies.random() < 0.2:
            raise OSError("the simulated store crashes during an upload")

    def listed(self, prefix: str) -> list[StoredObject]:
        """Return the objects of a listing, with their keys as paths."""
        now = self._now()
        if self.stale_s:
            now -= self.stale_s * self._lies.random()
        return [
            StoredObject(key, int(self._stored_at[key]), len(self.objects[key]))
            for key in sorted(self.objects)
            if key.startswith(prefix) and self._listed_at[key] <= now
        ]


class SimulatedStore(Store):
    """A store of one process."""

    def __init__(self, parsed: StoreURL, state: StoredState) -> None:
        super().__init__(parsed)
        self._state = state

    def _sign_get(self, key: str, ttl_s: float) -> str:
        del ttl_s
        return f"memory://simulated/{key}"

    def _status_of(self, key: str) -> ObjectStatus | None:
        self._state.before()
        data = self._state.objects.get(key)
        return None if data is None else ObjectStatus(len(data))

    def _open(self, key: str) -> StoredContent:
        self._state.before()
        data = self._state.objects.get(key)
        if data is None:
            raise FileNotFoundError(key)
        return StoredContent(io.BytesIO(data), len(data))

    def _put(
        self, key: str, content: BinaryIO, length: int, content_encoding: str, overwrite: bool
    ) -> None:
        del content_encoding
        state = self._state
        state.before()
        data = read_exactly(content, length)
        if overwrite or key not in state.objects:
            state.put(key, data)
        state.after()

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        self._state.before()
        for found in self._state.listed(prefix):
            yield replace(found, path=found.path.removeprefix(prefix))
        self._state.after()

    def _remove(self, key: str) -> None:
        self._state.before()
        self._state.objects.pop(key, None)
        self._state.after()

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, PermissionError)


def use_store(state: StoredState) -> None:
    """Make every store of this process the simulated one."""

    def open_store(url: str, **_: object) -> Store:
        return SimulatedStore(parse_store_url(url), state)

    registry.open_store = open_store
