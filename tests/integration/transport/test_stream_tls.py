"""The stream transport under TLS, and on Unix sockets."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any

import pytest

from gazette_sdk.errors import ConfigurationError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.server.process import Server
from gazette_sdk.server.stream import Answer, StreamMethod
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.stream.blocking import NotStreamError, TlsContext, dial
from gazette_sdk.transport.stream.wire import ChosenTransport, StreamTransport
from gazette_sdk.transport.wire import Tls
from support.certificates import Authority
from support.scripted_broker import header, in_loop
from support.scripted_stream import ScriptedStream

APPLIED = pb.ApplyResponse(header=header())


@dataclass
class Files:
    authority: Any
    cert_file: str
    key_file: str

    @property
    def tls(self):
        return Tls(trusted_ca_file=str(self.authority.ca_file))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    issued = authority.issue()
    return Files(authority, str(issued.cert_file), str(issued.key_file))


async def obliging(peer):
    await peer.greet()
    while True:
        peer.answer((await peer.call()).call, APPLIED)


def apply(transport):
    return transport.apply(pb.ApplyRequest())


@in_loop
async def test_a_trusted_server_is_spoken_to_under_tls(files):
    context = server_context(files.cert_file, files.key_file)
    async with ScriptedStream(obliging, tls=context) as server:
        async with StreamTransport(server.address, tls=files.tls) as transport:
            for _ in range(3):
                assert await apply(transport) == APPLIED
            [peer] = server.peers
            tls = peer.writer.get_extra_info("ssl_object")
            assert tls.selected_alpn_protocol() == "gzt/1"
        async with StreamTransport(server.address, connect_timeout_s=0.3) as untrusting:
            with pytest.raises(UnavailableError, match="certificate"):
                await apply(untrusting)


@in_loop
async def test_a_server_without_alpn_is_asked_by_the_preface(files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert_file, files.key_file)
    async with (
        ScriptedStream(obliging, tls=context) as server,
        StreamTransport(server.address, tls=files.tls) as transport,
    ):
        assert await apply(transport) == APPLIED


@in_loop
async def test_a_server_without_tls_is_told(files):
    async def close(reader, writer):
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1")
    address = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(UnavailableError, match="the broker: the connection was closed"):
        await dial(address, "the broker", TlsContext(files.tls), 10, asyncio.Protocol)
    server.close()


@in_loop
async def test_a_client_certificate_is_presented_where_it_is_given(files):
    context = server_context(files.cert_file, files.key_file, str(files.authority.ca_file))
    mine = files.authority.issue("client")
    tls = Tls(str(files.authority.ca_file), str(mine.cert_file), str(mine.key_file))
    async with ScriptedStream(obliging, tls=context) as server:
        async with StreamTransport(server.address, tls=tls) as transport:
            assert await apply(transport) == APPLIED
        for kind in (StreamTransport, ChosenTransport):
            options = {"tls": files.tls, "connect_timeout_s": 0.3}
            async with kind(server.address, **options) as nameless:
                with pytest.raises(UnavailableError):
                    await apply(nameless)


@in_loop
async def test_a_server_that_chooses_http2_is_no_stream_server(files):
    context = server_context(files.cert_file, files.key_file, alpn=("h2",))
    async with (
        ScriptedStream(obliging, tls=context) as server,
        StreamTransport(server.address, tls=files.tls, connect_timeout_s=0.3) as transport,
    ):
        with pytest.raises(UnavailableError, match="it chose h2 in TLS") as caught:
            await apply(transport)
        assert isinstance(caught.value.__cause__, NotStreamError)


@pytest.mark.parametrize("kind", [StreamTransport, ChosenTransport])
@in_loop
async def test_files_that_cannot_be_used_are_named(kind, files, tmp_path):
    async with kind("https://localhost:1", tls=Tls("/absent/ca.pem")) as transport:
        with pytest.raises(ConfigurationError, match=r"/absent/ca\.pem"):
            await apply(transport)
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    async with kind("https://localhost:1", tls=Tls(cert_file=str(nonsense))) as transport:
        with pytest.raises(ConfigurationError, match=r"nonsense\.pem"):
            await apply(transport)


@pytest.mark.parametrize("kind", [StreamTransport, ChosenTransport])
@pytest.mark.parametrize("host", ["", "host"])
@in_loop
async def test_unix_sockets_are_dialled(kind, host, tmp_path):
    server = Server(port=f"unix://{tmp_path}/socket")
    server.stream.add(_methods())
    await server.start()
    try:
        async with kind(f"unix://{host}{tmp_path}/socket") as transport:
            assert await apply(transport) == APPLIED
    finally:
        await server.stop(1.0)
    async with kind(f"unix://{tmp_path}/socket", connect_timeout_s=0.2) as transport:
        with pytest.raises(UnavailableError, match="cannot connect"):
            await apply(transport)


def _methods():
    async def serve(call):
        return Answer(APPLIED.SerializeToString())

    return [StreamMethod(RPCS_BY_NAME["Apply"], serve)]
