"""Shards of an application in real processes, for tests of what happens when they die.

::

    with run_shards(totals, processes=2) as shards:
        Journals(shards.transport).create("orders", partitions=2)
        ...                                              # publish
        shards.crash(0)
        shards.wait_caught_up(timeout_s=30)
        assert shards.store("orders/part-000").get("ada") == 250

As a program it is a consumer process that crashes at a chosen step of a commit::

    python -m gazette_sdk.testing.shards crash.json gazette_sdk.cli.gazette run-consumer ...

The file may be written while the program runs: ``{"step": "LOG_SENT", "nth": 3}``. From then on the
steps of all shards are counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from gazette_sdk.cluster.child_process import ChildProcess, reserve_port
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.shard_spec import recovery_log
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.lifecycle import shards_of, status_text, until_caught_up
from gazette_sdk.shard.consumer.process import Consumer
from gazette_sdk.shard.recovery import hints as fsm_hints
from gazette_sdk.shard.recovery.hints import load_hints
from gazette_sdk.shard.recovery.player import Playback
from gazette_sdk.shard.transaction.consume import OnStep
from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.shard.transaction.transaction import Shard
from gazette_sdk.testing.store_faults import CrashAt, exit_process
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect


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


T = TypeVar("T")

LEASE_TTL_S = 5.0
"""Default lifetime of leases, short for tests of lost leases."""

START_TIMEOUT_S = 60.0
"""Limit of a start, which takes about two seconds."""

END_TIMEOUT_S = 60.0
"""Limit of the end of a process."""

POLL_S = 0.05
"""Pause between two looks at shards that are not there yet."""

LOG_TAIL_LINES = 5
"""Number of lines of a process' log in an error."""


class ClusterLike(Protocol):
    """Cluster that shards run on, such as an embedded one."""

    @property
    def address(self) -> str:
        """URL of a broker."""

    @property
    def etcd_endpoint(self) -> str:
        """URL of its Etcd."""


