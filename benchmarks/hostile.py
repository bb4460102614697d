"""Appends of an authorized client while unknown clients send whatever they like.

    python benchmarks/hostile.py [--seconds 60] [--connections 200] [--json]

The broker, in a process of its own, requires tokens. Another process keeps up to 200 connections
without a token: half frames, garbage, floods of calls and PINGs, large JSON, bodies that are never
completed, gRPC that is none, resets. The program prints the rate of acknowledged appends beside the
rate without them, and the growth of the broker's resident memory over its idle size.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

from measure import Figure, arguments, report

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import PREFACE, Kind, Method, encode, encode_call, header
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect

KEYS = "YSBzZWNyZXQga2V5IG9mIHRoZSBiZW5jaG1hcms="
JOURNAL = "a/journal"
LINE = b'{"n":1,"payload":"%s"}\n' % (b"x" * 178)
WORKERS = 8
RATE_RATIO_MIN = 0.5
GROWTH_MIB_MAX = 150.0
LIFETIME_S = 5.0
"""Greatest lifetime of an unknown client's connection: then it makes another one."""

_APPEND = encode_call(Method.APPEND, pb.AppendRequest(journal=JOURNAL).SerializeToString())
_LIST = encode_call(Method.LIST, b"")


def _http(method: str, target: str, length: int, body: bytes = b"") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


def _http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _grpc_call(stream: int, length: int, *, ends: bool = False) -> bytes:
    """A List, and the begin of its request."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/protocol.Journal/List",
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )
    message = b"\0" + length.to_bytes(4, "big")
    return _http2_frame(1, 4, stream, headers) + _http2_frame(0, int(ends), stream, message)


_GRPC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _http2_frame(4, 0, 0)

ATTACKS: dict[str, tuple[bytes, bytes]] = {
    "half of a large call": (PREFACE + header(Kind.CALL, 16 << 20), bytes(1 << 20)),
    "half of a large message": (PREFACE + _APPEND + header(Kind.MESSAGE, 16 << 20), bytes(1 << 20)),
    "half of content": (PREFACE + _APPEND + header(Kind.CONTENT, 1 << 20), bytes(1000)),
    "half of a small frame": (PREFACE + b"\2\0\0\0\xff", b""),
    "half of the preface": (PREFACE[:4], b""),
    "calls without a token": (PREFACE, _LIST * 100),
    "pings": (PREFACE, encode(Kind.PING, b"x" * 64) * 1000),
    "garbage frames": (PREFACE, bytes(range(256)) * 16),
    "garbage": (b"", random.Random(1).randbytes(1 << 16)),
    "large JSON": (
        _http("POST", "/v1/journals/list", 2_000_000, b'{"selector":{"include":{"labels":['),
        b'{"name":"a","value":"b"},' * 4000,
    ),
    "half of a body": (_http("PUT", f"/{JOURNAL}", 1 << 30), bytes(1 << 16)),
    "half of a header": (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b""),
    "profiles": (_http("GET", "/debug/pprof/profile?seconds=60", 0), b""),
    "gRPC without frames": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""),
    "gRPC with garbage": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(1 << 16)),
    "half of gRPC requests": (
        _GRPC + b"".join(_grpc_call(stream, 4 << 20) for stream in range(1, 17, 2)),
        _http2_frame(0, 0, 1, bytes(16384)),
    ),
    "gRPC calls without a token": (
        _GRPC,
        b"".join(_grpc_call(stream, 0, ends=True) for stream in range(1, 201, 2)),
    ),
    "HTTP calls without a token": (b"", _http("GET", f"/{JOURNAL}", 0) * 10),
    "silence": (b"", b""),
}
"""Attacks by name: the bytes sent first, and those sent as long as the broker takes them."""


# ---------------------------------------------------------------- unknown clients


async def _attack(address: str, opening: bytes, flood: bytes, until_s: float) -> None:
    """Make one connection after the other, until the time is over."""
    parts = urlsplit(address)
    while (now_s := time.monotonic()) < until_s:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(min(LIFETIME_S, until_s - now_s)):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                try:
                    writer.write(opening)
                    sending = bool(flood)
                    while sending and not writer.is_closing():
                        writer.write(flood)
                        await writer.drain()
                        await asyncio.sleep(0.001)
                    await reader.read()
                finally:
                    writer.transport.abort()


async def _attack_all(address: str, connections: int, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for number, name in zip(range(connections), itertools.cycle(ATTACKS), strict=False):
            del number
            group.create_task(_attack(address, *ATTACKS[name], until_s))


def attack(address: str, connections: int, seconds: float) -> None:
    """Keep connections of all attacks for some seconds. To be run in a process of its own."""
    asyncio.run(_attack_all(address, connections, seconds))


# ------------------------------------------------------------------- broker


@dataclass(frozen=True)
class Broker:
    """A broker in another process."""

    address: str
    pid: int

    @property
    def resident_mib(self) -> float:
        """Its resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096 / (1 << 20)

    @property
    def descriptors(self) -> int:
        """Number of its open descriptors."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


def _serve(data: str, pipe: Connection) -> None:
    with EmbeddedCluster(data, sync_etcd=False, auth_keys=KEYS) as cluster:
        pipe.send(cluster.address)
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def broker() -> Iterator[Broker]:
    """Run a broker that requires tokens, over a temporary directory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="gazette-bench-") as data:
        process = context.Process(target=_serve, args=(data, there))
        process.start()
        there.close()
        try:
            yield Broker(here.recv(), process.pid or 0)
        finally:
            here.close()
            process.join(30)
            process.kill()


