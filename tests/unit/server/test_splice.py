import asyncio
import contextlib
import hashlib
import logging
import os
import random
import socket
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gazette_sdk.server import splice
from gazette_sdk.server.listener import Listener, PortProtocol
from gazette_sdk.server.splice import (
    READ_BYTES,
    UNKNOWN_BYTES_MAX,
    UNKNOWN_CALLS_MAX,
    CallHeaders,
    Splicer,
    UnknownFrames,
)
from gazette_sdk.transport.loop import run
from support import raw_grpc
from support.certificates import Authority
from support.open_files import open_files
from support.spools import until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
OPENING = PREFACE + b"\0\0\0\4\0\0\0\0\0"
"""Bytes with which a client of HTTP/2 begins."""


@asynccontextmanager
async def spliced(path: Path, behind, *, tls: ssl.SSLContext | None = None, admits: bool = True):
    """A port whose connections are spliced to a Unix socket, where ``behind`` serves.

    It admits each of them, as the gRPC server does at a call with a good token.
    """

    async def admit(reader, writer):
        if admits:
            splicer.find(f"unix:{writer.get_extra_info('peername')}").admit()
        await behind(reader, writer)

    server = await asyncio.start_unix_server(admit, path)
    splicer = Splicer(path)
    listener = Listener(tls=tls)
    listener.add(PortProtocol("splice", (b"PRI",), splicer))
    listener.bind("127.0.0.1", 0)
    await listener.start()
    try:
        yield listener.port, splicer
    finally:
        listener.close()
        await splicer.aclose()
        server.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def test_bytes_arrive_unchanged_in_both_directions_with_a_half_close(tmp_path):
    async def scenario():
        async with spliced(tmp_path / "s", _echo) as (port, splicer):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            frame = (READ_BYTES // 2).to_bytes(3, "big") + b"\0\0\0\0\0\1"  # of DATA
            sent = OPENING + b"".join(frame + os.urandom(READ_BYTES // 2) for _ in range(40))

            async def send() -> None:
                writer.write(sent)
                await writer.drain()
                writer.write_eof()

            sending = asyncio.create_task(send())
            received = await asyncio.wait_for(reader.read(), 20)
            await sending
            assert hashlib.sha1(received).digest() == hashlib.sha1(sent).digest()
            writer.close()
            await until(lambda: len(splicer.fronts) == 0)

    run(scenario(), 30)


def test_a_client_that_ends_its_tls_is_no_warning(tmp_path, caplog):
    certificate = Authority(tmp_path).issue()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.cert_file, certificate.key_file)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "test-CA.pem"))

    def call(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), 20) as plain,
            trusting.wrap_socket(plain, server_hostname="127.0.0.1") as client,
        ):
            client.sendall(OPENING)
            answer = client.recv(100)
            client.unwrap()
            return answer

    async def scenario():
        async with spliced(tmp_path / "s", _echo, tls=tls) as (port, splicer):
            assert await asyncio.to_thread(call, port) == OPENING
            await until(lambda: len(splicer.fronts) == 0)

    with caplog.at_level(logging.WARNING):
        run(scenario(), 30)
    assert caplog.messages == []


def test_a_slow_reader_holds_the_sender_back_and_gets_everything(tmp_path):
    total = 64 << 20
    pattern = os.urandom(1 << 20)
    sent = 0

    async def pour(reader, writer):
        nonlocal sent
        await reader.readexactly(1)
        for _ in range(total >> 20):
            writer.write(pattern)
            await writer.drain()
            sent += len(pattern)
        writer.close()

    async def scenario():
        async with spliced(tmp_path / "s", pour) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(OPENING)
            received = hashlib.sha1(await reader.readexactly(1000))
            stalled = -1
            while stalled != sent:  # until the sender does not get on any more
                stalled = sent
                await asyncio.sleep(0.05)
            assert sent < total // 2
            while data := await reader.read(1 << 20):
                received.update(data)
            assert received.digest() == hashlib.sha1(pattern * (total >> 20)).digest()
            writer.transport.abort()

    run(scenario(), 30)


