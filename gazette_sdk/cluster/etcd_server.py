"""A real etcd as a child process: for embedded clusters, and for tests.

The child listens on a free port of the loopback address, keeps its files in the directory it is
given, and dies with this process, however that ends. Two of them can not run over one directory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gazette_sdk.cluster.etcd_binary import find_etcd
from gazette_sdk.errors import ConfigurationError, EtcdError

__all__ = ["EtcdServer"]

HEARTBEAT_MS = 20
"""Raft tick. Small, because a lone member waits for some ticks before it elects itself."""

ELECTION_MS = 200
"""Election time-out; etcd asks for at least five ticks. Also bounds the shortest lease: 1 s."""

HISTORY_REVISIONS = 50_000
"""Revisions that are kept at least, for those who resume after a break, however long it was.

By count and not by time: what a cluster that was stopped for a month last did shall be known.
"""

LOCK_TIMEOUT_S = 5
"""A killed predecessor may take a moment to be gone; after that the directory is in use."""

PORT_ATTEMPTS = 5
"""A free port may be taken by somebody else between asking for it and listening on it."""

LOG_TAIL_LINES = 5
"""How much of etcd's own log an error shows."""

_LAUNCHER = Path(__file__).with_name("_etcd_launcher.py")

_log = logging.getLogger(__name__)


