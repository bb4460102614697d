"""Memory and processor time of a broker with idle journals.

    python benchmarks/idle.py [--journals 1000] [--seconds 60] [--replication 1] [--json]

The broker runs in another process, with a `file://` store and without clients; with several
replicas as many brokers share the process. Its memory is the process's resident size, including the
interpreter and all libraries.
"""

from __future__ import annotations

import time
from pathlib import Path

from measure import Figure, arguments, cluster, report

MIB = 1 << 20
TICKS_PER_S = 100
SETTLE_S = 10
MEMORY_MIB_MAX = 200.0
CORE_PERCENT_MAX = 5.0


def journals(count: int, replication: int = 1) -> str:
    """Return specs of journals."""
    names = "".join(f"  - name: idle/part-{i:04d}\n" for i in range(count))
    return f"""
name: idle/
replication: {replication}
fragment:
  length: 16777216
  compression_codec: GZIP
  stores: ["file:///"]
  refresh_interval: 5m
children:
{names}"""


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / MIB
    raise AssertionError("the kernel tells no resident size")


def processor_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", journals=1000, seconds=60, replication=1)
    specs = journals(options.journals, options.replication)
    with cluster(specs, journal_limit=options.journals + 1, brokers=options.replication) as running:
        time.sleep(SETTLE_S)
        before, begun = processor_s(running.pid), time.monotonic()
        time.sleep(options.seconds)
        used = processor_s(running.pid) - before
        percent = 100 * used / (time.monotonic() - begun)
        memory = resident_mib(running.pid)
    report(
        [
            Figure("resident memory", memory, MEMORY_MIB_MAX, "MiB", 1.0, more_is_better=False),
            Figure("one core", percent, CORE_PERCENT_MAX, "%", 1.0, more_is_better=False),
        ],
        options,
    )


if __name__ == "__main__":
    main()
