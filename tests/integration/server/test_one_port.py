"""Every protocol on one port, plain and over TLS, with clients from outside."""

from __future__ import annotations

import asyncio
import ssl

import grpc
import grpc.aio
import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.listener import PortProtocol
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.loop import run
from support.certificates import Authority
from support.raw_http import exchange
from support.scripted_journals import HEADER, ScriptedJournals, items, metadata, serving, stub


async def curl(*arguments: str) -> tuple[int, str]:
    """Run curl; its exit status and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "10", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def certificate(authority):
    return authority.issue()


def tls_of(certificate, ca_file=""):
    return server_context(str(certificate.cert_file), str(certificate.key_file), str(ca_file))


def secure_channel(server, authority, client=None) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        f"localhost:{server.listener.port}",
        grpc.ssl_channel_credentials(
            authority.ca_file.read_bytes(),
            client.key_file.read_bytes() if client else None,
            client.cert_file.read_bytes() if client else None,
        ),
    )


async def append_and_read(channel: grpc.aio.Channel, content: bytes = b"some content") -> None:
    """One append and one read over a channel."""
    response = await stub(channel, "Append")(
        iter(
            [pb.AppendRequest(journal="a/b"), pb.AppendRequest(content=content), pb.AppendRequest()]
        )
    )
    assert response.commit.end - response.commit.begin == len(content)
    read = [r async for r in stub(channel, "Read")(pb.ReadRequest(journal="a/b"))]
    assert read[1].content == b"content"


def test_grpc_and_http_share_a_port():
    async def scenario():
        async with serving(ScriptedJournals()) as server:
            assert await curl(f"{server.endpoint}/a/journal") == (0, "content")
            async with grpc.aio.insecure_channel(f"localhost:{server.listener.port}") as channel:
                await append_and_read(channel)
                await append_and_read(channel, b"x" * 1_000_000)
            assert await curl(f"{server.endpoint}/debug/ready") == (0, "")

    run(scenario(), 20)


def test_the_commands_of_the_documentation_work():
    async def scenario():
        journals = ScriptedJournals()
        follow = asyncio.Event()

        async def read(request, _call):
            yield metadata(request.offset)
            yield b"from %d\n" % request.offset
            if request.block:
                await follow.wait()
                yield b"later\n"

        journals.on_read = read
        async with serving(journals) as server:
            journal = f"{server.endpoint}/examples/foobar"
            process = await asyncio.create_subprocess_exec(
                *("curl", "-sS", "--max-time", "10", "-X", "PUT", "--data-binary", "@-", journal),
                stdin=asyncio.subprocess.PIPE,
            )
            await process.communicate(b"line one\nline two\n")
            assert process.returncode == 0
            assert b"".join(journals.appended[0][1:-1]) == b"line one\nline two\n"

            assert await curl(f"{journal}?offset=7") == (0, "from 7\n")

            following = await asyncio.create_subprocess_exec(
                *("curl", "-sS", "-N", "--max-time", "10", f"{journal}?offset=7&block=true"),
                stdout=asyncio.subprocess.PIPE,
            )
            assert following.stdout is not None
            assert await following.stdout.readline() == b"from 7\n"
            follow.set()
            assert await following.stdout.read() == b"later\n"
            assert await following.wait() == 0

    run(scenario(), 30)


def test_tls_carries_both(authority, certificate):
    async def scenario():
        async with serving(ScriptedJournals(), tls=tls_of(certificate)) as server:
            assert server.endpoint.startswith("https://localhost:")
            trust = ("--cacert", str(authority.ca_file))
            # curl offers HTTP/2 where it can: it must be given HTTP/1.1.
            assert await curl(*trust, f"{server.endpoint}/a/journal") == (0, "content")
            async with secure_channel(server, authority) as channel:
                await append_and_read(channel)
                await append_and_read(channel, b"x" * 3_000_000)
            status, _ = await curl(f"{server.endpoint}/a/journal")
            assert status == 60  # an authority it does not know

    run(scenario(), 30)


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [
        (["h2", "http/1.1"], "http/1.1"),
        (["http/1.1"], "http/1.1"),
        (["h2"], "h2"),
        (["grpc-exp", "h2"], "h2"),
        ([], None),
    ],
)
def test_alpn_prefers_http_1(authority, certificate, offered, agreed):
    async def scenario():
        async with serving(ScriptedJournals(), tls=tls_of(certificate)) as server:
            context = ssl.create_default_context(cafile=str(authority.ca_file))
            if offered:
                context.set_alpn_protocols(offered)
            _, writer = await asyncio.open_connection(
                "127.0.0.1", server.listener.port, ssl=context, server_hostname="localhost"
            )
            chosen = writer.get_extra_info("ssl_object").selected_alpn_protocol()
            writer.transport.abort()
            return chosen

    assert run(scenario(), 10) == agreed


def test_http_without_alpn_works_over_tls(authority, certificate):
    async def scenario():
        async with serving(ScriptedJournals(), tls=tls_of(certificate)) as server:
            context = ssl.create_default_context(cafile=str(authority.ca_file))
            return await exchange(server.endpoint, "GET", "/a/journal", ssl=context)

    assert run(scenario(), 10).body == b"content"


def test_clients_must_have_a_certificate_where_an_authority_is_configured(
    tmp_path, authority, certificate
):
    stranger = Authority(tmp_path, "other CA").issue("stranger")
    client = authority.issue("client")

    async def scenario():
        tls = tls_of(certificate, authority.ca_file)
        async with serving(ScriptedJournals(), tls=tls) as server:
            trust = ("--cacert", str(authority.ca_file))
            url = f"{server.endpoint}/a/journal"
            status, _ = await curl(*trust, url)
            assert status != 0
            for who, fits in ((client, True), (stranger, False)):
                own = ("--cert", str(who.cert_file), "--key", str(who.key_file))
                status, output = await curl(*trust, *own, url)
                assert (status == 0, output) == (fits, "content" if fits else "")
            async with secure_channel(server, authority, client) as channel:
                await append_and_read(channel)
            async with secure_channel(server, authority) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub(channel, "Apply")(pb.ApplyRequest(), timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    run(scenario(), 40)


def test_plain_text_on_a_tls_port_is_closed(certificate):
    async def scenario():
        async with serving(ScriptedJournals(), tls=tls_of(certificate)) as server:
            plain = server.endpoint.replace("https", "http")
            return await exchange(plain, "GET", "/a/journal")

    assert run(scenario(), 10).status_line == ""


@pytest.mark.parametrize("secure", [False, True])
def test_a_further_protocol_can_be_added(authority, certificate, secure):
    class Echo(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            transport.write(b"hello ")

        def data_received(self, data):
            self.transport.write(data)

    async def scenario():
        tls = server_context(
            str(certificate.cert_file), str(certificate.key_file), alpn=("echo/1", "http/1.1", "h2")
        )
        async with serving(ScriptedJournals(), tls=tls if secure else None) as server:
            server.listener.add(PortProtocol("echo", (b"ECHO/1\r\n\r\n",), Echo, alpn="echo/1"))
            context = None
            if secure:
                context = ssl.create_default_context(cafile=str(authority.ca_file))
                context.set_alpn_protocols(["echo/1"])
            reader, writer = await asyncio.open_connection(
                "localhost", server.listener.port, ssl=context
            )
            if secure:  # agreed on already: it is handed over before it says anything
                assert await reader.readexactly(6) == b"hello "
                writer.write(b"ECHO/1\r\n\r\n")
                assert await reader.readexactly(10) == b"ECHO/1\r\n\r\n"
            else:
                writer.write(b"ECHO/1\r\n\r\n")
                assert await reader.readexactly(16) == b"hello ECHO/1\r\n\r\n"
            writer.transport.abort()
            if not secure:
                assert (await exchange(server.endpoint, "GET", "/a/journal")).body == b"content"

    run(scenario(), 10)


def test_many_connections_of_both_kinds_at_once():
    async def scenario():
        journals = ScriptedJournals()
        async with serving(journals) as server:

            async def over_http(number: int) -> None:
                answer = await exchange(
                    server.endpoint, "PUT", "/a/journal", body=b"%d" % number * 1000
                )
                assert answer.status == 204

            async def over_grpc() -> None:
                # Channels share connections unless told otherwise.
                options = [("grpc.use_local_subchannel_pool", 1)]
                address = f"127.0.0.1:{server.listener.port}"
                async with grpc.aio.insecure_channel(address, options=options) as channel:
                    await append_and_read(channel)

            await asyncio.gather(
                *(over_http(number) for number in range(100)), *(over_grpc() for _ in range(30))
            )

    run(scenario(), 30)


def test_a_slow_grpc_reader_is_waited_for_and_does_not_stop_others():
    async def scenario():
        produced = 0

        async def pour(_request, _call):
            nonlocal produced
            yield metadata()
            for _ in range(3000):
                yield b"x" * 32_000
                produced += 1

        journals = ScriptedJournals()
        journals.on_read = pour
        async with (
            serving(journals) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.listener.port}") as channel,
        ):
            slow = stub(channel, "Read")(pb.ReadRequest(journal="a/slow"))
            assert (await slow.read()).header == HEADER
            before = -1
            while before != produced:  # until it has no more room for what is not taken
                before = produced
                await asyncio.sleep(0.1)
            assert produced < 2000
            journals.on_read = lambda *_: items(metadata(), b"content")
            await append_and_read(channel)
            slow.cancel()

    run(scenario(), 20)
