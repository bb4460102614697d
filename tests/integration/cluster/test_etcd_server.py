from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

from gazette_sdk.cluster import child_process
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.errors import ConfigurationError, EtcdError
from support.etcd import run, within


def test_it_starts_serves_stops_and_starts_again_over_the_same_directory(tmp_path):
    server = EtcdServer(tmp_path / "new" / "dir")

    async def scenario():
        for previous in (None, b"one", b"two"):
            await server.start()
            client = await Etcd.connect(server.endpoint)
            found = await client.range(b"/key")
            assert [kv.value for kv in found.entries] == ([previous] if previous else [])
            await client.put(b"/key", b"two" if previous else b"one")
            await client.aclose()
            await server.stop()
            assert server.pid is None
            with pytest.raises(EtcdError, match="not running"):
                _ = server.endpoint

    run(scenario())


def test_what_was_acknowledged_before_a_kill_is_there_after_a_restart(tmp_path):
    server = EtcdServer(tmp_path)

    async def scenario():
        for round_number in range(3):
            await server.start()
            client = await Etcd.connect(server.endpoint)
            assert (await client.range(b"/", b"0")).count == round_number
            await client.put(b"/%d" % round_number, b"")
            await client.aclose()
            server.kill()
            assert server.pid is None

    run(scenario())


def test_wait_tells_when_it_ends(tmp_path):
    server = EtcdServer(tmp_path, sync_writes=False)

    async def scenario():
        await server.start()
        waiting = asyncio.create_task(server.wait())
        await asyncio.sleep(0)
        os.kill(server.pid, signal.SIGKILL)
        assert await within(waiting) == -signal.SIGKILL
        assert await within(server.wait()) == -signal.SIGKILL
        await server.stop()

    run(scenario())


def test_it_dies_with_a_parent_that_is_killed_and_its_directory_is_free_again(tmp_path):
    program = textwrap.dedent(
        f"""
        import sys
        from gazette_sdk.cluster.etcd_server import EtcdServer
        server = EtcdServer({str(tmp_path)!r}, sync_writes=False)
        server.start_blocking()
        print(server.pid, flush=True)
        sys.stdin.read()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        pid = int(parent.stdout.readline())
        assert pid == int((tmp_path / "lock").read_text())
        descriptor = os.pidfd_open(pid)
        parent.kill()
        parent.wait(10)
    # Readable once the process ended.
    ended, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    assert ended

    server = EtcdServer(tmp_path, sync_writes=False)
    server.start_blocking()
    server.stop_blocking()


def test_a_directory_in_use_is_refused_and_its_user_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "LOCK_TIMEOUT_S", 1)
    first, second = EtcdServer(tmp_path, sync_writes=False), EtcdServer(tmp_path)
    first.start_blocking()
    try:
        with pytest.raises(ConfigurationError, match=rf"process {first.pid}.* runs over"):
            second.start_blocking()
        assert second.pid is None
        assert first.pid is not None
    finally:
        first.stop_blocking()


def test_a_cancelled_start_leaves_nothing_running(tmp_path):
    async def scenario():
        loop, launched = asyncio.get_running_loop(), asyncio.Event()

        class Observed(EtcdServer):
            def _command(self, binary, port):
                loop.call_soon_threadsafe(launched.set)
                return super()._command(binary, port)

        server = Observed(tmp_path, sync_writes=False)
        starting = asyncio.create_task(server.start())
        await launched.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert server.pid is None

    run(scenario())


def test_an_etcd_that_does_not_start_says_why(tmp_path):
    (tmp_path / "data").write_text("a file where etcd wants a directory")
    with pytest.raises(EtcdError, match=r"did not start over .*(?s:.)*log:"):
        EtcdServer(tmp_path).start_blocking()


@pytest.mark.parametrize(("version", "each"), [("3.5.2", True), ("3.5.3", False)])
def test_a_version_that_loses_writes_stores_each_entry_with_its_writes(tmp_path, version, each):
    binary = tmp_path / "etcd"
    binary.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
    binary.chmod(0o755)
    assert ("--backend-batch-limit=1" in EtcdServer(tmp_path)._command(binary, 1)) is each


def test_an_etcd_that_is_never_ready_is_ended_in_time(tmp_path):
    stuck = tmp_path / "stuck"
    stuck.write_text("#!/bin/sh\n[ $1 = --version ] || exec sleep 600\n")
    stuck.chmod(0o755)
    server = EtcdServer(tmp_path / "data", binary=stuck, start_timeout_s=0.5)
    with pytest.raises(EtcdError, match=r"not ready within 0\.5 s"):
        server.start_blocking()
    assert server.pid is None


def test_one_that_ignores_sigterm_is_killed(tmp_path):
    stubborn = tmp_path / "stubborn"
    # Says that it is ready as etcd does, then heeds no SIGTERM.
    stubborn.write_text(
        f"#!{sys.executable}\n"
        "import os, signal, socket\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "s.sendto(b'READY=1', os.environ['NOTIFY_SOCKET'])\n"
        "while True:\n    signal.pause()\n"
    )
    stubborn.chmod(0o755)
    server = EtcdServer(tmp_path / "data", binary=stubborn, stop_timeout_s=0.2)
    server.start_blocking()
    server.stop_blocking()
    assert server.pid is None