# ------------------------------------------------------------------- client


async def create_journal(transport: Transport) -> None:
    """Create the journal, and wait until it takes appends."""
    spec = pb.JournalSpec(name=JOURNAL, replication=1)
    spec.fragment.length = 1 << 28
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.refresh_interval.FromSeconds(60)
    change = pb.ApplyRequest.Change(upsert=spec)
    await transport.apply(pb.ApplyRequest(changes=[change]))
    appends = AppendService(transport)
    await appends.append(pb.AppendRequest(journal=JOURNAL), b"")
    await appends.flush()
    await appends.aclose()


async def _line() -> AsyncIterator[pb.AppendRequest | bytes]:
    yield pb.AppendRequest(journal=JOURNAL)
    yield LINE
    yield pb.AppendRequest()


async def append_rate(transport: Transport, seconds: float) -> float:
    """Return the acknowledged appends per second of some workers, with one in flight each."""
    until_s = time.monotonic() + seconds

    async def work() -> int:
        count = 0
        while time.monotonic() < until_s:
            response = await transport.append(_line())
            count += response.status == pb.OK
        return count

    return sum(await asyncio.gather(*(work() for _ in range(WORKERS)))) / seconds


async def measure(
    target: Broker, *, seconds: float, connections: int
) -> tuple[float, float, float, float]:
    """Measure with and without unknown clients.

    Returns:
        the append rate with them and without, the idle memory in MiB, and its greatest growth.
    """
    transport = connect(target.address, auth_keys=KEYS)
    try:
        await create_journal(transport)
        await append_rate(transport, min(2.0, seconds))  # warm caches
        undisturbed = [await append_rate(transport, min(5.0, seconds))]
        idle_mib = target.resident_mib
        context = multiprocessing.get_context("spawn")
        attackers = context.Process(target=attack, args=(target.address, connections, seconds + 2))
        attackers.start()
        await asyncio.sleep(1.5)  # they import and connect
        growth_mib = 0.0
        disturbed = []
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            disturbed.append(await append_rate(transport, 0.5))
            growth_mib = max(growth_mib, target.resident_mib - idle_mib)
        await asyncio.to_thread(attackers.join)
        undisturbed.append(await append_rate(transport, min(5.0, seconds)))
    finally:
        await transport.aclose()
    return statistics.mean(disturbed), statistics.mean(undisturbed), idle_mib, growth_mib


def main() -> None:
    """Run the program."""
    options = arguments(__doc__ or "", seconds=60, connections=200, rounds=1)
    with broker() as target:
        disturbed, undisturbed, idle_mib, growth_mib = asyncio.run(
            measure(target, seconds=options.seconds, connections=options.connections)
        )
    report(
        [
            Figure("appends, under attack", disturbed, undisturbed, "/s", RATE_RATIO_MIN),
            Figure(
                "memory, over idle", growth_mib, GROWTH_MIB_MAX, "MiB", 1.0, more_is_better=False
            ),
            Figure("memory, idle", idle_mib, idle_mib, "MiB", None),
        ],
        options,
    )


if __name__ == "__main__":
    main()
