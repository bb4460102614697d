"""Appends and reads over the stream wire and over gRPC, of one broker, in turn.

    python benchmarks/stream_wire.py [--rounds 5] [--mib 128] [--chunk-kib 1024] [--singles 1000]
                                     [--json] [--check]

- **append**: one acknowledged append of many chunks, in MB of content per second
- **read**: the journal's first content, which the broker has in a file
- **single**: latency of appends of 200 bytes, one after the other, from a coroutine

The clients are the SDK's transport over either wire, and a raw blocking socket on the stream wire,
which has no bar. Broker and client are two processes.

The least cost of an append is writing its content to a new file and hashing it ("disk"). On a
virtual machine this is several times slower if the host has to supply the memory. So the program
writes and deletes a file of the same size before each append: no append reuses another's memory.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

from measure import Figure, arguments, cluster, in_turn, percentiles_in_turn, report
from raw import RawStream, append_frames, read_frame
from wire import JOURNAL, append, read, write_and_hash

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import END_FRAME, Kind, Method, encode, encode_call
from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append_once

NAME = "bench/wire"
APPEND_BAR = 1.5
READ_BAR = 3.0
SINGLE_BAR = 1.0
PERCENTS = (50, 99)
LINE = b'{"n":1,"payload":"%s"}\n' % (b"x" * 178)


def raw_append(stream: RawStream, chunk: bytes, count: int) -> float:
    """Append content as one append; return MB/s."""
    frame = encode(Kind.CONTENT, chunk)
    begun = time.perf_counter()
    request = pb.AppendRequest(journal=NAME)
    stream.socket.sendall(encode_call(Method.APPEND, request.SerializeToString()))
    for _ in range(count):
        stream.socket.sendall(frame)
    (answer,) = stream.call(END_FRAME)
    taken = time.perf_counter() - begun
    commit = pb.AppendResponse.FromString(answer.payload).commit
    assert commit.end - commit.begin == count * len(chunk)
    return count * len(chunk) / 1e6 / taken


def raw_read(stream: RawStream, length: int) -> float:
    """Read content from the journal's begin; return MB/s."""
    begun = time.perf_counter()
    stream.socket.sendall(read_frame(pb.ReadRequest(journal=NAME, end_offset=length)))
    received, is_ended = 0, False
    while not is_ended:
        for frame in stream.receive():
            if frame.kind == Kind.CONTENT:
                received += len(frame.payload)
            is_ended = is_ended or frame.kind == Kind.STATUS
    assert received == length, f"{received} bytes instead of {length}"
    return received / 1e6 / (time.perf_counter() - begun)


async def singles(transport: Transport, count: int) -> list[float]:
    """Return the seconds of each append."""

    async def line() -> AsyncIterator[bytes]:
        yield LINE

    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        await append_once(transport, pb.AppendRequest(journal=NAME), line())
        taken.append(time.perf_counter() - begun)
    return taken


def raw_singles(stream: RawStream, count: int) -> list[float]:
    """Return the seconds of each append."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        (answer,) = stream.call(append_frames(NAME, LINE))
        response = pb.AppendResponse.FromString(answer.payload)
        taken.append(time.perf_counter() - begun)
        assert response.status == pb.OK
    return taken


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", mib=128, chunk_kib=1024, singles=1000)
    chunk = bytes(range(256)) * (options.chunk_kib << 2)
    count = (options.mib << 20) // len(chunk)
    length = count * len(chunk)
    with cluster(JOURNAL) as running:

        def after_warming(measured: Callable[[], float]) -> Callable[[], float]:
            def warmed() -> float:
                write_and_hash(running.data, chunk, count)
                return measured()

            return warmed

        raw = RawStream(running.address)
        raw_singles(raw, 1)  # a broker waits only so long for a first call
        grpc = connect(running.address, wire="grpc")
        stream = connect(running.address, wire="stream")
        rates = in_turn(
            options.rounds,
            grpc_append=after_warming(lambda: sdk_loop.run(append(grpc, chunk, count))),
            stream_append=after_warming(lambda: sdk_loop.run(append(stream, chunk, count))),
            raw_append=after_warming(lambda: raw_append(raw, chunk, count)),
            disk=after_warming(lambda: write_and_hash(running.data, chunk, count)),
            grpc_read=lambda: sdk_loop.run(read(grpc, length)),
            stream_read=lambda: sdk_loop.run(read(stream, length)),
            raw_read=lambda: raw_read(raw, length),
        )
        latencies = percentiles_in_turn(
            options.rounds,
            PERCENTS,
            grpc=lambda: sdk_loop.run(singles(grpc, options.singles)),
            stream=lambda: sdk_loop.run(singles(stream, options.singles)),
            raw=lambda: raw_singles(raw, options.singles),
        )
        raw.close()
        for transport in (grpc, stream):
            sdk_loop.run(transport.aclose())
    names = {"stream": "stream", "raw": "raw socket"}
    bars = {"append": APPEND_BAR, "read": READ_BAR}
    figures = [
        Figure(
            f"{kind}, {names[way]}, gRPC = baseline",
            rates[f"{way}_{kind}"],
            rates[f"grpc_{kind}"],
            "MB/s",
            bar if way == "stream" else None,
        )
        for kind, bar in bars.items()
        for way in names
    ]
    figures += [
        Figure(
            f"single p{percent}, {names[way]}, gRPC = baseline",
            latencies[way][percent] * 1e6,
            latencies["grpc"][percent] * 1e6,
            "µs",
            SINGLE_BAR if way == "stream" else None,
            more_is_better=False,
        )
        for way in names
        for percent in PERCENTS
    ]
    figures += [
        Figure(
            f"append, {way}, disk = baseline", rates[f"{way}_append"], rates["disk"], "MB/s", None
        )
        for way in ("stream", "grpc")
    ]
    report(figures, options)


if __name__ == "__main__":
    main()
