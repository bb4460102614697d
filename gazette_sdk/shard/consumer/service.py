"""The shard service: Stat, List, Apply, GetHints and Unassign (shard sections 2 and 11).

The same object serves gRPC and the JSON gateway. Requests and responses are the protocol's
messages; a call that fails raises a :class:`~gazette_sdk.errors.GazetteError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace, ShardAssignment, ShardEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put
from gazette_sdk.cluster.items import ItemChange, apply_items
from gazette_sdk.errors import EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.labels import Matcher
from gazette_sdk.protocol.rules import SHARD_RPCS, complete, unrouted_header
from gazette_sdk.protocol.shard_spec import (
    matches_shard,
    primary_hint_key,
    recovery_log,
    reduce_status,
    source_journals,
    validate_shard_rpc,
)
from gazette_sdk.server.authorization import Authorization
from gazette_sdk.server.call import Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.json_gateway import JsonUnary
from gazette_sdk.shard.consumer.authorize import (
    Templates,
    admit_change,
    admit_id,
    admit_upsert,
    is_unchanged,
    no_templates,
)
from gazette_sdk.shard.consumer.hints_keys import load_hints
from gazette_sdk.shard.consumer.resolver import Resolver, ServedShard, primary_of
from gazette_sdk.shard.recovery import hints as fsm_hints
from gazette_sdk.transport.wire import Peer

__all__ = ["ShardPeers", "ShardService", "json_methods", "shard_methods"]

SLICE_SHARDS = 25
"""Number of shards that are listed before other tasks of the event loop run."""


class ShardPeers(Protocol):
    """Other processes of the application, to which Stat is forwarded."""

    async def stat(self, request: cpb.StatRequest, peer: Peer) -> cpb.StatResponse:
        """Ask a process, with a token that this process signs."""


class ShardService:
    """The calls of a consumer process.

    Args:
        resolver: resolves shards.
        keyspace: mirror of Etcd.
        etcd: takes changes, and has the hints.
        local_id: this process.
        peers: other processes.
        authorization: verifies callers.
        templates: returns the shards that the application gives to journals, which callers with
            a selector may create.
    """

    def __init__(
        self,
        *,
        resolver: Resolver[Any],
        keyspace: ConsumerKeySpace,
        etcd: Etcd,
        local_id: pb.ProcessSpec.ID,
        peers: ShardPeers,
        authorization: Authorization,
        templates: Templates = no_templates,
    ) -> None:
        self._resolver = resolver
        self._keyspace = keyspace
        self._etcd = etcd
        self._local_id = local_id
        self._peers = peers
        self._authorization = authorization
        self._templates = templates

    # ---------------------------------------------------------------- Stat

    async def stat(self, request: cpb.StatRequest, call: Call) -> cpb.StatResponse:
        """Offsets that a shard has read through, once it has read through those of the request."""
        claims = self._authorization.verify(call, Capability.READ)
        async with (
            self._authorization.bound(claims, call),
            self._resolver.resolve(
                request.shard,
                claims,
                may_proxy=not request.HasField("header"),
                proxy_header=request.header if request.HasField("header") else None,
                read_through=request.read_through,
            ) as resolution,
        ):
            if resolution.status == cpb.OK and resolution.shard is None:
                return await self._forward(request, resolution.header)
            response = cpb.StatResponse(status=resolution.status, header=resolution.header)
            shard: ServedShard | None = resolution.shard
            if shard is not None:
                response.read_through.update(shard.read_through)
                response.publish_at.update(shard.publish_at)
            return complete(response)

    async def _forward(self, request: cpb.StatRequest, header: pb.Header) -> cpb.StatResponse:
        """Ask the primary, which must not forward the request again."""
        forwarded = cpb.StatRequest()
        forwarded.CopyFrom(request)
        forwarded.header.CopyFrom(header)
        return await self._peers.stat(forwarded, primary_of(request.shard, header))

    # --------------------------------------------------------- List, Apply

    async def list(self, request: cpb.ListRequest, call: Call) -> cpb.ListResponse:
        """All shards that match the request and the caller's claims, with their statuses."""
        claims = self._authorization.verify(call, Capability.LIST)
        validate_shard_rpc(request)
        wanted, allowed = Matcher(request.selector), Matcher(claims.selector)
        response = cpb.ListResponse(header=self._header())
        complete(response)
        # One entry of the mirror is never changed, but those of a shard may be of a later revision.
        for number, item in enumerate(self._keyspace.items(), start=1):
            if matches_shard(wanted, item.value) and matches_shard(allowed, item.value):
                response.shards.append(complete(self._listed(item)))
            if number % SLICE_SHARDS == 0:
                await asyncio.sleep(0)
        return response

    def _listed(self, item: ShardEntry) -> cpb.ListResponse.Shard:
        # A process that has two assignments for a moment is one member of the route.
        statuses: dict[tuple[str, str], list[cpb.ReplicaStatus]] = {}
        for entry in self._keyspace.assignments(item.id):
            statuses.setdefault((entry.zone, entry.suffix), []).append(entry.value)
        return cpb.ListResponse.Shard(
            spec=item.value,
            mod_revision=item.mod_revision,
            create_revision=item.create_revision,
            route=self._keyspace.shard_route(item.id),
            status=[reduce_status(held) for held in statuses.values()],
        )

    async def apply(self, request: cpb.ApplyRequest, call: Call) -> cpb.ApplyResponse:
        """Create, change and delete shards, and store their primary hints, in one transaction."""
        claims = self._authorization.verify(call, Capability.APPLY)
        validate_shard_rpc(request)
        for change in request.changes:
            if change.HasField("primary_hints"):  # else the next recovery would fail
                fsm_hints.validate(change.primary_hints, recovery_log(change.upsert))
        async with self._authorization.bound(claims, call):
            compares = await self._admit(claims, request.changes)
            applied = await apply_items(
                self._etcd,
                self._keyspace,
                [
                    ItemChange(
                        change.delete or change.upsert.id,
                        change.expect_mod_revision,
                        None if change.delete else complete(change.upsert).SerializeToString(),
                    )
                    for change in request.changes
                ],
                compares=compares,
                puts=[
                    Put(
                        primary_hint_key(change.upsert).encode(),
                        fsm_hints.to_json(change.primary_hints),
                    )
                    for change in request.changes
                    if change.HasField("primary_hints")
                ],
            )
        response = cpb.ApplyResponse(header=self._header())
        if not applied.succeeded:
            response.status = cpb.ETCD_TRANSACTION_FAILED
        response.header.etcd.revision = applied.revision
        return complete(response)

    async def _admit(
        self, claims: Claims, changes: Sequence[cpb.ApplyRequest.Change]
    ) -> Sequence[Compare]:
        """Check that the caller's claims allow changes.

        Returns:
            the conditions that shards are still those that were checked.

        Raises:
            UnauthenticatedError: they do not allow it.
            GazetteError: the application's sources cannot be listed.
        """
        if claims.allows_every_journal:
            return []
        compares = []
        for change in changes:
            item = self._keyspace.item(change.delete or change.upsert.id)
            admit_change(claims, change, None if item is None else item.value)
            compares.append(
                Compare.mod_revision(
                    self._keyspace.item_key(change.delete or change.upsert.id),
                    0 if item is None else item.mod_revision,
                )
            )
        upserts = [change.upsert for change in changes if not change.delete]
        moved = [spec for spec in upserts if not is_unchanged(spec, self._spec(spec.id))]
        if moved:
            journals = {journal for spec in moved for journal in source_journals(spec)}
            templates = await self._templates(journals)
            for spec in moved:
                others = (item.value for item in self._keyspace.items() if item.id != spec.id)
                admit_upsert(spec, self._spec(spec.id), templates, others)
        return compares

    def _spec(self, shard: str) -> cpb.ShardSpec | None:
        item = self._keyspace.item(shard)
        return None if item is None else item.value

    # ------------------------------------------------------------ GetHints

    async def get_hints(self, request: cpb.GetHintsRequest, call: Call) -> cpb.GetHintsResponse:
        """The hints of a shard, all of them checked."""
        claims = self._authorization.verify(call, Capability.READ)
        response = cpb.GetHintsResponse(header=self._header())
        item = self._keyspace.item(request.shard)
        if item is None or not matches_shard(Matcher(claims.selector), item.value):
            response.status = cpb.SHARD_NOT_FOUND
            return complete(response)
        async with self._authorization.bound(claims, call):
            stored = await load_hints(self._etcd, item.value)
        response.primary_hints.SetInParent()
        if stored.primary is not None:
            response.primary_hints.hints.CopyFrom(stored.primary)
        for hints in stored.backups:
            backup = response.backup_hints.add()
            if hints is not None:
                backup.hints.CopyFrom(hints)
        return complete(response)

    # ------------------------------------------------------------ Unassign

    async def unassign(self, request: cpb.UnassignRequest, call: Call) -> cpb.UnassignResponse:
        """Remove failed assignments, and those of primaries; the allocator then assigns anew."""
        claims = self._authorization.verify(call, Capability.APPLY)
        validate_shard_rpc(request)
        response = cpb.UnassignResponse()
        removed: Sequence[ShardAssignment] = ()
        for shard in dict.fromkeys(request.shards):
            if not claims.allows_every_journal:
                admit_id(claims, shard, self._spec(shard))
            found = [
                entry
                for entry in self._keyspace.assignments(shard)
                if entry.value.code == cpb.ReplicaStatus.FAILED
                or (entry.slot == 0 and not request.only_failed)
            ]
            if found:
                response.shards.append(shard)
                removed = [*removed, *found]
        if not removed or request.dry_run:
            return response
        async with self._authorization.bound(claims, call):
            if not await self._remove(removed):
                return cpb.UnassignResponse(status=cpb.ETCD_TRANSACTION_FAILED)
        return response

    async def _remove(self, assignments: Sequence[ShardAssignment]) -> bool:
        """Remove assignments, all or none; return False if one of them has changed."""
        try:
            result = await self._etcd.txn(
                [Compare.mod_revision(entry.key, entry.mod_revision) for entry in assignments],
                [Delete(entry.key) for entry in assignments],
            )
        except EtcdError as error:
            if "too many operations" not in str(error):
                raise
            raise EtcdError(
                f"{error}: the request removes {len(assignments)} assignments, and Etcd takes 128"
                " in one transaction unless configured otherwise; name fewer shards in a request"
            ) from error
        if result.succeeded:
            await self._keyspace.wait_for_revision(result.revision)
        return result.succeeded

    def _header(self) -> pb.Header:
        """Return the header of answers without a route."""
        known = self._keyspace.member(self._local_id.zone, self._local_id.suffix) is not None
        return unrouted_header(self._local_id if known else None, self._keyspace.header)


# ---------------------------------------------------------------- on the wires


def shard_methods(service: ShardService) -> Iterator[Method]:
    """Return the methods to register with a :class:`~gazette_sdk.server.grpc_server.GrpcServer`."""
    serves: dict[str, Callable[[Any, Call], Any]] = {
        "Stat": service.stat,
        "List": service.list,
        "Apply": service.apply,
        "GetHints": service.get_hints,
        "Unassign": service.unassign,
    }
    for rpc in SHARD_RPCS:
        yield Method(rpc, serves[rpc.name], encode=_encode)


def json_methods(service: ShardService) -> Mapping[str, JsonUnary]:
    """Return ``/v1/shards/list`` and ``/v1/shards/stat``, for a ``JsonGateway``."""
    return {
        "/v1/shards/list": JsonUnary(Capability.LIST, cpb.ListRequest, service.list),
        "/v1/shards/stat": JsonUnary(Capability.READ, cpb.StatRequest, service.stat),
    }


def _encode(message: Message) -> bytes:
    return complete(message).SerializeToString()
