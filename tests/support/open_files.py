"""Files and sockets of this process, and the check that a test leaves none open."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["leaves_no_file_open", "open_files"]

WAIT_S = 10.0


def open_files() -> dict[str, str]:
    """Return the open descriptors of this process, and the file of each."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since, or of this listing
            found[descriptor.name] = str(descriptor.readlink())
    return found


@contextlib.contextmanager
def leaves_no_file_open() -> Iterator[None]:
    """Check that as many files are open at the end as at the begin, or fewer.

    Threads that end, also those of earlier tests, may close theirs within ``WAIT_S``.
    """
    before = open_files()
    yield
    gc.collect()
    ends_at = time.monotonic() + WAIT_S
    while len(after := open_files()) > len(before) and time.monotonic() < ends_at:
        time.sleep(0.01)
    left = [file for descriptor, file in after.items() if before.get(descriptor) != file]
    assert len(after) <= len(before), f"opened and not closed: {left}"
