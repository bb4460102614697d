"""Gathering of facts, from all that can be reached. Nothing is ever written.

Sources are asked at the same time, each for a few seconds at most. An error of a source is the
reason why its facts are missing; members that do not answer are left out of what they alone know.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from google.protobuf.message import DecodeError, Message

from gazette_sdk.cli.client import check_address, open_etcd
from gazette_sdk.cli.doctor.checks import without_query
from gazette_sdk.cli.doctor.facts import (
    CertificateFacts,
    EtcdFacts,
    Facts,
    JournalFacts,
    ProcessFacts,
    QuotaFacts,
    ShardFacts,
    Source,
    SpoolFacts,
)
from gazette_sdk.cli.program import explain
from gazette_sdk.cluster.consumer_keys import CONSUMERS_PREFIX
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.cluster.items import items_prefix
from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.fragment.stores import open_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Authorizer, Capability
from gazette_sdk.protocol.names import is_tls, may_send_token
from gazette_sdk.protocol.rules import HEADS_RPC, MEMBERS_RPC, REPORT_RPC, Rpc
from gazette_sdk.protocol.shard_spec import recovery_log
from gazette_sdk.server.settings import EtcdSettings
from gazette_sdk.server.tls import certificate_end, end_of_certificate
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.grpc import GrpcWire
from gazette_sdk.transport.listing import list_journals
from gazette_sdk.transport.loop import for_each
from gazette_sdk.transport.wire import (
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    SERVICE,
    Destination,
    Tls,
    WireOptions,
)

FIRST_TIMEOUT_S, NEXT_TIMEOUT_S = 5.0, 3.5
"""Longest times of a source that needs no other one, and of one that does. Together they leave a
second of ten for the rest."""

MEMBER_TIMEOUT_S = 2.0
"""Longest time of a request of one member, or of one connection for its certificate."""

CONNECT_TIMEOUT_S = 3.0
"""Longest time of a connection to the broker. The source has more, so that the reason is shown."""

SHARDS_MAX = 1000
"""Shards of which hints are read, at most: the first of each application."""

HEADS_MAX = 500
KEYS_MAX = 20_000
LATENCY_READS = 5
SPOOL_FILES_MAX = 200_000
_CALLS = 32
_LATENCY_KEY = b"/gazette-doctor"
"""Key that is read, and need not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of facts, with the rights to ask for them.

    Attributes:
        address: address of a broker.
        authorizer: signs calls, or has the token for them; None for none.
        tls: certificates.
        etcd: options of Etcd.
        spool_dir: spool directory of a broker on this machine; empty for none.
        consumers: addresses of consumers that brokers do not know of.
        cert_files: files of certificates on this machine.
    """

    address: str
    authorizer: Authorizer | None = field(default=None, repr=False)
    tls: Tls = field(default_factory=Tls)
    etcd: EtcdSettings = field(default_factory=EtcdSettings)
    spool_dir: str = ""
    consumers: Sequence[str] = ()
    cert_files: Sequence[str] = ()

    def token(self) -> str | None:
        """Return a token for calls that show the cluster; None where none is needed."""
        if self.authorizer is None:
            return None
        rights = Capability.LIST | Capability.READ
        return self.authorizer.header(rights, pb.LabelSelector(), 60.0, time.time())

    async def call(self, rpc: Rpc, request: Message) -> Any:
        """Return the answer of the broker.

        Raises:
            GazetteError: there is none.
        """
        address = check_address(self.address, "with --broker.address or in GAZETTE_ADDRESS")
        options = WireOptions(
            address=address,
            tls=self.tls,
            max_receive_bytes=MAX_RECEIVE_BYTES,
            reconnect_backoff_max_s=RECONNECT_BACKOFF_MAX_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            read_chunk_bytes=None,
            call_timeout_s=0.0,
        )
        async with aclosing(GrpcWire(options)) as wire:
            return await wire.call(Destination(rpc, None, SERVICE, address, self.token()), request)

    @asynccontextmanager
    async def http(self) -> AsyncIterator[Callable[[str, str, float], Awaitable[str]]]:
        """Open a client; it returns what a path of an endpoint has, within a time.

        Raises:
            ConfigurationError: a certificate cannot be used.
        """
        context = self.tls.context(["http/1.1"])

        async def get(endpoint: str, path: str, timeout_s: float) -> str:
            parts = urlsplit(endpoint)
            async with AsyncExitStack() as stack:
                connector: aiohttp.BaseConnector = aiohttp.TCPConnector(ssl=context)
                base = f"{parts.scheme}://{parts.netloc}"
                if parts.scheme == "unix":
                    connector, base = aiohttp.UnixConnector(parts.path), "http://localhost"
                session = await stack.enter_async_context(
                    aiohttp.ClientSession(
                        connector=connector, timeout=aiohttp.ClientTimeout(timeout_s)
                    )
                )
                token = self.token() if may_send_token(self.address, endpoint) else None
                headers = {} if token is None else {"Authorization": token}
                async with session.get(base + path, headers=headers) as answer:
                    answer.raise_for_status()
                    return await answer.text()

        yield get


class NotThereError(GazetteError):
    """Absence of a source: nothing is wrong, and there is nothing to ask."""


async def gather(place: Place) -> Facts:
    """Return the facts that can be gathered. It takes ten seconds at most."""
    facts = Facts(now=time.time(), broker=place.address)

    async def asked(source: Source, work: Awaitable[None], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await work
        except TimeoutError:
            facts.missing[source] = f"no answer within {timeout_s:g} s"
        except (GazetteError, OSError, aiohttp.ClientError) as error:
            facts.missing[source] = explain(error)

    for sources, timeout_s in ((_FIRST, FIRST_TIMEOUT_S), (_NEXT, NEXT_TIMEOUT_S)):
        async with asyncio.TaskGroup() as group:
            for source, gather_source in sources.items():
                group.create_task(asked(source, gather_source(place, facts), timeout_s))
    return facts


# ---------------------------------------------------------------- brokers


async def _report(place: Place, facts: Facts) -> None:
    facts.report = await place.call(REPORT_RPC, clpb.ReportRequest())


async def _members(place: Place, facts: Facts) -> None:
    answer = await place.call(MEMBERS_RPC, clpb.MembersRequest(details=True))
    facts.members = list(answer.members)
    sent = time.time()
    for each in (await place.call(MEMBERS_RPC, clpb.MembersRequest(local=True))).members:
        facts.clock_ahead_s = each.clock_us / 1e6 - (sent + time.time()) / 2


async def _journals(place: Place, facts: Facts) -> None:
    async with connect(
        check_address(place.address, "with --broker.address or in GAZETTE_ADDRESS"),
        authorizer=place.authorizer,
        tls=place.tls,
        cache_size=0,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    ) as transport:
        listing = await list_journals(transport)
    facts.journals = [
        JournalFacts(each.spec, [f"{m.zone}/{m.suffix}" for m in each.route.members])
        for each in listing.journals
    ]


async def _metrics(place: Place, facts: Facts) -> None:
    if Source.MEMBERS in facts.missing:
        raise NotThereError("the members are not known")
    answered: list[ProcessFacts] = []

    async def ask(member: clpb.Member) -> None:
        try:
            found = samples_of(await get(member.endpoint, "/debug/metrics", MEMBER_TIMEOUT_S))
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        if "process_open_fds" in found and "process_max_fds" in found:
            name = f"{member.id.zone}/{member.id.suffix}"
            answered.append(
                ProcessFacts(
                    name=name,
                    open_files=found["process_open_fds"],
                    open_files_max=found["process_max_fds"],
                    audit_failing_s=found.get("gazette_audit_journal_failing_seconds", 0.0),
                    audit_dropped=found.get("gazette_audit_dropped_records_total", 0.0),
                )
            )

    async with place.http() as get:
        await for_each(facts.members, ask, _CALLS)
    if not answered:
        raise NotThereError("no member shows its metrics: is --debug.private set?")
    facts.processes = answered


_SAMPLE = re.compile(r"(?m)^(\w+)(?:\{[^}]*\})? ([-+.\w]+)$")


def samples_of(text: str) -> dict[str, float]:
    """Return the last value of each metric of a page of metrics."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            found[name] = float(value)
        except ValueError:
            continue
    return found


