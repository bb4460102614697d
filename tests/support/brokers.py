"""Brokers for tests: real ones over a real Etcd, and the mirror of an Etcd that is not there.

``a_broker`` runs a whole broker. A ``HandBroker`` is one without allocator, whose assignments a
test writes by hand; its peers are other brokers of the test, or whatever stands for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.process import Broker, BrokerConfig
from gazette_sdk.broker.recovery.routes import LastRoutes
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import (
    Delete,
    KeyValue,
    Operation,
    Put,
    WatchBatch,
    WatchEvent,
)
from gazette_sdk.cluster.membership import EtcdConfig
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, ReadItem, ReplicateItem, Target
from support.etcd import EtcdFixture

ZONE = "local"
LIMIT_S = 20.0


# ------------------------------------------------------------------ messages


def journal_spec(name: str, **changes: Any) -> pb.JournalSpec:
    """A valid spec: replication 1, NONE, fragments of 1 MiB, no store."""
    labels = changes.pop("labels", {})
    fragment = {
        "length": 1 << 20,
        "compression_codec": pb.NONE,
        "stores": [],
        "refresh_interval_s": 300,
        "flush_interval_s": 0,
    }
    fragment.update({k: changes.pop(k) for k in list(changes) if k in fragment})
    spec = pb.JournalSpec(name=name, replication=1, labels=label_set(**labels))
    for key, value in changes.items():
        setattr(spec, key, value)
    spec.fragment.length = fragment["length"]
    spec.fragment.compression_codec = fragment["compression_codec"]
    spec.fragment.stores.extend(fragment["stores"])
    spec.fragment.refresh_interval.FromMilliseconds(round(fragment["refresh_interval_s"] * 1000))
    spec.fragment.flush_interval.FromMilliseconds(round(fragment["flush_interval_s"] * 1000))
    return spec


async def stream(opening: pb.AppendRequest, *items: AppendItem) -> AsyncIterator[AppendItem]:
    """An append's stream, as it is given; nothing commits by itself."""
    yield opening
    for item in items:
        yield item


COMMIT = pb.AppendRequest()


# ------------------------------------------------------------------ clients


class Client:
    """What tests do with journals, over any transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    async def apply(self, *specs: pb.JournalSpec, expect: int = 0) -> pb.ApplyResponse:
        changes = [
            pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=expect) for spec in specs
        ]
        return await self.transport.apply(pb.ApplyRequest(changes=changes))

    async def delete(self, *names: str) -> pb.ApplyResponse:
        changes = [pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1) for name in names]
        return await self.transport.apply(pb.ApplyRequest(changes=changes))

    async def append(self, journal: str, *chunks: bytes, **fields: Any) -> pb.AppendResponse:
        """One whole append."""
        opening = pb.AppendRequest(journal=journal, **fields)
        return await self.transport.append(stream(opening, *chunks, COMMIT))

    async def append_when_ready(
        self, journal: str, *chunks: bytes, **fields: Any
    ) -> pb.AppendResponse:
        """One append, once the journal has a primary."""
        transient = (pb.NO_JOURNAL_PRIMARY_BROKER, pb.INSUFFICIENT_JOURNAL_BROKERS)
        async with asyncio.timeout(LIMIT_S):
            revision = 0
            while True:
                fields["min_etcd_revision"] = revision
                response = await self.append(journal, *chunks, **fields)
                if response.status not in transient:
                    return response
                revision = response.header.etcd.revision + 1

    async def read(self, journal: str, offset: int = 0, **fields: Any) -> bytes:
        """All content from an offset to where the read ends."""
        return b"".join(
            [
                item
                for item in await self.read_items(journal, offset, **fields)
                if isinstance(item, bytes)
            ]
        )

    async def read_items(self, journal: str, offset: int = 0, **fields: Any) -> list[ReadItem]:
        request = pb.ReadRequest(journal=journal, offset=offset, **fields)
        async with asyncio.timeout(LIMIT_S):
            return [item async for item in self.transport.read(request)]

    async def fragments(self, journal: str) -> list[pb.Fragment]:
        response = await self.transport.list_fragments(pb.FragmentsRequest(journal=journal))
        return [entry.spec for entry in response.fragments]

    async def fragments_when(
        self, journal: str, holds: Any, *, limit_s: float = LIMIT_S
    ) -> list[pb.Fragment]:
        """Its fragments, as soon as ``holds`` is true of them."""
        async with asyncio.timeout(limit_s):
            while not holds(found := await self.fragments(journal)):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
            return found

    async def append_until(
        self, journal: str, content: bytes, status: int, *, limit_s: float = 5.0
    ) -> list[pb.AppendResponse]:
        """Append again and again until the answer is ``status``. Returns all answers."""
        responses = [await self.append(journal, content)]
        async with asyncio.timeout(limit_s):
            while responses[-1].status != status:
                await asyncio.sleep(0.1)
                responses.append(await self.append(journal, content))
        return responses

    async def spec(self, journal: str) -> pb.JournalSpec:
        selector = pb.LabelSelector(include=label_set(name=journal))
        async for response in self.transport.list(pb.ListRequest(selector=selector)):
            return response.journals[0].spec
        raise AssertionError


# ------------------------------------------------------------------ brokers


def config_for(etcd: EtcdFixture, directory: Path, suffix: str = "broker-1") -> BrokerConfig:
    """A configuration with all files below ``directory``."""
    (directory / "fragments").mkdir(exist_ok=True)
    return BrokerConfig(
        suffix=suffix,
        zone=ZONE,
        endpoint=f"http://{suffix}.test:8080",
        spool_dir=directory / f"spools-{suffix}",
        etcd=EtcdConfig(endpoint=etcd.address, lease_ttl_s=5),
        file_root=directory / "fragments",
        watch_delay_s=0.005,
    )


@contextlib.asynccontextmanager
async def a_broker(
    etcd: EtcdFixture, directory: Path, suffix: str = "broker-1", **changes: Any
) -> AsyncIterator[tuple[Broker, Client]]:
    """A whole broker, and a client of it."""
    broker = Broker(replace(config_for(etcd, directory, suffix), **changes))
    try:
        await broker.start()
        yield broker, Client(InProcessTransport(broker.service))
    finally:
        await broker.stop()


async def crash(broker: Broker) -> None:
    """Let go of a broker as its process' end would: nothing is rolled, uploaded or revoked."""
    for task in broker._member.tasks.values():
        task.cancel()
    for replica in broker.resolver.replicas:
        for task in list(replica._tasks):
            task.cancel()
    await broker.persister.aclose()
    assert broker._membership is not None
    assert broker._etcd is not None
    assert broker._spools is not None
    broker._membership._renewal.cancel()  # type: ignore[union-attr]
    # What Etcd does when the lease runs out, without the wait.
    await broker._etcd.revoke(broker._membership.lease)
    await broker._close()
    broker.ended.cancel()


