"""Consumer process that crashes at a chosen step of a commit.

::

    python -m gazette_sdk.testing.shard_process crash.json gazette_sdk.cli.gazette run-consumer ...

The file may be written while the program runs: ``{"step": "LOG_SENT", "nth": 3}``. From then on the
steps of all shards are counted.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
from pathlib import Path

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.shard.consumer.process import Consumer
from gazette_sdk.shard.transaction.consume import OnStep
from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.testing.commit_faults import CrashAt, exit_process

__all__ = ["main"]


class _CrashByFile:
    """Crash that a file asks for, from the next step after it was written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._crash: CrashAt | None = None

    def __call__(self, step: CommitStep) -> None:
        with self._lock:
            if self._crash is None:
                if not self._path.exists():
                    return
                wanted = json.loads(self._path.read_text())
                self._crash = CrashAt(CommitStep[wanted["step"]], wanted["nth"], exit_process)
            crash = self._crash
        crash(step)


def main(arguments: list[str]) -> None:
    """Run a module as a program, whose consumers crash as the file says.

    Args:
        arguments: the file, the module's name, and the program's arguments.

    Raises:
        ConfigurationError: an argument is missing.
    """
    if len(arguments) < 2:
        raise ConfigurationError(
            "there is nothing to run: give a file, a module, and the program's arguments"
        )
    path, module, *_ = arguments
    sys.argv = arguments[1:]  # the program's name is replaced by its file's
    crash = _CrashByFile(Path(path))

    def new_on_step(_shard: str) -> OnStep:
        return crash

    Consumer.new_on_step = staticmethod(new_on_step)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except GazetteError as error:
        sys.exit(str(error))