# ---------------------------------------------------------------- shards


async def _shards(place: Place, facts: Facts) -> None:
    addresses: dict[str, str] = {}
    for member in facts.members:
        if member.component != "broker" and not member.error:
            addresses.setdefault(member.component, member.endpoint)
    addresses |= {address: address for address in place.consumers}
    if Source.MEMBERS in facts.missing and not place.consumers:
        raise NotThereError("consumers are not known: name them by --consumer")
    found: list[ShardFacts] = []
    logs: dict[str, tuple[str, int | None]] = {}
    for name, address in addresses.items():
        async with ShardClient(
            address, authorizer=place.authorizer, tls=place.tls, connect_timeout_s=MEMBER_TIMEOUT_S
        ) as client:
            listing = await client.list(with_processes=True)
            application = listing.application or name

            async def look(
                shard: cpb.ListResponse.Shard, client: ShardClient = client, app: str = application
            ) -> ShardFacts:
                log = recovery_log(shard.spec)
                known = ShardFacts(spec=shard.spec, application=app, has_log=bool(log))
                is_running = any(each.code == cpb.ReplicaStatus.PRIMARY for each in shard.status)
                if not log or not is_running:
                    return known
                try:
                    hints = await client.get_hints(shard.spec.id)
                except GazetteError:
                    return known
                logs[shard.spec.id] = log, first_offset(hints, log)
                return replace(known, has_hints=_has_hints(hints))

            found += await for_each(listing.shards[:SHARDS_MAX], look, _CALLS)
    facts.shards = await _with_logs(place, found, logs)