def test_a_reset_on_one_side_ends_the_other(tmp_path):
    ended = asyncio.Event()

    async def wait_for_end(reader, writer):
        try:
            await reader.read()
        except ConnectionResetError:
            pass
        finally:
            writer.transport.abort()
            ended.set()

    async def scenario():
        async with spliced(tmp_path / "s", wait_for_end) as (port, splicer):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(OPENING)
            await until(lambda: len(splicer.fronts) == 1)
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()
            await asyncio.wait_for(ended.wait(), 5)

    run(scenario(), 10)


def test_the_server_behind_closing_closes_the_client(tmp_path):
    async def hang_up(reader, writer):
        await reader.readexactly(1)
        writer.write(b"bye")
        writer.close()

    async def scenario():
        async with spliced(tmp_path / "s", hang_up) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(OPENING)
            assert await asyncio.wait_for(reader.read(), 5) == b"bye"
            writer.close()

    run(scenario(), 10)


def test_without_a_server_behind_the_connection_ends(tmp_path):
    async def scenario():
        async with spliced(tmp_path / "s", _echo) as (port, splicer):
            splicer.path = tmp_path / "missing"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(OPENING)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 5)
            writer.transport.abort()

    run(scenario(), 10)


def test_closing_ends_spliced_connections(tmp_path):
    async def scenario():
        async with spliced(tmp_path / "s", _echo) as (port, splicer):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(OPENING)
            assert await reader.readexactly(len(OPENING)) == OPENING
            await splicer.aclose()
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 5)
            writer.transport.abort()

    run(scenario(), 10)


def test_no_descriptor_is_left_behind(tmp_path):
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(OPENING * 3000)
        assert len(await reader.readexactly(99_000)) == 99_000
        writer.close()

    async def scenario():
        before = len(open_files())
        async with spliced(tmp_path / "s", _echo) as (port, splicer):
            for _ in range(3):
                await asyncio.gather(*(talk(port) for _ in range(20)))
            await until(lambda: len(splicer.fronts) == 0)
        await until(lambda: len(open_files()) <= before)

    run(scenario(), 20)


def test_a_client_that_left_is_forgotten_while_the_server_behind_accepts_nothing(
    tmp_path, monkeypatch
):
    """As the gRPC server does while the process has no free descriptor."""
    monkeypatch.setattr(splice, "HALF_CLOSED_TIMEOUT_S", 0.1)

    async def scenario():
        behind = socket.socket(socket.AF_UNIX)
        with behind:
            behind.bind(str(tmp_path / "s"))
            behind.listen()
            splicer, listener = Splicer(tmp_path / "s"), Listener()
            listener.add(PortProtocol("splice", (b"PRI",), splicer))
            port = listener.bind("127.0.0.1", 0)
            await listener.start()
            before = len(open_files())
            for _ in range(5):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(OPENING)
                await until(lambda: len(splicer.fronts) == 1 and not splicer.connecting)
                writer.close()
                await until(lambda: not splicer.fronts)
            await until(lambda: len(open_files()) == before)
            listener.close()
            await splicer.aclose()

    run(scenario(), 10)


# ---------------------------------------------------------------------- unknown clients


def frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 1]) + payload


SETTINGS, DATA = frame(4), frame(0, bytes(16384))
CALL = frame(1, b"headers of a call")


