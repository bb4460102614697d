"""``gazette``: brokers (cli section 3), clusters for development, and what a cluster can do."""

from __future__ import annotations

import sys

from gazette_sdk.cli.bench.settings import BENCH, BENCH_CLUSTER
from gazette_sdk.cli.command import Command
from gazette_sdk.cli.program import Program
from gazette_sdk.cli.settings import DEV, PRINT_CONFIG
from gazette_sdk.server.settings import BROKER, DEBUG, ETCD, LOGGING

__all__ = ["GAZETTE", "main"]

_SERVE = Command(
    "serve",
    "Serve journals as a broker of a cluster",
    "gazette_sdk.cli.serve:run",
    (BROKER, ETCD, DEBUG, LOGGING),
    details=(
        "gRPC and HTTP share one port. Without --broker.host, or with a loopback name, only this "
        "machine is served; any other name is advertised, and all interfaces are served.\n\n"
        "SIGTERM or Ctrl-C drain: the journals are handed to other brokers, what is not stored "
        "yet is stored, and the process ends with status 0. That needs other brokers with room; "
        "further signals change nothing."
    ),
    examples=(
        (
            "gazette serve --broker.port 8080 --broker.file-root /var/lib/gazette",
            "a broker for this machine, with an Etcd at localhost:2379",
        ),
        (
            "gazette serve --broker.host 10.0.0.7 --broker.port 8080 --etcd.address http://etcd:2379",
            "a broker of a cluster",
        ),
    ),
    is_service=True,
)

_DEV = Command(
    "dev",
    "Run a complete local cluster in the foreground: Etcd, brokers, fragments in files",
    "gazette_sdk.cli.dev:run",
    (DEV, LOGGING),
    details=(
        "Prints how to reach it. Ctrl-C stops it; the next start over the same directory goes on "
        "from there, also after it was killed."
    ),
    examples=(
        ("gazette dev", "at http://localhost:8080, with its data in ./gazette-data"),
        ("gazette dev --data /tmp/play --port 9090 --brokers 3", "three brokers, elsewhere"),
    ),
)

_BENCH = Command(
    "bench",
    "Measure a cluster: publishing, tail latency, catch-up reads; and check what it does",
    "gazette_sdk.cli.bench.command:run",
    (BENCH, BENCH_CLUSTER, LOGGING),
    details=(
        "Makes journals of its own, publishes dicts to them and reads them back, with the SDK's "
        "Publisher and Reader, and removes the journals again. What brokers stored of them stays "
        "in the store, below --prefix.\n\n"
        "`publish` publishes as fast as it goes, and counts what is acknowledged. `tail` publishes "
        "at a fixed rate, while another process reads: a latency counts from the time when its "
        "message was due, also where it was sent late. `read` reads everything back and compares "
        "it with what was acknowledged. Messages which were lost, duplicated, reordered or changed "
        "are named, and the status is 1.\n\n"
        "An interrupted run cleans up, too."
    ),
    examples=(
        ("gazette bench", "the cluster at GAZETTE_ADDRESS, or http://localhost:8080"),
        ("gazette bench --embedded", "a cluster of its own, on this machine"),
        (
            "gazette bench --mode publish_batch --messages 1000000 --size 500 --journals 16",
            "messages in lists of a thousand",
        ),
        (
            "gazette bench --phases tail --rate 5000 --duration 1m --replication 3",
            "latencies of a minute, with three replicas",
        ),
        ("gazette bench --json | jq .tail.latency_ms.p99", "one JSON object, for programs"),
    ),
)

_PRINT_CONFIG = Command(
    "print-config",
    "Print the effective configuration of `serve` as an INI file",
    "gazette_sdk.cli.configuration:run",
    (BROKER, ETCD, DEBUG, LOGGING, PRINT_CONFIG),
    details="What equals its default is commented. Keys and tokens are shown when asked for only.",
    examples=(("gazette print-config > gazette.ini", "a file to begin with"),),
)

GAZETTE = Program(
    name="gazette",
    summary="gazette: brokers of append-only journals.",
    commands=(_SERVE, _DEV, _BENCH, _PRINT_CONFIG),
    ini="gazette.ini",
)


def main() -> int:
    """Run ``gazette`` with this process's arguments; returns the status to exit with."""
    return GAZETTE.main()


if __name__ == "__main__":
    sys.exit(main())
