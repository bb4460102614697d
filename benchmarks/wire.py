"""Streamed appends and reads, compared with a plain grpcio echo of messages of the same size.

    python benchmarks/wire.py [--rounds 5] [--mib 256] [--chunk-kib 128] [--json]

The broker, the echo server and this client are three processes. Figures are MB of content per
second; the echo sends its content both ways. The last line compares the append with its least cost:
writing the content to a new file and hashing it, in one loop without a network. This limits appends
on virtual machines where new memory is slow.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
from measure import Figure, arguments, cluster, in_turn, report

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append_once

ECHO = "/bench.Echo/Echo"
BAR = 0.7

JOURNAL = """
name: bench/wire
replication: 1
fragment:
  length: 17179869184
  compression_codec: NONE
  stores: []
  refresh_interval: 1h
"""
OPTIONS = [("grpc.max_receive_message_length", 16 << 20), ("grpc.max_send_message_length", -1)]


async def _echo_server(pipe: Connection) -> None:
    async def echo(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message

    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler}),)
    )
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await asyncio.to_thread(pipe.recv)
    await server.stop(0)


def _run_echo_server(pipe: Connection) -> None:
    asyncio.run(_echo_server(pipe))


async def echo(port: int, chunk: bytes, count: int) -> float:
    """Send content through the echo; return MB/s."""

    async def messages() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield chunk

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        begun = time.perf_counter()
        received = 0
        async for message in channel.stream_stream(ECHO)(messages()):
            received += len(message)
    assert received == count * len(chunk)
    return received / 1e6 / (time.perf_counter() - begun)


async def append(transport: Transport, chunk: bytes, count: int) -> float:
    """Append content as one append; return MB/s."""

    async def content() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield chunk

    begun = time.perf_counter()
    response = await append_once(transport, pb.AppendRequest(journal="bench/wire"), content())
    assert response.commit.end - response.commit.begin == count * len(chunk)
    return count * len(chunk) / 1e6 / (time.perf_counter() - begun)


def write_and_hash(directory: Path, chunk: bytes, count: int) -> float:
    """Write content to a new file and hash it; return MB/s."""
    digest, begun = hashlib.sha1(), time.perf_counter()
    with tempfile.TemporaryFile(dir=directory) as file:
        for index in range(count):
            os.pwrite(file.fileno(), chunk, index * len(chunk))
            digest.update(chunk)
    return count * len(chunk) / 1e6 / (time.perf_counter() - begun)


async def read(transport: Transport, length: int) -> float:
    """Read content from the journal's begin; return MB/s."""
    request = pb.ReadRequest(journal="bench/wire", end_offset=length)
    begun = time.perf_counter()
    received = 0
    async for item in transport.read(request):
        if isinstance(item, bytes):
            received += len(item)
    assert received == length
    return received / 1e6 / (time.perf_counter() - begun)


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", mib=256, chunk_kib=128)
    chunk = bytes(range(256)) * (options.chunk_kib << 2)
    count = (options.mib << 20) // len(chunk)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_run_echo_server, args=(there,), daemon=True)
    server.start()
    port = here.recv()
    with cluster(JOURNAL) as running:
        transport = connect(running.address, wire="grpc")
        medians = in_turn(
            options.rounds,
            echo=lambda: sdk_loop.run(echo(port, chunk, count)),
            append=lambda: sdk_loop.run(append(transport, chunk, count)),
            disk=lambda: write_and_hash(running.data, chunk, count),
            read=lambda: sdk_loop.run(read(transport, count * len(chunk))),
        )
        sdk_loop.run(transport.aclose())
    here.send("stop")
    server.join(10)
    report(
        [
            Figure(f"streamed {name}, echo = baseline", medians[name], medians["echo"], "MB/s", BAR)
            for name in ("append", "read")
        ]
        + [Figure("append, disk = baseline", medians["append"], medians["disk"], "MB/s", BAR)],
        options,
    )


if __name__ == "__main__":
    main()
