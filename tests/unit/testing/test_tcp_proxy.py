"""The TCP proxy: cuts, resets, refusals and delays, for all and for single processes."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.testing.tcp_proxy import TcpProxy

WAIT_S = 20.0
SILENCE_S = 0.2


class _Echo(socketserver.BaseRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError):
            while data := self.request.recv(65536):
                self.request.sendall(data)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


@contextlib.contextmanager
def echoing(port=0):
    with _Server(("127.0.0.1", port), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxy():
    with echoing() as port, TcpProxy(port) as proxy:
        yield proxy


@contextlib.contextmanager
def connected(proxy):
    with socket.create_connection(("127.0.0.1", proxy.port), WAIT_S) as client:
        yield client


def echo(client, content=b"ping"):
    client.settimeout(WAIT_S)
    client.sendall(content)
    return receive(client, len(content))


def receive(client, length):
    got = b""
    while len(got) < length:
        data = client.recv(length - len(got))
        if not data:
            break
        got += data
    return got


def assert_silent(client):
    client.settimeout(SILENCE_S)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(WAIT_S)


def refused(proxy):
    """Wait until connections are refused."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            with connected(proxy) as client:
                client.settimeout(WAIT_S)
                client.recv(1)
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            pass  # nothing had connected to the target before
    return False


def test_it_forwards_both_ways_and_ends(proxy):
    content = bytes(range(256)) * 4000
    with connected(proxy) as client:
        threading.Thread(target=client.sendall, args=(content,)).start()
        assert receive(client, len(content)) == content
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    assert proxy.connections_made == 1
    assert proxy.address == f"http://127.0.0.1:{proxy.port}"


@pytest.mark.parametrize("direction", ["both", "requests", "answers"])
def test_a_cut_holds_bytes_back_until_it_is_healed(proxy, direction):
    with connected(proxy) as client:
        assert echo(client) == b"ping"
        proxy.cut(direction)
        client.sendall(b"held")
        assert_silent(client)
        with connected(proxy) as another:
            another.sendall(b"held, too")
            assert_silent(another)
            proxy.heal()
            assert receive(client, 4) == b"held"
            assert receive(another, 9) == b"held, too"


def test_a_cut_hides_that_the_other_end_is_gone():
    with contextlib.ExitStack() as running:
        port = running.enter_context(echoing())
        with TcpProxy(port) as proxy, connected(proxy) as client:
            assert echo(client) == b"ping"
            proxy.cut("answers")
            client.shutdown(socket.SHUT_WR)  # the echo server answers with its own end
            assert_silent(client)
            proxy.heal()
            assert client.recv(1) == b""


def test_a_reset_breaks_connections_and_serves_new_ones(proxy):
    with connected(proxy) as client:
        assert echo(client) == b"ping"
        proxy.reset()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    with connected(proxy) as client:
        assert echo(client) == b"ping"


def test_a_refusal_resets_and_refuses_until_it_is_healed(proxy):
    with connected(proxy) as client:
        assert echo(client) == b"ping"
        proxy.refuse()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), WAIT_S)
    proxy.heal()
    with connected(proxy) as client:
        assert echo(client) == b"ping"


def test_a_delay_is_added_in_each_direction(proxy):
    with connected(proxy) as client:
        proxy.delay(0.15)
        began = time.monotonic()
        assert echo(client) == b"ping"
        assert time.monotonic() - began >= 0.3
        proxy.delay(60, "answers")
        client.sendall(b"late")
        assert_silent(client)
        proxy.heal()
        assert receive(client, 4) == b"late"


def test_connections_are_refused_while_the_target_refuses():
    with contextlib.ExitStack() as running:
        port = running.enter_context(echoing())
        with TcpProxy(port) as proxy:
            with connected(proxy) as client:
                assert echo(client) == b"ping"
            running.close()
            assert refused(proxy)
            with echoing(port):
                deadline = time.monotonic() + WAIT_S
                while True:
                    try:
                        with connected(proxy) as client:
                            assert echo(client) == b"ping"
                            break
                    except ConnectionError:
                        assert time.monotonic() < deadline


def closed_before_the_first_byte(proxy):
    with connected(proxy) as client:
        client.sendall(b"ping")
        return client.recv(4) == b""


def test_connections_are_accepted_and_closed_while_the_target_refuses():
    """As load balancers and service meshes do."""
    with contextlib.ExitStack() as running:
        port = running.enter_context(echoing())
        with TcpProxy(port) as proxy:
            proxy.accept_for_dead()
            with connected(proxy) as client:
                assert echo(client) == b"ping"
            running.close()
            assert closed_before_the_first_byte(proxy)
            assert closed_before_the_first_byte(proxy)
            with echoing(port), connected(proxy) as client:
                assert echo(client) == b"ping"
            proxy.heal()
            assert refused(proxy)


def test_a_proxy_that_hangs_up_resets_connections_and_closes_new_ones(proxy):
    with connected(proxy) as client:
        assert echo(client) == b"ping"
        proxy.hang_up()
        with pytest.raises(ConnectionResetError):
            client.recv(4)
        assert closed_before_the_first_byte(proxy)
        proxy.heal()
        with connected(proxy) as another:
            assert echo(another) == b"ping"


CLIENT = """
import socket, sys
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
for line in sys.stdin:
    try:
        client.settimeout(float(line))
        client.sendall(b"ping")
        print(client.recv(4).decode() or "ended", flush=True)
    except TimeoutError:
        print("silent", flush=True)
    except OSError:
        print("reset", flush=True)
"""


def test_a_fault_of_one_process_leaves_others_alone(proxy):
    with (
        connected(proxy) as client,
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(proxy.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):

        def answer(limit_s):
            process.stdin.write(f"{limit_s}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert answer(WAIT_S) == "ping"
        proxy.cut("answers", pid=process.pid)
        assert answer(SILENCE_S) == "silent"
        assert echo(client) == b"ping"
        proxy.heal(pid=process.pid)
        assert answer(WAIT_S) == "ping"
        proxy.refuse(pid=process.pid)
        while answer(WAIT_S) not in {"reset", "ended"}:
            pass
        assert echo(client) == b"ping"
        process.stdin.close()


def test_faults_of_one_process_are_refused_elsewhere(proxy, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match="Linux"):
        proxy.cut(pid=1)


def test_a_port_in_use_is_reported(proxy):
    with pytest.raises(ConfigurationError, match=f"port {proxy.port}"):
        TcpProxy(1, port=proxy.port).start()
