import asyncio
import contextlib
import errno
import gc
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server import listener as listener_module
from gazette_sdk.server.listener import HTTP_OPENINGS, Listener, PortProtocol, find_protocol
from gazette_sdk.transport.loop import run
from support.spools import until


class Recorder(asyncio.Protocol):
    """Keeps what it is given; answers with its own name."""

    def __init__(self, name: str, seen: list[tuple[str, bytes]]) -> None:
        self.name = name
        self.seen = seen

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.seen.append((self.name, data))
        self.transport.write(self.name.encode() + b":" + data)


def wires(seen: list[tuple[str, bytes]]) -> list[PortProtocol]:
    return [
        PortProtocol("grpc", (b"PRI * HTTP/2.0\r\n",), lambda: Recorder("grpc", seen)),
        PortProtocol("http", HTTP_OPENINGS, lambda: Recorder("http", seen)),
        PortProtocol("stream", (b"GZT/1\r\n\r\n",), lambda: Recorder("stream", seen)),
    ]


@pytest.mark.parametrize(
    ("opening", "name", "undecided"),
    [
        (b"", None, True),
        (b"P", None, True),
        (b"PRI * HT", None, True),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "grpc", False),
        (b"PUT /a", "http", False),
        (b"GET /", "http", False),
        (b"GE", None, True),
        (b"G", None, True),
        (b"GZT/1\r\n\r\n", "stream", False),
        (b"GZT/2", None, False),
        (b"PATCH / HTTP/1.1\r\n", None, False),
        (b"PA", None, False),
        (b"get / HTTP/1.1", None, False),
        (b"\x16\x03\x01", None, False),
        (b"OPTIONS * HTTP/1.1", "http", False),
    ],
)
def test_the_first_bytes_say_the_protocol(opening, name, undecided):
    wire, more = find_protocol(opening, wires([]))
    assert (wire.name if wire else None, more) == (name, undecided)


@given(st.binary(max_size=30), st.integers(0, 30))
def test_more_bytes_never_change_a_decision(opening, cut):
    known = wires([])
    wire, more = find_protocol(opening[:cut], known)
    if not more:
        assert find_protocol(opening, known)[0] is wire


