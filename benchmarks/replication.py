"""Cost of replication for appends, and its use for reads, over three local brokers.

    python benchmarks/replication.py [--rounds 7] [--json] [--check]

Each broker has a process of its own. Appends go over one raw stream connection to the journal's
primary: to a journal with three replicas, and to one with a single replica, in turn. First as many
bytes as the brokers take, with some appends in flight; then one append at a time, for the latency.

Then two processes read the same journal of three replicas, from its begin to its end: both through
its primary, through two different brokers, and straight from the fragment store. A reader alone is
the baseline.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import selectors
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from measure import Figure, arguments, in_turn, percentiles_in_turn, report
from raw import RawStream, append_frames, read_frame

from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import Frame, Kind, decode_status
from gazette_sdk.testing import gazette_cluster
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.journal_reader import RetryReader

MIB = 1 << 20
FRAGMENT_MIB = 32
SPEED_BAR = 0.4
SMALL = b'{"n":1,"payload":"%s"}\n' % (b"x" * 178)

JOURNALS = """
name: measured/
fragment:
  length: {length}
  compression_codec: NONE
  stores: [file:///store/]
  refresh_interval: 5s
children:
  - {{name: measured/once, replication: 1}}
  - {{name: measured/thrice, replication: 3}}
  - {{name: measured/read, replication: 3}}
"""


class Primary:
    """Raw connection to the primary of one journal."""

    def __init__(self, cluster: LocalCluster, journal: str) -> None:
        self.journal = journal
        self._stream = RawStream(endpoints(cluster, journal)[0])

    def mb_per_s(self, size: int, count: int, depth: int) -> float:
        """Keep ``depth`` appends of ``size`` bytes in flight, and return MB/s."""
        frames = append_frames(self.journal, b"x" * (size - 1) + b"\n")
        socket = self._stream.socket
        selector = selectors.DefaultSelector()
        selector.register(socket, selectors.EVENT_READ)
        began = time.perf_counter()
        sent = answered = 0
        while answered < count:
            while sent < count and sent - answered < depth:
                socket.sendall(frames)
                sent += 1
            selector.select()
            answered += _acknowledged(self._stream.receive())
        selector.close()
        return size * count / (time.perf_counter() - began) / 1e6

    def latencies_us(self, count: int) -> list[float]:
        """Append one small message at a time, and return how long each took."""
        frames = append_frames(self.journal, SMALL)
        found = []
        for _ in range(count):
            began = time.perf_counter()
            (answer,) = self._stream.call(frames)
            found.append((time.perf_counter() - began) * 1e6)
            assert pb.AppendResponse.FromString(answer.payload).status == pb.OK
        return found

    def close(self) -> None:
        """Disconnect."""
        self._stream.close()


def _acknowledged(frames: list[Frame]) -> int:
    codes = [decode_status(frame.payload).code for frame in frames if frame.kind == Kind.STATUS]
    assert not any(codes), f"an append failed: {codes}"
    return len(codes)


def endpoints(cluster: LocalCluster, journal: str) -> list[str]:
    """Return the endpoints of the brokers of a journal, its primary first."""

    async def find() -> list[str]:
        async with cluster.connect() as transport:
            selector = pb.LabelSelector(
                include=pb.LabelSet(labels=[pb.Label(name="name", value=journal)])
            )
            async for response in transport.list(pb.ListRequest(selector=selector)):
                for found in response.journals:
                    route = found.route
                    others = [e for i, e in enumerate(route.endpoints) if i != route.primary]
                    return [route.endpoints[route.primary], *others]
        raise LookupError(f"no journal {journal}")

    return asyncio.run(find())


# ------------------------------------------------------------------------------------ reads


def read_from_broker(endpoint: str, journal: str, length: int) -> float:
    """Read a journal through one broker, and return how many seconds it took."""
    stream = RawStream(endpoint)
    began = time.perf_counter()
    request = pb.ReadRequest(journal=journal, end_offset=length, block=True)
    stream.socket.sendall(read_frame(request))
    received = 0
    while received < length:
        received += sum(
            len(frame.payload) for frame in stream.receive() if frame.kind == Kind.CONTENT
        )
    stream.close()
    return time.perf_counter() - began


def read_from_store(store: str, journal: str, length: int) -> float:
    """Read a journal from the files of its fragment store, without a broker."""

    async def read() -> float:
        async with connect(store) as transport:
            began = time.perf_counter()
            reader = RetryReader(transport, pb.ReadRequest(journal=journal, end_offset=length))
            received = 0
            while received < length:
                received += len(await reader.read(MIB))
            return time.perf_counter() - began

    return asyncio.run(read())


def together(pool: ProcessPoolExecutor, length: int, *reads: Callable[[], float]) -> float:
    """Return the MB/s of all reads together, each in a process of its own."""
    began = time.perf_counter()
    for future in [pool.submit(read) for read in reads]:
        future.result()
    return length * len(reads) / (time.perf_counter() - began) / 1e6


def fill(cluster: LocalCluster, mib: int) -> int:
    """Fill the journal that is read, wait until the store has it, and return its length."""
    primary = Primary(cluster, "measured/read")
    primary.mb_per_s(MIB, mib + 2 * FRAGMENT_MIB, 4)  # the last fragment is not stored yet
    primary.close()
    length = mib * MIB
    folder = Path(cluster.fragments, "store", "measured", "read")
    ends_at = time.monotonic() + 60
    while sum(file.stat().st_size for file in folder.glob("*")) < length:
        assert time.monotonic() < ends_at, "the fragments are not stored"
        time.sleep(0.1)
    return length


def main() -> None:
    """Measure, and print a table."""
    options = arguments(__doc__ or "", rounds=7, mib=64, small=400, read_mib=128)
    figures = []
    with gazette_cluster(3) as cluster:
        cluster.apply(JOURNALS.format(length=FRAGMENT_MIB * MIB))
        once, thrice = (Primary(cluster, f"measured/{name}") for name in ("once", "thrice"))
        for name, size, depth in (("1 MiB", MIB, 4), ("32 KiB", 32 << 10, 32)):
            count = options.mib * MIB // size
            found = in_turn(
                options.rounds,
                once=partial(once.mb_per_s, size, count, depth),
                thrice=partial(thrice.mb_per_s, size, count, depth),
            )
            figures.append(
                Figure(
                    f"appends of {name}, R = 3 beside R = 1",
                    found["thrice"], found["once"], "MB/s", SPEED_BAR,
                )
            )  # fmt: skip
        spent = percentiles_in_turn(
            options.rounds,
            (50, 99),
            once=partial(once.latencies_us, options.small),
            thrice=partial(thrice.latencies_us, options.small),
        )
        figures += [
            Figure(
                f"acknowledgement of 200 bytes, p{percent}, R = 3 beside R = 1",
                spent["thrice"][percent], spent["once"][percent], "µs", None, more_is_better=False,
            )
            for percent in (50, 99)
        ]  # fmt: skip
        once.close()
        thrice.close()

        length = fill(cluster, options.read_mib)
        primary, other, _ = endpoints(cluster, "measured/read")
        store = f"file://{cluster.fragments}/store/"
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            here = partial(read_from_broker, primary, "measured/read", length)
            there = partial(read_from_broker, other, "measured/read", length)
            stored = partial(read_from_store, store, "measured/read", length)
            read = in_turn(
                options.rounds,
                one=lambda: together(pool, length, here),
                same=lambda: together(pool, length, here, here),
                two=lambda: together(pool, length, here, there),
                stored_one=lambda: together(pool, length, stored),
                stored=lambda: together(pool, length, stored, stored),
            )
        for name, run, alone in (
            ("through one broker", "same", "one"),
            ("through two brokers", "two", "one"),
            ("of the store", "stored", "stored_one"),
        ):
            text = f"two readers {name}, beside one"
            figures.append(Figure(text, read[run], read[alone], "MB/s", None))
    report(figures, options)


if __name__ == "__main__":
    main()
