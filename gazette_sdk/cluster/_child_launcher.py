"""Launcher of a child process: it takes a lock and replaces itself by the child's program.

:mod:`gazette_sdk.cluster.child_process` runs it as a program, with plain ``python -I -S``, so that
no code runs between fork and exec of a process that may have threads. It

1. configures the kernel to kill it when its parent dies (Linux), which survives the exec,
2. takes the lock, for example of a data directory; it is held as long as the program runs,
3. replaces itself by the program.

Arguments: pid of the parent, path of the lock file (empty for no lock), seconds to wait for the
lock, then the command line of the program. It ends by SIGALRM if another process keeps the lock.
"""

import ctypes
import fcntl
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Take the lock, then exec the program."""
    parent, lock_path, lock_timeout_s = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    command = sys.argv[4:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process ended meanwhile")

    if lock_path:
        _take_lock(lock_path, lock_timeout_s)
    os.execv(command[0], command)  # noqa: S606 -- the launcher's purpose


def _take_lock(lock_path: str, lock_timeout_s: int) -> None:
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    signal.alarm(lock_timeout_s)
    fcntl.flock(lock, fcntl.LOCK_EX)
    signal.alarm(0)
    os.truncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    os.set_inheritable(lock, True)


if __name__ == "__main__":
    main()
