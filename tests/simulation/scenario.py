"""One run: a cluster, its clients, its faults, and the checks at its end."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gazette_sdk.broker.spool.directory import Durability
from gazette_sdk.cluster.verification import ANSWER_CALLS
from gazette_sdk.errors import CorruptFragmentError, GazetteError
from gazette_sdk.fragment.content import decode_fragment
from gazette_sdk.fragment.stores.base import StoredContent
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import parse_content_path
from gazette_sdk.protocol.rules import validate
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import Target
from simulation import plants, threads
from simulation.checker import Checker, Promise, Violation
from simulation.cluster import Cluster, Host, Settings
from simulation.disk import Disks, watch_syncs
from simulation.etcd_channel import EtcdHost, use_channels
from simulation.loop import VirtualLoop, current_node
from simulation.network import Network
from simulation.schedule import FAULTS, FAULTS_OF_MACHINES, FURTHER_FAULTS, Faults
from simulation.store import STORE_URL, StoredState, use_store
from simulation.wire import endpoint_of, transport, use_dials
from simulation.workload import Workload, read_all

__all__ = ["Outcome", "Plan", "run_seed"]

PROGRESS_S = 60.0
"""Time after the last fault within which every journal has to take appends again, virtual."""

READABLE_S = 60.0
"""Time within which every broker of a journal has to serve all of it, virtual."""

SUSPENSION_SHARE = 0.25
"""Share of seeds in which machines are suspended. The others are the runs that they were."""

BALANCED_S = 30.0
"""Time after that within which primaries have to be spread over the brokers, virtual."""

FURTHER_RATE = 0.3
"""Rate of seeds with one of the further faults."""

SLOW_CALLS = 100
"""Latencies that are added to the bars of fail-overs: some messages take a :data:`SLOW_MESSAGE`."""

SLOW_MESSAGE = 20
"""Latencies that a slow message takes. One of the calls that make a challenge is enough, and the
answer is awaited for so many times as long: :data:`ANSWER_CALLS`."""

PUNCTUAL_LATENCY_S = 0.01
"""Latency up to which a broker that lives answers a challenge in time."""

DISKS = Path("/dev/shm")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions of a seed before a run begins."""

    settings: Settings
    replication: int
    journals: list[str]
    writers: int
    pause_s: float
    codec: int
    latency_s: float
    refresh_s: int
    faults: list[str]
    duration_s: float
    further: list[str]
    of_machines: list[str]

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return the plan of a seed."""
        rng = random.Random(f"plan {seed}")
        brokers = rng.randint(3, 5)
        replication = 1 if seed % 4 == 0 else rng.choice((2, 3))
        return cls(
            settings=Settings(
                brokers=brokers,
                zones=2,
                lease_ttl_s=rng.choice((5, 5, 10)),
                durability=rng.choice((Durability.REPLICATED,) * 2 + (Durability.PERSISTED,)),
            ),
            replication=replication,
            journals=[f"sim/journal-{number}" for number in range(rng.randint(1, 3))],
            writers=rng.randint(1, 2),
            pause_s=rng.choice((0.2, 0.5, 1.5)),
            codec=rng.choice((pb.NONE, pb.NONE, pb.SNAPPY, pb.GZIP)),
            latency_s=rng.choice((0.001, 0.01, 0.05)),
            refresh_s=rng.choice((2, 5, 20)),
            faults=rng.choices(list(FAULTS), k=rng.randint(1, 5)),
            duration_s=10.0 + 15.0 * rng.random(),
            further=_further_faults(seed),
            of_machines=_faults_of_machines(seed),
        )


def _further_faults(seed: int) -> list[str]:
    rng = random.Random(f"further faults {seed}")
    return [rng.choice(list(FURTHER_FAULTS))] if rng.random() < FURTHER_RATE else []


def _faults_of_machines(seed: int) -> list[str]:
    rng = random.Random(f"faults of machines {seed}")
    if rng.random() >= FURTHER_RATE or "etcd-goes-back" in _further_faults(seed):
        return []
    return rng.choices(list(FAULTS_OF_MACHINES), k=rng.randint(1, 3))


@dataclass(slots=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        violations: broken promises.
        log: lines of its log.
        acknowledged: number of appends.
        virtual_s: length of the run.
    """

    violations: list[Violation] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    acknowledged: int = 0
    virtual_s: float = 0.0


