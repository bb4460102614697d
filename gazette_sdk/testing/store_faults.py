"""Faults of fragment stores: a store around any other that delays, fails, breaks and lags.

In the tests' own process::

    faults = StoreFaultInjector(StoreFaults(errors_before=0.1), seed=7)
    with faults.installed():       # stores that brokers open from now on are wrapped
        ...
        faults.fail()              # every operation fails from now
        faults.heal()              # no faults any more

A process of its own, such as ``gazette serve``, is started by :mod:`~.faulty_process` with a file
of settings, which :func:`save_store_faults` writes and rewrites while the process runs.

All random decisions (:class:`Chance`) come from one seed. :class:`CrashAt` stops a shard at a
chosen step of a commit.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self, cast

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.fragment.stores import (
    ObjectStatus,
    Store,
    StoredContent,
    StoredObject,
    wrap_stores,
)
from gazette_sdk.fragment.stores.base import OPERATION_TIMEOUT_S
from gazette_sdk.protocol.names import parse_store_url
from gazette_sdk.shard.transaction.machine import CommitStep


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


EXIT_STATUS = 137
"""Exit status of a process that crashes: that of one that is killed."""


class InjectedCrashError(Exception):
    """A crash that a test has asked for. What runs ends without anything further."""


class CrashAt:
    """Function to call at each step of a commit, which crashes at one of them.

    Args:
        step: the step.
        nth: the time it is reached at which to crash, from 1 on.
        crash: ends what runs; raises :class:`InjectedCrashError` by default.

    Attributes:
        has_crashed: the step was reached.
        steps: all steps that were reached, in order.
    """

    def __init__(
        self, step: CommitStep, nth: int = 1, crash: Callable[[], None] | None = None
    ) -> None:
        self.has_crashed = False
        self.steps: list[CommitStep] = []
        self._step = step
        self._left = nth
        self._crash = crash or _raise
        self._lock = threading.Lock()

    def __call__(self, step: CommitStep) -> None:
        """Note a step, and crash if it is the one."""
        with self._lock:
            self.steps.append(step)
            if step is self._step:
                self._left -= 1
            crashes = step is self._step and self._left == 0
        if crashes:
            self.has_crashed = True
            self._crash()


def exit_process() -> None:
    """End this process at once, as a kill does: nothing is flushed, closed or given up."""
    os._exit(EXIT_STATUS)


def _raise() -> None:
    raise InjectedCrashError("a test has asked for this crash")


OPERATIONS: Final = ("signget", "exists", "get", "put", "list", "remove")
"""Names of a store's operations, as its metrics have them."""

INJECTED_MAX: Final = 10_000
"""Number of injected faults that an injector remembers: the last ones."""

_RATES: Final = (
    "errors_before",
    "errors_after",
    "partial_uploads",
    "torn_uploads",
    "empty_uploads",
    "broken_reads",
)

_FOLLOW_S: Final = 0.05
"""Pause after which a hanging operation looks again whether its settings' file has changed."""


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """Settings of a store's faults. Rates are probabilities from 0 to 1, per operation.

    Attributes:
        latency_s: least and greatest additional time of an operation, in seconds.
        errors_before: rate of operations that fail without an effect.
        errors_after: rate of puts and removals that have their effect, and then fail.
        partial_uploads: rate of puts whose content breaks off in the middle. They fail.
        torn_uploads: rate of puts that leave an object without its last bytes, and report success.
        empty_uploads: rate of puts that leave an empty object, and report success.
        broken_reads: rate of opened objects whose content breaks off in the middle.
        list_lag_s: time in seconds for which listings omit a new object. Stores have modification
            times in whole seconds: an object appears up to a second later.
        revoked: True if the store refuses the credentials of every operation.
        unreachable: True if every operation fails.
        hangs: True if operations wait until this is False again. They fail after their time limit.
        operations: names of the affected operations, of :data:`OPERATIONS`.
    """

    latency_s: tuple[float, float] = (0.0, 0.0)
    errors_before: float = 0.0
    errors_after: float = 0.0
    partial_uploads: float = 0.0
    torn_uploads: float = 0.0
    empty_uploads: float = 0.0
    broken_reads: float = 0.0
    list_lag_s: float = 0.0
    revoked: bool = False
    unreachable: bool = False
    hangs: bool = False
    operations: tuple[str, ...] = OPERATIONS

    def __post_init__(self) -> None:
        for name in _RATES:
            rate = getattr(self, name)
            if not 0 <= rate <= 1:
                raise ConfigurationError(f"{name}={rate}: give a probability from 0 to 1")
        low, high = self.latency_s
        if not 0 <= low <= high:
            raise ConfigurationError(
                f"latency_s={self.latency_s}: give the least and the greatest time, in seconds"
            )
        if unknown := set(self.operations) - set(OPERATIONS):
            raise ConfigurationError(
                f"operations: a store has no {', '.join(sorted(unknown))}; "
                f"it has {', '.join(OPERATIONS)}"
            )


