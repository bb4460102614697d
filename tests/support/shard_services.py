"""Consumer processes without shards' transactions: the shard service over scripted shards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import KeyValue, WatchBatch, WatchEvent
from gazette_sdk.cluster.items import assignment_key, item_key, member_key
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import AllowAll, Authority, authority_for
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.rules import complete
from gazette_sdk.server.authorization import Authorization
from gazette_sdk.server.json_gateway import JsonGateway
from gazette_sdk.server.process import Server
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.pages import ShardPages, json_page_methods, page_methods
from gazette_sdk.shard.consumer.resolver import ShardResolver
from gazette_sdk.shard.consumer.service import ShardService, json_methods, shard_methods
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.member_calls import MemberCalls
from support.memory_transport import MemoryTransport

ROOT = "/gazette/consumers/app"


def shard_spec(shard: str, *, labels: Mapping[str, str] | None = None, **fields: Any):
    """A spec with a recovery log and two backups of hints, of one source named as the shard."""
    values = {
        "recovery_log_prefix": "recovery/logs",
        "hint_prefix": "/hints",
        "hint_backups": 2,
        "sources": [cpb.ShardSpec.Source(journal=f"source/{shard}")],
        "max_txn_duration": {"seconds": 1},
        **fields,
    }
    return cpb.ShardSpec(id=shard, labels=label_set((labels or {}).items()), **values)


def process_id(suffix: str) -> pb.ProcessSpec.ID:
    return pb.ProcessSpec.ID(zone="zone", suffix=suffix)


def consumer_spec(suffix: str, endpoint: str = "http://host:1234") -> cpb.ConsumerSpec:
    return cpb.ConsumerSpec(
        process_spec=pb.ProcessSpec(id=process_id(suffix), endpoint=endpoint), shard_limit=10
    )


class ScriptedShard:
    """Shard whose store and offsets are as the test says."""

    def __init__(self, shard: str, create_revision: int) -> None:
        self.shard = shard
        self.create_revision = create_revision
        self.assigned_at = 0
        self.is_primary = False
        self.uses = 0
        self.is_ready = False
        self.has_ended = False
        self.is_shut_down = False
        self.read_through: dict[str, int] = {}
        self.publish_at: dict[str, int] = {}
        self.write_heads: dict[str, int] | None = None
        self.watermark_us = 0
        self.recovery = (0, 0)
        self._changed = asyncio.Condition()

    def continues(self, item: Any, assignment: Any, *, is_primary: bool) -> bool:
        if item.create_revision != self.create_revision:
            return False
        promoted = is_primary and not self.is_primary
        return assignment.create_revision == self.assigned_at or promoted

    def update(self, item: Any, assignments: Any, *, is_primary: bool) -> None:
        self.is_primary = is_primary
        self.assigned_at = max(entry.create_revision for entry in assignments)

    def start(self) -> None:
        pass

    def stopping(self) -> None:
        self.has_ended = True

    async def shut_down(self) -> None:
        async with self._changed:
            self.has_ended = True
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.uses == 0)
        self.is_shut_down = True

    async def change(self, **values: Any) -> None:
        async with self._changed:
            for name, value in values.items():
                setattr(self, name, value)
            self._changed.notify_all()

    async def wait_for_store(self) -> bool:
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_ready or self.has_ended)
        return self.is_ready

    async def wait_for_offsets(self, read_through: Mapping[str, int]) -> bool:
        def has_reached() -> bool:
            known = self.read_through
            return all(known[name] >= read_through[name] for name in known.keys() & read_through)

        async with self._changed:
            await self._changed.wait_for(lambda: has_reached() or self.has_ended)
        return has_reached()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self.uses += 1
        try:
            yield
        finally:
            self.uses -= 1
            if self.has_ended:
                asyncio.get_running_loop().create_task(self.change())


def scripted_resolver(
    keyspace: ConsumerKeySpace, suffix: str
) -> tuple[ShardResolver[ScriptedShard], list[ScriptedShard]]:
    """A resolver, and all shards that it made."""
    made: list[ScriptedShard] = []

    def make(item: Any, _: ScriptedShard | None) -> ScriptedShard:
        made.append(ScriptedShard(item.id, item.create_revision))
        return made[-1]

    resolver: ShardResolver[ScriptedShard] = ShardResolver(
        keyspace, process_id(suffix), make=make, shut_down=lambda _, shard: shard.shut_down()
    )
    return resolver, made


class Mirror:
    """Mirror that the test changes, without Etcd."""

    def __init__(self) -> None:
        self.keyspace = ConsumerKeySpace(ROOT)
        self.keyspace.header = pb.Header.Etcd(cluster_id=9, member_id=8, revision=0, raft_term=7)
        self.revision = 0
        self._created: dict[str, int] = {}

    def change(self, *changes: tuple[str, bytes | None]) -> None:
        """One batch, at one revision: keys below the root, and values; None deletes."""
        self.revision += 1
        events = []
        for key, value in changes:
            created = self._created.pop(key, self.revision)
            if value is not None:
                self._created[key] = created
            version = 1 if created == self.revision else 2
            kv = KeyValue(
                f"{ROOT}/{key}".encode(), value or b"", created, self.revision, version, 0
            )
            events.append(WatchEvent(value is None, kv))
        header = pb.Header.Etcd(cluster_id=9, member_id=8, revision=self.revision, raft_term=7)
        self.keyspace.apply([WatchBatch(header, tuple(events))])


@dataclass
class ServedShards:
    """A consumer process with its port.

    Attributes:
        client: asks it over gRPC.
        shards: the shards that it made.
    """

    suffix: str
    server: Server
    etcd: Etcd
    keyspace: ConsumerKeySpace
    resolver: ShardResolver[ScriptedShard]
    service: ShardService
    pages: ShardPages
    client: ShardClient
    shards: list[ScriptedShard] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    async def settle(self) -> None:
        """Wait until the mirror has what Etcd has now."""
        await self.keyspace.wait_for_revision((await self.etcd.range(b"x")).header.revision)


@contextlib.asynccontextmanager
async def served_shards(
    connect: Callable[[], Any],
    suffix: str,
    *,
    auth_keys: str = "",
    transport: Transport | None = None,
) -> AsyncIterator[ServedShards]:
    """A consumer process, announced in Etcd without a lease."""
    authority: Authority | AllowAll = authority_for(auth_keys or None)
    server = Server(host="127.0.0.1")
    endpoint = server.bind()
    signer = authority if isinstance(authority, Authority) else None
    async with (
        connect() as etcd,
        ShardClient(endpoint, authorizer=signer) as client,
        ShardClient(endpoint, authorizer=signer) as peers,
    ):
        value = consumer_spec(suffix, endpoint).SerializeToString()
        await etcd.put(member_key(ROOT, "zone", suffix), value)
        keyspace = ConsumerKeySpace(ROOT)
        members = MemberCalls(keyspace, process_id(suffix), endpoint=endpoint)
        resolver, shards = scripted_resolver(keyspace, suffix)
        await keyspace.load(etcd)
        watching = asyncio.create_task(keyspace.watch(etcd, delay_s=0.001))
        service = ShardService(
            resolver=resolver,
            keyspace=keyspace,
            etcd=etcd,
            local_id=process_id(suffix),
            peers=peers,
            authorization=Authorization(authority),
            templates=_templates,
            application="app",
        )
        pages = ShardPages(
            resolver=resolver,
            keyspace=keyspace,
            transport=transport or MemoryTransport(),
            members=members,
            authorization=Authorization(authority),
            application="app",
        )
        server.grpc.add((*shard_methods(service), *page_methods(pages)))
        methods = {**json_methods(service), **json_page_methods(pages)}
        server.http.mount(
            "/v1/", JsonGateway(methods, authority=authority, note_refusal=service.note_refusal)
        )
        await server.start()
        try:
            yield ServedShards(
                suffix, server, etcd, keyspace, resolver, service, pages, client, shards
            )
        finally:
            await server.stop(grace_s=0.5)
            await members.aclose()
            watching.cancel()
            await asyncio.wait([watching])


async def _templates(journals: Collection[str]) -> Sequence[cpb.ShardSpec]:
    """The shards of an application whose sources are below ``source/``."""
    sources = (journal for journal in journals if journal.startswith("source/"))
    return [shard_spec(journal.removeprefix("source/")) for journal in sources]


async def put_shard(etcd: Etcd, spec: cpb.ShardSpec) -> int:
    """Store a spec; return its revision."""
    return await etcd.put(item_key(ROOT, spec.id), complete(spec).SerializeToString())


async def assign(
    etcd: Etcd, shard: str, suffix: str, slot: int, *, code: int = 0, errors: tuple[str, ...] = ()
) -> int:
    """Store an assignment with a status; return its revision."""
    value = cpb.ReplicaStatus(code=code, errors=errors).SerializeToString()
    return await etcd.put(assignment_key(ROOT, shard, "zone", suffix, slot), value)
