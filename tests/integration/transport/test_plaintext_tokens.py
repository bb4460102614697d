"""Tokens toward brokers without TLS, which the routes of a service with TLS name."""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from support.scripted_broker import append_ok, in_loop, read_metadata, route_to
from support.scripted_stream_broker import ScriptedStreamBroker
from support.wires import over

JOURNAL = "a/journal"


async def append(transport):
    async def requests():
        yield pb.AppendRequest(journal=JOURNAL)
        yield b"content"
        yield pb.AppendRequest()

    return await transport.append(requests())


async def accept(requests):
    _ = [request async for request in requests]
    return append_ok(0, 7)


async def read(transport):
    return [item async for item in transport.read(pb.ReadRequest(journal=JOURNAL))]


CALLS = pytest.mark.parametrize("call", [append, read])


@contextlib.asynccontextmanager
async def route_to_plain_broker(wire, *, host, **options):
    """A transport to a service with TLS that knows a route to a broker without it."""
    async with (
        ScriptedStreamBroker("127.0.0.1:0") as plain,
        wire.served(**options) as (_, transport),
    ):
        plain.on_append = accept
        plain.on_read = lambda _: [read_metadata(0, 0, 3)]
        route = route_to(f"http://{host}:{urlsplit(plain.address).port}")
        transport.routes.update(JOURNAL, route)
        yield plain, transport


@CALLS
@over("stream over TLS")
@in_loop
async def test_a_token_is_not_sent_without_tls_where_the_service_has_it(wire, call):
    # 0.0.0.0 leads to this machine, and is not loopback.
    async with route_to_plain_broker(wire, host="0.0.0.0", auth_token="secret") as (plain, client):
        with pytest.raises(ConfigurationError, match="allow_plaintext_tokens=True"):
            await call(client)
        assert not plain.metadata
        assert client.routes.get(JOURNAL) is None  # the next call asks the service again


@CALLS
@over("stream over TLS")
@in_loop
async def test_a_token_is_sent_where_that_is_allowed(wire, call):
    options = {"auth_token": "secret", "allow_plaintext_tokens": True}
    async with route_to_plain_broker(wire, host="0.0.0.0", **options) as (plain, client):
        await call(client)
        assert plain.metadata["authorization"] == "Bearer secret"


@over("stream over TLS")
@in_loop
async def test_a_token_is_sent_over_loopback(wire):
    async with route_to_plain_broker(wire, host="127.0.0.1", auth_token="secret") as (
        plain,
        client,
    ):
        await read(client)
        assert plain.metadata["authorization"] == "Bearer secret"


@over("stream over TLS")
@in_loop
async def test_calls_without_a_token_go_to_brokers_without_tls(wire):
    async with route_to_plain_broker(wire, host="0.0.0.0") as (plain, client):
        await read(client)
        assert "authorization" not in plain.metadata


@over("stream")
@in_loop
async def test_a_token_is_sent_where_the_service_has_no_tls_either(wire):
    async with route_to_plain_broker(wire, host="0.0.0.0", auth_token="secret") as (plain, client):
        await read(client)
        assert plain.metadata["authorization"] == "Bearer secret"
