"""Broker of a local cluster: one ``gazette serve`` process at a time.

:func:`wait_until` waits for a condition of the cluster's keys in Etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import http.client
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.child_process import ChildProcess
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.membership import DEV_VARIABLE
from gazette_sdk.errors import ClosedError, ConfigurationError, EtcdError, GazetteError
from gazette_sdk.transport import loop as sdk_loop

RETRY_PAUSE_S = 0.1
"""Pause before Etcd is reached again."""

CHECK_S = 0.25
"""Pause between checks while no key changes."""

DIAL_TIMEOUT_S = 2.0
"""Limit of reaching one member of Etcd, before another is tried."""

_log = logging.getLogger(__name__)


async def wait_until(
    endpoint: Callable[[], str], condition: Callable[[BrokerKeySpace], bool]
) -> None:
    """Wait until the keys of a cluster meet a condition. Failures of Etcd are waited out.

    Args:
        endpoint: returns the URL of a member of Etcd that runs.
        condition: returns True if the keys meet it. It may depend on the state of processes, too.
    """
    while True:
        try:
            async with aclosing(
                await Etcd.connect(endpoint(), dial_timeout_s=DIAL_TIMEOUT_S)
            ) as etcd:
                keyspace = BrokerKeySpace()
                await keyspace.load(etcd)
                watch = asyncio.create_task(keyspace.watch(etcd, delay_s=0))
                try:
                    while not condition(keyspace):
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(CHECK_S):
                                await keyspace.wait_for_update()
                    return
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except EtcdError as error:
            _log.debug("Etcd is tried again: %s", error)
            await asyncio.sleep(RETRY_PAUSE_S)


async def current_revision(endpoint: Callable[[], str]) -> int:
    """Return the revision of Etcd. Failures of Etcd are waited out.

    Args:
        endpoint: returns the URL of a member of Etcd that runs.
    """
    while True:
        try:
            async with aclosing(
                await Etcd.connect(endpoint(), dial_timeout_s=DIAL_TIMEOUT_S)
            ) as etcd:
                return (await etcd.range(b"\x00")).header.revision
        except EtcdError as error:
            _log.debug("Etcd is tried again: %s", error)
            await asyncio.sleep(RETRY_PAUSE_S)


START_TIMEOUT_S = 60.0
"""Limit of a start, which takes about two seconds."""

END_TIMEOUT_S = 10.0
"""Limit of the end of a process that was killed."""

SERVES_POLL_S = 0.02
"""Pause between two requests to a broker that starts."""

LOG_TAIL_LINES = 5
"""Number of lines of a broker's log in an error."""


