"""StreamTransport against servers that are something else, or break calls off."""

from __future__ import annotations

import pytest

from gazette_sdk.errors import CallError, UnavailableError
from gazette_sdk.protocol.stream_frames import Kind, encode, encode_goaway, header
from gazette_sdk.transport.stream.blocking import NotStreamError
from support.scripted_broker import in_loop
from support.stream_transports import APPLIED, apply, items, pool, served

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")

# ----------------------------------------------------------- something else there


async def _closes(peer):
    pass


async def _answers_http(peer):
    peer.raw(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


async def _greets_wrongly(peer):
    peer.raw(encode(Kind.HELLO, b"\xff\xff"))
    await peer.hang_up()


async def _begins_out_of_order(peer):
    peer.raw(encode(Kind.STATUS, b"\0"))
    await peer.hang_up()


async def _swallows(peer):
    await peer.hang_up()


@pytest.mark.parametrize(
    "script", [_closes, _answers_http, _greets_wrongly, _begins_out_of_order, _swallows]
)
@in_loop
async def test_what_speaks_something_else_is_told_from_what_cannot_be_reached(script):
    async with served(script, connect_timeout_s=0.3) as (server, transport):
        pool(transport).hello_timeout_s = 0.1
        with pytest.raises(UnavailableError, match=server.address) as caught:
            await apply(transport)
        assert isinstance(caught.value.__cause__, NotStreamError)


@in_loop
async def test_a_server_that_is_full_says_so_and_speaks_this_wire():
    async def script(peer):
        peer.raw(encode_goaway("too many connections"))

    async with served(script, connect_timeout_s=0.3) as (_, transport):
        with pytest.raises(UnavailableError, match="too many connections") as caught:
            await apply(transport)
        assert not isinstance(caught.value.__cause__, NotStreamError)


# -------------------------------------------------------------- broken in a call


async def _lose(peer, _began):
    peer.writer.transport.abort()


async def _break_off_inside_a_frame(peer, _began):
    peer.raw(header(Kind.MESSAGE, 100) + b"half")


async def _garbage(peer, _began):
    peer.raw(b"\xfe" * 40)
    await peer.hang_up()


async def _oversize(peer, _began):
    peer.raw(bytes((Kind.CONTENT,)) + (1 << 30).to_bytes(4, "big"))
    await peer.hang_up()


async def _out_of_order(peer, began):
    peer.raw(encode(Kind.CONTENT, b"x"))
    await peer.hang_up()


async def _success_without_response(peer, began):
    peer.raw(encode(Kind.STATUS, b"\0"))
    await peer.hang_up()


async def _goaway_and_close(peer, _began):
    peer.raw(encode_goaway("restarting"))


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (_lose, "Apply at http"),
        (_break_off_inside_a_frame, "closed the connection"),
        (_garbage, "unknown kind 254"),
        (_oversize, "CONTENT frame of 1073741824 bytes"),
        (_out_of_order, "out of order"),
        (_success_without_response, "success without a response"),
        (_goaway_and_close, "restarting"),
    ],
)
@in_loop
async def test_a_call_that_breaks_is_unavailable_and_the_next_one_reconnects(breaks, text):
    broken = []

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        if not broken:
            broken.append(1)
            await breaks(peer, began)
            return
        peer.answer(began.call, APPLIED)
        await peer.hang_up()

    async with served(script) as (server, transport):
        with pytest.raises(UnavailableError, match=text):
            await apply(transport)
        assert await apply(transport) == APPLIED
        assert len(server.peers) == 2


@in_loop
async def test_an_append_whose_acknowledgement_is_lost_is_sent_once():
    async def script(peer):
        await peer.greet()
        await peer.whole_append()
        peer.writer.transport.abort()

    async with served(script) as (server, transport):
        with pytest.raises(UnavailableError):
            await transport.append(items(b"content"))
        assert len(server.peers) == 1


@in_loop
async def test_a_message_that_is_none_is_an_error_of_the_call_alone():
    async def script(peer):
        await peer.greet()
        peer.raw(peer.calls.answer((await peer.call()).call, b"\xff"))
        peer.answer((await peer.call()).call, APPLIED)
        await peer.hang_up()

    async with served(script) as (server, transport):
        with pytest.raises(CallError, match="malformed") as caught:
            await apply(transport)
        assert caught.value.code == "INTERNAL"
        assert await apply(transport) == APPLIED
        assert len(server.peers) == 1


@in_loop
async def test_responses_above_the_callers_bound_are_refused():
    async def script(peer):
        await peer.greet()
        peer.answer((await peer.call()).call, APPLIED)
        await peer.hang_up()

    async with served(script, max_receive_bytes=3) as (_, transport):
        with pytest.raises(CallError, match="max_receive_bytes") as caught:
            await apply(transport)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