class Peers(Transport):
    """Carries calls between brokers of one process, by member id."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, str], Transport] = {}

    def add(self, suffix: str, transport: Transport, zone: str = ZONE) -> None:
        self.of[zone, suffix] = transport

    def _at(self, target: Target) -> Transport:
        assert target.route is not None
        member = target.member
        if member is None:
            member = next(m for m in target.route.members if (m.zone, m.suffix) in self.of)
        return self.of[member.zone, member.suffix]

    def list(self, request: pb.ListRequest) -> AsyncIterator[pb.ListResponse]:
        raise AssertionError("List is never proxied")

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        raise AssertionError("Apply is never proxied")

    def read(self, request: pb.ReadRequest, target: Target = ANYWHERE) -> AsyncIterator[ReadItem]:
        return self._at(target).read(request, target)

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        return await self._at(target).append(requests, target)

    def replicate(
        self, requests: AsyncIterator[ReplicateItem], target: Target
    ) -> AsyncIterator[pb.ReplicateResponse]:
        return self._at(target).replicate(requests, target)

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        return await self._at(target).list_fragments(request, target)

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, target: Target = ANYWHERE
    ) -> pb.FragmentStoreHealthResponse:
        raise AssertionError("FragmentStoreHealth is never proxied")

    async def aclose(self) -> None:
        pass


class HandBroker(Broker):
    """A broker without allocator: the test assigns journals by hand."""

    async def _allocate(self) -> None:
        await asyncio.Event().wait()

    @property
    def lease(self) -> int:
        assert self._membership is not None
        return self._membership.lease


def without_waiting(monkeypatch: Any) -> None:
    """Let brokers go on with journals of absent ones, as other implementations do."""
    monkeypatch.setattr(LastRoutes, "absent_brokers", lambda *_: ())


class HandCluster:
    """Brokers without allocator, members that are only keys, and one Etcd."""

    def __init__(
        self, etcd: EtcdFixture, directory: Path, *, answer_timeout_s: float | None = None
    ) -> None:
        self.etcd_fixture = etcd
        self.directory = directory
        self.answer_timeout_s = answer_timeout_s
        self.peers = Peers()
        self.brokers: dict[str, HandBroker] = {}
        self.etcd: Etcd

    async def __aenter__(self) -> Self:
        self.etcd = await Etcd.connect(self.etcd_fixture.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        for broker in self.brokers.values():
            await broker.stop()
        await self.etcd.aclose()

    async def start(self, suffix: str = "broker-1", **changes: Any) -> Client:
        """Start a broker, and give a client of it."""
        changes = {"answer_timeout_s": self.answer_timeout_s, **changes}
        config = replace(config_for(self.etcd_fixture, self.directory, suffix), **changes)
        broker = HandBroker(config, self.peers)
        self.brokers[suffix] = broker
        await broker.start()
        transport = InProcessTransport(broker.service)
        self.peers.add(suffix, transport)
        return Client(transport)

    async def member(self, suffix: str, transport: Transport | None = None) -> None:
        """A member which is only a key, with whatever answers for it."""
        spec = pb.BrokerSpec(journal_limit=10)
        spec.process_spec.id.zone, spec.process_spec.id.suffix = ZONE, suffix
        spec.process_spec.endpoint = f"http://{suffix}.test:8080"
        await self.etcd.put(self._keyspace.member_key(ZONE, suffix), spec.SerializeToString())
        if transport is not None:
            self.peers.add(suffix, transport)

    async def assign(self, journal: str, *suffixes: str | None) -> int:
        """Make exactly these the journal's members, by slot; ``None`` leaves a slot empty.

        They change all at once: a member between two slots would have to let its replica go.
        """
        keyspace = self._keyspace
        wanted = {
            keyspace.assignment_key(journal, ZONE, suffix, slot): self._lease(suffix)
            for slot, suffix in enumerate(suffixes)
            if suffix is not None
        }
        prefix = f"{keyspace.root}/assign/{journal}#".encode()
        there = {kv.key for kv in (await self.etcd.range(prefix, prefix[:-1] + b"$")).entries}
        changes: list[Operation] = [Delete(key) for key in sorted(there - set(wanted))]
        changes += [Put(key, b"", lease) for key, lease in wanted.items() if key not in there]
        if not changes:
            return 0
        revision = (await self.etcd.txn([], changes)).revision
        for broker in self.brokers.values():
            await broker.keyspace.wait_for_revision(revision)
        return revision

    def _lease(self, suffix: str) -> int:
        return self.brokers[suffix].lease if suffix in self.brokers else 0

    @property
    def _keyspace(self) -> BrokerKeySpace:
        return next(iter(self.brokers.values())).keyspace


# ------------------------------------------------------------------ a mirror by hand


class Mirror:
    """A key space which a test fills, as if Etcd had sent it."""

    def __init__(self) -> None:
        self.keyspace = BrokerKeySpace()
        self.revision = 10
        self._versions: dict[bytes, tuple[int, int]] = {}  # create revision, version

    def put(self, values: Mapping[bytes, bytes], delete: Iterable[bytes] = ()) -> int:
        """One revision that deletes, and then writes. Returns it."""
        self.batch([(key, None) for key in delete] + list(values.items()))
        return self.revision

    def batch(self, events: Iterable[tuple[bytes, bytes | None]]) -> None:
        """One batch of changes, each in a revision of its own."""
        made = []
        for key, value in events:
            self.revision += 1
            if value is None:
                self._versions.pop(key, None)
                kv = KeyValue(key, b"", 0, self.revision, 0, 0)
                made.append(WatchEvent(is_delete=True, kv=kv))
                continue
            created, version = self._versions.get(key, (self.revision, 0))
            self._versions[key] = created, version + 1
            kv = KeyValue(key, value, created, self.revision, version + 1, 0)
            made.append(WatchEvent(is_delete=False, kv=kv))
        header = pb.Header.Etcd(cluster_id=12, member_id=34, revision=self.revision, raft_term=78)
        self.keyspace.apply([WatchBatch(header, tuple(made))])

    def item(self, spec: pb.JournalSpec) -> tuple[bytes, bytes]:
        return self.keyspace.item_key(spec.name), spec.SerializeToString()

    def member(
        self, suffix: str, zone: str = ZONE, limit: int = 10, *, exiting: bool = False
    ) -> tuple[bytes, bytes]:
        spec = pb.BrokerSpec(journal_limit=limit, exiting=exiting)
        spec.process_spec.id.zone, spec.process_spec.id.suffix = zone, suffix
        spec.process_spec.endpoint = f"http://{zone}-{suffix}.test"
        return self.keyspace.member_key(zone, suffix), spec.SerializeToString()

    def assignment(
        self, journal: str, suffix: str, slot: int, route: pb.Route | None = None, zone: str = ZONE
    ) -> tuple[bytes, bytes]:
        value = b"" if route is None else route.SerializeToString()
        return self.keyspace.assignment_key(journal, zone, suffix, slot), value
