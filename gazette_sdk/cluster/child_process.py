"""Child process that dies with this process, also if that is killed, and the port it listens on.

It runs through :mod:`gazette_sdk.cluster._child_launcher`, which holds a lock as long as the child
lives. The servers of embedded and local clusters are such children, and the members of one machine
(``--processes``).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gazette_sdk.errors import ConfigurationError, GazetteError

ENDED = b"GAZETTE_CHILD_ENDED"
"""Datagram that is sent to the socket of a child's notifications when it has ended."""

LOCK_TIMEOUT_S = 5
"""Longest wait for the lock of a killed predecessor; after that the lock is held by another."""

PORTS = range(20_000, 32_000)
"""Below the ports of outgoing connections: none takes the port of a killed server."""

PORT_ATTEMPTS = 200
"""Number of ports that are tried."""

_LAUNCHER = Path(__file__).with_name("_child_launcher.py")

_EndCallback = Callable[[int], None]

_chance = random.SystemRandom()
_reserved: set[int] = set()


def reserve_port() -> int:
    """Return a port of the loopback address for servers that this process starts.

    On Linux no other process reserves it until this process ends, also while the server is down:
    the clients of a killed server must not reach another one at its address.

    Raises:
        ConfigurationError: none was found.
    """
    for _ in range(PORT_ATTEMPTS):
        port = _chance.choice(PORTS)
        if port in _reserved:
            continue
        probe = socket.socket()
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.close()
            continue
        # From now on servers, which set this option, can be bound to the port beside it, but no
        # other probe. Systems other than Linux would refuse the server, too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            probe.detach()  # open until this process ends
        else:
            probe.close()
        _reserved.add(port)
        return port
    raise ConfigurationError(
        f"no free port was found from {PORTS.start} to {PORTS.stop}; stop other servers"
    )


class ChildProcess:
    """A child process and the thread that started it.

    For the kernel the parent of a child is the *thread* that started it, and the child is killed
    when that thread ends; so the thread waits for the child.

    Args:
        command: the program's path and its arguments.
        directory: its working directory.
        lock_path: file that is locked while the child lives. It holds the child's process id. If
            another process keeps the lock, the child ends by SIGALRM. None for no lock.
        log_path: file of its output and errors; None to share those of this process.
        environment: its environment.
        notify_path: socket that receives :data:`ENDED` when the child has ended; None for none.

    Raises:
        GazetteError: the child could not be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        lock_path: Path | None,
        log_path: Path | None,
        environment: Mapping[str, str],
        notify_path: str | None = None,
    ) -> None:
        self.status: int | None = None
        self._lock = threading.Lock()
        self._callbacks: list[_EndCallback] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._failure: OSError | None = None
        launched = [
            *(sys.executable, "-I", "-S", str(_LAUNCHER)),
            *(str(os.getpid()), str(lock_path or ""), str(LOCK_TIMEOUT_S)),
            *command,
        ]
        self._thread = threading.Thread(
            target=self._run,
            args=(launched, directory, log_path, environment, notify_path),
            name=f"gazette-child-{Path(command[0]).name}",
            daemon=True,
        )
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise GazetteError(f"{command[0]} could not be started: {self._failure}")

    def _run(
        self,
        command: list[str],
        directory: Path,
        log_path: Path | None,
        environment: Mapping[str, str],
        notify_path: str | None,
    ) -> None:
        try:
            log = None if log_path is None else log_path.open("ab")
            try:
                process = subprocess.Popen(  # noqa: S603 -- our own command line
                    command,
                    cwd=directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C in a terminal must not reach it: it stops after its users.
                    start_new_session=True,
                )
            finally:
                if log is not None:
                    log.close()
        except OSError as error:
            self._failure = error
            self._started.set()
            return
        self._process = process
        self._started.set()
        status = process.wait()
        with self._lock:
            self.status = status
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(status)
        if notify_path is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            # After the start the socket is closed.
            if notify.connect_ex(notify_path) == 0:
                notify.send(ENDED)

    @property
    def pid(self) -> int:
        """Process id of the child, also after its end."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True until the child has ended."""
        return self.status is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the child has ended."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.signal(signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the child; return True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call_when_ended(self, callback: _EndCallback) -> None:
        """Call back from the child's thread with the exit status; at once if it has ended."""
        with self._lock:
            status = self.status
            if status is None:
                self._callbacks.append(callback)
        if status is not None:
            callback(status)
