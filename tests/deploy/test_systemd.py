"""The units of systemd: checked by systemd's own tools, and their processes with a real socket."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from gazette_sdk import Journals, connect
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.transport import loop as sdk_loop
from support.deployments import DEPLOY, environment_of, variables_of
from support.etcd import etcd, etcd_server
from support.order_totals import publish

__all__ = ["etcd", "etcd_server"]

UNITS = DEPLOY / "systemd"
COMMANDS = {"broker": ("serve",), "consumer": ("run-consumer",)}
TIMEOUT_S = 60.0
EXPOSURE_MAX = 2.0

BINARY = "/opt/gazette/bin/gazette"
OF_SYSTEMD = {"PYTHONFAULTHANDLER", "APPLICATION"}
"""Variables that are no options."""

DENY_WRITE_EXECUTE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(65, 1, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Program that does what MemoryDenyWriteExecute= does, where the kernel can (Linux 6.3 or newer),
and then runs its arguments."""

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(
    ANALYZE is None and "CI" not in os.environ, reason="systemd-analyze is not installed"
)


def settings_of(kind: str, instance: str, state: Path) -> dict[str, list[str]]:
    """Return the settings of an instance's unit, with its specifiers replaced."""
    found = defaultdict(list)
    for line in (UNITS / f"gazette-{kind}@.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            for specifier, text in (
                ("%i", instance),
                ("%l", "localhost"),
                ("%H", "localhost"),
                ("%S", str(state)),
            ):
                value = value.replace(specifier, text)
            found[name].append(value)
    return found


class Unit:
    """The process of a unit, and the socket at which it says how it is.

    Args:
        kind: ``broker`` or ``consumer``.
        instance: name of the instance.
        directory: of its state, and of the socket.
        files: content of its environment files.
    """

    def __init__(self, kind: str, instance: str, directory: Path, files: str) -> None:
        settings = settings_of(kind, instance, directory)
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "NOTIFY_SOCKET": str(directory / f"{kind}-{instance}"),
            "WATCHDOG_USEC": str(int(settings["WatchdogSec"][0].removesuffix("s")) * 1_000_000),
        }
        for line in settings["Environment"]:
            environ.update(environment_of(shlex.split(line)))
        environ.update(environment_of(files.splitlines()))
        work = Path(settings["WorkingDirectory"][0])
        work.mkdir(parents=True, exist_ok=True)
        command = settings["ExecStart"][0].replace("${APPLICATION}", environ.get("APPLICATION", ""))
        self.log = directory / f"{kind}-{instance}.log"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(environ["NOTIFY_SOCKET"])
        self._socket.settimeout(TIMEOUT_S)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", DENY_WRITE_EXECUTE, sys.executable),
                    *shlex.split(command.replace(BINARY, "-m gazette_sdk.cli.gazette")),
                ],
                cwd=work,
                env=environ,
                stdout=log,
                stderr=log,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def wait_for(self, *lines: str) -> list[list[str]]:
        """Return the datagrams until one has all these lines."""
        found = []
        while not found or not set(lines) <= set(found[-1]):
            try:
                found.append(self._socket.recv(4096).decode().split("\n"))
            except TimeoutError:
                pytest.fail(f"no {lines} after {found[-3:]}: {self.log.read_text()[-2000:]}")
        return found


