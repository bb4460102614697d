"""``gazette``: brokers (cli section 3), clusters for development, and benchmarks."""

from __future__ import annotations

import sys

from gazette_sdk.cli.bench.settings import BENCH, BENCH_CLUSTER
from gazette_sdk.cli.client import BrokerClientSettings
from gazette_sdk.cli.command import Command
from gazette_sdk.cli.completion import completion_command
from gazette_sdk.cli.program import Program
from gazette_sdk.cli.settings import DEV, PRINT_CONFIG
from gazette_sdk.server.options import Group
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
        "SIGTERM or Ctrl-C drain the broker: its journals move to other brokers, its spools are "
        "stored, and it ends with status 0. This needs other brokers with room; only the last one "
        "of a cluster ends without. Further signals change nothing."
    ),
    examples=(
        (
            "gazette serve --broker.port 8080 --broker.file-root /var/lib/gazette",
            "a broker for this machine, with an Etcd at localhost:2379",
        ),
        (
            "gazette serve --broker.host 10.0.0.7 --broker.spool-dir /spools --etcd.address http://etcd:2379",
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
        "Prints its address and examples. Ctrl-C stops it. The next start with the same directory "
        "finds all journals and their content, also after a kill."
    ),
    examples=(
        ("gazette dev", "at http://localhost:8080, with its data in ./gazette-data"),
        ("gazette dev --data /tmp/play --port 9090 --brokers 3", "three brokers at another port"),
    ),
)

_BENCH = Command(
    "bench",
    "Measure a cluster: publishing, tail latency and catch-up reads; and verify all messages",
    "gazette_sdk.cli.bench.command:run",
    (BENCH, BENCH_CLUSTER, LOGGING),
    details=(
        "Creates journals, publishes dicts to them and reads them with the SDK's Publisher and "
        "Reader, and deletes the journals. Fragments which brokers stored stay in the store, below "
        "--prefix.\n\n"
        "`publish` publishes as fast as possible until all messages are acknowledged. `tail` "
        "publishes at a fixed rate while another process reads: a latency counts from the time "
        "when its message was due, even if it was sent late. `read` reads all messages and "
        "compares them with those that were acknowledged. Lost, duplicated, reordered and changed "
        "messages are named, and the status is 1.\n\n"
        "An interrupted run deletes its journals, too."
    ),
    examples=(
        ("gazette bench", "the cluster at GAZETTE_ADDRESS, or http://localhost:8080"),
        ("gazette bench --embedded", "a temporary cluster on this machine"),
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
    details="Defaults are comments. Keys and tokens are shown with --show-secrets only.",
    examples=(("gazette print-config > gazette.ini", "write a first INI file"),),
)

_BROKER_OF_CONSUMERS = Group("Broker", BrokerClientSettings)
"""Options under which consumers, which read the same INI file, find their broker."""

GAZETTE = Program(
    name="gazette",
    summary="gazette: brokers of append-only journals, and benchmarks.",
    commands=(_SERVE, _DEV, _BENCH, _PRINT_CONFIG, completion_command("gazette")),
    ini="gazette.ini",
    ini_guests=(_BROKER_OF_CONSUMERS,),
)


def main() -> int:
    """Run ``gazette`` with this process's arguments; return the exit status."""
    return GAZETTE.main()


if __name__ == "__main__":
    sys.exit(main())