async def _ask(port: int, *parts: bytes) -> bytes:
    """Send bytes in parts, each after the one before was surely sent, and read to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        return await asyncio.wait_for(reader.read(1000), 5)
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


def _listening(seen):
    listener = Listener()
    for wire in wires(seen):
        listener.add(wire)
    listener.bind("127.0.0.1", 0)
    return listener


def test_a_connection_is_handed_over_with_all_it_said():
    async def scenario():
        seen: list[tuple[str, bytes]] = []
        listener = _listening(seen)
        await listener.start()
        try:
            assert await _ask(listener.port, b"GZT/1\r\n\r\nhello") == b"stream:GZT/1\r\n\r\nhello"
            assert await _ask(listener.port, b"GET / HTTP/1.1") == b"http:GET / HTTP/1.1"
            await _ask(listener.port, b"P", b"RI *", b" HTTP/2.0\r\n", b"more")
        finally:
            listener.close()
        assert b"".join(data for name, data in seen if name == "grpc").startswith(b"PRI * HTTP/2.0")

    run(scenario(), 10)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_small_answers_are_sent_at_once(address):
    """With Nagle's algorithm, the second of two answers waits 40 ms for the first one's ACK."""

    async def scenario():
        made: list[Recorder] = []

        def recorder() -> Recorder:
            made.append(Recorder("stream", []))
            return made[-1]

        listener = Listener()
        listener.add(PortProtocol("stream", (b"GZT/1\r\n\r\n",), recorder))
        listener.bind("localhost", 0)
        await listener.start()
        try:
            _, writer = await asyncio.open_connection(address, listener.port)
            writer.write(b"GZT/1\r\n\r\n")
            await until(lambda: made)
            accepted = made[0].transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            made[0].transport.abort()
            writer.transport.abort()
        finally:
            listener.close()

    run(scenario(), 10)


@pytest.mark.parametrize(
    "opening", [b"PATCH / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02", b"hello\r\n"]
)
def test_an_unknown_protocol_closes_the_connection(opening):
    async def scenario():
        seen: list[tuple[str, bytes]] = []
        listener = _listening(seen)
        await listener.start()
        try:
            assert await _ask(listener.port, opening) == b""
        finally:
            listener.close()
        assert not seen

    run(scenario(), 10)


@pytest.mark.parametrize("opening", [b"", b"GE"])
def test_a_connection_that_shows_no_protocol_in_time_is_closed(monkeypatch, opening):
    monkeypatch.setattr(listener_module, "OPENING_TIMEOUT_S", 0.05)

    async def scenario():
        listener = _listening([])
        await listener.start()
        try:
            assert await _ask(listener.port, opening) == b""
        finally:
            listener.close()

    run(scenario(), 10)


def test_closing_drops_connections_without_a_protocol():
    async def scenario():
        listener = _listening([])
        await listener.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GE")
        await until(lambda: listener._opening)
        listener.close()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 5)
        writer.transport.abort()
        with pytest.raises(OSError, match=r"."):
            await asyncio.open_connection("127.0.0.1", listener.port)

    run(scenario(), 10)


@pytest.mark.parametrize("turns", range(5))
def test_closing_aborts_connections_that_are_just_being_made(turns):
    async def scenario() -> None:
        listener = Listener()
        listener.bind("127.0.0.1", 0)
        await listener.start()
        clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(8)]
        for _ in range(turns):
            await asyncio.sleep(0)
        listener.close()
        loop = asyncio.get_running_loop()
        for client in clients:
            client.setblocking(False)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(loop.sock_recv(client, 1), 2) == b""
            client.close()

    run(scenario(), timeout=10)
    gc.collect()  # which tells of sockets that nobody closed


def test_connections_are_refused_from_binding_until_the_start():
    async def scenario():
        listener = _listening([])
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)
        await listener.start()
        try:
            assert await _ask(listener.port, b"GET /late") == b"http:GET /late"
        finally:
            listener.close()

    run(scenario(), 10)


def test_a_port_that_is_bound_is_in_use_before_it_is_served():
    first, second = _listening([]), Listener()
    try:
        with pytest.raises(ConfigurationError, match=f"port {first.port}.* already in use"):
            second.bind("127.0.0.1", first.port)
    finally:
        first.close()


def test_a_port_that_another_process_serves_on_at_the_start_is_in_use():
    class Taken(socket.socket):
        def listen(self, _backlog=0):
            raise OSError(errno.EADDRINUSE, "Address already in use")

    async def scenario():
        listener = Listener()
        taken = Taken()
        listener._sockets.append(taken)
        with pytest.raises(ConfigurationError, match="is already in use; stop the process"):
            await listener.start()
        assert taken.fileno() == -1

    run(scenario(), 10)


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"port {port} of .* in use; stop the process"
        ):
            Listener().bind("127.0.0.1", port)
        with pytest.raises(ConfigurationError, match="in use"):
            Listener().bind("localhost", port)


def test_an_unknown_host_is_refused():
    with pytest.raises(ConfigurationError, match="check the host name"):
        Listener().bind("no-such-host.invalid", 0)


def test_localhost_is_every_loopback_address():
    async def scenario():
        listener = Listener()
        listener.add(PortProtocol("http", HTTP_OPENINGS, lambda: Recorder("http", [])))
        port = listener.bind("localhost", 0)
        await listener.start()
        try:
            hosts = (
                ["127.0.0.1", "::1"] if socket.has_ipv6 and _has_ipv6_loopback() else ["127.0.0.1"]
            )
            for host in hosts:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET /")
                assert await asyncio.wait_for(reader.readexactly(10), 5) == b"http:GET /"
                writer.transport.abort()
        finally:
            listener.close()

    run(scenario(), 10)


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_all_interfaces_can_be_bound():
    async def scenario():
        listener = Listener()
        port = listener.bind("", 0)
        await listener.start()
        try:
            with socket.create_connection(("127.0.0.1", port), 5):
                pass
        finally:
            listener.close()

    run(scenario(), 10)


def test_a_unix_socket_is_served_and_removed(tmp_path: Path):
    async def scenario():
        path = tmp_path / "socket"
        listener = Listener()
        listener.add(PortProtocol("http", HTTP_OPENINGS, lambda: Recorder("http", [])))
        listener.bind_unix(path)
        await listener.start()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /")
        assert await asyncio.wait_for(reader.readexactly(10), 5) == b"http:GET /"
        writer.transport.abort()
        with pytest.raises(ConfigurationError, match="cannot be bound"):
            Listener().bind_unix(path)
        listener.close()
        assert not path.exists()

    run(scenario(), 10)


def test_a_unix_socket_left_behind_is_replaced(tmp_path: Path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    listener = Listener()
    listener.bind_unix(path)
    listener.close()


def test_a_unix_socket_in_a_missing_directory_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="cannot be bound"):
        Listener().bind_unix(tmp_path / "missing" / "socket")