@needs_systemd
@pytest.mark.parametrize("kind", COMMANDS)
def test_systemd_accepts_the_unit(kind, tmp_path):
    text = (UNITS / f"gazette-{kind}@.service").read_text()
    assert f"ExecStart={BINARY} " in text
    (tmp_path / f"gazette-{kind}@1.service").write_text(text.replace(BINARY, sys.executable))
    found = subprocess.run(
        [ANALYZE, "verify", tmp_path / f"gazette-{kind}@1.service"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_unit_is_confined(kind):
    found = subprocess.run(
        [
            *(ANALYZE, "security", "--offline=true", "--no-pager"),
            *(f"--threshold={EXPOSURE_MAX * 10:.0f}", UNITS / f"gazette-{kind}@.service"),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-300:]


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_variable_of_the_unit_and_of_the_sample_files_is_an_option(kind, tmp_path):
    known = variables_of(*COMMANDS[kind])
    lines = [
        word
        for line in settings_of(kind, "1", tmp_path)["Environment"]
        for word in shlex.split(line)
    ]
    for sample in UNITS.glob(f"{kind}-*.env"):
        lines += sample.read_text().splitlines()
    used = set(environment_of(lines, commented=True))
    assert used - OF_SYSTEMD - known == set()
    shared = environment_of((UNITS / "cluster.env").read_text().splitlines(), commented=True)
    assert set(shared) <= variables_of("serve") | variables_of("run-consumer")
    assert set(shared) & known


def test_a_broker_that_was_drained_by_a_call_is_started_again(tmp_path):
    """It ends with status 0, after which `on-failure` would leave it."""
    assert settings_of("broker", "1", tmp_path)["Restart"] == ["always"]


def test_a_broker_says_that_it_serves_and_how_far_it_has_drained(etcd, tmp_path):
    def broker(name: str, *more: str) -> Unit:
        lines = [
            f"ETCD_ADDRESS={etcd.address}",
            f"BROKER_PORT={reserve_port()}",
            f"BROKER_FILE_ROOT={tmp_path}",
            *more,
        ]
        return Unit("broker", name, tmp_path, "\n".join(lines))

    with broker("1") as first, broker("full", "BROKER_LIMIT=1") as full:
        started = first.wait_for("READY=1", "STATUS=serving 0 journals")
        assert started[0] == ["WATCHDOG=1", "STATUS=starting"]
        full.wait_for("READY=1")
        port = environ_of(first)["BROKER_PORT"]
        transport = connect(f"http://localhost:{port}")
        try:
            Journals(transport=transport).create("an/example", partitions=4, replication=1)
        finally:
            sdk_loop.run(transport.aclose(), TIMEOUT_S)
        first.wait_for("WATCHDOG=1", "STATUS=serving 3 journals")
        first.process.send_signal(signal.SIGTERM)
        first.wait_for("STOPPING=1", "STATUS=draining 3 of 3 journals")
        first.wait_for("WATCHDOG=1", "STATUS=draining 3 of 3 journals")
        with broker("third") as third:
            third.wait_for("READY=1")
            first.wait_for("STOPPING=1", "STATUS=ending")
            assert first.process.wait(TIMEOUT_S) == 0
            third.wait_for("STATUS=serving 3 journals")
    spools = tmp_path / "gazette" / "broker-1" / "spools"
    assert list(spools.iterdir())
    assert '"msg":"goodbye"' in first.log.read_text().replace(": ", ":")


def environ_of(unit: Unit) -> dict[str, str]:
    """Return the environment of a unit's process."""
    content = Path(f"/proc/{unit.process.pid}/environ").read_text()
    return environment_of(content.split("\0"))


PROGRAM = """
from gazette_sdk import shard


@shard.handler(message=dict, store=shard.JsonStore, sources="topic=orders")
def totals(txn, order):
    txn.store["count"] = txn.store.get("count", 0) + 1
"""


def test_a_consumer_says_that_it_serves_and_ends_in_order(gazette_cluster, tmp_path, monkeypatch):
    cluster = gazette_cluster(1)
    (tmp_path / "counted.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    Journals(transport=cluster.transport).create("orders", partitions=2, replication=1)
    publish(cluster.transport, 5)
    lines = [
        f"ETCD_ADDRESS={cluster.etcd_endpoint}",
        f"BROKER_ADDRESS={cluster.address}",
        "APPLICATION=counted:totals",
    ]
    with Unit("consumer", "totals-1", tmp_path, "\n".join(lines)) as unit:
        unit.wait_for("READY=1")
        unit.wait_for("WATCHDOG=1", "STATUS=serving 2 shards")
        unit.process.send_signal(signal.SIGTERM)
        unit.wait_for("STOPPING=1", "STATUS=ending")
        assert unit.process.wait(TIMEOUT_S) == 0
