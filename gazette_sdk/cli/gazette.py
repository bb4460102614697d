"""``gazette``: brokers (cli section 3), clusters for development, benchmarks and dry runs."""

from __future__ import annotations

import sys

from gazette_sdk.cli.capacity import COMMAND as CAPACITY
from gazette_sdk.cli.client import ADDRESS_ALIASES, BrokerClientSettings
from gazette_sdk.cli.completion import completion_command
from gazette_sdk.cli.console import SERVE as SERVE_CONSOLE
from gazette_sdk.cli.program import Command, Program
from gazette_sdk.cli.settings import (
    BENCH,
    BENCH_CLUSTER,
    BROKER_PROCESSES,
    CONSUMER,
    CONSUMER_BROKER,
    CONSUMER_ETCD,
    CONSUMER_PROCESSES,
    DEV,
    DEV_CONTROL,
    DOCTOR,
    DOCTOR_BROKER,
    MONITORING,
    PRINT_CONFIG,
    SIMULATE,
)
from gazette_sdk.cli.spark.commands import SPARK_COMMANDS
from gazette_sdk.server.options import Group
from gazette_sdk.server.settings import BROKER, CONSOLE, DEBUG, ETCD, LOGGING, METRICS

_SERVE = Command(
    "serve",
    "Serve journals as a broker of a cluster",
    "gazette_sdk.cli.serve:run",
    (BROKER, BROKER_PROCESSES, ETCD, CONSOLE, DEBUG, METRICS, LOGGING),
    details=(
        "gRPC and HTTP share one port. Without --broker.host, or with a loopback name, only this "
        "machine is served; any other name is advertised, and all interfaces are served.\n\n"
        "SIGTERM or Ctrl-C drain the broker: its journals move to other brokers, its spools are "
        "stored, and it ends with status 0. This needs other brokers with room; only the last ones "
        "of a cluster end without. Further signals change nothing, except SIGQUIT: the broker "
        "stores its spools for at most ten seconds and ends, without a drain.\n\n"
        "A broker uses one processor core. With --processes N there are N brokers on this machine, "
        "with ids ID-1 to ID-N, the next N ports, and spool directories DIR/ID-1 to DIR/ID-N. This "
        "process starts them, passes signals on to them, and starts one that ends by itself again."
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
        (
            "gazette serve --processes auto --broker.id host-7 --broker.port 8080",
            "a broker for each core: host-7-1 at port 8080, host-7-2 at port 8081",
        ),
    ),
    is_service=True,
)

_RUN_CONSUMER = Command(
    "run-consumer",
    "Run shards of an application, with other processes that run the same one",
    "gazette_sdk.cli.run_consumer:run",
    (CONSUMER, CONSUMER_PROCESSES, CONSUMER_ETCD, CONSUMER_BROKER, DEBUG, LOGGING),
    details=(
        "APPLICATION is a function decorated with shard.handler, or a subclass of "
        "shard.Application, in the Python module MODULE, which is also looked for in the current "
        "directory. Each journal of its `sources` gets a shard. Processes of one application share "
        "its shards: start another one to have less for each, and to take over when one dies.\n\n"
        "SIGTERM or Ctrl-C drain the process: its shards move to other processes, and it ends with "
        "status 0. Further signals change nothing, except SIGQUIT: the process ends, without a "
        "drain.\n\n"
        "A process uses one processor core for most of its work. With --processes N there are N of "
        "them on this machine, with ids ID-1 to ID-N and the next N ports."
    ),
    examples=(
        ("gazette run-consumer orders:totals", "with the brokers and the Etcd of `gazette dev`"),
        (
            "gazette run-consumer orders:totals --etcd.address http://etcd:2379",
            "with the Etcd of another cluster, and the broker of GAZETTE_ADDRESS",
        ),
        ("gazette run-consumer orders:totals --processes auto", "one process for each core"),
    ),
    arguments="MODULE:APPLICATION",
    arguments_min=1,
    arguments_max=1,
    is_service=True,
)

