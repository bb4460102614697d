"""Unit costs of brokers, by which `gazette capacity` estimates what a cluster needs.

    python benchmarks/unit_costs.py [--mib 64] [--rounds 3] [--json]

Three brokers share a process, whose processor time counts, without that of the client. A journal of
one replica shows the primary's work for a megabyte and for an append; one of three replicas adds
the primary's sending and two replicas. Journals end in files: the upload's share is that of the
codec, which is measured alone over the content of the messages. The keys in Etcd of a journal are
counted by their lengths. `idle.py` and `allocator.py` measure the other costs.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable

from allocator import Cluster
from broker_append import processor_time_s
from measure import Figure, arguments, cluster, in_turn, report
from raw import RawStream, append_frames, read_frame

from gazette_sdk.fragment.codecs import compressor
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import Kind

MIB = 1 << 20
SMALL_APPENDS = 2_000
READY_S = 30.0

SPECS = "name: unit/\nchildren:\n" + "".join(
    f"""
  - name: unit/of-{replicas}
    replication: {replicas}
    fragment:
      length: 1073741824
      compression_codec: NONE
      stores: ["file:///"]
      refresh_interval: 5m
"""
    for replicas in (1, 3)
)


def message(number: int) -> bytes:
    """Return a message of an order, as JSON."""
    return (
        b'{"uuid":"8a6e0804-2bd0-11ee-b001-%012x","customer":"customer-%05d","amount":%d.%02d,'
        b'"currency":"EUR","created":"2026-11-29T06:%02d:%02d.%06dZ","status":"accepted"}\n'
        % (number, number * 7919 % 90_000, number * 31 % 1000, number % 100, number // 60 % 60,
           number % 60, number * 7 % 1_000_000)
    )  # fmt: skip


def messages(mib: int) -> bytes:
    """Return so many mebibytes of messages, none of which is repeated."""
    content = b"".join(message(number) for number in range(mib * MIB // len(message(0)) + 1))
    return content[: mib * MIB]


class Client:
    """Client of one journal, over a plain socket."""

    def __init__(self, address: str, journal: str) -> None:
        self.journal = journal
        self._stream = RawStream(address)

    def append(self, content: bytes, count: int) -> None:
        """Append some content so many times, one after the other."""
        frames = append_frames(self.journal, content)
        for _ in range(count):
            (answer,) = self._stream.call(frames)
            assert pb.AppendResponse.FromString(answer.payload).status == pb.OK

    def read(self, length: int) -> None:
        """Read a journal from its begin."""
        request = pb.ReadRequest(journal=self.journal, end_offset=length)
        self._stream.socket.sendall(read_frame(request))
        while not any(frame.kind == Kind.STATUS for frame in self._stream.receive()):
            pass


def codec_ms(codec: int, content: bytes) -> tuple[float, float]:
    """Return the processor time per megabyte of a codec, and what is left of the content."""
    begun, out = time.process_time(), io.BytesIO()
    packer = compressor(codec, out)
    for begin in range(0, len(content), MIB):
        packer.write(content[begin : begin + MIB])
    packer.close()
    spent_s = time.process_time() - begun
    return spent_s * 1000 / (len(content) / 1e6), len(out.getvalue()) / len(content)


def etcd_bytes() -> tuple[float, float]:
    """Return the bytes of a journal's spec in Etcd with its key, and those of each replica."""
    of = Cluster.of(1, 3, 3)
    entries = of.keyspace([list(of.members)]).entries
    lengths = {entry.key.split(b"/")[3]: 0 for entry in entries}
    for entry in entries:
        lengths[entry.key.split(b"/")[3]] += len(entry.key) + len(entry.raw)
    return lengths[b"items"], lengths[b"assign"] / 3


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", mib=64, rounds=3)
    content, figures = messages(1), []

    def add(name: str, value: float, unit: str) -> None:
        figures.append(Figure(name, value, value, unit, None))

    with cluster(SPECS, brokers=3) as running:
        clients = [Client(running.address, f"unit/of-{replicas}") for replicas in (1, 3)]
        for client in clients:
            _append_when_ready(client)

        def spent_ms(work: Callable[[], object]) -> float:
            before = processor_time_s(running.pid)
            work()
            return (processor_time_s(running.pid) - before) * 1000

        one, three = clients
        megabytes = options.mib * len(content) / 1e6
        found = in_turn(
            options.rounds,
            one=lambda: spent_ms(lambda: one.append(content, options.mib)),
            three=lambda: spent_ms(lambda: three.append(content, options.mib)),
            small_one=lambda: spent_ms(lambda: one.append(message(1), SMALL_APPENDS)),
            small_three=lambda: spent_ms(lambda: three.append(message(1), SMALL_APPENDS)),
            read=lambda: spent_ms(lambda: one.read(options.mib * len(content))),
        )
    add("megabyte appended, its primary", found["one"] / megabytes, "ms")
    add("the same, each further replica", (found["three"] - found["one"]) / 2 / megabytes, "ms")
    add("append, its primary", found["small_one"] / SMALL_APPENDS * 1000, "µs")
    more_ms = found["small_three"] - found["small_one"]
    add("the same, each further replica", more_ms / 2 / SMALL_APPENDS * 1000, "µs")
    add("megabyte read", found["read"] / megabytes, "ms")
    stored = messages(16)
    for codec in (pb.GZIP, pb.ZSTANDARD, pb.SNAPPY):
        spent, left = codec_ms(codec, stored)
        name = pb.CompressionCodec.Name(codec)
        add(f"megabyte stored with {name}", spent, "ms")
        add(f"what is left of it with {name}", left * 100, "%")
    spec, assignment = etcd_bytes()
    add("journal's spec in Etcd", spec, "bytes")
    add("each replica's assignment in Etcd", assignment, "bytes")
    report(figures, options)


def _append_when_ready(client: Client) -> None:
    ends_at = time.monotonic() + READY_S
    while True:
        try:
            client.append(message(0), 10)
        except AssertionError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    main()