@pytest.mark.parametrize(
    ("sent", "passes", "holds"),
    [
        (PREFACE + SETTINGS + CALL + DATA, len(PREFACE + SETTINGS + CALL + DATA), False),
        (PREFACE + SETTINGS + DATA[:5], len(PREFACE + SETTINGS), False),
        (PREFACE + DATA[:5000], len(PREFACE) + 5000, False),
        (PREFACE + DATA * 5, UNKNOWN_BYTES_MAX, True),
        (PREFACE + CALL * (UNKNOWN_CALLS_MAX + 5), len(PREFACE + CALL * UNKNOWN_CALLS_MAX), True),
        (
            PREFACE + CALL * UNKNOWN_CALLS_MAX + SETTINGS + CALL,
            24 + 26 * UNKNOWN_CALLS_MAX + 9,
            True,
        ),
    ],
    ids=["a call", "half a header", "half a frame", "bytes", "calls", "calls between others"],
)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_frames_of_an_unknown_client_pass_up_to_the_bounds_in_any_pieces(
    sent, passes, holds, piece
):
    frames, taken = UnknownFrames(), b""
    for begin in range(0, len(sent), piece):
        frames.put(sent[begin : begin + piece])
        taken += frames.take()
    assert taken == sent[:passes]
    assert frames.holds is holds
    assert taken + frames.rest() == sent


@pytest.mark.parametrize(
    "sent", [PREFACE + CALL, PREFACE[:20] + bytes(20), PREFACE[:18] + random.randbytes(5000)]
)
def test_a_client_that_does_not_begin_as_http2_is_not_joined_with_the_server(tmp_path, sent):
    joined = []

    async def join(reader, writer):
        joined.append(reader)
        writer.close()

    async def scenario():
        async with spliced(tmp_path / "s", join, admits=False) as (port, splicer):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 2) == b""
            assert not splicer.fronts
            assert not joined
            writer.transport.abort()

    run(scenario(), 10)


def test_an_unknown_client_passes_few_bytes_until_a_call_has_a_good_token(tmp_path):
    sent = OPENING + raw_grpc.call(1, "/a/b") + frame(0, os.urandom(1 << 20))
    received = bytearray()

    async def collect(reader, writer):
        while data := await reader.read(1 << 16):
            received.extend(data)
        writer.close()

    async def scenario():
        async with spliced(tmp_path / "s", collect, admits=False) as (
            port,
            splicer,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await until(lambda: len(received) == UNKNOWN_BYTES_MAX)
            [connection] = splicer._unknown
            assert not connection.transport.is_reading()
            connection.admit()
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 10) == b""
            assert bytes(received) == sent
            writer.close()

    run(scenario(), 20)


@pytest.mark.parametrize("left", [b"", b"\0\0"])
def test_a_client_may_end_before_its_call_is_found_to_have_a_good_token(tmp_path, left):
    sent = OPENING + raw_grpc.call(1, "/a/b")
    found = asyncio.Event()

    async def answer(reader, writer):
        assert await reader.read() == sent
        await found.wait()
        writer.write(b"bye")
        writer.close()

    async def scenario():
        async with spliced(tmp_path / "s", answer, admits=False) as (port, splicer):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent + left)
            writer.write_eof()
            await until(lambda: bool(splicer._unknown))
            [connection] = splicer._unknown
            await until(lambda: connection.front.has_ended)
            connection.admit()
            found.set()
            assert await asyncio.wait_for(reader.read(), 10) == b"bye"
            writer.close()

    run(scenario(), 20)