class BrokerState(enum.StrEnum):
    """State of a broker's process."""

    STARTING = "starting"
    """It runs, and is no member of the cluster yet."""

    RUNNING = "running"
    """It is a member, and serves."""

    PAUSED = "paused"
    """It was stopped by SIGSTOP."""

    DRAINING = "draining"
    """It was asked to drain, and has not ended."""

    ENDED = "ended"
    """It has ended, or was never started."""


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Options that the brokers of a local cluster share.

    Attributes:
        etcd: returns the URL of a member of Etcd that runs.
        etcd_address: address of Etcd for the broker.
        file_root: directory of ``file://`` stores.
        lease_ttl_s: lifetime of leases in Etcd, in seconds.
        log_level: least level of log records.
        log_format: format of log records.
        logs: directory of log files; None to share the output of this process.
        locks: directory of lock files.
        arguments: further arguments of ``gazette serve``.
    """

    etcd: Callable[[], str]
    etcd_address: str
    file_root: Path
    lease_ttl_s: float
    log_level: str
    log_format: str
    logs: Path | None
    locks: Path
    arguments: Sequence[str]


class LocalBroker:
    """A broker of a local cluster, which can be killed, paused, drained and started again.

    All methods block. They may be called from any thread except that of the SDK's event loop:
    asynchronous code calls them by :func:`asyncio.to_thread`.

    Args:
        name: its id.
        zone: its zone.
        spools: its disk: the directory of what is not stored yet. It survives the process.
        options: options that all brokers share.
        port: its port on loopback, also after a restart.
        advertise_port: the port that it advertises, which a proxy may map.

    Attributes:
        name: its id; another one after ``start(name=...)``.
        zone: its zone.
        address: its URL, not that of a proxy.
        spools: its disk.
        starts: number of its processes.
    """

    def __init__(
        self,
        name: str,
        zone: str,
        spools: Path,
        options: BrokerOptions,
        *,
        port: int,
        advertise_port: int,
    ) -> None:
        self.name = name
        self.zone = zone
        self.address = f"http://localhost:{port}"
        self.spools = spools
        self.starts = 0
        self._port = port
        self._advertise_port = advertise_port
        self._options = options
        self._child: ChildProcess | None = None
        self._state = BrokerState.ENDED
        self._ends_on_purpose = False
        self._since = 0
        self._lock = threading.RLock()

    @property
    def state(self) -> BrokerState:
        """State of its process."""
        child = self._child
        return self._state if child is not None and child.is_running else BrokerState.ENDED

    @property
    def pid(self) -> int | None:
        """Process id; None if it has ended."""
        child = self._child
        return child.pid if child is not None and child.is_running else None

    @property
    def status(self) -> int | None:
        """Exit status of its last process, negative for a signal; None while it runs."""
        return self._child.status if self._child is not None else None

    @property
    def ends_by_itself(self) -> bool:
        """False once the present process was asked to end."""
        return not self._ends_on_purpose

    @property
    def log(self) -> Path | None:
        """File of its log; None if it shares the output of this process."""
        return None if self._options.logs is None else self._options.logs / f"{self.name}.log"

    # ------------------------------------------------------------- controls

    def start(
        self,
        *,
        name: str = "",
        empty_disk: bool = False,
        timeout_s: float = START_TIMEOUT_S,
        wait: bool = True,
    ) -> None:
        """Start a process, by default with the same id over the same disk.

        Args:
            name: another id.
            empty_disk: True to delete everything on its disk.
            timeout_s: longest time until it serves.
            wait: False to return at once; :meth:`wait_until_serving` waits then.

        Raises:
            ConfigurationError: it runs already.
            GazetteError: the process has ended.
            TimeoutError: it does not serve in time.
        """
        with self._lock:
            if self.state is not BrokerState.ENDED:
                raise ConfigurationError(f"{self.name} runs already (it is {self.state.value})")
            if empty_disk:
                shutil.rmtree(self.spools, ignore_errors=True)
            self.spools.mkdir(parents=True, exist_ok=True)
            self.name = name or self.name
            self._since = sdk_loop.run(current_revision(self._options.etcd), timeout_s)
            self._state = BrokerState.STARTING
            self._ends_on_purpose = False
            self._child = ChildProcess(
                self._command(),
                self.spools.parent,
                lock_path=self._options.locks / f"{self.spools.name}.lock",
                log_path=self.log,
                environment=_environment(),
            )
            self.starts += 1
        if wait:
            self.wait_until_serving(timeout_s)

    def wait_until_serving(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until a started process is a member of its cluster and answers.

        Raises:
            GazetteError: the process has ended.
            TimeoutError: it does not serve in time.
        """
        child = self._require_running()
        deadline = time.monotonic() + timeout_s
        sdk_loop.run(self._until_announced(child), timeout_s)
        while not _answers(self._port):
            if not child.is_running:
                raise GazetteError(f"{self.name} {_ended(child)}{self._tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} does not serve within {timeout_s:g} s")
            time.sleep(SERVES_POLL_S)
        with self._lock:
            if self._state is BrokerState.STARTING:
                self._state = BrokerState.RUNNING

    def kill(self) -> None:
        """End the process with SIGKILL, and wait until it has ended.

        Raises:
            ClosedError: it does not run.
        """
        with self._lock:
            child = self._require_running()
            self._ends_on_purpose = True
            child.kill()
        if not child.join(END_TIMEOUT_S):
            raise TimeoutError(f"{self.name} (process {child.pid}) was killed and has not ended")

    def pause(self) -> None:
        """Stop the process with SIGSTOP. Its connections stay open.

        Raises:
            ClosedError: it does not run.
        """
        with self._lock:
            self._require_running().signal(signal.SIGSTOP)
            self._state = BrokerState.PAUSED

    def resume(self) -> None:
        """Continue a paused process. It ends by itself if it has lost its lease meanwhile.

        Raises:
            ClosedError: it does not run.
        """
        with self._lock:
            self._require_running().signal(signal.SIGCONT)
            self._state = BrokerState.RUNNING

    def drain(self, *, timeout_s: float | None = START_TIMEOUT_S) -> None:
        """Ask the process with SIGTERM to move its journals to other brokers, and to end.

        Args:
            timeout_s: longest time until it has ended; None to return at once.

        Raises:
            ClosedError: it does not run.
            GazetteError: it has failed.
            TimeoutError: it has not ended in time: no other broker has room for its journals.
        """
        with self._lock:
            child = self._require_running()
            self._ends_on_purpose = True
            child.signal(signal.SIGTERM)
            self._state = BrokerState.DRAINING
        if timeout_s is None:
            return
        if not child.join(timeout_s):
            raise TimeoutError(
                f"{self.name} has not drained within {timeout_s:g} s, and goes on: as many other "
                "brokers must run as its journals have replicas, and have room"
            )
        if child.status != 0:
            raise GazetteError(f"{self.name} {_ended(child)}{self._tail()}")

    def wait_until_ended(self, timeout_s: float) -> int:
        """Wait until the process has ended; return its exit status, negative for a signal.

        Raises:
            TimeoutError: it has not ended in time.
        """
        child = self._child
        if child is None:
            raise ClosedError(f"{self.name} was not started")
        if not child.join(timeout_s):
            raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s")
        assert child.status is not None
        return child.status

    def call_when_ended(self, callback: Callable[[int], None]) -> None:
        """Call back, from another thread, with the exit status of the present process."""
        self._require_running().call_when_ended(callback)

    def stop(self, timeout_s: float = 0.0) -> None:
        """End the process: without a drain if there is time for that, else by SIGKILL.

        Args:
            timeout_s: longest time for storing its spools; 0 to kill it at once.
        """
        with self._lock:
            child = self._child
            if child is None:
                return
            self._ends_on_purpose = True
        if timeout_s > 0 and child.is_running:
            with self._lock:
                child.signal(signal.SIGCONT)
                child.signal(signal.SIGQUIT)
                self._state = BrokerState.DRAINING
            if child.join(timeout_s):
                return
            _log.warning("%s has not ended within %g s; it is killed", self.name, timeout_s)
        child.kill()
        child.join(END_TIMEOUT_S)

    # --------------------------------------------------------------- inside

    def _require_running(self) -> ChildProcess:
        child = self._child
        if child is None or not child.is_running:
            raise ClosedError(f"{self.name} does not run; start it first")
        return child

    async def _until_announced(self, child: ChildProcess) -> None:
        """Wait until a started process has written its key in Etcd.

        Raises:
            GazetteError: the process has ended.
        """

        def is_announced(keyspace: BrokerKeySpace) -> bool:
            entry = keyspace.member(self.zone, self.name)
            # The key of an earlier process is there until its lease ends.
            return entry is not None and entry.create_revision > self._since

        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def note_end(_status: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

        child.call_when_ended(note_end)
        announced = asyncio.create_task(wait_until(self._options.etcd, is_announced))
        failed = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait([announced, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise GazetteError(f"{self.name} {_ended(child)}{self._tail()}")
            await announced
        finally:
            announced.cancel()
            failed.cancel()
            await asyncio.gather(announced, failed, return_exceptions=True)

    def _command(self) -> list[str]:
        options = self._options
        return [
            *(sys.executable, "-m", "gazette_sdk.cli.gazette", "serve"),
            *("--broker.id", self.name, "--broker.zone", self.zone),
            *("--broker.port", str(self._port), "--broker.spool-dir", str(self.spools)),
            *("--broker.advertise-port", str(self._advertise_port)),
            *("--broker.file-root", str(options.file_root)),
            *("--etcd.address", options.etcd_address, "--etcd.lease", f"{options.lease_ttl_s:g}s"),
            *("--log.level", options.log_level, "--log.format", options.log_format),
            *options.arguments,
        ]

    def _tail(self) -> str:
        if self.log is None or not self.log.exists():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "; the end of its log:\n" + "\n".join(lines)


def _ended(child: ChildProcess) -> str:
    status = child.status
    assert status is not None
    if status == -signal.SIGALRM:
        return "ended: another process uses its disk; stop that first"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _environment() -> dict[str, str]:
    """Return the environment of a broker: without options of other brokers."""
    prefixes = ("BROKER_", "ETCD_", "CONSOLE_", "DEBUG_", "LOG_")
    found = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    return {**found, DEV_VARIABLE: "1"}


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("localhost", port, timeout=1.0)
    try:
        connection.request("GET", "/debug/ready")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
