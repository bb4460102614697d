"""State of a running process: tasks, threads, memory and CPU profile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from prometheus_client import REGISTRY

from gazette_sdk.errors import CallError

__all__ = [
    "dump_tasks",
    "dump_threads",
    "heap_statistics",
    "memory_statistics",
    "profile",
    "sample_stacks",
]

_SUSPENDED = ("cr", "ag", "gi")
"""Prefixes of the attributes of coroutines, asynchronous and plain generators."""

SAMPLE_INTERVAL_S = 0.01
"""Seconds between two samples of a CPU profile."""

TOP_TYPES = 50
"""Number of types in the heap statistics."""

_profiling = threading.Lock()
"""Held while a CPU profile of this process is taken: each sample stops all threads."""


def dump_tasks() -> str:
    """Return every task of the running loop with its stack."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    out = [f"{len(tasks)} tasks\n"]
    for task in tasks:
        out.append(f"\n{task.get_name()}: {task.get_coro()!r}\n")
        out += traceback.StackSummary.extract(_awaited(task.get_coro())).format()
    return "".join(out)


def _awaited(waiting: Any) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a suspended coroutine, the outermost first."""
    while waiting is not None:
        kind = next((kind for kind in _SUSPENDED if hasattr(waiting, f"{kind}_frame")), None)
        if kind is None:
            return
        frame = getattr(waiting, f"{kind}_frame")
        if frame is not None:
            # Frames of compiled coroutines (those of grpcio) have no line.
            yield frame, frame.f_lineno or 1
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def dump_threads() -> str:
    """Return every thread with its stack."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = _frames()
    out = [f"{len(frames)} threads\n"]
    for ident, frame in frames.items():
        out.append(f"\nthread {ident} {names.get(ident, '')}\n")
        out += traceback.format_stack(frame)
    return "".join(out)


def memory_statistics() -> dict[str, int | float]:
    """Return memory sizes and counts that cost little."""
    statistics: dict[str, int | float] = {
        f"gc_{name}_generation_{generation}": value
        for generation, values in enumerate(gc.get_stats())
        for name, value in values.items()
    }
    statistics["allocated_blocks"] = sys.getallocatedblocks()
    for name in ("process_resident_memory_bytes", "process_virtual_memory_bytes"):
        value = REGISTRY.get_sample_value(name)
        if value is not None:
            statistics[name] = value
    return statistics


def heap_statistics() -> str:
    """Return objects by type, and allocations by line if ``tracemalloc`` is on."""
    objects = gc.get_objects()
    counts = Counter(type(item).__qualname__ for item in objects)
    lines = [f"{len(objects)} objects under garbage collection"]
    lines += [f"{count:10} {name}" for name, count in counts.most_common(TOP_TYPES)]
    if tracemalloc.is_tracing():
        lines += [
            str(line) for line in tracemalloc.take_snapshot().statistics("lineno")[:TOP_TYPES]
        ]
    else:
        lines.append("for allocations by line, start the process with PYTHONTRACEMALLOC=1")
    return "\n".join([*lines, ""])


async def profile(duration_s: float) -> str:
    """Take a CPU profile of the process, as :func:`sample_stacks`. Cancelling ends the sampling.

    It is taken on a thread of its own. The event loop's thread pool, which is small, must never
    wait for a profile: the broker's own work needs it.

    Raises:
        CallError: ``RESOURCE_EXHAUSTED``: another profile is being taken.
    """
    if not _profiling.acquire(blocking=False):
        raise CallError(
            "another profile is being taken; try again when it has ended",
            code="RESOURCE_EXHAUSTED",
        )
    stopped = threading.Event()
    taken: concurrent.futures.Future[str] = concurrent.futures.Future()

    def sample() -> None:
        try:
            stacks = sample_stacks(duration_s, stopped)
        finally:
            _profiling.release()
        if taken.set_running_or_notify_cancel():
            taken.set_result(stacks)

    try:
        threading.Thread(target=sample, name="profile", daemon=True).start()
    except RuntimeError:  # the system refuses a further thread
        _profiling.release()
        raise
    try:
        return await asyncio.wrap_future(taken)
    finally:
        stopped.set()


def sample_stacks(duration_s: float, stopped: threading.Event) -> str:
    """Return a CPU profile from samples of all threads. Blocks its own thread.

    Args:
        duration_s: seconds to sample for.
        stopped: ends the sampling early.

    Returns:
        Folded stacks, the outermost frame first, with counts: the input of flame graph tools.
    """
    counts: Counter[str] = Counter()
    own = threading.get_ident()
    until_s = time.monotonic() + duration_s
    while time.monotonic() < until_s and not stopped.wait(SAMPLE_INTERVAL_S):
        for ident, frame in _frames().items():
            if ident != own:
                counts[_folded(frame)] += 1
    return "".join(f"{stack} {count}\n" for stack, count in counts.most_common())


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()  # noqa: SLF001 - documented, despite its name


def _folded(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "?")
        names.append(f"{module}.{code.co_qualname}")
        frame = frame.f_back
    return ";".join(reversed(names))
