"""Connections for plain code: how they are opened, and what is told where they are not."""

from __future__ import annotations

import asyncio
import time

import pytest

from gazette_sdk.errors import (
    ConfigurationError,
    UnavailableError,
)
from gazette_sdk.protocol.stream_frames import encode_goaway
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.stream import blocking
from gazette_sdk.transport.stream.blocking import BlockingClient, NotStreamError, TlsContext
from gazette_sdk.transport.wire import Tls
from support.blocking_clients import (
    OPENING,
    Served,
    certificates,
    destination,
    may_be_dialled,
    nothing_leaks,
    obliging,
)
from support.certificates import Authority
from support.scripted_broker import in_loop, until

__all__ = ["certificates", "nothing_leaks"]


async def _closes(peer):
    pass


async def _answers_http(peer):
    peer.raw(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


async def _swallows(peer):
    await peer.hang_up()


@pytest.mark.parametrize("script", [_closes, _answers_http, _swallows])
@in_loop
async def test_what_speaks_something_else_is_told_and_left_alone(monkeypatch, script):
    monkeypatch.setattr(blocking, "DIAL_TIMEOUT_S", 0.1)
    async with Served(script) as served:
        assert may_be_dialled(served.client, served.server.address)
        with pytest.raises(NotStreamError, match="broker zone/member"):
            await served.prepare()
        assert not may_be_dialled(served.client, served.server.address)
        assert await served.tried() is None


@in_loop
async def test_what_could_not_be_dialled_is_left_alone_ever_longer(monkeypatch):
    monkeypatch.setattr(blocking, "REDIAL_AFTER_S", 0.2)
    is_well = False

    async def ailing(peer):
        if is_well:
            await obliging(peer)

    async with Served(ailing) as served:
        address = served.server.address

        async def left_alone_s():
            with pytest.raises(NotStreamError):
                await served.prepare()
            failed_at = time.monotonic()
            assert not may_be_dialled(served.client, address)
            await until(lambda: may_be_dialled(served.client, address))
            return time.monotonic() - failed_at

        assert await left_alone_s() > 0.1
        assert await left_alone_s() > 0.3
        is_well = True
        await served.append()
        assert may_be_dialled(served.client, address)
        is_well = False
        assert await left_alone_s() < 0.7  # it was well meanwhile


@in_loop
async def test_others_are_spoken_to_while_one_cannot_be_dialled():
    async with Served(obliging) as served:
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(served.client.prepare, destination("http://127.0.0.1:1"))
        assert not may_be_dialled(served.client, "http://127.0.0.1:1")
        assert may_be_dialled(served.client, served.server.address)
        await served.append()


@in_loop
async def test_what_cannot_be_reached_is_told(certificates, tmp_path):
    context, _ = certificates
    client = BlockingClient(TlsContext(Tls()))
    for address in ("http://127.0.0.1:1", f"unix://{tmp_path}/none"):
        assert client.append(destination(address), OPENING, b"x") is None
        assert may_be_dialled(client, address)
        with pytest.raises(UnavailableError, match="cannot connect to broker zone/member"):
            client.prepare(destination(address))
        assert not may_be_dialled(client, address)
    async with Served(obliging, tls=context) as served:
        refused = (
            r"cannot agree on TLS with broker zone/member.*; give the certificate of the authority"
        )
        with pytest.raises(UnavailableError, match=refused):
            await served.prepare()


@in_loop
async def test_a_certificate_that_has_expired_is_to_be_renewed(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue(days=-0.5)
    context = server_context(str(issued.cert_file), str(issued.key_file), alpn=("gzt/1",))
    trusting = Tls(trusted_ca_file=str(authority.ca_file))
    async with Served(obliging, tls=context, client_tls=trusting) as served:
        with pytest.raises(UnavailableError, match=r"certificate has expired.*; renew"):
            await served.prepare()


@in_loop
async def test_a_certificate_that_cannot_be_used_is_told_and_not_read_again_at_once(
    certificates, tmp_path
):
    context, _ = certificates
    missing = Tls(trusted_ca_file=str(tmp_path / "none.pem"))
    async with Served(obliging, tls=context, client_tls=missing) as served:
        with pytest.raises(ConfigurationError):
            await served.prepare()
        assert not may_be_dialled(served.client, served.server.address)


@in_loop
async def test_a_server_that_chooses_http2_is_no_stream_server(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue()
    context = server_context(str(issued.cert_file), str(issued.key_file), alpn=("h2",))
    client_tls = Tls(trusted_ca_file=str(authority.ca_file))
    async with Served(_swallows, tls=context, client_tls=client_tls) as served:
        with pytest.raises(NotStreamError, match="it chose h2 in TLS"):
            await served.prepare()


@in_loop
async def test_a_server_that_is_leaving_speaks_the_wire():
    async def script(peer):
        peer.raw(encode_goaway("it stops"))
        await peer.hang_up()

    async with Served(script) as served:
        with pytest.raises(UnavailableError, match="it stops") as caught:
            await served.prepare()
        assert not isinstance(caught.value, NotStreamError)
