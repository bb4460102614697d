from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest

from gazette_sdk.cluster.verification import Input, dial, hold
from support.etcd import run


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def answer(listener, count):
    """Answer so many connections, as a broker does, in a thread."""

    def serve():
        for _ in range(count):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_an_endpoint_that_accepts_and_is_silent_is_unclear(listener):
    port = listener.getsockname()[1]
    assert run(dial(f"http://127.0.0.1:{port}", timeout_s=0.05)) is Input.UNCLEAR


def test_an_endpoint_that_answers_is_reached(listener):
    answering = answer(listener, 2)
    port = listener.getsockname()[1]
    for endpoint in (f"http://127.0.0.1:{port}", f"https://localhost:{port}/path"):
        assert run(dial(endpoint)) is Input.REACHED
    answering.join(10)


@pytest.mark.parametrize("how", ["accept", "read", "reset"])
def test_an_endpoint_that_closes_before_the_first_byte_is_no_answer(listener, how):
    """A proxy in front of a dead process does so."""

    def serve():
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                if how != "accept":
                    connection.recv(1000)
                if how == "reset":
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    port = listener.getsockname()[1]
    for host in ("http://127.0.0.1", "https://localhost"):
        assert run(dial(f"{host}:{port}")) is Input.CLOSED
    serving.join(10)


def test_an_endpoint_on_which_nobody_listens_refuses(listener):
    port = listener.getsockname()[1]
    listener.close()
    for host in ("127.0.0.1", "localhost"):
        assert run(dial(f"http://{host}:{port}")) is Input.REFUSED


def test_unix_sockets_are_dialled_too(tmp_path):
    path = tmp_path / "socket"
    endpoint = f"unix://{path}"
    assert run(dial(endpoint)) is Input.UNCLEAR  # it may be on another machine
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        assert run(dial(endpoint)) is Input.REFUSED
        bound.listen()
        answering = answer(bound, 1)
        assert run(dial(endpoint)) is Input.REACHED
        answering.join(10)


@pytest.mark.parametrize("endpoint", ["http://no-such-host.invalid:80", "other://host"])
def test_what_is_no_refusal_is_unclear(endpoint):
    assert run(dial(endpoint)) is Input.UNCLEAR


def test_a_dial_is_bounded(monkeypatch):
    async def scenario():
        async def never(*_):
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never)
        assert await dial("http://127.0.0.1:1", timeout_s=0.01) is Input.UNCLEAR

    run(scenario())


def test_a_held_connection_is_kept_until_its_process_ends(listener):
    async def scenario():
        port = listener.getsockname()[1]
        answering = threading.Thread(target=lambda: accepted.append(listener.accept()[0]))
        accepted = []
        answering.start()
        holding = asyncio.ensure_future(hold(f"http://127.0.0.1:{port}", timeout_s=5))
        await asyncio.to_thread(answering.join)
        with accepted[0] as connection:
            assert b"Connection" not in await asyncio.to_thread(connection.recv, 1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            done, _ = await asyncio.wait([holding], timeout=0.05)
            assert not done
        assert await holding is Input.REACHED
        listener.close()
        assert await hold(f"http://127.0.0.1:{port}") is Input.REFUSED

    run(scenario())
