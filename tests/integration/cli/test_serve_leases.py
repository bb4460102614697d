"""Leases of `gazette serve`: restarts after kills, pauses, and keys that another process holds."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import urllib.request

import pytest

from gazette_sdk import connect
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.listing import apply_journals
from integration.cli.test_processes import TIMEOUT_S, serve, served_at
from support.brokers import journal_spec
from support.etcd import etcd, etcd_server

__all__ = ["etcd", "etcd_server"]

LONG_S = 3600
"""A lease that does not end within a test."""


def options(etcd, directory, *, lease_s=LONG_S):
    return [
        *("--etcd.address", etcd.address, f"--etcd.lease={lease_s}s", "--broker.id=broker-1"),
        f"--broker.spool-dir={directory}",
    ]


async def appended(endpoint, content):
    transport = connect(endpoint)
    try:
        request = pb.AppendRequest(journal="a/journal")
        return (await append(transport, request, [content])).commit
    finally:
        await transport.aclose()


async def created(endpoint):
    transport = connect(endpoint)
    change = pb.ApplyRequest.Change(upsert=journal_spec("a/journal"))
    await apply_journals(transport, pb.ApplyRequest(changes=[change]))
    await transport.aclose()


def test_a_killed_broker_does_not_wait_for_its_own_old_lease(etcd, tmp_path):
    end = 0
    for attempt in range(3):
        started = time.monotonic()
        with serve(tmp_path, *options(etcd, tmp_path / "spools")) as process:
            endpoint, logged = served_at(process)
            endpoint = endpoint.replace("localhost", "127.0.0.1")
            print(f"serves after {time.monotonic() - started:.2f} s")
            assert ("revoked the lease of an earlier process" in logged) == (attempt > 0)
            if attempt == 0:
                asyncio.run(created(endpoint))
            commit = asyncio.run(appended(endpoint, b"content"))
            assert (commit.begin, commit.end) == (end, end + 7)
            end += 7
            process.kill()
            process.wait(TIMEOUT_S)


def test_a_broker_that_waits_for_a_held_key_refuses_connections_and_ends_at_a_signal(
    etcd, tmp_path
):
    port = reserve_port()
    with serve(tmp_path, *options(etcd, tmp_path / "one")) as holder:
        served_at(holder)
        with serve(tmp_path, *options(etcd, tmp_path / "two"), f"--broker.port={port}") as waiting:
            logged = b""
            while b"is held by another process" not in logged:
                line = waiting.stderr.readline()
                assert line, logged
                logged += line
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            waiting.send_signal(signal.SIGTERM)
            _, errors = waiting.communicate(timeout=TIMEOUT_S)
            assert waiting.returncode == 0, errors
            assert b"Traceback" not in errors
        # A third one is announced as soon as the first one leaves.
        with serve(tmp_path, *options(etcd, tmp_path / "two")) as waiting:
            while b"is held by another process" not in waiting.stderr.readline():
                assert waiting.poll() is None
            holder.send_signal(signal.SIGTERM)
            assert holder.wait(TIMEOUT_S) == 0
            served_at(waiting)
            waiting.kill()


def test_two_pauses_of_half_a_lease_shortly_after_each_other_do_not_cost_it(etcd, tmp_path):
    with serve(tmp_path, *options(etcd, tmp_path / "spools", lease_s=5)) as process:
        endpoint, _ = served_at(process)
        for pause_s in (0.3, 1.3, 1.3):
            time.sleep(pause_s)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(2.5)
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(5.5)  # a lost lease would have ended it by now
        assert process.poll() is None, process.stderr.read()
        with urllib.request.urlopen(f"{endpoint}/debug/ready", timeout=TIMEOUT_S) as answer:
            assert answer.status == 200
        process.kill()