NO_FAULTS: Final = StoreFaults()


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Fault that was injected.

    Attributes:
        operation: the operation, of :data:`OPERATIONS`.
        key: key of the object, or prefix of the listing.
        fault: the setting of :class:`StoreFaults` which it comes from.
    """

    operation: str
    key: str
    fault: str


class StoreFaultInjector:
    """Faults of all stores that it wraps. Any thread may call, also while the stores are in use.

    Args:
        faults: settings to begin with.
        seed: derives every random decision: the nth operation of a kind on an object has the same
            faults in every run.
        clock: seconds since 1970, for the lag of listings.
        sleep: pauses the calling thread for some seconds.
    """

    def __init__(
        self,
        faults: StoreFaults = NO_FAULTS,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.injected: deque[InjectedFault] = deque(maxlen=INJECTED_MAX)
        self.clock = clock
        self.sleep = sleep
        self._chance = Chance(seed)
        self._faults = faults
        self._changed = threading.Condition()
        self._path: Path | None = None
        self._version: tuple[int, int] | None = None

    @classmethod
    def following(cls, path: Path) -> Self:
        """Return an injector with the settings of a file, which are read again when it changes.

        Args:
            path: file that :func:`save_store_faults` writes.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        seed, faults = _load(path)
        injector = cls(faults, seed=seed)
        injector._path = path
        return injector

    @property
    def faults(self) -> StoreFaults:
        """Settings of now."""
        if self._path is not None:
            self._follow(self._path)
        return self._faults

    def change(self, **changes: object) -> None:
        """Change some of the settings, by name."""
        with self._changed:
            self._faults = dataclasses.replace(self._faults, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()

    def fail(self) -> None:
        """Make every operation fail from now on, those of opened objects included."""
        self.change(unreachable=True)

    def revoke(self) -> None:
        """Make the stores refuse the credentials from now on."""
        self.change(revoked=True)

    def hang(self) -> None:
        """Make every operation wait from now on."""
        self.change(hangs=True)

    def heal(self) -> None:
        """End all faults."""
        with self._changed:
            self._faults = NO_FAULTS
            self._changed.notify_all()

    def wrap(self, store: Store) -> FaultyStore:
        """Return a store with these faults around another one."""
        return FaultyStore(store, self)

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Wrap every store that is opened in this process while the context is open."""
        with wrap_stores(self.wrap):
            yield self

    # ------------------------------------------------- used by the stores

    def before(self, operation: str, key: str, limit_s: float) -> _Decision:
        """Delay or fail an operation before its effect, and decide what follows.

        Args:
            operation: its name.
            key: its object.
            limit_s: longest time to hang, in seconds.

        Raises:
            OSError: the operation fails.
        """
        faults = self.faults
        if operation not in faults.operations:
            return _UNHARMED
        chance = self._chance.about(f"{operation} {key}")
        # All numbers are drawn, so that one setting does not change the decisions of another.
        delay_s = chance.uniform(*faults.latency_s)
        numbers = [chance.random() for _ in range(5)]
        if delay_s:
            self._note(operation, key, "latency_s")
            self.sleep(min(delay_s, limit_s))
            faults = self.faults
        if faults.hangs:
            self._note(operation, key, "hangs")
            faults = self._wait_while_hanging(limit_s)
        self.ensure_reachable(operation, key, faults)
        if numbers[0] < faults.errors_before:
            self._note(operation, key, "errors_before")
            raise ConnectionError(f"injected: {operation} failed, without an effect")
        return self._decide(operation, key, faults, numbers[1:])

    def _decide(
        self, operation: str, key: str, faults: StoreFaults, numbers: Sequence[float]
    ) -> _Decision:
        """Decide the fault of an operation that was not failed at its beginning."""
        fails_after, breaks, at, tears = numbers
        decision = _Decision()
        if operation == "put" and breaks < faults.partial_uploads:
            self._note(operation, key, "partial_uploads")
            decision.breaks_at = at
        elif operation == "get" and breaks < faults.broken_reads:
            self._note(operation, key, "broken_reads")
            decision.breaks_at = at
        elif operation in {"put", "remove"} and fails_after < faults.errors_after:
            self._note(operation, key, "errors_after")
            decision.fails_after = True
        if operation == "put" and decision.breaks_at is None:
            if tears < faults.torn_uploads:
                self._note(operation, key, "torn_uploads")
                decision.kept = at
            elif tears < faults.torn_uploads + faults.empty_uploads:
                self._note(operation, key, "empty_uploads")
                decision.kept = 0.0
        return decision

    def ensure_reachable(self, operation: str, key: str, faults: StoreFaults | None = None) -> None:
        """Raise the error of a store that is unreachable, or has revoked the credentials.

        Raises:
            OSError: it is.
        """
        faults = faults or self.faults
        if operation not in faults.operations:
            return
        if faults.unreachable:
            self._note(operation, key, "unreachable")
            raise ConnectionError("injected: the store is unreachable")
        if faults.revoked:
            self._note(operation, key, "revoked")
            raise PermissionError("injected: the credentials were revoked")

    def _note(self, operation: str, key: str, fault: str) -> None:
        self.injected.append(InjectedFault(operation, key, fault))

    def _wait_while_hanging(self, limit_s: float) -> StoreFaults:
        deadline = time.monotonic() + limit_s
        with self._changed:
            while (faults := self.faults).hangs:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("injected: the store did not answer in time")
                self._changed.wait(min(left_s, _FOLLOW_S) if self._path else left_s)
        return faults

    def _follow(self, path: Path) -> None:
        found = path.stat()
        version = (found.st_mtime_ns, found.st_ino)
        if version != self._version:
            seed, faults = _load(path)
            with self._changed:
                self._version, self._faults = version, faults
                if seed != self._chance.seed:
                    self._chance = Chance(seed)
                self._changed.notify_all()


@dataclass(slots=True)
class _Decision:
    """Fault of an operation that was not failed at its beginning."""

    breaks_at: float | None = None  # part of its content, from 0 to 1
    kept: float = 1.0  # part of its content that the store keeps
    fails_after: bool = False


_UNHARMED: Final = _Decision()


class FaultyStore(Store):
    """A fragment store with injected faults around another one.

    It has the URL of the other one, and translates and counts errors as that one does.

    Args:
        store: the other one.
        injector: decides the faults; one may serve many stores.
    """

    # A store may call the operations of another one's backend.
    # ruff: noqa: SLF001

    def __init__(self, store: Store, injector: StoreFaultInjector) -> None:
        super().__init__(parse_store_url(store.url))
        self.store = store
        self.injector = injector
        self._parsed = store._parsed
        self.remedy = store.remedy
        self.authorization_remedy = store.authorization_remedy

    def close(self) -> None:
        """Close the other store."""
        self.store.close()

    @contextmanager
    def bounded(self, seconds: float) -> Iterator[None]:
        """See :class:`~gazette_sdk.fragment.stores.base.Store`."""
        with super().bounded(seconds), self.store.bounded(seconds):
            yield

    def _sign_get(self, key: str, ttl_s: float) -> str:
        self._before("signget", key)
        return self.store._sign_get(key, ttl_s)

    def _status_of(self, key: str) -> ObjectStatus | None:
        self._before("exists", key)
        return self.store._status_of(key)

    def _open(self, key: str) -> StoredContent:
        decision = self._before("get", key)
        found = self.store._open(key)
        fails_at = None if decision.breaks_at is None else int(decision.breaks_at * found.length)
        raw = _FaultyContent(
            found.raw, fails_at, lambda: self.injector.ensure_reachable("get", key)
        )
        return dataclasses.replace(found, raw=cast("BinaryIO", raw))

    def _put(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        decision = self._before("put", key)
        if decision.breaks_at is not None:
            breaks_at = int(decision.breaks_at * length)
            content = cast("BinaryIO", _FaultyContent(content, breaks_at, lambda: None))
        kept = int(decision.kept * length)
        self.store._put(key, content, kept, content_encoding, overwrite)
        if decision.breaks_at is not None:  # an object of that name was there already
            raise ConnectionError("injected: the upload broke off")
        if decision.fails_after:
            raise ConnectionError("injected: put failed, after its effect")

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        self._before("list", prefix)
        faults = self.injector.faults
        lag_s = faults.list_lag_s if "list" in faults.operations else 0.0
        for found in self.store._list(prefix):
            if not lag_s or found.mod_time + 1 + lag_s <= self.injector.clock():
                yield found

    def _remove(self, key: str) -> None:
        decision = self._before("remove", key)
        self.store._remove(key)
        if decision.fails_after:
            raise ConnectionError("injected: remove failed, after its effect")

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, PermissionError) or self.store._is_refusal(error)

    def _is_missing(self, error: BaseException) -> bool:
        return self.store._is_missing(error)

    def _before(self, operation: str, key: str) -> _Decision:
        return self.injector.before(operation, key, self._remaining(OPERATION_TIMEOUT_S))


class _FaultyContent(io.RawIOBase):
    """Content that breaks off at a position, or when its store becomes unreachable.

    Args:
        content: the whole content, read from its current position.
        fails_at: number of bytes after which reading fails; None for no such failure.
        check: raises an error when reading must fail for another reason.
    """

    def __init__(self, content: BinaryIO, fails_at: int | None, check: Callable[[], None]) -> None:
        super().__init__()
        self._content = content
        self._fails_at = fails_at
        self._check = check
        self._begin = content.tell() if content.seekable() else 0
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._content.seekable()

    def tell(self) -> int:
        return self._content.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = self._content.seek(offset, whence)
        self._at = target - self._begin
        return target

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        self._check()
        wanted = len(buffer)
        if self._fails_at is not None:
            wanted = min(wanted, self._fails_at - self._at)
            if wanted <= 0:
                raise ConnectionError("injected: the content broke off")
        data = self._content.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._content.close()
        super().close()


def save_store_faults(path: Path, faults: StoreFaults, *, seed: int = 0) -> None:
    """Write the settings of faults to a file that processes follow, as one step.

    Args:
        path: the file; :meth:`StoreFaultInjector.following` reads it.
        faults: the settings.
        seed: derives all random decisions. A new seed begins a new sequence of them.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    partial.write_text(
        json.dumps({"seed": seed, **dataclasses.asdict(faults)}, indent=1), encoding="utf-8"
    )
    partial.replace(path)


def _load(path: Path) -> tuple[int, StoreFaults]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        seed = fields.pop("seed")
        for name in ("latency_s", "operations"):
            fields[name] = tuple(fields[name])
        return seed, StoreFaults(**fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{path}: no settings of store faults ({error}); write it with save_store_faults()"
        ) from error