_DEV = Command(
    "dev",
    "Run a complete local cluster in the foreground: Etcd, brokers, fragments in files",
    "gazette_sdk.cli.dev:run",
    (DEV, CONSOLE, LOGGING),
    details=(
        "Prints its address and examples. Ctrl-C stops it. The next start with the same directory "
        "finds all journals and their content, also after a kill.\n\n"
        "With --brokers 2 or more each broker is a process. `gazette dev kill broker-1`, `pause`, "
        "`resume`, `drain` and `start` try out what happens, and `gazette dev status` shows it."
    ),
    examples=(
        ("gazette dev", "at http://localhost:8080, with its data in ./gazette-data"),
        ("gazette dev --data /tmp/play --port 9090 --brokers 3", "three brokers at another port"),
        ("gazette dev --brokers 4 --zones a,b", "two brokers in each of two zones"),
    ),
)


def _control(name: str, summary: str, details: str, *, names_min: int = 1) -> Command:
    """Return a command about brokers of a running ``gazette dev``."""
    return Command(
        f"dev {name}",
        summary,
        f"gazette_sdk.cli.dev:{name}",
        (DEV_CONTROL,),
        details=f"{details} The cluster was started with --brokers 2 or more and this --data.",
        examples=((f"gazette dev {name} broker-1", "one broker of ./gazette-data"),),
        arguments="BROKER..." if names_min else "[BROKER...]",
        arguments_min=names_min,
        arguments_max=None,
        in_doubt="" if name == "status" else "the cluster goes on; see `gazette dev status`",
    )


_CONTROLS = (
    _control(
        "status",
        "Show the brokers of a running `gazette dev`",
        "Without names all brokers are shown.",
        names_min=0,
    ),
    _control(
        "kill",
        "Kill brokers of a running `gazette dev`",
        "They end by SIGKILL, like a crash, and are not started again.",
    ),
    _control(
        "pause",
        "Pause brokers of a running `gazette dev`",
        "They are stopped by SIGSTOP: their connections stay open, and no one answers.",
    ),
    _control(
        "resume",
        "Resume paused brokers of a running `gazette dev`",
        "A broker whose pause was longer than its lease ends, and is started again.",
    ),
    _control(
        "drain",
        "Drain brokers of a running `gazette dev`",
        "They move their journals to other brokers and end, as by SIGTERM. As many others must run "
        "as the journals have replicas: of `gazette dev --brokers 3`, whose journals have three, "
        "no broker can leave, and the command gives up after a minute.",
    ),
    _control(
        "start",
        "Start brokers of a running `gazette dev` again",
        "They have the id, the port and the disk which they had.",
    ),
)

