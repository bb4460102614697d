"""Processes of a Spark benchmark: a standalone cluster, an S3 emulator, and what they all use.

All of them listen on the loopback interface, and end with the program that started them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

START_TIMEOUT_S = 300.0
SAMPLE_S = 0.5
SPARK_HOME = Path(pyspark.__file__).parent

EMULATOR = "S3 emulator"
"""Kind of the process of the emulator."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def emulator(directory: Path) -> Iterator[str]:
    """Run an S3 emulator which keeps objects on disk; yield its endpoint.

    It checks no credentials, but clients need some: they are set in this process's environment.
    """
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "test")
    port = _free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
    # An object in memory is one of at most so many bytes; others are files below TMPDIR.
    environment = {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "1024", "TMPDIR": str(directory)}
    with _running([*command, "-p", str(port)], port, directory / "s3.log", environment):
        endpoint = f"http://127.0.0.1:{port}"
        import botocore.session  # noqa: PLC0415 - which reads the environment

        client = botocore.session.Session().create_client(
            "s3", region_name="us-east-1", endpoint_url=endpoint
        )
        client.create_bucket(Bucket="bench")
        client.close()
        yield endpoint


@contextmanager
def standalone(directory: Path, workers: int, memory_mib: int) -> Iterator[str]:
    """Run a Spark master, and workers with one core each; yield the URL of the master.

    Args:
        directory: where they log, and where executors have their files.
        workers: number of workers.
        memory_mib: memory that each of them offers to executors.
    """
    spark_class = str(SPARK_HOME / "bin" / "spark-class")
    environment = {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(directory),
        "SPARK_DAEMON_MEMORY": "256m",
    }
    port, deploy = _free_port(), "org.apache.spark.deploy"
    listen = ["--host", "127.0.0.1", "--webui-port", "0"]
    master = [spark_class, f"{deploy}.master.Master", *listen, "--port", str(port)]
    with ExitStack() as opened:
        opened.enter_context(_running(master, port, directory / "master.log", environment))
        ports = []
        for number in range(workers):
            ports.append(_free_port())
            worker = [spark_class, f"{deploy}.worker.Worker", *listen, "--port", str(ports[-1])]
            worker += ["--cores", "1", "--memory", f"{memory_mib}m"]
            worker += ["--work-dir", str(directory / f"worker-{number}")]
            worker += [f"spark://127.0.0.1:{port}"]
            log = directory / f"worker-{number}.log"
            opened.enter_context(_running(worker, ports[-1], log, environment, waits=False))
        for at in ports:
            _wait_for(at)
        yield f"spark://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _running(
    command: Sequence[str],
    port: int,
    log: Path,
    environment: dict[str, str],
    *,
    waits: bool = True,
) -> Iterator[None]:
    """Run a command that listens on a port of the loopback interface."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            cwd=log.parent,
        )
    try:
        if waits:
            _wait_for(port)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _wait_for(port: int) -> None:
    """Wait until a process listens on a port."""
    ends_at = time.monotonic() + START_TIMEOUT_S
    while not _listens(port):
        if time.monotonic() > ends_at:
            raise TimeoutError(f"no process listens on port {port}; see its log")
        time.sleep(0.1)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


# ------------------------------------------------------------------- what they use


@dataclass
class Use:
    """Use of processor and memory, by kind of process.

    Attributes:
        cpu_s: processor time of all processes of a kind.
        peak_mib: peak memory of the largest process of a kind.
        processes: number of processes of a kind.
    """

    cpu_s: Counter[str] = field(default_factory=Counter)
    peak_mib: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    processes: Counter[str] = field(default_factory=Counter)


class Sampler:
    """Thread that samples the processes that descend from this one.

    What a process uses between the last sample and its end is not seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._kinds: dict[int, str] = {}
        self._cpu_s: dict[int, float] = {}
        self._peak_mib: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def measured(self) -> Iterator[Use]:
        """Measure what a block uses. What it yields is complete when the block has ended."""
        self._sample()
        with self._lock:
            before = dict(self._cpu_s)
            self._peak_mib.clear()
        for pid in before:
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # begins a new peak
        use = Use()
        yield use
        self._sample()
        with self._lock:
            for pid, peak_mib in self._peak_mib.items():
                kind = self._kinds[pid]
                use.cpu_s[kind] += self._cpu_s[pid] - before.get(pid, 0.0)
                use.peak_mib[kind] = max(use.peak_mib[kind], peak_mib)
                use.processes[kind] += 1

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        children: dict[int, list[int]] = defaultdict(list)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (stat := _stat(int(entry.name))):
                children[int(stat[1])].append(int(entry.name))
        with self._lock:
            self._visit(os.getpid(), "driver's Python", children)

    def _visit(self, pid: int, kind: str, children: dict[int, list[int]]) -> None:
        """Sample a process of a kind, and those that descend from it."""
        stat, peak_mib = _stat(pid), _peak_mib(pid)
        if stat and peak_mib:
            self._kinds[pid] = kind
            self._cpu_s[pid] = (int(stat[11]) + int(stat[12])) / _TICKS_PER_S
            self._peak_mib[pid] = max(self._peak_mib.get(pid, 0.0), peak_mib)
        for child in children.get(pid, ()):
            self._visit(child, _kind(kind, _command(child)), children)


def _kind(parent: str, command: str) -> str:
    """Return the kind of a process from its parent's kind and its command."""
    if "moto.server" in command:
        return EMULATOR
    if "deploy.master" in command or "deploy.worker" in command:
        return "master and workers"
    if "CoarseGrainedExecutorBackend" in command:
        return "executors"
    if "SparkSubmit" in command:
        return "driver's JVM"
    # The JVM of an executor starts workers, and that of the driver planners.
    return {
        "executors": "Python workers",
        "driver's JVM": "planners",
        "driver's Python": "others",
    }.get(parent, parent)


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's status behind its name; none if it has ended."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return stat.rpartition(") ")[2].split()
    return []


def _peak_mib(pid: int) -> float:
    """Return the peak of a process's memory; 0 if it has ended."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
        peaks = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        return int(next(peaks, "0")) / 1024
    return 0.0


def _command(pid: int) -> str:
    """Return the command of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8")
    return ""
