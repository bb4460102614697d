"""Listening sockets of a process that is flooded, or has no free descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time

from gazette_sdk.server import listener as acceptor_module
from gazette_sdk.server.listener import Listener, PortProtocol, UnknownShare
from gazette_sdk.transport.loop import run
from support.spools import until

CLIENT = r"""
import socket, sys
held = []
for _ in range(300):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    held[-1].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
print("all connected", flush=True)
sys.stdin.read()
"""

SERVER = r"""
import asyncio, json, logging, os, resource, sys
from gazette_sdk.server.process import Server

records = []

class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())

def free():
    found = []
    try:
        while True:
            found.append(os.dup(0))
    except OSError:
        return len(found)
    finally:
        for fd in found:
            os.close(fd)

async def scenario(client):
    logging.getLogger().addHandler(Keep())
    server = Server(host="127.0.0.1")
    await server.start()
    port = str(server.listener.port)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", client, port, stdin=pipe, stdout=pipe
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
    before = free()
    await child.stdout.readline()
    await asyncio.sleep(2)
    during = free()
    child.stdin.close()
    await child.wait()
    async with asyncio.timeout(30):
        while free() < before:
            await asyncio.sleep(0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /debug/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    status = await reader.readline()
    writer.close()
    print(json.dumps([during, before, status.decode(), records]), flush=True)
    await server.stop(0)

asyncio.run(scenario(sys.argv[1]))
"""


def test_a_process_without_free_descriptors_warns_once_and_recovers():
    done = subprocess.run(
        [sys.executable, "-c", SERVER, CLIENT],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    during, before, status, records = json.loads(done.stdout)
    assert during < 10 < before
    assert status == "HTTP/1.1 200 OK\r\n"
    # Descriptors ran out in the listener, or in the splice to the gRPC server.
    warnings = [text for text in records if "raise the limit of open files (ulimit -n)" in text]
    assert 1 <= len(warnings) <= 2
    assert len(records) <= 3
    assert "Traceback" not in done.stderr


def test_new_connections_leave_the_loop_to_others():
    async def scenario():
        listener = Listener()
        listener.add(PortProtocol("any", (b"X",), asyncio.Protocol))
        port = listener.bind("127.0.0.1", 0)
        await listener.start()
        turns = 0
        with contextlib.ExitStack() as held:
            for _ in range(100):  # none is accepted before the loop runs again
                held.enter_context(socket.create_connection(("127.0.0.1", port)))
            while len(listener._opening) < 100:
                turns += 1
                await asyncio.sleep(0)
            listener.close()
        return turns

    assert run(scenario(), 10) >= 100 // acceptor_module.ACCEPTS_PER_TURN


def test_connections_are_accepted_slowly_while_unknown_clients_have_used_their_share():
    async def scenario():
        share = UnknownShare()
        share.spend(100.0)
        listener = Listener(unknown=share)
        listener.add(PortProtocol("any", (b"X",), asyncio.Protocol))
        port = listener.bind("127.0.0.1", 0)
        await listener.start()
        begun_s = time.monotonic()
        with contextlib.ExitStack() as held:
            for _ in range(20):
                held.enter_context(socket.create_connection(("127.0.0.1", port)))
            await until(lambda: len(listener._opening) == 20)
            listener.close()
        return time.monotonic() - begun_s

    pauses = 20 // acceptor_module.ACCEPTS_PER_TURN - 1
    assert run(scenario(), 10) >= pauses * acceptor_module.SLOW_PACE_S
