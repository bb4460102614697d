import asyncio
from pathlib import Path

import grpc.aio
import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.process import Server, configured_server
from gazette_sdk.server.settings import BrokerSettings, DebugSettings
from gazette_sdk.transport.loop import run
from support.certificates import Authority
from support.raw_http import exchange
from support.scripted_journals import ScriptedJournals, serving, stub


def test_the_endpoint_is_known_once_bound():
    server = Server()
    with pytest.raises(ConfigurationError, match="not bound yet"):
        _ = server.endpoint
    endpoint = server.bind()
    assert (
        endpoint == server.endpoint == server.bind() == f"http://localhost:{server.listener.port}"
    )
    server._close_listeners()


@pytest.mark.parametrize(
    ("options", "endpoint"),
    [
        ({"advertise_host": "h.example"}, "http://h.example:{}"),
        ({"host": "127.0.0.1"}, "http://127.0.0.1:{}"),
        ({"host": "127.0.0.1", "port": ""}, "http://127.0.0.1:{}"),
        ({"advertise_host": "::1"}, "http://[::1]:{}"),
    ],
)
def test_the_advertised_endpoint_follows_the_options(options, endpoint):
    server = Server(**options)
    assert server.bind() == endpoint.format(server.listener.port)
    server._close_listeners()


@pytest.mark.parametrize("port", ["x", "-1", "65536", "unix://", "unix://host", "unix:///"])
def test_a_malformed_port_is_refused(port):
    with pytest.raises(ConfigurationError, match=r"is no port|names no socket"):
        Server(port=port).bind()


def test_a_failed_binding_leaves_nothing_bound():
    blocker = Server(host="127.0.0.1")
    blocker.bind()
    server = Server(host="127.0.0.1", debug_port=str(blocker.listener.port))
    with pytest.raises(ConfigurationError, match="in use"):
        server.bind()
    assert not server.listener._sockets
    with pytest.raises(ConfigurationError, match="not bound yet"):
        _ = server.endpoint
    blocker._close_listeners()


def test_a_unix_socket_carries_both_protocols(tmp_path: Path):
    async def scenario():
        path = tmp_path / "gazette.sock"
        async with serving(ScriptedJournals(), port=f"unix://{path}") as server:
            assert server.endpoint == f"unix://localhost{path}"
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                assert (await stub(channel, "Apply")(pb.ApplyRequest())).header.etcd.revision == 56
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"GET /debug/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 5)) == b"HTTP/1.1 200 OK\r\n"
            writer.transport.abort()
        assert not path.exists()

    run(scenario(), 10)


def test_the_inner_socket_is_private_and_removed_at_the_end():
    async def scenario():
        server = Server()
        await server.start()
        directory = server._directory
        assert directory.stat().st_mode & 0o777 == 0o700
        await server.stop(0)
        assert not directory.exists()

    run(scenario(), 10)


def test_a_stopped_server_refuses_connections_at_once_and_a_stop_may_be_repeated():
    async def scenario():
        server = Server()
        endpoint = await server.start()
        assert (await exchange(endpoint, "GET", "/debug/ready")).status == 200
        await asyncio.wait_for(server.stop(), 5)
        await server.stop()
        with pytest.raises(OSError, match=r"."):
            await exchange(endpoint, "GET", "/debug/ready")

    run(scenario(), 10)


def test_servers_of_one_process_do_not_meet():
    async def scenario():
        first, second = ScriptedJournals(), ScriptedJournals()
        async with serving(first) as one, serving(second) as two:
            assert one.endpoint != two.endpoint
            await exchange(one.endpoint, "GET", "/a/journal")
        assert (len(first.calls), len(second.calls)) == (1, 0)

    run(scenario(), 10)


def test_a_configured_server_is_bound_everywhere_and_advertises_its_host(tmp_path):
    issued = Authority(tmp_path).issue()
    certificate = {
        "server_cert_file": str(issued.cert_file),
        "server_cert_key_file": str(issued.key_file),
    }
    plain = configured_server(BrokerSettings(host="h.example"), DebugSettings(port="0"))
    assert plain.bind() == f"http://h.example:{plain.listener.port}"
    assert plain._debug_listener.port not in {None, plain.listener.port}
    plain._close_listeners()
    secure = configured_server(BrokerSettings(host="h.example", **certificate), DebugSettings())
    assert secure.bind() == f"https://h.example:{secure.listener.port}"
    secure._close_listeners()
    path = tmp_path / "socket"
    local = configured_server(
        BrokerSettings(host="h.example", port=f"unix://{path}", **certificate),
        DebugSettings(),
    )
    assert local.bind() == f"unix://h.example{path}"
    local._close_listeners()
