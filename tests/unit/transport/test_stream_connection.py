"""A connection against whatever may arrive, without a socket."""

from __future__ import annotations

import asyncio
import socket

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.protocol.stream_frames import (
    PREFACE,
    Kind,
    Method,
    encode,
    encode_goaway,
    encode_hello,
    encode_status,
)
from gazette_sdk.transport.stream.connection import (
    HELD_BYTES_MAX,
    LOW_WATER_BYTES,
    Connection,
    EndReason,
)
from support.scripted_broker import in_loop


class Wire:
    """An asyncio transport that keeps what is written."""

    def __init__(self):
        self.written = b""
        self.closed = False
        self.paused = 0

    def set_write_buffer_limits(self, high, low):
        pass

    def get_extra_info(self, name):
        return None

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        self.paused += 1

    def resume_reading(self):
        self.paused -= 1

    def abort(self):
        self.closed = True

    close = abort


class Keeper:
    """Who owns the connection."""

    def __init__(self):
        self.events = []

    def idle(self, connection):
        self.events.append("idle")

    def lost(self, connection):
        self.events.append("lost")


def made():
    wire, keeper = Wire(), Keeper()
    connection = Connection(keeper.idle, keeper.lost)
    connection.connection_made(wire)
    assert wire.written == PREFACE
    return connection, wire, keeper


def feed(connection, data):
    while data:
        room = connection.get_buffer(-1)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


FRAMES = st.sampled_from(
    [
        encode(Kind.MESSAGE, b"response"),
        encode(Kind.CONTENT, b"content"),
        encode_status(0),
        encode_status(14, "unavailable"),
        encode(Kind.PING, b"ping"),
        encode(Kind.PONG, b""),
        encode_goaway("bye"),
        encode_hello("z", "s"),
        encode(Kind.STATUS, b""),
        encode(Kind.CALL, b"\x01\x00\x00"),
    ]
)
PIECES = st.lists(st.one_of(FRAMES, st.binary(max_size=40)), max_size=12)
METHODS = st.sampled_from([Method.LIST, Method.APPLY, Method.READ, Method.APPEND])


@given(pieces=PIECES, methods=st.lists(METHODS, max_size=3), greeted=st.booleans())
def test_whatever_arrives_every_call_ends_and_nothing_is_raised(pieces, methods, greeted):
    @in_loop
    async def run():
        connection, wire, keeper = made()
        if greeted:
            feed(connection, encode_hello("z", "s"))
        calls = []
        for piece in pieces:
            if methods and connection.greeted.done() and connection.usable:
                method = methods.pop()
                calls.append(connection.begin(method, b""))
                if method is Method.APPEND:
                    calls[-1].send_end()
            if wire.closed:
                break
            feed(connection, piece)
        for call in calls[1:]:
            call.give_up()
        connection.connection_lost(None)
        assert keeper.events[-1] == "lost"
        for call in calls:
            assert call.over
            while await call.more():
                call.take()
        await connection.closed()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others

    run()


@in_loop
async def test_items_that_nobody_takes_stop_the_reading_once():
    connection, wire, _ = made()
    feed(connection, encode_hello())
    call = connection.begin(Method.READ, b"")
    content = encode(Kind.CONTENT, bytes(HELD_BYTES_MAX // 2))
    for expected in (0, 0, 1, 1):
        feed(connection, content)
        assert wire.paused == expected
    while call.take() is not None:
        pass
    assert wire.paused == 0
    connection.connection_lost(None)
    assert call.ended is EndReason.LOST


@in_loop
async def test_a_single_large_response_stops_nothing():
    connection, wire, keeper = made()
    feed(connection, encode_hello())
    call = connection.begin(Method.APPLY, b"")
    feed(connection, encode(Kind.MESSAGE, bytes(2 * HELD_BYTES_MAX)))
    assert wire.paused == 0
    feed(connection, encode_status(0))
    await call.end()
    assert keeper.events == ["idle"]
    connection.connection_lost(None)


@in_loop
async def test_what_was_given_up_is_dropped_and_reading_goes_on():
    connection, wire, keeper = made()
    feed(connection, encode_hello())
    call = connection.begin(Method.READ, b"")
    for _ in range(4):
        feed(connection, encode(Kind.CONTENT, bytes(HELD_BYTES_MAX // 2)))
    assert wire.paused == 1
    call.give_up()
    assert wire.paused == 0
    feed(connection, encode(Kind.CONTENT, b"late"))
    assert call.take() is None
    feed(connection, encode_status(1, "given up"))
    assert keeper.events == ["idle"]
    assert connection.usable
    connection.connection_lost(None)


@in_loop
async def test_a_whole_append_is_one_write():
    connection, wire, _ = made()
    feed(connection, encode_hello())
    writes = []
    wire.write = writes.append
    connection.append(b"request", b"content")
    assert len(writes) == 1
    connection.connection_lost(None)


@in_loop
async def test_masses_of_content_are_waited_for_in_large_pieces_and_all_else_in_any():
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        keeper = Keeper()
        _, connection = await loop.create_connection(
            lambda: Connection(keeper.idle, keeper.lost), sock=ours
        )
        await loop.sock_recv(theirs, 100)
        await loop.sock_sendall(theirs, encode_hello())
        await asyncio.wait_for(connection.greeted, 5)
        call = connection.begin(Method.READ, b"")
        await loop.sock_recv(theirs, 100)

        def low_water() -> int:
            return ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

        content = bytes(300 << 10)
        frame = encode(Kind.CONTENT, content)
        seen = set()
        sending = asyncio.ensure_future(loop.sock_sendall(theirs, frame * 2 + frame[:-1]))
        while not sending.done():
            await asyncio.sleep(0)
            seen.add(low_water())
        await asyncio.sleep(0.05)
        assert seen <= {1, LOW_WATER_BYTES}
        assert low_water() == 1  # a byte is missing, and nobody waits for more than that
        await loop.sock_sendall(theirs, frame[-1:] + encode(Kind.PING, b"there?"))
        assert await asyncio.wait_for(loop.sock_recv(theirs, 100), 5) == encode(
            Kind.PONG, b"there?"
        )
        assert [call.take().payload for _ in range(3)] == [content] * 3
        connection.drop("the test ends")
        await asyncio.sleep(0)
