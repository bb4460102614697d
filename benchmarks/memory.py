"""Peak memory of a reader over one large journal.

    python benchmarks/memory.py [--gb 10] [--json]

The program publishes a journal of 10 GB to a broker in another process, which stores it as
`file://` fragments in a temporary directory: twice that space must be free. Then a new process
reads the whole journal with each method. Its memory is the peak of its resident size, including
the interpreter and all libraries.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from measure import Figure, arguments, report
from messages import gazette_dev
from peers.gazette import BATCH_MESSAGES, CONSUMERS, Gazette, apply, columns, specs_of

from gazette_sdk import Publisher, connect, mapping
from gazette_sdk.transport import loop as sdk_loop

MIB = 1 << 20
PEAK_MIB_MAX = 300.0
TOPIC = "bench-memory"
JOURNAL = f"{TOPIC}/part-000"
FRAGMENT_BYTES = 512 * MIB
WAYS = (CONSUMERS[0], CONSUMERS[-1])


def fill(address: str, length_bytes: int) -> int:
    """Publish ``length`` bytes to the journal; return the number of messages."""
    transport = connect(address)
    apply(transport, specs_of(TOPIC, 1, fragment_bytes=FRAGMENT_BYTES))
    count = landed = 0
    with Publisher(mapping.direct(JOURNAL), transport=transport) as publisher:
        while landed < length_bytes:
            receipt = publisher.publish_batch(columns(count, count + BATCH_MESSAGES))
            landed += receipt.length_bytes
            count += BATCH_MESSAGES
    sdk_loop.run(transport.aclose())
    return count


def read(pipe: Connection, address: str, way: str, count: int) -> None:
    """Read the journal with one method; report the peak memory of this process, in MiB."""
    reader = Gazette(address, [way])
    taken = reader.consumers[way](TOPIC, count)
    print(f"{way}: {count / taken:,.0f} messages/s", file=sys.stderr)
    pipe.send(peak_mib())
    reader.close()


def peak_mib() -> float:
    """Return the peak of this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / MIB
    raise AssertionError("the kernel tells no peak of resident memory")


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", gb=10)
    context = multiprocessing.get_context("spawn")
    figures = []
    with gazette_dev() as address:
        begun = time.perf_counter()
        count = fill(address, options.gb * 10**9)
        took = time.perf_counter() - begun
        print(f"filled: {count:,} messages, {count / took:,.0f} messages/s", file=sys.stderr)
        for way in WAYS:
            here, there = context.Pipe()
            process = context.Process(target=read, args=(there, address, way, count), daemon=True)
            process.start()
            there.close()
            peak = here.recv()
            process.join(60)
            figures.append(
                Figure(f"peak of {way}", peak, PEAK_MIB_MAX, "MiB", 1.0, more_is_better=False)
            )
    report(figures, options)


if __name__ == "__main__":
    main()