class ShardProcess:
    """A ``gazette run-consumer`` process. All methods block.

    Args:
        name: its id.
        command: arguments of ``gazette``.
        directory: for its files and its log.

    Attributes:
        name: its id.
        address: its URL.
        log: file of its log.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        port = reserve_port()
        self.name = name
        self.address = f"http://localhost:{port}"
        self.log = directory / f"{name}.log"
        self._crash = directory / f"{name}.crash"
        self._command = [
            *(sys.executable, "-m", "gazette_sdk.testing.shards", str(self._crash)),
            *("gazette_sdk.cli.gazette", "run-consumer", *command),
            *("--consumer.id", name, "--consumer.port", str(port)),
            *("--consumer.directory", str(directory / name)),
        ]
        self._directory = directory
        self._child: ChildProcess | None = None

    @property
    def is_running(self) -> bool:
        """True until it has ended; also while it is paused."""
        return self._child is not None and self._child.is_running

    @property
    def pid(self) -> int:
        """Its process id, while it runs."""
        return self._require_running().pid

    def start(self) -> None:
        """Start it, again after its end. It recovers nothing from its own disk."""
        if self.is_running:
            raise ConfigurationError(f"{self.name} runs already")
        self._crash.unlink(missing_ok=True)
        self._child = ChildProcess(
            self._command,
            self._directory,
            lock_path=self._directory / f"{self.name}.lock",
            log_path=self.log,
            environment=_environment(),
        )

    def crash(self) -> None:
        """End it with SIGKILL. Its shards move when its lease ends."""
        child = self._require_running()
        child.kill()
        self._join(child)

    def crash_at(self, step: CommitStep, nth: int = 1) -> None:
        """Have it end at once when it reaches a step of a commit, counted from now.

        Args:
            step: the step.
            nth: which time.
        """
        wanted = json.dumps({"step": step.name, "nth": nth})
        made = self._crash.with_suffix(".new")
        made.write_text(wanted)
        made.rename(self._crash)

    def pause(self) -> None:
        """Stop it with SIGSTOP. Its connections stay open."""
        self._require_running().signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue it. It ends by itself if it has lost its lease meanwhile."""
        self._require_running().signal(signal.SIGCONT)

    def drain(self) -> None:
        """Have it move its shards to others and end, by SIGTERM; wait for the end.

        Raises:
            GazetteError: it has failed.
            TimeoutError: it has not ended in time.
        """
        child = self._require_running()
        child.signal(signal.SIGTERM)
        self._join(child)
        if child.status:
            raise GazetteError(f"{self.name} ended with status {child.status}{self.tail()}")

    def wait_until_ended(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Wait until it has ended, and return its exit status, negative for a signal.

        Raises:
            TimeoutError: it has not ended in time.
        """
        assert self._child is not None, "it was started"
        self._join(self._child, timeout_s)
        assert self._child.status is not None
        return self._child.status

    def stop(self) -> None:
        """Kill it if it runs."""
        if self._child is not None:
            self._child.kill()
            self._join(self._child)

    def tail(self) -> str:
        """Return the end of its log, for an error."""
        if not self.log.exists():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"; the end of the log of {self.name}:\n" + "\n".join(lines)

    def _require_running(self) -> ChildProcess:
        if self._child is None or not self._child.is_running:
            raise ConfigurationError(f"{self.name} does not run{self.tail()}")
        return self._child

    def _join(self, child: ChildProcess, timeout_s: float = END_TIMEOUT_S) -> None:
        if not child.join(timeout_s):
            raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s{self.tail()}")


class RunningShards:
    """Processes of one application. Use it as a context manager; see :func:`run_shards`.

    Attributes:
        processes: the processes.
        directory: directory of their files and logs.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        *,
        processes: int = 1,
        cluster: ClusterLike | None = None,
        lease_ttl_s: float = LEASE_TTL_S,
        arguments: Sequence[str] = (),
    ) -> None:
        self._application = application
        self._place = _place_of(application)
        self._count = processes
        self._cluster = cluster
        self._lease_ttl_s = lease_ttl_s
        self._arguments = tuple(arguments)
        self._stack = ExitStack()
        self.processes: list[ShardProcess] = []
        self.directory = Path()

    # -------------------------------------------------------------------- life

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(tempfile.mkdtemp(prefix="gazette-run-shards-"))
            if self._cluster is None:
                data = self.directory / "cluster"
                self._cluster = stack.enter_context(EmbeddedCluster(data, sync_etcd=False))
            self._transport = connect(self._cluster.address)
            stack.callback(lambda: sdk_loop.run(self._transport.aclose(), END_TIMEOUT_S))
            stack.callback(self._stop_all)
            command = [
                self._place,
                *("--broker.address", self._cluster.address),
                *("--etcd.address", self._cluster.etcd_endpoint),
                *("--etcd.lease", f"{self._lease_ttl_s:g}s", "--log.level", "info"),
                *self._arguments,
            ]
            for index in range(self._count):
                process = ShardProcess(f"process-{index}", command, self.directory)
                self.processes.append(process)
                process.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        if error is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            error.add_note(f"the logs of the processes are in {self.directory}")

    def _stop_all(self) -> None:
        for process in self.processes:
            process.stop()

    @property
    def address(self) -> str:
        """URL of a broker."""
        assert self._cluster is not None, "it is used as a context manager"
        return self._cluster.address

    @property
    def transport(self) -> Transport:
        """Transport to the journals."""
        return self._transport

    def start(self, index: int) -> None:
        """Start a process that has ended."""
        self.processes[index].start()

    def crash(self, index: int) -> None:
        """Kill a process; see :meth:`ShardProcess.crash`."""
        self.processes[index].crash()

    def crash_at(self, step: CommitStep, nth: int = 1, *, index: int = 0) -> None:
        """Have a process end at a step of a commit; see :meth:`ShardProcess.crash_at`."""
        self.processes[index].crash_at(step, nth)

    def pause(self, index: int) -> None:
        """Stop a process with SIGSTOP."""
        self.processes[index].pause()

    def resume(self, index: int) -> None:
        """Continue a process that was stopped."""
        self.processes[index].resume()

    def drain(self, index: int) -> None:
        """Drain a process, and wait for its end."""
        self.processes[index].drain()

    # -------------------------------------------------------------------- state

    def list_shards(self) -> Sequence[cpb.ListResponse.Shard]:
        """Return all shards, as the first process lists them that answers."""
        return sdk_loop.run(self.ask(lambda client: client.list()), START_TIMEOUT_S).shards

    async def ask(self, call: Callable[[ShardClient], Awaitable[T]]) -> T:
        """Ask the processes in turn, until one answers; on the SDK's event loop.

        Args:
            call: the call. The caller bounds the wait for an answer.
        """
        while True:
            for process in self._running():
                client = ShardClient(process.address, connect_timeout_s=1.0, call_timeout_s=2.0)
                async with client:
                    try:
                        return await call(client)
                    except GazetteError:
                        continue  # it starts, is paused, or was killed
            await asyncio.sleep(POLL_S)

    def wait_until(
        self,
        holds: Callable[[Sequence[cpb.ListResponse.Shard]], bool],
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Wait until the list of shards is as wanted.

        Raises:
            TimeoutError: it is not in time; the text has the last list.
        """
        deadline = time.monotonic() + timeout_s
        while not holds(shards := self.list_shards()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the shards are not as wanted: {status_text(shards)}")
            time.sleep(POLL_S)

    def wait_caught_up(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the shards have consumed all that their sources hold by now.

        Raises:
            TimeoutError: they have not in time; the text has their statuses.
            GazetteError: the journals cannot be listed.
        """
        waiting = until_caught_up(self._application, self._transport, self.ask)
        try:
            sdk_loop.run(asyncio.wait_for(waiting, timeout_s), timeout_s + 2.0)
        except TimeoutError:
            tails = "".join(process.tail() for process in self.processes)
            found = status_text(self.list_shards()) if self._running() else "no process runs"
            raise TimeoutError(
                f"the shards have not caught up within {timeout_s:g} s: {found}{tails}"
            ) from None

    def store(self, journal: str) -> Any:
        """Return the store of the shard of a journal, as its recovery log has it.

        It is a copy: what is done to it changes nothing. It is open until the end of the context.

        Args:
            journal: a source of the shard.

        Raises:
            GazetteError: no shard reads the journal, or its log cannot be played.
        """
        directory = Path(tempfile.mkdtemp(prefix="store-", dir=self.directory))
        store = sdk_loop.run(self._recovered(journal, directory), START_TIMEOUT_S)
        self._stack.callback(store.destroy)
        return store

    # ------------------------------------------------------------------ parts

    def _running(self) -> list[ShardProcess]:
        return [process for process in self.processes if process.is_running]

    async def _recovered(self, journal: str, directory: Path) -> Any:
        spec = (await shards_of(journal, self.ask))[0]
        async with _etcd_of(self._cluster) as etcd:
            stored = await load_hints(etcd, spec)
        hints = fsm_hints.choose(stored.primary, stored.backups, recovery_log(spec))
        playback = Playback(self._transport, hints, directory)
        playing = asyncio.create_task(playback.run())
        await playback.finish()
        await playing
        handle = Shard(spec.id, spec, directory, spec.id, self._transport)
        store = await asyncio.to_thread(self._application.new_store, handle)
        await asyncio.to_thread(store.restore)
        return store


def run_shards(
    application: Application[Any, Any],
    *,
    processes: int = 1,
    cluster: ClusterLike | None = None,
    lease_ttl_s: float = LEASE_TTL_S,
    arguments: Sequence[str] = (),
) -> RunningShards:
    """Return processes that run an application's shards, to be used by ``with``.

    They are ``gazette run-consumer`` processes, which import the application by its module's name:
    define it at the top of a module.

    Args:
        application: the application.
        processes: number of processes.
        cluster: brokers and Etcd; by default an embedded cluster of one broker.
        lease_ttl_s: lifetime of the processes' leases in Etcd, in seconds, at least 1.
        arguments: further arguments of ``gazette run-consumer``.

    Raises:
        ConfigurationError: the application cannot be imported by another process.
    """
    return RunningShards(
        application,
        processes=processes,
        cluster=cluster,
        lease_ttl_s=lease_ttl_s,
        arguments=arguments,
    )


def _place_of(application: Application[Any, Any]) -> str:
    """Return ``MODULE:NAME`` of an application.

    Raises:
        ConfigurationError: it has none.
    """
    function = getattr(application, "function", type(application))
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ConfigurationError(
            f"the application {module}.{name} cannot be imported by another process: define it at "
            "the top of a module"
        )
    return f"{module}:{name}"


def _environment() -> dict[str, str]:
    """Return the environment of a process: this one's modules, and no options of others."""
    prefixes = ("BROKER_", "CONSUMER_", "ETCD_", "DEBUG_", "LOG_")
    found = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    found["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return found


@asynccontextmanager
async def _etcd_of(cluster: ClusterLike | None) -> AsyncIterator[Etcd]:
    assert cluster is not None, "it is used as a context manager"
    async with aclosing(await Etcd.connect(cluster.etcd_endpoint)) as etcd:
        yield etcd
