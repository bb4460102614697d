"""Start of a broker with many idle journals, and the memory that they cost.

    python benchmarks/idle_start.py [--journals 10000] [--json] [--check]

A first cluster creates the journals and stops. The second one starts over its data, in a process of
its own. It has started when Etcd has the synchronized route of each journal, so that appends and
reads are served. Then all journals are listed, and the memory of the process is read again.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection

from idle import journals, resident_mib
from measure import Figure, add_outputs, report

from gazette_sdk.adaptive_spin import new_loop
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.loop import adopt_running_loop, run

START_S_MAX = 30.0
MEMORY_MIB_MAX = 1024.0
LIST_MIB_MAX = 32.0
LIMIT_S = 300.0


async def _serve(data: str, specs: str, journal_count: int, pipe: Connection) -> None:
    adopt_running_loop()
    cluster = EmbeddedCluster(data, sync_etcd=False, journal_limit=journal_count + 1)
    async with cluster:
        if specs:
            await cluster.aapply(specs)
        keyspace = cluster.brokers[0].broker.keyspace
        async with asyncio.timeout(LIMIT_S):
            while not all(
                (found := keyspace.assignments(item.id)) and found[0].value.members
                for item in list(keyspace.items())
            ):
                await keyspace.wait_for_update()
        pipe.send(cluster.address)
        await asyncio.to_thread(pipe.recv)


def _serve_in_process(data: str, specs: str, journal_count: int, pipe: Connection) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(data, specs, journal_count, pipe))


async def _count_listed(address: str) -> int:
    """Return the number of journals that a listing has."""
    count = 0
    async with connect(address) as transport:
        async for response in transport.list(pb.ListRequest()):
            count += len(response.journals)
    return count


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journals", type=int, default=10_000)
    add_outputs(parser)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gazette-bench-") as data:
        for specs in (journals(options.journals), ""):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve_in_process, args=(data, specs, options.journals, there), daemon=True
            )
            begun = time.monotonic()
            process.start()
            there.close()
            try:
                address = here.recv()
                start_s = time.monotonic() - begun
                assert process.pid is not None
                memory = resident_mib(process.pid)
                listed = run(_count_listed(address))
                assert listed == options.journals, f"{listed} journals were listed"
                listing = resident_mib(process.pid) - memory
                here.send("stop")
                process.join(LIMIT_S)
            finally:
                process.kill()
    report(
        [
            Figure("start", start_s, START_S_MAX, "s", 1.0, more_is_better=False),
            Figure("resident memory", memory, MEMORY_MIB_MAX, "MiB", 1.0, more_is_better=False),
            Figure("more after a listing", listing, LIST_MIB_MAX, "MiB", 1.0, more_is_better=False),
        ],
        options,
    )


if __name__ == "__main__":
    main()