def _has_hints(response: cpb.GetHintsResponse) -> bool:
    return any(each.HasField("hints") for each in (response.primary_hints, *response.backup_hints))


def first_offset(response: cpb.GetHintsResponse, log: str) -> int | None:
    """Return the offset of a log at which a recovery by the newest hints begins; None without."""
    for each in (response.primary_hints, *response.backup_hints):
        if each.HasField("hints"):
            hints = each.hints
            offsets = [
                segment.first_offset
                for node in hints.live_nodes
                for segment in node.segments
                if (segment.log or hints.log) == log
            ]
            return min(offsets, default=None)
    return None


async def _with_logs(
    place: Place, shards: Sequence[ShardFacts], logs: dict[str, tuple[str, int | None]]
) -> Sequence[ShardFacts]:
    """Return shards with the sizes of their logs, as far as brokers say."""
    names = sorted({log for log, _ in logs.values()})
    heads: dict[str, clpb.HeadsResponse.Head] = {}
    try:
        for at in range(0, len(names), HEADS_MAX):
            request = clpb.HeadsRequest(journals=names[at : at + HEADS_MAX])
            for head in (await place.call(HEADS_RPC, request)).heads:
                heads[head.journal] = head
    except CallError:
        return shards
    known = []
    for shard in shards:
        log, first = logs.get(shard.id, ("", None))
        head = heads.get(log)
        if head is None or not head.HasField("head"):
            known.append(shard)
            continue
        known.append(
            replace(
                shard,
                log_bytes=head.size if head.HasField("size") else None,
                recovery_bytes=None if first is None else max(head.head - first, 0),
            )
        )
    return known


# ---------------------------------------------------------------- Etcd


async def _etcd(place: Place, facts: Facts) -> None:
    async with open_etcd(place.etcd, MEMBER_TIMEOUT_S) as etcd:
        members = await etcd.statuses(timeout_s=MEMBER_TIMEOUT_S)
        times = []
        for _ in range(LATENCY_READS):
            begun = time.perf_counter()
            await etcd.range(_LATENCY_KEY)
            times.append(time.perf_counter() - begun)
        shared = await _shared_stores(etcd, place.etcd.prefix)
    facts.etcd = EtcdFacts(
        members=members, latency_s=statistics.median(times), shared_stores=shared
    )


