"""All figures of performance and latency, from one run on one machine.

    python benchmarks/figures.py [--only NAME,...] [--out benchmarks/figures.json]

The programs run one after the other. What they print as JSON is written to a file, with the
machine, the version and the day. Run this on a machine without other work: it takes about 40
minutes. Redis, NATS and Kafka are measured by `scripts/peers`, which installs and starts them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "figures.json"

PROGRAMS = {
    "wire": (),
    "stream_wire": (),
    "tailing_readers": (),
    "fragments": (),
    "idle": (),
    "idle_start": (),
    "idle_shards": (),
    "console": (),
    "hostile": (),
    "allocator": (),
    "recovery": (),
    "replication": (),
    "processes": (),
    "shard_io": (),
    "timers": (),
    "tables": (),
    "tracing": (),
    "memory": ("--gb", "2"),
    "spark_read": (),
}
"""Programs that print a list of figures, with their arguments."""

PEERS = {"words": (), "run": ("--singles", "0"), "latency": ()}
"""Measurements of `scripts/peers`, with their arguments."""

PROGRAM_TIMEOUT_S = 1800.0


class ProgramError(Exception):
    """A program that failed, and the end of what it wrote to its standard error."""


def machine() -> dict[str, str]:
    """Return what identifies the machine and the tested version."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    revision = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "cpu": cpu.group(1).strip() if cpu else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{round(int(memory.group(1)) / (1 << 20))} GiB" if memory else "",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "version": importlib.metadata.version("gazette-sdk"),
        "revision": revision.stdout.strip(),
        "day": datetime.now(UTC).date().isoformat(),
    }


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8") if file.exists() else ""


def measured(command: list[str]) -> Any:
    """Run a program, and return what it printed as JSON.

    Raises:
        ProgramError: it failed.
    """
    print(f"{' '.join(command)} …", end="", file=sys.stderr, flush=True)
    began = time.monotonic()
    run = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_TIMEOUT_S,
    )
    print(f" {time.monotonic() - began:.0f} s", file=sys.stderr)
    if run.returncode:
        raise ProgramError(f"{' '.join(command)} failed:\n{run.stderr[-4000:]}")
    return json.loads(run.stdout)


def main() -> None:
    """Run the programs, and write what they measured.

    Raises:
        SystemExit: programs failed. What the others measured is written.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PROGRAMS, *PEERS]
    parser.add_argument(
        "--only", default="", help="names, with commas between; the others stay as they are"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    found: dict[str, Any] = {}
    if options.only and options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    found["machine"] = machine()
    failures = []
    for name in wanted:
        if name in PROGRAMS:
            program = [sys.executable, f"benchmarks/{name}.py", *PROGRAMS[name], "--json"]
        else:
            program = ["scripts/peers", name, *PEERS[name], "--json"]
        try:
            found[name] = measured(program)
        except (ProgramError, subprocess.TimeoutExpired, ValueError) as error:
            failures.append(f"{name}: {error}")
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