_BENCH = Command(
    "bench",
    "Measure a cluster: publishing, tail latency and catch-up reads; and verify all messages",
    "gazette_sdk.cli.bench.phases:run",
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

_DOCTOR = Command(
    "doctor",
    "Diagnose a cluster: what is wrong with it, and what may go wrong next",
    "gazette_sdk.cli.doctor.command:run",
    (DOCTOR, DOCTOR_BROKER, ETCD),
    details=(
        "Asks a broker, the other members, and Etcd; on the machine of a broker, with its "
        "--broker.spool-dir or its INI file, it looks at the spools, too. What cannot be asked is "
        "listed as not checked, and all else is. Nothing is written to the cluster, and no secret "
        "is shown.\n\n"
        "Each finding has its evidence, why it matters, and a command that shows more or mends it. "
        "The exit status is 0 if nothing is wrong, 1 for warnings, and 2 for errors, or if nothing "
        "can be asked.\n\n"
        "A token without a selector that may LIST and READ shows all."
    ),
    examples=(
        ("gazette doctor", "with the Etcd at localhost, and the broker of GAZETTE_ADDRESS"),
        (
            "gazette doctor --etcd.address http://etcd:2379 --broker.address http://broker-1:8080",
            "another cluster",
        ),
        ("gazette doctor --json | jq '.checks[] | select(.status == \"error\")'", "for scripts"),
        ("gazette doctor --bundle fault.tar.gz", "for a report of a fault"),
    ),
)

_SIMULATE = Command(
    "allocator simulate",
    "Show which replicas would move if brokers left or joined, or specs changed; a dry run",
    "gazette_sdk.cli.allocator:run",
    (SIMULATE, ETCD),
    details=(
        "Runs the brokers' own allocator in memory, over the live cluster in Etcd or over a "
        "described one, until nothing is left to do. It never writes to Etcd.\n\n"
        "Prints the load of each broker before and after: primaries, replicas (primaries "
        "included), and replicas per limit. Then how many replicas would move and how many must, "
        "and what would have no place, and why. Changes can be combined. Without a change it "
        "shows what the allocator would do now."
    ),
    examples=(
        ("gazette allocator simulate --remove a/broker-1", "a broker of the live cluster is lost"),
        ("gazette allocator simulate --remove-zone a --verbose", "a zone fails"),
        (
            "gazette allocator simulate --drain a/broker-1 --add a/broker-9:2048",
            "a broker is replaced",
        ),
        (
            "gazette allocator simulate --replication orders/=3 --format json",
            "all journals below orders/ get three replicas",
        ),
        ("gazette allocator simulate --save cluster.yaml", "write the live cluster's description"),
        (
            "gazette allocator simulate --cluster cluster.yaml --specs specs.yaml",
            "specs are applied to a described cluster",
        ),
    ),
)

_SPOOLS_ACCEPT = Command(
    "spools accept",
    "Accept that Etcd was restored from an older backup, for the spools of a broker",
    "gazette_sdk.cli.serve:accept",
    (LOGGING,),
    details=(
        "A broker that has seen more than Etcd has, or another Etcd, keeps all of its spools "
        "unverified: they are not served, not uploaded and not removed. Its log names the "
        "DIRECTORY. Start all brokers first, and apply the specs of journals that are missing, "
        "which brings their content back without this command.\n\n"
        "The broker over the directory, or the next one that starts, then compares its spools with "
        "what the other brokers and the stores have. It uses those of which no other broker has "
        "other bytes, and keeps the others under names that end in .superseded."
    ),
    examples=(("gazette spools accept /spools", "at the broker's own machine"),),
    arguments="DIRECTORY",
    arguments_min=1,
    arguments_max=1,
)

_MONITORING_WRITE = Command(
    "monitoring write",
    "Write alerts, recording rules and dashboards of a cluster for Prometheus and Grafana",
    "gazette_sdk.cli.monitoring:write",
    (MONITORING,),
    details=(
        "Files are written into DIRECTORY: alerts.yml and rules.yml, the option slo.yml with an "
        "objective for appends, and dashboards/*.json. They are those of this version: write them "
        "again after an upgrade."
    ),
    examples=(
        ("gazette monitoring write /etc/prometheus/gazette", "rules for Prometheus"),
        (
            "gazette monitoring write monitoring --runbooks https://wiki.example/runbooks",
            "alerts that link to a copy of the runbooks",
        ),
    ),
    arguments="DIRECTORY",
    arguments_min=1,
    arguments_max=1,
)

_PRINT_CONFIG = Command(
    "print-config",
    "Print the effective configuration of `serve` as an INI file",
    "gazette_sdk.cli.settings:run",
    (BROKER, BROKER_PROCESSES, ETCD, CONSOLE, DEBUG, METRICS, LOGGING, PRINT_CONFIG),
    details="Defaults are comments. Keys and tokens are shown with --show-secrets only.",
    examples=(("gazette print-config > gazette.ini", "write a first INI file"),),
)

_BROKER_OF_CONSUMERS = Group("Broker", BrokerClientSettings)
"""Options under which consumers, which read the same INI file, find their broker."""

GAZETTE = Program(
    name="gazette",
    summary="gazette: brokers of append-only journals, and benchmarks.",
    commands=(
        _SERVE,
        _RUN_CONSUMER,
        _DEV,
        *_CONTROLS,
        SERVE_CONSOLE,
        _BENCH,
        _DOCTOR,
        CAPACITY,
        _SIMULATE,
        *SPARK_COMMANDS,
        _SPOOLS_ACCEPT,
        _MONITORING_WRITE,
        _PRINT_CONFIG,
        completion_command("gazette"),
    ),
    ini="gazette.ini",
    ini_guests=(_BROKER_OF_CONSUMERS,),
    aliases=ADDRESS_ALIASES,
    sibling="gazette_sdk.cli.gazctl:GAZCTL",
)


def main() -> int:
    """Run ``gazette`` with this process's arguments; return the exit status."""
    return GAZETTE.main()


if __name__ == "__main__":
    sys.exit(main())