async def _shared_stores(etcd: Etcd, root: str) -> dict[str, str]:
    """Return the stores in which journals of another cluster have the names of ours.

    Both clusters are read at one revision. Values of other clusters that are no specs are left out.
    """
    own = f"{root}/".encode()
    parent = own[: own.rstrip(b"/").rindex(b"/") + 1]
    others: dict[tuple[str, str], str] = {}
    for begin, end in ((parent, own), (prefix_end(own), prefix_end(parent))):
        if begin >= end:
            continue
        for kv in (await etcd.range(begin, end, limit=KEYS_MAX)).entries:
            prefix, separator, _ = kv.key.partition(b"/items/")
            if not separator or prefix.startswith(CONSUMERS_PREFIX.encode()):
                continue
            for name, store in _stores_of(kv.value):
                others[name, store] = prefix.decode(errors="replace")
    if not others:
        return {}
    found = {}
    prefix = items_prefix(root)
    for kv in (await etcd.range(prefix, prefix_end(prefix), limit=KEYS_MAX)).entries:
        for place in _stores_of(kv.value):
            if place in others:
                found[place[1]] = others[place]
    return found


def _stores_of(value: bytes) -> Iterable[tuple[str, str]]:
    try:
        spec = pb.JournalSpec.FromString(value)
    except DecodeError:
        return []
    return [(spec.name, store) for store in spec.fragment.stores]


_QUOTA = "etcd_server_quota_backend_bytes"
_SIZE = "etcd_mvcc_db_total_size_in_bytes"
_IN_USE = "etcd_mvcc_db_total_size_in_use_in_bytes"


async def _quotas(place: Place, facts: Facts) -> None:
    if Source.ETCD in facts.missing:
        raise NotThereError("Etcd does not answer")
    etcd = place.etcd
    tls = Tls(etcd.trusted_ca_file, etcd.cert_file, etcd.cert_key_file)
    found: list[QuotaFacts] = []
    async with Place(address=etcd.address, tls=tls).http() as get:
        for member in facts.etcd.members:
            if member.error:
                continue
            try:
                samples = samples_of(await get(member.address, "/metrics", MEMBER_TIMEOUT_S))
            except (aiohttp.ClientError, TimeoutError, OSError):
                samples = {}
            size = samples.get(_SIZE, member.size_bytes)
            in_use = samples.get(_IN_USE, member.size_in_use_bytes)
            quota = samples.get(_QUOTA, member.quota_bytes)
            if quota is not None:
                found.append(
                    QuotaFacts(
                        address=member.address,
                        size_bytes=size,
                        in_use_bytes=size if in_use is None else in_use,
                        quota_bytes=quota,
                    )
                )
    if not found:
        raise NotThereError("no member of Etcd says its quota, and none shows its metrics")
    facts.quotas = found


# ---------------------------------------------------------------- certificates


async def _certificates(place: Place, facts: Facts) -> None:
    endpoints = {place.address, *(each.endpoint for each in facts.members)}
    endpoints |= {each.address for each in facts.etcd.members}
    endpoints |= {each.strip() for each in place.etcd.address.split(",")}
    served = sorted(each for each in endpoints if each and is_tls(each))

    async def look(read: Callable[[], CertificateFacts | None]) -> CertificateFacts | None:
        return await asyncio.to_thread(read)

    reads = [lambda each=each: _served_certificate(each) for each in served]
    reads += [lambda each=each: _stored_certificate(each) for each in place.cert_files if each]
    found = await for_each(reads, look, _CALLS)
    facts.certificates = [each for each in found if each is not None]


def _served_certificate(endpoint: str) -> CertificateFacts | None:
    """Return the certificate that a server shows, valid or not; None if it does not answer."""
    parts = urlsplit(endpoint)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is only looked at: nothing is sent
    try:
        with (
            socket.create_connection(
                (parts.hostname or "", parts.port or 443), MEMBER_TIMEOUT_S
            ) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname) as tls,
        ):
            der = tls.getpeercert(binary_form=True)
    except OSError:
        return None
    return None if der is None else _certificate_of(endpoint, end_of_certificate(der))


