"""A blocking connection over a socket that is full, empty, or TLS that has some of it already."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from gazette_sdk import adaptive_spin
from gazette_sdk.protocol.stream_frames import Kind, encode, encode_hello
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.stream.blocking import (
    PROTOCOLS,
    BlockingConnection,
    LostConnectionError,
    StreamBlockingCall,
)
from gazette_sdk.transport.wire import Tls
from support.certificates import Authority

WAIT_S = 10.0


@pytest.fixture
def ends():
    """A connection, and the server's socket."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(WAIT_S)
    connection = BlockingConnection(ours)
    with contextlib.closing(connection), theirs:
        yield connection, theirs


def read(sock, length):
    got = bytearray()
    while len(got) < length:
        got += sock.recv(length - len(got))
    return bytes(got)


def test_what_does_not_fit_at_once_is_sent_as_there_is_room(ends):
    connection, theirs = ends
    data = bytes(range(256)) * (16 << 10)
    got = []
    reader = threading.Thread(target=lambda: got.append(read(theirs, len(data))))
    threading.Timer(0.05, reader.start).start()
    connection.send(data)
    reader.join(WAIT_S)
    assert got == [data]


def test_who_does_not_read_is_given_the_time_of_reads(ends):
    connection, _ = ends
    assert not connection.receive(0.1)
    began_at = time.monotonic()
    with pytest.raises(LostConnectionError, match="does not read"):
        connection.send(bytes(4 << 20))
    assert 0.1 <= time.monotonic() - began_at < WAIT_S
    with pytest.raises(LostConnectionError, match="does not read"):
        connection.send_soon(b"x")


def test_where_nothing_is_to_be_waited_for_nothing_is(ends):
    connection, theirs = ends
    assert not connection.receive(0)
    with pytest.raises(LostConnectionError, match="does not read"):
        connection.send_soon(bytes(4 << 20))
    theirs.sendall(encode_hello())
    connection.receive(0)
    assert connection.greeted


def test_a_read_waits_for_its_time_and_no_longer_than_for_bytes(ends, monkeypatch):
    connection, theirs = ends
    for spin_s in (adaptive_spin.SPIN_S, 1000.0):  # asleep in the end, or awake all the time
        monkeypatch.setattr(adaptive_spin, "SPIN_S", spin_s)
        began_at = time.monotonic()
        assert not connection.receive(0.05)
        assert time.monotonic() - began_at >= 0.05
    monkeypatch.undo()
    threading.Timer(0.05, theirs.sendall, (encode_hello(),)).start()
    connection.receive(WAIT_S)
    assert connection.greeted


def test_an_interruption_wakes_who_reads(ends):
    connection, _ = ends
    threading.Timer(0.05, connection.interrupt).start()
    with pytest.raises(LostConnectionError):
        connection.receive(WAIT_S)


class Client:
    """Client of one call, which takes its connection back."""

    is_closed = False

    def discard(self, connection):
        """Nothing."""


@pytest.mark.parametrize("error", [TimeoutError("alarm"), OSError("alarm"), ValueError("alarm")])
def test_the_error_of_an_alarm_interrupts_the_wait_for_an_answer(ends, alarm, error):
    connection, _ = ends
    connection.liveness.begin(time.monotonic())
    call = StreamBlockingCall(Client(), connection, None, 0.0)
    with alarm(error), pytest.raises(type(error), match="alarm"):
        call.wait(WAIT_S)
    assert call.over


def test_the_error_of_an_alarm_interrupts_the_wait_for_room(ends, alarm):
    connection, _ = ends
    call = StreamBlockingCall(Client(), connection, None, 0.0)
    with alarm(TimeoutError("alarm")), pytest.raises(TimeoutError, match="alarm"):
        call.send(bytes(64 << 20))


def test_what_tls_has_decrypted_already_is_not_waited_for(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue()
    server_tls = server_context(str(issued.cert_file), str(issued.key_file))
    client_tls = Tls(trusted_ca_file=str(authority.ca_file)).context(PROTOCOLS)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(WAIT_S)
        accepted = []
        accept = threading.Thread(
            target=lambda: accepted.append(server_tls.wrap_socket(theirs, server_side=True))
        )
        accept.start()
        connection = BlockingConnection(client_tls.wrap_socket(ours, server_hostname="localhost"))
        accept.join(WAIT_S)
        with contextlib.closing(connection), accepted[0] as server:
            greet(connection, server)
            # One record of TLS, and more than one read's worth: the rest of it is with us.
            server.sendall(encode(Kind.PONG, b"") * 2000)
            connection.receive(WAIT_S)
            began_at = time.monotonic()
            connection.receive(WAIT_S)
            assert time.monotonic() - began_at < WAIT_S / 2


def greet(connection, server):
    server.sendall(encode_hello())
    while not connection.greeted:
        connection.receive(WAIT_S)  # perhaps a ticket of TLS alone
