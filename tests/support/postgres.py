"""PostgreSQL for tests: an own server on a free loopback port, in a temporary directory.

The programs are those of the operating system (``scripts/setup dev`` installs them on Debian). The
server refuses to run as root; it then runs as ``postgres``, the package's user, or ``nobody``.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gazette_sdk.cluster.child_process import reserve_port
from support.services import wait_until_it_serves

STOP_TIMEOUT_S = 30.0
_BECOME = """
import os, sys
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Start a server; yields SQLAlchemy's URL of its database."""
    programs = _programs()
    directory = Path(tempfile.mkdtemp(prefix="gazette-sdk-postgres-"))
    try:
        become = _unprivileged(directory)
        data = directory / "data"
        subprocess.run(
            [
                *become,
                *(
                    programs / "initdb",
                    "-D",
                    data,
                    "-A",
                    "trust",
                    "-U",
                    "tests",
                    "-E",
                    "UTF8",
                    "-N",
                ),
            ],
            check=True,
            capture_output=True,
            cwd=directory,
            env=_environment(directory),
        )
        port = reserve_port()
        with _server(programs, directory, data, port, become):
            yield f"postgresql+psycopg://tests@127.0.0.1:{port}/postgres"
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def _server(
    programs: Path, directory: Path, data: Path, port: int, become: list[str]
) -> Iterator[None]:
    settings = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "fsync": "off",
        "max_connections": "20",
        "shared_buffers": "8MB",
    }
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *become,
                *(programs / "postgres", "-D", data, "-p", str(port)),
                *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=_environment(directory),
        )
    try:
        # It listens earlier, and refuses clients until it has started.
        wait_until_it_serves(process, port, log, "ready to accept connections")
        yield
    finally:
        # Does not wait for clients.
        process.send_signal(2)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _programs() -> Path:
    found = shutil.which("postgres")
    candidates = [Path(found).parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for candidate in candidates:
        if (candidate / "initdb").exists():
            return candidate
    raise FileNotFoundError("PostgreSQL is not installed; run scripts/setup dev")


def _unprivileged(directory: Path) -> list[str]:
    """Give the directory to a user that the server may run as; return what runs a command so.

    A child changes its user itself: with ``subprocess``'s ``user=`` this process would fork, which
    the threads of gRPC do not survive.
    """
    if os.geteuid() != 0:
        return []
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    os.chown(directory, user.pw_uid, user.pw_gid)
    return [sys.executable, "-c", _BECOME, str(user.pw_gid), str(user.pw_uid)]


def _environment(directory: Path) -> dict[str, str]:
    return {"PATH": os.defpath, "HOME": str(directory), "LC_ALL": "C", "TZ": "UTC"}
