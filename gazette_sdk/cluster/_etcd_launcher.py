"""The step between this process and an embedded etcd: it becomes that etcd.

Run as a program by :mod:`gazette_sdk.cluster.etcd_server`, with plain ``python -I -S``, so that
nothing has to run between fork and exec of a process that may have threads. It

1. asks the kernel to kill it when its parent dies (Linux), which survives the exec,
2. locks the data directory; the lock lives as long as etcd does, whoever started it,
3. replaces itself by etcd.

Arguments: pid of the parent, path of the lock file, seconds to wait for the lock, then the
command line of etcd. It ends by SIGALRM where the lock stays taken.
"""

import ctypes
import fcntl
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Lock, then become etcd."""
    parent, lock_path, lock_timeout_s = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    command = sys.argv[4:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process ended meanwhile")

    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    signal.alarm(lock_timeout_s)
    fcntl.flock(lock, fcntl.LOCK_EX)
    signal.alarm(0)
    os.truncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    os.set_inheritable(lock, True)
    os.execv(command[0], command)  # noqa: S606 -- becoming it is the point


if __name__ == "__main__":
    main()