def test_unknown_clients_are_cut_in_time_and_the_oldest_where_there_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(splice, "UNKNOWN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(splice, "UNKNOWN_CONNECTIONS_MAX", 3)

    async def scenario():
        async with spliced(tmp_path / "s", _echo, admits=False) as (port, splicer):
            clients = []
            for number in range(5):
                clients.append(await asyncio.open_connection("127.0.0.1", port))
                clients[-1][1].write(OPENING)
                assert await clients[-1][0].readexactly(len(OPENING)) == OPENING
                assert len(splicer._unknown) == min(number + 1, 3)
            [*_, newest] = splicer._unknown
            newest.admit()
            for reader, _ in clients[:4]:
                assert await asyncio.wait_for(reader.read(), 5) == b""
            clients[4][1].write(DATA)
            assert await clients[4][0].readexactly(len(DATA)) == DATA
            assert not splicer._unknown
            for _, writer in clients:
                writer.transport.abort()

    run(scenario(), 20)


# ---------------------------------------------------------------------- headers

TRACE = raw_grpc.literal(b"trace-bin", bytes(range(200, 256)))
BAD_PATH = raw_grpc.literal(b":path", b"/\xe3")
HUFFMAN = 0x80


def _encoded(bits: str) -> bytes:
    """A string of Huffman codes, with its length."""
    bits += "1" * (-len(bits) % 8)
    text = int(bits, 2).to_bytes(len(bits) // 8, "big")
    return bytes([HUFFMAN | len(text)]) + text


NINE, BRACE, E3 = "011111", "1" * 14 + "0", "1" * 15 + "100100"
"""Codes of ``9``, ``{`` and the byte 0xe3 (RFC 7541 appendix B)."""


@pytest.mark.parametrize(
    ("block", "is_valid"),
    [
        (raw_grpc.fields(raw_grpc.literal(b":path", b"/a/b")), True),
        (raw_grpc.fields(BAD_PATH), False),
        (b"\x82\x86" + BAD_PATH, False),
        (b"\x3f\xe1\x1f" + BAD_PATH, False),  # after a size of the table
        (b"\x44\2/\xe3", False),  # a name of the static table, kept
        (b"\x04\2/\xe3", False),
        (b"\x7f\1\2/\xe3", False),  # a name of the dynamic table
        (b"\x44" + _encoded(NINE + BRACE), True),
        (b"\x44" + _encoded(E3), False),
        (b"\x44" + _encoded(NINE + E3), False),
        (b"\x44\2/", False),  # it ends within the value
        (b"\x44", False),
        (b"\x7f\x80\x80\x80\x80\x80\x80\0\1a", False),  # a long integer
        (raw_grpc.literal(b"a\xe3", b"b"), False),
        (TRACE, True),
        (TRACE + BAD_PATH, False),
        (raw_grpc.literal(b"-binary", b"\xe3"), False),
    ],
)
def test_headers_are_ascii_but_for_binary_ones(block, is_valid):
    begin = raw_grpc.PREFACE + raw_grpc.frame(0, 0, 1, b"\xe3" * 100)
    half = len(block) // 2
    for frames in (
        raw_grpc.frame(1, 4, 1, block),
        raw_grpc.frame(1, 0x24, 1, b"\0\0\0\0\1" + block),  # with a priority
        raw_grpc.frame(1, 0, 1, block[:half]) + raw_grpc.frame(9, 4, 1, block[half:]),
        raw_grpc.frame(1, 0, 1, block) + raw_grpc.frame(9, 4, 1),
    ):
        sent = begin + frames
        assert CallHeaders().take(sent) == (sent if is_valid else None)
        in_bytes = CallHeaders()
        *pieces, last = [in_bytes.take(sent[at : at + 1]) for at in range(len(sent))]
        assert b"".join(pieces) == begin  # no part of headers is forwarded
        assert last == (frames if is_valid else None)


@pytest.mark.parametrize(
    "frames",
    [
        raw_grpc.frame(1, 0x0C, 1, b"\0\x82"),  # padded
        raw_grpc.frame(1, 0x24, 1, b"\0\0"),  # a part of a priority
        raw_grpc.frame(9, 4, 1, b"\x82"),  # it continues nothing
        raw_grpc.frame(1, 0, 1, b"\x82") + raw_grpc.frame(1, 4, 3, b"\x82"),
        raw_grpc.frame(1, 0, 1, b"\x82") + raw_grpc.frame(0, 0, 1),
        raw_grpc.frame(1, 0, 1, b"\x82") + raw_grpc.frame(9, 0, 1) * 8000,
        raw_grpc.frame(1, 4, 1, bytes(splice.HEADERS_BYTES_MAX + 1))[:-1],
        raw_grpc.frame(1, 0, 1, b"\x82") + raw_grpc.frame(9, 0, 1, b"\x82" * (64 << 10)),
    ],
)
def test_headers_in_frames_of_no_client_of_grpc_are_refused(frames):
    assert CallHeaders().take(raw_grpc.PREFACE + frames) is None
