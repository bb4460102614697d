"""Local cluster: Etcd, brokers in processes of their own, and a fragment store in files.

Brokers have the same names over a data directory each time (:func:`broker_name`). Leases of brokers
that do not serve any more are revoked (:func:`revoke_leases`). :class:`EtcdMembers` is its Etcd, of
one member or several.

:class:`ControlServer` lets other processes control a running cluster. It listens on loopback. Its
port and a secret are in a file of the data directory, which only its user can read. A request and
its answer are one line of JSON each.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import orjson

from gazette_sdk.cluster.broker_keys import BrokerKeySpace, is_consistent
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_server import EtcdServer, Peers
from gazette_sdk.contexts import Startable
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdError,
    GazetteError,
    LeaseLostError,
)
from gazette_sdk.local_cluster.broker import BrokerOptions, BrokerState, LocalBroker, wait_until
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.transport import connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import apply_in_batches


def broker_name(spools: Path, index: int) -> str:
    """Return the id of a broker, ``broker-0`` and so on, which is also the name of its spools.

    Directories of earlier versions have names such as ``broker-000``. Such a broker keeps its
    name, because spools belong to an id.

    Args:
        spools: directory of all spools.
        index: number of the broker, from 0.
    """
    earlier = f"broker-{index:03d}"
    return earlier if (spools / earlier).is_dir() else f"broker-{index}"


ETCD_TXN_CHANGES = 100
"""Changes per Etcd transaction, whose default limit is 128 operations."""


def request_of(specs: str) -> pb.ApplyRequest:
    """Return the changes that a YAML document describes. Those without ``revision`` match any.

    Raises:
        ValidationError: the document is malformed.
    """
    root = journalspace.parse(specs)
    journalspace.push_down(root)
    request = journalspace.to_apply_request(root)
    for change in request.changes:
        if not change.expect_mod_revision:
            change.expect_mod_revision = -1
    return request


async def revoke_leases(endpoint: str, leases: Iterable[int] | None = None) -> None:
    """Revoke leases whose holders are dead; by default all leases.

    Otherwise a cluster would wait until they expire.

    Args:
        endpoint: URL of Etcd.
        leases: ids of the leases.
    """
    async with aclosing(await Etcd.connect(endpoint)) as etcd:
        for lease in await etcd.leases() if leases is None else leases:
            with suppress(LeaseLostError):  # it has just expired
                await etcd.revoke(lease)


READY_TIMEOUT_S = 60.0
"""Default limit of waiting for all journals."""

_log = logging.getLogger(__name__)


class LocalCluster(Startable):
    """Etcd and ``gazette serve`` processes on loopback, over one directory.

    A second start with the same directory continues with its data, also after ``kill -9``. All
    methods block, and may be called from any thread except that of the SDK's event loop:
    asynchronous code uses ``async with``, and calls methods by :func:`asyncio.to_thread`.

    Args:
        data: directory of all data: ``etcd/``, ``fragments/`` (the root of ``file://`` stores),
            ``spools/`` with one directory for each broker, and ``locks/``.
        brokers: number of brokers, with the ids ``broker-0`` and so on.
        zones: names of zones, which are given to the brokers in turn; or how many: ``a``, ``b``
            and so on. One zone is ``local``.
        etcd_members: number of members of Etcd.
        port: port of the first broker; 0 for a free one.
        lease_ttl_s: lifetime of the brokers' leases in Etcd, in seconds, at least 1.
        sync_etcd: False if Etcd need not force its writes to disk, for tests with temporary data.
        log_level: least level of the brokers' log records.
        log_format: their format.
        logs: directory of their log files; None to share the output of this process.
        restarts: True to start a broker again if it ends by itself, for example without its lease.
        arguments: further arguments of each ``gazette serve``.
        advertise: returns the port that a broker or a member of Etcd advertises, given the one
            that it serves; for proxies. By default it is the same.

    Attributes:
        data: directory of all data.
        brokers: the brokers.
        etcd: Etcd.

    Raises:
        ConfigurationError: a number is wrong.
    """

    def __init__(
        self,
        data: Path | str,
        *,
        brokers: int = 3,
        zones: int | Sequence[str] = 1,
        etcd_members: int = 1,
        port: int = 0,
        lease_ttl_s: float = 20.0,
        sync_etcd: bool = True,
        log_level: str = "warn",
        log_format: str = "text",
        logs: Path | None = None,
        restarts: bool = False,
        arguments: Sequence[str] = (),
        advertise: Callable[[int], int] = int,
    ) -> None:
        if brokers < 1:
            raise ConfigurationError(f"a cluster needs at least one broker, not {brokers}")
        names = _zone_names(zones)
        self.data = Path(data).absolute()
        self.etcd = EtcdMembers(
            self.data / "etcd", etcd_members, sync_writes=sync_etcd, advertise=advertise
        )
        self._restarts = restarts
        self._is_stopping = False
        self._failure: GazetteError | None = None
        self._failed = threading.Event()
        self._supervisors: list[threading.Thread] = []
        self._logs = logs
        spools = self.data / "spools"
        self.brokers: list[LocalBroker] = []
        for index in range(brokers):
            name = broker_name(spools, index)
            options = BrokerOptions(
                etcd=self.etcd.endpoint,
                etcd_address=self.etcd.advertised_address(index % etcd_members),
                file_root=self.fragments,
                lease_ttl_s=lease_ttl_s,
                log_level=log_level,
                log_format=log_format,
                logs=logs,
                locks=self.data / "locks",
                arguments=tuple(arguments),
            )
            its_port = port if index == 0 and port else reserve_port()
            zone = names[index % len(names)]
            self.brokers.append(
                LocalBroker(
                    name,
                    zone,
                    spools / name,
                    options,
                    port=its_port,
                    advertise_port=advertise(its_port),
                )
            )

    @property
    def fragments(self) -> Path:
        """Directory of stored fragments, the root of ``file://`` stores."""
        return self.data / "fragments"

    @property
    def address(self) -> str:
        """URL of the first broker that runs.

        Raises:
            ClosedError: none runs.
        """
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """URLs of the brokers that run.

        Raises:
            ClosedError: none runs.
        """
        found = [each.address for each in self.brokers if each.state is BrokerState.RUNNING]
        if not found:
            raise ClosedError("no broker of the local cluster runs; start one first")
        return found

    @property
    def etcd_endpoint(self) -> str:
        """URL of a member of Etcd that runs."""
        return self.etcd.endpoint()

    def broker(self, name: str) -> LocalBroker:
        """Return a broker by its id.

        Raises:
            ConfigurationError: there is none.
        """
        for each in self.brokers:
            if each.name == name:
                return each
        names = ", ".join(each.name for each in self.brokers)
        raise ConfigurationError(f"there is no broker {name!r}; the cluster has {names}")

    # -------------------------------------------------------- start and stop

    def start(self) -> Self:
        """Start Etcd and all brokers. After an error everything is stopped again.

        Raises:
            ConfigurationError: the directory is in use, or no etcd was found.
            GazetteError: the start failed.
            TimeoutError: a broker does not serve in time.
        """
        self._is_stopping = False
        for directory in (self.fragments, self.data / "locks", self._logs):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        for broker in self.brokers:
            if broker.log is not None and broker.log.exists():  # of an earlier run: one is kept
                broker.log.replace(broker.log.with_suffix(".log.1"))
        try:
            self.etcd.start()
            # This process holds the lock of Etcd's directory, and brokers die with the process
            # that started them: all holders of leases are dead.
            sdk_loop.run(revoke_leases(self.etcd.endpoint()), READY_TIMEOUT_S)
            self._in_parallel(self.start_broker, self.brokers)
        except BaseException:
            self.stop(0)
            raise
        return self

    def start_broker(
        self, broker: LocalBroker, *, name: str = "", empty_disk: bool = False
    ) -> None:
        """Start a broker, and start it again when it ends by itself if the cluster does so.

        See :meth:`LocalBroker.start`.
        """
        broker.start(name=name, empty_disk=empty_disk)
        if self._restarts:
            # From a thread of its own: the caller of the callback is the thread of the child.
            broker.call_when_ended(lambda status: self._supervise(broker, status))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End all brokers, then Etcd. Calling it again does nothing.

        Args:
            timeout_s: longest time for storing spools; 0 to kill the brokers at once. What is not
                stored stays in ``spools/``, and the next start continues with it.
        """
        self._is_stopping = True
        try:
            self._in_parallel(lambda broker: broker.stop(timeout_s), self.brokers)
            while self._supervisors:
                self._supervisors.pop().join()
            for broker in self.brokers:  # one may have been started again meanwhile
                broker.stop()
        finally:
            self.etcd.stop()
            self._failed.set()

    def wait_for_failure(self) -> None:
        """Wait until the cluster is stopped.

        Raises:
            GazetteError: a broker could not be started again.
        """
        self._failed.wait()
        if self._failure is not None:
            raise self._failure

    # -------------------------------------------------------------- journals

    def apply(self, specs: str, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Create or change journals by a YAML document, and wait until all have their replicas.

        Without ``revision``, a change matches any revision.

        Args:
            specs: YAML as for ``gazctl journals apply``.
            timeout_s: longest time of the wait.

        Raises:
            ValidationError: the document or a journal in it is malformed.
            TimeoutError: a journal requires more brokers than there are.
        """
        request = request_of(specs)

        async def send() -> None:
            async with aclosing(self.connect()) as transport:
                await apply_in_batches(transport, request, ETCD_TXN_CHANGES)

        sdk_loop.run(send(), timeout_s)
        names = [change.upsert.name for change in request.changes]
        self._wait(lambda keyspace: self._unready(keyspace, names), timeout_s)

    def connect(self) -> Transport:
        """Return a new transport to the first broker that runs. Close it when it is not used."""
        return connect(self.address)

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the members are the brokers that run, and all journals have their replicas.

        While fewer brokers run than a journal wants, it needs a replica on each of them.

        Raises:
            TimeoutError: they are not in time. The text names what is missing.
        """
        self._wait(self._unready, timeout_s)

    # ---------------------------------------------------------------- faults

    def kill_etcd(self, index: int) -> None:
        """End a member of Etcd with SIGKILL."""
        self.etcd.kill(index)

    def start_etcd(self, index: int) -> None:
        """Start a member of Etcd again."""
        self.etcd.start_member(index)

    # ----------------------------------------------------------------- inside

    def _in_parallel(
        self, call: Callable[[LocalBroker], None], brokers: Iterable[LocalBroker]
    ) -> None:
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(call, brokers))

    def _wait(self, unready: Callable[[BrokerKeySpace], str], timeout_s: float) -> None:
        missing = "Etcd does not answer"

        def condition(keyspace: BrokerKeySpace) -> bool:
            nonlocal missing
            missing = unready(keyspace)
            return not missing

        try:
            sdk_loop.run(wait_until(self.etcd.endpoint, condition), timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"the local cluster is not ready after {timeout_s:g} s: {missing}"
            ) from None

    def _unready(self, keyspace: BrokerKeySpace, journals: Iterable[str] | None = None) -> str:
        """Return what is not ready, empty for nothing."""
        wanted = {
            (each.zone, each.name)
            for each in self.brokers
            if each.state in {BrokerState.STARTING, BrokerState.RUNNING}
        }
        members = {(entry.zone, entry.suffix) for entry in keyspace.members()}
        if members != wanted:
            return f"its members are {_listed(members)}, and {_listed(wanted)} run"
        for name in [entry.id for entry in keyspace.items()] if journals is None else journals:
            item = keyspace.item(name)
            if item is None:
                return f"{name} does not exist"
            assignments = keyspace.assignments(name)
            replicas = min(desired_replication(item.value), len(wanted))
            if len(assignments) != replicas:
                return f"{name} has {len(assignments)} of {replicas} replicas"
            if not is_consistent(assignments):
                return f"{name} has replicas that have not synchronised"
        return ""

    def _supervise(self, broker: LocalBroker, status: int) -> None:
        """Start a broker again if it was not ended on purpose."""
        if self._is_stopping or not broker.ends_by_itself:
            return
        thread = threading.Thread(
            target=self._restart, args=(broker, status), name=f"restart {broker.name}"
        )
        self._supervisors.append(thread)
        thread.start()

    def _restart(self, broker: LocalBroker, status: int) -> None:
        if status == 0:
            _log.info("%s has drained, and is started again", broker.name)
        else:
            _log.warning(
                "%s joins the cluster again: its process ended with status %d. A pause of it or of "
                "etcd for longer than the lease causes this",
                broker.name,
                status,
            )
        try:
            self.start_broker(broker)
        except (GazetteError, TimeoutError) as error:
            if self._is_stopping:
                return
            self._failure = GazetteError(
                f"{broker.name} cannot join the cluster again: {error}; start the cluster again: "
                "it continues with its data"
            )
            self._failed.set()


def _zone_names(zones: int | Sequence[str]) -> list[str]:
    if isinstance(zones, int):
        if not 1 <= zones <= 26:
            raise ConfigurationError(f"a cluster has 1 to 26 zones, not {zones}")
        return ["local"] if zones == 1 else [chr(ord("a") + index) for index in range(zones)]
    if isinstance(zones, str) or not zones or not all(zones):
        raise ConfigurationError("zones are a number, or a list of names: zones=['a', 'b']")
    return list(zones)


def _listed(members: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{zone}/{name}" for zone, name in sorted(members)) or "none"


# ------------------------------------------------------------------ Etcd

HEARTBEAT_MS = 50
"""Raft tick of several members, which answer each other within a millisecond."""

ELECTION_MS = 500
"""Election time-out of several members. A busy machine holds them up."""


class EtcdMembers:
    """Etcd of one member or several, each a child process.

    A killed member is started again over its directory and at its port.

    Args:
        data: directory of their files.
        count: number of members, at least 1. An odd number is usual: most of them must run.
        sync_writes: False if writes need not be forced to disk, for tests with temporary data.
        advertise: returns the port to advertise for a port that is served, which a proxy maps.

    Raises:
        ConfigurationError: the number is wrong.
    """

    def __init__(
        self,
        data: Path,
        count: int = 1,
        *,
        sync_writes: bool = True,
        advertise: Callable[[int], int] = int,
    ) -> None:
        if count < 1:
            raise ConfigurationError(f"an Etcd needs at least one member, not {count}")
        ports = [reserve_port() for _ in range(count)]
        self._advertised = [advertise(port) for port in ports]
        if count == 1:
            # At this path EmbeddedCluster has its Etcd, too.
            self.servers = [
                EtcdServer(
                    data,
                    sync_writes=sync_writes,
                    port=ports[0],
                    advertise_port=self._advertised[0],
                )
            ]
            return
        urls = tuple(
            (f"member-{index}", f"http://127.0.0.1:{reserve_port()}") for index in range(count)
        )
        self.servers = [
            EtcdServer(
                data / name,
                peers=Peers(name, urls, heartbeat_ms=HEARTBEAT_MS, election_ms=ELECTION_MS),
                sync_writes=sync_writes,
                port=port,
                advertise_port=advertised,
            )
            for (name, _), port, advertised in zip(urls, ports, self._advertised, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.servers)

    @property
    def endpoints(self) -> list[str]:
        """URLs of the members that run."""
        return [server.endpoint for server in self.servers if server.pid is not None]

    @property
    def address(self) -> str:
        """URLs of the members that run, separated by commas: the address for a client."""
        return ",".join(self.endpoints)

    def advertised_address(self, first: int = 0) -> str:
        """Return the advertised URLs of all members, separated by commas.

        Args:
            first: number of the member that comes first.
        """
        ports = self._advertised[first:] + self._advertised[:first]
        return ",".join(f"http://127.0.0.1:{port}" for port in ports)

    def endpoint(self, index: int = 0) -> str:
        """Return the URL of a member that runs, if possible that with this number.

        Raises:
            EtcdError: none runs.
        """
        count = len(self.servers)
        for offset in range(count):
            server = self.servers[(index + offset) % count]
            if server.pid is not None:
                return server.endpoint
        raise EtcdError("no member of the local Etcd runs; start one first")

    def start(self) -> None:
        """Start all members that do not run.

        Raises:
            ConfigurationError: no usable etcd was found, or the directory is in use.
            EtcdError: a member ended, or was not ready in time.
        """
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(EtcdServer.start_blocking, self.servers))

    def start_member(self, index: int) -> None:
        """Start one member again. Other members must run.

        Raises:
            EtcdError: it ended, or was not ready in time.
        """
        self.servers[index].start_blocking()

    def kill(self, index: int) -> None:
        """End a member with SIGKILL."""
        self.servers[index].kill()

    def stop(self) -> None:
        """Stop all members at the same time."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(EtcdServer.stop_blocking, self.servers))


CONTROL_FILE = "control.json"

REQUEST_TIMEOUT_S = 10.0
"""Limit of receiving a request."""

LINE_BYTES_MAX = 1 << 16

CONNECTIONS_MAX = 16
"""Further connections are closed."""

Control: TypeAlias = Literal["kill", "pause", "resume", "drain", "start", "status"]
"""Controls of brokers."""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """Status of a broker.

    Attributes:
        name: its id.
        zone: its zone.
        state: a :class:`~gazette_sdk.local_cluster.broker.BrokerState`.
        address: its URL.
        pid: its process; None if it has ended.
        starts: number of its processes.
    """

    name: str
    zone: str
    state: str
    address: str
    pid: int | None
    starts: int


class ControlServer:
    """Server of the controls of a local cluster, on the running event loop.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, and write the control file.

        Raises:
            OSError: the file cannot be written.
        """
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, limit=LINE_BYTES_MAX
        )
        port = self._server.sockets[0].getsockname()[1]
        _write_private(self._path, orjson.dumps({"port": port, "secret": self._secret}))

    async def stop(self) -> None:
        """End all calls, and delete the control file."""
        if self._server is None:
            return
        self._path.unlink(missing_ok=True)
        self._server.close()
        for call_ in self._calls:
            call_.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        self._server = None

    @property
    def _path(self) -> Path:
        return self._cluster.data / CONTROL_FILE

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._calls) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._calls.add(task)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await reader.readline()
            writer.write(orjson.dumps(await self._answer(line)) + b"\n")
            await writer.drain()
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            writer.transport.abort()  # no one waits for the answer, or the cluster stops
        finally:
            self._calls.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        request = orjson.loads(line)
        if not hmac.compare_digest(str(request.get("secret")), self._secret):
            return {"error": "the secret of the control file is another one; try again"}
        control, names = request.get("control"), request.get("brokers")
        if control not in get_args(Control) or not isinstance(names, list):
            return {"error": f"the cluster has no control {control!r}; it runs another version"}
        try:
            brokers = [self._cluster.broker(str(name)) for name in names]
            if control != "status":
                work = (asyncio.to_thread(self._perform(control), each) for each in brokers)
                await asyncio.gather(*work)
        except (GazetteError, TimeoutError) as error:
            return {"error": str(error)}
        shown = brokers if names else self._cluster.brokers
        return {"brokers": [asdict(_status(each)) for each in shown]}

    def _perform(self, control: str) -> Callable[[LocalBroker], None]:
        controls: dict[str, Callable[[LocalBroker], None]] = {
            "kill": LocalBroker.kill,
            "pause": LocalBroker.pause,
            "resume": LocalBroker.resume,
            "drain": LocalBroker.drain,
            "start": self._cluster.start_broker,
        }
        return controls[control]


