"""``gazette``: brokers (cli section 3), and clusters for development."""

from __future__ import annotations

import sys

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
    commands=(_SERVE, _DEV, _PRINT_CONFIG),
    ini="gazette.ini",
)


def main() -> int:
    """Run ``gazette`` with this process's arguments; returns the status to exit with."""
    return GAZETTE.main()


if __name__ == "__main__":
    sys.exit(main())