def _stored_certificate(path: str) -> CertificateFacts | None:
    return _certificate_of(path, certificate_end(path))


def _certificate_of(place: str, ends_at: float | None) -> CertificateFacts | None:
    return None if ends_at is None else CertificateFacts(place=place, ends_at=ends_at)


# ---------------------------------------------------------------- lifecycle rules


async def _lifecycle(_place: Place, facts: Facts) -> None:
    if Source.JOURNALS in facts.missing:
        raise NotThereError("the journals are not known")
    logs: dict[str, list[str]] = {}
    for journal in facts.journals:
        if journal.is_recovery_log:
            for store in journal.spec.fragment.stores:
                logs.setdefault(store, []).append(journal.spec.name)
    expiring: list[str] = []
    for store, names in logs.items():
        match urlsplit(store).scheme:
            case "file":
                continue
            case "s3":
                expiring += await asyncio.to_thread(_expiring, store, names)
            case _:
                raise NotThereError(
                    f"the rules of {without_query(store)} cannot be read by this command"
                )
    facts.expiring = expiring


def _expiring(url: str, names: Sequence[str]) -> list[str]:
    """Return the journals of a store whose fragments a rule of its bucket removes."""
    store: Any = open_store(url)
    try:
        found: list[str] = store.expiring(names)
    finally:
        store.close()
    return found


# ---------------------------------------------------------------- this machine


async def _machine(place: Place, facts: Facts) -> None:
    if not place.spool_dir:
        raise NotThereError(
            "no spool directory is named: give --broker.spool-dir on the machine of a broker"
        )
    facts.spools = await asyncio.to_thread(spools_of, Path(place.spool_dir), facts.now)


def spools_of(root: Path, now: float) -> SpoolFacts:
    """Return what is known of a spool directory.

    Args:
        root: the directory.
        now: Unix time in seconds.

    Raises:
        OSError: it cannot be read.
    """
    usage = shutil.disk_usage(root)
    damaged, superseded = [], []
    oldest_at, oldest = now, ""
    for number, path in enumerate(_files(root)):
        if number == SPOOL_FILES_MAX:
            break
        shown = str(path.relative_to(root))
        match path.suffix:
            case ".damaged":
                damaged.append(shown)
            case ".superseded":
                superseded.append(shown)
            case ".content":
                status = path.stat()
                if status.st_size and status.st_mtime < oldest_at:
                    oldest_at, oldest = status.st_mtime, shown
    return SpoolFacts(
        directory=str(root),
        free_bytes=usage.free,
        total_bytes=usage.total,
        filesystem=_filesystem_of(root),
        damaged=sorted(damaged),
        superseded=sorted(superseded),
        oldest_s=now - oldest_at if oldest else None,
        oldest=oldest,
    )


def _files(root: Path) -> Iterable[Path]:
    """Yield the files below a directory; those that are removed meanwhile are left out."""
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if path.is_file():
                yield path


def _filesystem_of(path: Path) -> str:
    """Return the type of a path's file system; empty where Linux does not say."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    place, found = path.resolve(), ("", "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if place.is_relative_to(point) and len(point) >= len(found[0]):
            found = point, kind
    return found[1]


_Gather = Callable[[Place, Facts], Awaitable[None]]

_FIRST: dict[Source, _Gather] = {
    Source.REPORT: _report,
    Source.MEMBERS: _members,
    Source.JOURNALS: _journals,
    Source.ETCD: _etcd,
    Source.MACHINE: _machine,
}
"""Sources that need no other one."""

_NEXT: dict[Source, _Gather] = {
    Source.SHARDS: _shards,
    Source.METRICS: _metrics,
    Source.QUOTA: _quotas,
    Source.CERTIFICATES: _certificates,
    Source.LIFECYCLE: _lifecycle,
}
"""Sources that need facts of others."""

assert {*_FIRST, *_NEXT} == set(Source), "each source is gathered"
