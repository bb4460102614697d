"""Threads and clocks of the product, on the virtual clock.

:func:`install` replaces what the broker's modules use of real threads and real time, for the whole
process: a process simulates, or does something else. Work of executors runs on the loop, after a
virtual delay and in the context of its node, so that a killed broker's uploads end with it.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, Self

from gazette_sdk.broker import read
from gazette_sdk.broker.append import append
from gazette_sdk.broker.fragments import index, persister
from gazette_sdk.broker.spool import directory, spool
from gazette_sdk.fragment import registry
from gazette_sdk.server import authorization
from simulation.loop import EPOCH_S, VirtualLoop, current_node

__all__ = ["CLOCK_ERRORS_S", "install"]

CLOCK_ERRORS_S: dict[str, float] = {}
"""Seconds by which the wall clocks of machines are ahead of the right time, by name."""


class _LoopExecutor(Executor):
    """Executor whose work runs on the event loop, later."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn`` after a virtual delay."""
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the future's
                future.set_exception(error)
            else:
                future.set_result(result)

        loop = _loop()
        loop.call_later(loop.work_delay_s(), work)
        return future

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        """Run it now: the caller is itself work of a thread."""
        return iter([fn(*args) for args in zip(*iterables, strict=True)])

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing: what was submitted runs on."""


class _LoopThread:
    """Thread that runs its function on the event loop, later."""

    def __init__(self, *, target: Callable[[], None], **_: Any) -> None:
        self._target = target

    def start(self) -> None:
        """Run it after a virtual delay."""
        loop = _loop()
        loop.call_later(loop.work_delay_s(), self._target)


def install(seed: int) -> None:
    """Replace threads and clocks in this process, and seed its random numbers."""
    random.seed(seed)
    real_time = time.time
    time.time = _unix_time
    time.monotonic = _monotonic_time
    time.clock_gettime = lambda _: _boot_time()
    for function in (
        spool.Spool.__init__,
        index.Index.__init__,
        append.Appends.__init__,
        authorization.Authorization.__init__,
    ):
        _replace_default(function, real_time, _unix_time)
    for module in (read, persister, directory):
        module.ThreadPoolExecutor = _LoopExecutor  # type: ignore[attr-defined]
    registry.threading = types.SimpleNamespace(  # type: ignore[attr-defined]
        Thread=_LoopThread, Lock=threading.Lock
    )


def _replace_default(function: Any, old: object, new: object) -> None:
    """Replace the default value of an argument, which was bound when the function was defined."""
    function.__defaults__ = tuple(
        new if value is old else value for value in function.__defaults__ or ()
    )
    for name, value in (function.__kwdefaults__ or {}).items():
        if value is old:
            function.__kwdefaults__[name] = new


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def _unix_time() -> float:
    loop, node = asyncio._get_running_loop(), current_node()
    error_s = CLOCK_ERRORS_S.get(node.name, 0.0) if node is not None else 0.0
    return EPOCH_S + error_s + (loop.world_s if isinstance(loop, VirtualLoop) else 0.0)


def _boot_time() -> float:
    loop = asyncio._get_running_loop()
    return loop.boot_time() if isinstance(loop, VirtualLoop) else 0.0


def _monotonic_time() -> float:
    loop = asyncio._get_running_loop()
    return loop.time() if loop is not None else 0.0