class EtcdServer:
    """One etcd process over one data directory.

    Usable from asyncio (:meth:`start`, :meth:`stop`, :meth:`wait`), and from plain code through
    :meth:`start_blocking` and :meth:`stop_blocking`. It may be started again after it ended.

    Args:
        data_dir: directory of etcd's files; made when missing. It can be started over again by
            a later process, also after this one was killed.
        binary: the etcd to run; when not given, that which
            :func:`~gazette_sdk.cluster.etcd_binary.find_etcd` finds.
        sync_writes: whether writes reach the disk before they are acknowledged. Only tests,
            whose data dies with them anyway, may say no.
        start_timeout_s: how long etcd may take to be ready.
        stop_timeout_s: how long etcd may take to end after SIGTERM, before it is killed.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        binary: Path | None = None,
        sync_writes: bool = True,
        start_timeout_s: float = 30.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self._binary = binary
        self._sync_writes = sync_writes
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._port = 0
        self._child: _Child | None = None

    @property
    def endpoint(self) -> str:
        """URL of the running server, as ``http://127.0.0.1:PORT``.

        Raises:
            EtcdError: it is not running.
        """
        if self._child is None:
            raise EtcdError("the embedded etcd is not running; start it first")
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server, ``None`` when there is none."""
        return self._child.pid if self._child is not None and self._child.is_running else None

    async def start(self) -> None:
        """Start the server and wait until it serves. Cancellation stops it again.

        Raises:
            ConfigurationError: no usable etcd was found, or the directory is in use.
            EtcdError: etcd ended, or was not ready in time.
        """
        starting = asyncio.ensure_future(asyncio.to_thread(self.start_blocking))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            child = self._child
            if child is not None:
                child.kill()
            await asyncio.wait([starting])
            if starting.exception() is None:
                await asyncio.to_thread(self.stop_blocking)
            raise

    async def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL when it does not heed that in time."""
        await asyncio.shield(asyncio.to_thread(self.stop_blocking))

    async def wait(self) -> int:
        """Wait until the server ended by itself or was stopped.

        Returns:
            Its exit status, negative for the signal that ended it.
        """
        child = self._child
        if child is None:
            raise EtcdError("the embedded etcd is not running; start it first")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(status: int) -> None:
            if not ended.done():
                ended.set_result(status)

        def tell_threadsafe(status: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, status)

        child.call_when_ended(tell_threadsafe)
        return await ended

    def kill(self) -> None:
        """End the server at once with SIGKILL, as a crash would. Returns when it is gone."""
        if self._child is not None:
            self._child.kill()
            self._child.join(self._stop_timeout_s)
            self._child = None

    def start_blocking(self) -> None:
        """:meth:`start` for plain code."""
        if self.pid is not None:
            return
        binary = self._binary if self._binary is not None else find_etcd()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, PORT_ATTEMPTS + 1):
            # Started again it serves where its clients look for it, if it can.
            port = self._port if self._port and attempt == 1 else _free_port()
            child, problem = self._launch(binary, port)
            if problem is None:
                self._port = port
                _log.info("etcd runs as process %d at %s", child.pid, self.endpoint)
                return
            self._child = None
            if "address already in use" not in problem or attempt == PORT_ATTEMPTS:
                raise EtcdError(f"etcd did not start over {self.data_dir}: {problem}")

    def stop_blocking(self) -> None:
        """:meth:`stop` for plain code."""
        child, self._child = self._child, None
        if child is None:
            return
        child.signal(signal.SIGTERM)
        if not child.join(self._stop_timeout_s):
            _log.warning("etcd (process %d) ignored SIGTERM; killing it", child.pid)
            child.kill()
            child.join(self._stop_timeout_s)

    def _launch(self, binary: Path, port: int) -> tuple[_Child, str | None]:
        """Start one child and await its readiness. Returns it, and what went wrong if anything."""
        log_path = self.data_dir / "etcd.log"
        with tempfile.TemporaryDirectory(prefix="gazette-etcd-") as folder:
            # etcd speaks systemd's protocol: one datagram says that it is ready. The thread that
            # keeps the child sends another one when the child ended, so one wait sees both.
            notify_path = f"{folder}/notify"
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.bind(notify_path)
                child = _Child(
                    self._command(binary, port), self.data_dir, log_path, notify_path=notify_path
                )
                self._child = child
                deadline = time.monotonic() + self._start_timeout_s
                while True:
                    notify.settimeout(max(0.001, deadline - time.monotonic()))
                    try:
                        message = notify.recv(4096)
                    except TimeoutError:
                        child.kill()
                        child.join(self._stop_timeout_s)
                        return child, (
                            f"not ready within {self._start_timeout_s:g} s{_tail(log_path)}"
                        )
                    if b"READY=1" in message:
                        return child, None
                    if message == _ENDED:
                        break
        if child.status == -signal.SIGALRM:
            raise ConfigurationError(
                f"another etcd{_holder(self._lock_path)} runs over {self.data_dir}; "
                "stop the process that started it, or use another data directory"
            )
        return child, f"it ended with status {child.status}{_tail(log_path)}"

    @property
    def _lock_path(self) -> Path:
        return self.data_dir / "lock"

    def _command(self, binary: Path, port: int) -> list[str]:
        client = f"http://127.0.0.1:{port}"
        # A lone member has no peers: a socket in the data directory keeps that door closed.
        peer = "unix://peer:0"
        command = [
            sys.executable,
            "-I",
            "-S",
            str(_LAUNCHER),
            str(os.getpid()),
            str(self._lock_path),
            str(LOCK_TIMEOUT_S),
            str(binary),
            "--name=embedded",
            "--data-dir=data",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=embedded={peer}",
            f"--heartbeat-interval={HEARTBEAT_MS}",
            f"--election-timeout={ELECTION_MS}",
            "--auto-compaction-mode=revision",
            f"--auto-compaction-retention={HISTORY_REVISIONS}",
            "--log-level=warn",
            "--logger=zap",
        ]
        if not self._sync_writes:
            command.append("--unsafe-no-fsync")
        return command


_ENDED = b"GAZETTE_ETCD_ENDED"

_EndCallback = Callable[[int], None]


class _Child:
    """The process, kept by a thread of its own.

    The kernel counts a child's parent as the *thread* that started it, and kills the child when
    that thread ends; so the thread that starts it stays to wait for it.
    """

    def __init__(
        self, command: list[str], directory: Path, log_path: Path, *, notify_path: str
    ) -> None:
        self.status: int | None = None
        self._lock = threading.Lock()
        self._callbacks: list[_EndCallback] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(
            target=self._keep,
            args=(command, directory, log_path, notify_path),
            name="gazette-etcd",
            daemon=True,
        )
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise EtcdError(f"etcd could not be started: {self._failure}")

    def _keep(self, command: list[str], directory: Path, log_path: Path, notify_path: str) -> None:
        # etcd takes ETCD_* for flags; ETCD_ADDRESS and ETCD_PREFIX are ours.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        environment["NOTIFY_SOCKET"] = notify_path
        try:
            with log_path.open("wb") as log:
                process = subprocess.Popen(  # noqa: S603 -- our own command line
                    command,
                    cwd=directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C in a terminal is for us: we stop etcd when its users have stopped.
                    start_new_session=True,
                )
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
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            # Nobody listens any more once the start was awaited.
            if notify.connect_ex(notify_path) == 0:
                notify.send(_ENDED)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self.status is None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call_when_ended(self, callback: _EndCallback) -> None:
        """Call back from the keeping thread with the exit status; at once if it has ended."""
        with self._lock:
            status = self.status
            if status is None:
                self._callbacks.append(callback)
        if status is not None:
            callback(status)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "; the end of its log:\n" + "\n".join(lines) if lines else ""


def _holder(lock_path: Path) -> str:
    text = lock_path.read_text().strip()
    return f" (process {text})" if text else ""