async def call(data: Path, control: Control, names: Sequence[str] = ()) -> list[BrokerStatus]:
    """Control brokers of the local cluster that runs over a directory.

    Args:
        data: its directory.
        control: what is done to the brokers.
        names: their ids. ``status`` without names is about all brokers.

    Returns:
        The status of the brokers afterwards.

    Raises:
        ConfigurationError: no cluster with controls runs there.
        GazetteError: the cluster refused, for example because there is no such broker.
    """
    try:
        found = orjson.loads((data / CONTROL_FILE).read_bytes())
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", found["port"], limit=LINE_BYTES_MAX
        )
    except (FileNotFoundError, ConnectionError) as error:
        raise ConfigurationError(
            f"no cluster of several brokers runs over {data}; start one by `gazette dev --brokers "
            "3`, or name its directory with --data"
        ) from error
    try:
        request = {"secret": found["secret"], "control": control, "brokers": list(names)}
        writer.write(orjson.dumps(request) + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise GazetteError("the cluster has stopped meanwhile; see its output")
    answer = orjson.loads(line)
    if "error" in answer:
        raise GazetteError(answer["error"])
    return [BrokerStatus(**each) for each in answer["brokers"]]


def _status(broker: LocalBroker) -> BrokerStatus:
    return BrokerStatus(
        name=broker.name,
        zone=broker.zone,
        state=broker.state.value,
        address=broker.address,
        pid=broker.pid,
        starts=broker.starts,
    )


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, at once."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    Path(name).replace(path)