def run_seed(
    seed: int,
    *,
    plant: str = "",
    left_out: AbstractSet[Promise] = frozenset(),
    keeps_log: bool = True,
) -> Outcome:
    """Run a seed. It changes this process for good: call it in a process of its own.

    Args:
        seed: decides on everything.
        plant: name of a bug to plant; none by default.
        left_out: promises that are not checked.
        keeps_log: False to save the time of writing a log.
    """
    gc.disable()  # nothing of a killed process may be collected, and so cleaned up
    threads.install(seed)
    if plant:
        plants.PLANTS[plant]()
    outcome = Outcome()
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    checker = Checker(left_out)
    outcome.violations = checker.violations
    root = Path(tempfile.mkdtemp(prefix="simulation-", dir=DISKS if DISKS.is_dir() else None))
    _capture_logs(loop, outcome, checker, str(root), keeps_log=keeps_log)
    try:
        loop.run_until_complete(_run(seed, root, loop, checker))
    except Exception as error:  # noqa: BLE001 - a violation as any other
        _log.exception("the run failed")
        checker.violated(Promise.NO_CRASH, f"the run failed: {error!r}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    outcome.acknowledged = checker.acknowledged
    outcome.virtual_s = loop.time()
    return outcome


async def _run(seed: int, root: Path, loop: VirtualLoop, checker: Checker) -> None:
    plan = Plan.of(seed)
    _log.warning("seed %d: %s", seed, plan)
    network = Network(random.Random(f"network {seed}"), plan.latency_s)
    use_channels(network)
    use_dials(network)
    store = StoredState(
        loop.unix_time, random.Random(f"store {seed}"), random.Random(f"lies {seed}")
    )
    use_store(store)
    disks = Disks(random.Random(f"disks {seed}"))
    watch_syncs(disks)
    etcd = EtcdHost(network, random.Random(f"etcd {seed}"))
    rng = random.Random(f"cluster {seed}")
    cluster = Cluster(
        root, plan.settings, rng, network=network, etcd=etcd, store=store, disks=disks
    )
    for host in cluster.hosts:
        cluster.start(host)

    def client(name: str, zone: str = "") -> Transport:
        return transport(network, name, rng, services=cluster.names, zone=zone, cache_size=100)

    admin = client("admin")
    await _until(lambda: all(_is_serving(host) for host in cluster.hosts), 30.0)
    goes_back = "etcd-goes-back" in plan.further
    # An Etcd that went back does not know members which are there.
    members = (lambda: frozenset(cluster.names)) if goes_back else etcd.members
    workload = Workload(checker, random.Random(f"workload {seed}"), members)

    def faults_of(stream: str) -> Faults:
        chance = random.Random(f"{stream} {seed}")
        return Faults(cluster, workload, plan.latency_s, chance, lambda: _create(admin, plan))

    faults, suspensions = faults_of("faults"), faults_of("suspensions")
    await _create(admin, plan)
    faults.journals_are_created()
    for number in range(plan.writers):
        workload.start_writer(client(f"writer-{number}"), plan.journals, plan.pause_s)
    for journal in plan.journals:
        for zone in ("zone-0", "zone-1"):  # they prefer other brokers
            reader = client(f"reader of {journal} in {zone}", zone)
            workload.start_reader(reader, journal, zone)
    await asyncio.sleep(2 * rng.random())

    of_machines = Faults(
        cluster,
        workload,
        plan.latency_s,
        random.Random(f"schedule of machines {seed}"),
        lambda: _create(admin, plan),
    )
    of_machines.begin(plan.duration_s, plan.of_machines)
    # What an Etcd that goes back has lost, only brokers can have that are alive meanwhile.
    others = [] if goes_back else plan.faults
    suspending = None
    if not goes_back and suspensions.rng.random() < SUSPENSION_SHARE:
        suspending = asyncio.create_task(suspensions.suspend(plan.duration_s))
    await faults.run(plan.duration_s, [*others, *plan.further])
    if suspending is not None:
        suspending.cancel()
        await suspensions.end()
    if plan.of_machines:
        await of_machines.end()
    if await _check_progress(plan, workload, checker, admin):
        if plan.of_machines and plan.replication > 1:
            await _check_fail_over(plan, of_machines, workload, checker, client)
        await workload.stop()
        for journal in plan.journals:
            await _check_readable(cluster, journal, client("last reader"), checker)
        await _check_balanced(cluster, plan, checker)
    await workload.stop()
    await _stop(cluster)
    for journal in plan.journals:
        checker.final(journal, "store", 0, _stored(store, journal))
    _log.warning("over: %d appends were acknowledged", checker.acknowledged)


async def _create(admin: Transport, plan: Plan) -> None:
    """Create the journals."""
    request = pb.ApplyRequest()
    for journal in plan.journals:
        spec = request.changes.add().upsert
        spec.name, spec.replication = journal, plan.replication
        fragment = spec.fragment
        fragment.length = 4096
        fragment.compression_codec = plan.codec  # type: ignore[assignment]
        fragment.stores.append(STORE_URL)
        fragment.refresh_interval.FromSeconds(plan.refresh_s)
    validate(request)
    while True:
        try:
            response = await admin.apply(request)
        except GazetteError as error:
            _log.warning("journals are not created yet: %s", error)
        else:
            if response.status == pb.OK:
                return
        await asyncio.sleep(0.5)


# ------------------------------------------------------------------------ checks


async def _check_progress(
    plan: Plan, workload: Workload, checker: Checker, admin: Transport
) -> bool:
    """Check that every journal takes an append again. Return True if all do."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + PROGRESS_S

    async def append(journal: str) -> bool:
        reason = "?"
        while loop.time() < ends_at:
            reason = await workload.append(admin, journal)
            if not reason:
                return True
            await asyncio.sleep(0.5)
        checker.violated(
            Promise.PROGRESS, f"{journal} takes no append {PROGRESS_S:.0f} s after faults: {reason}"
        )
        return False

    return all(await asyncio.gather(*map(append, plan.journals)))


async def _check_fail_over(
    plan: Plan,
    faults: Faults,
    workload: Workload,
    checker: Checker,
    client: Callable[[str], Transport],
) -> None:
    """Check that appends go on soon after one broker of a quiet cluster dies or is cut off."""
    loop, cluster = asyncio.get_running_loop(), faults.cluster

    def is_whole() -> bool:
        routes = cluster.routes()
        return (
            all(_is_serving(host) for host in cluster.hosts)
            and len(routes) == len(plan.journals)
            and all(len(route) == plan.replication for route in routes)
        )

    if plan.replication == plan.settings.brokers:
        return  # the others are too few
    try:
        await _until(is_whole, PROGRESS_S)
    except TimeoutError:
        _log.warning("the cluster is not whole")
        return
    await asyncio.sleep(2 * plan.settings.lease_ttl_s)  # of quiet
    if not is_whole() or not await _check_progress(plan, workload, checker, client("admin")):
        return
    host = faults.rng.choice(cluster.routes())[0]
    starts, node, begun_at = host.starts, host.node, loop.time()
    member = pb.ProcessSpec.ID(zone=host.zone, suffix=host.name)
    route = pb.Route(members=[member], endpoints=[endpoint_of(host.name)], primary=0)
    lost = Target(route=route, member=member)
    what, bar_s = await faults.lose(host)
    if what.startswith("kill"):
        bar_s += ANSWER_CALLS * SLOW_MESSAGE * plan.latency_s
    # The end of the lease decides, at the latest.
    bar_s = min(bar_s, plan.settings.lease_ttl_s + 1.0) + SLOW_CALLS * plan.latency_s

    async def attempts(journal: str) -> None:
        """Return when an append succeeds. Each attempt asks some broker for the route.

        The first one goes to the broker that is lost: a primary notices a cut by the answer that an
        append waits for. Others may all be relayed, by brokers that wait for it themselves.
        """
        first = asyncio.create_task(workload.append(client("probe"), journal, lost))
        tasks: set[asyncio.Task[str]] = {first}
        try:
            while not any(task.done() and not task.result() for task in tasks):
                tasks.add(asyncio.create_task(workload.append(client("probe"), journal)))
                await asyncio.sleep(0.2)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    try:
        async with asyncio.timeout(bar_s):
            await asyncio.gather(*map(attempts, plan.journals))
    except TimeoutError:
        checker.violated(
            Promise.FAIL_OVER, f"{what} of {host.name}: a journal takes no append for {bar_s:.1f} s"
        )
    _log.warning("%s of %s: appends go on after %.2f s", what, host.name, loop.time() - begun_at)
    is_punctual = plan.latency_s <= PUNCTUAL_LATENCY_S
    if not what.startswith("kill") and is_punctual and (host.starts, host.node) != (starts, node):
        checker.violated(Promise.FAIL_OVER, f"{what} of {host.name}: it lives, and was deposed")
    await faults.end()
    await _check_progress(plan, workload, checker, client("admin"))


async def _check_readable(
    cluster: Cluster, journal: str, reader: Transport, checker: Checker
) -> None:
    """Check what each broker of a journal serves."""
    for host in cluster.hosts:
        broker = host.broker
        if broker is None or not _is_serving(host):
            continue
        replica = broker.resolver.replica(journal)
        if replica is None:
            continue
        end = max(checker.end_of(journal), replica.index.summary().end)
        member = pb.ProcessSpec.ID(zone=host.zone, suffix=host.name)
        route = pb.Route(members=[member], endpoints=[endpoint_of(host.name)], primary=0)
        try:
            async with asyncio.timeout(READABLE_S):
                while True:
                    try:
                        content = await read_all(
                            reader, journal, Target(route=route, member=member), end
                        )
                    except GazetteError as error:
                        _log.warning("%s at %s is not readable: %s", journal, host.name, error)
                    else:
                        if len(content) >= end:
                            checker.final(journal, host.name, 0, content)
                            break
                    if host.broker is not broker:
                        break
                    await asyncio.sleep(1.0)
        except TimeoutError:
            if host.broker is broker and broker.resolver.replica(journal) is replica:
                spans = [f"[{f.begin}, {f.end})" for f in replica.index.page(limit=99).fragments]
                checker.violated(
                    Promise.READABLE,
                    f"{journal} at {host.name} is not readable up to {end}: {', '.join(spans)}",
                )


async def _check_balanced(cluster: Cluster, plan: Plan, checker: Checker) -> None:
    """Check that primaries are spread over the brokers, where journals have several replicas."""
    share = -(-len(plan.journals) // plan.settings.brokers)
    if plan.replication == 1 or any(host.is_leaving for host in cluster.hosts):
        return
    led: Counter[str] = Counter()

    def is_balanced() -> bool:
        nonlocal led
        led = Counter(route[0].name for route in cluster.routes())
        return led.total() == len(plan.journals) and max(led.values()) <= share + 1

    try:
        await _until(is_balanced, BALANCED_S)
    except TimeoutError:
        checker.violated(Promise.BALANCED, f"primaries of brokers: {dict(led)}")


async def _stop(cluster: Cluster) -> None:
    """Stop all brokers, which store what they have."""
    _log.warning("all brokers stop")
    stops = []
    for host in cluster.hosts:
        host.wanted = False
        if host.node is not None and host.broker is not None:
            stops.append(host.node.task(host.broker.stop(persist_timeout_s=120.0)))
    if stops:
        await asyncio.wait(stops, timeout=300.0)


def _stored(store: StoredState, journal: str) -> bytes:
    """Return a journal's content in the store, up to the first gap."""
    fragments = []
    for key, data in store.objects.items():
        if key.startswith(journal + "/"):
            fragment = parse_content_path(journal, key.removeprefix(journal + "/"))
            fragments.append((fragment.begin, -fragment.end, key, fragment, data))
    content = b""
    for begin, _, key, fragment, data in sorted(fragments, key=lambda found: found[:3]):
        if begin > len(content) or fragment.end <= len(content):
            continue
        raw = StoredContent(io.BytesIO(data), len(data))
        try:
            with decode_fragment(raw, fragment, begin, source=key) as decoded:
                content += decoded.readall()[len(content) - begin :]
        except CorruptFragmentError:
            continue  # torn; another object has to have its content
    return content


def _is_serving(host: Host) -> bool:
    broker = host.broker
    return broker is not None and broker._is_composed


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a poll costs no real time
            await asyncio.sleep(0.05)


# ------------------------------------------------------------------------ log


def _capture_logs(
    loop: VirtualLoop, outcome: Outcome, checker: Checker, root: str, *, keeps_log: bool
) -> None:
    """Write all log records into the run's log, with virtual time and node."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            node = current_node()
            text = record.getMessage().replace(root, "")
            if record.exc_info and record.levelno >= logging.ERROR:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
                if not record.name.startswith("simulation"):
                    checker.violated(Promise.NO_CRASH, f"{node and node.name}: {text}")
            outcome.log.append(f"{loop.world_s:9.4f} {node.name if node else '-':9} {text}")

    def unhandled(_: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = f"{context.get('message')}: {error!r}"
        _log.error(text, exc_info=error)
        node = current_node()
        checker.violated(Promise.NO_CRASH, f"{node and node.name}: {text}")

    level = logging.WARNING if keeps_log else logging.ERROR
    logging.basicConfig(handlers=[Handler()], level=level, force=True)
    if keeps_log:
        logging.getLogger("simulation").setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    loop.set_exception_handler(unhandled)
