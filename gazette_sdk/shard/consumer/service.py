"""The shard service: Stat, List, Apply, GetHints and Unassign (shard sections 2 and 11).

The same object serves gRPC and the JSON gateway. Requests and responses are the protocol's
messages; a call that fails raises a :class:`~gazette_sdk.errors.GazetteError`.

Changes of shards are admitted by their caller's claims. A caller with a selector changes the shards
that it matches, and nothing else by them. The id and the prefixes of a shard name its recovery log
and the Etcd keys of its hints, and ids have slashes: a free choice would lead to the log of any
shard, and to any key. Its sources are read with the rights of the process. So they are those that
the shard has, or those that the application gives it.

gRPC methods of an application are calls of a shard's state, here or at its primary. A forwarded
request has the resolution's header in its metadata, as over HTTP, and in its field ``header`` where
it has one of that type: consumers of other implementations look there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf import json_format
from google.protobuf.message import Message

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace, ShardAssignment, ShardEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put
from gazette_sdk.cluster.items import AppliedItems, ItemChange, apply_items
from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    EtcdError,
    GazetteError,
    MappingError,
    ShardStatusError,
    UnauthenticatedError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.labels import Matcher, label_set, matches
from gazette_sdk.protocol.rules import SHARD_RPCS, Rpc, complete, unrouted_header
from gazette_sdk.protocol.shard_spec import (
    ID,
    hint_keys,
    matches_shard,
    primary_hint_key,
    recovery_log,
    reduce_status,
    source_journals,
    validate_shard_rpc,
)
from gazette_sdk.server import grpc_server
from gazette_sdk.server.authorization import AuditEvent, AuditLog, Authorization, Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.json_gateway import JsonUnary
from gazette_sdk.shard.application.application import Method as EndpointMethod
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.endpoints import EndpointCalls, forwarded_claims, status_of
from gazette_sdk.shard.consumer.resolver import ServedShard, ShardResolver, primary_of
from gazette_sdk.shard.consumer.state import STATE
from gazette_sdk.shard.recovery import hints as fsm_hints
from gazette_sdk.shard.recovery.hints import load_hints
from gazette_sdk.transport.wire import Peer

NAMES_MAX = 3
"""Greatest number of shards of one change that a record of the audit log names."""

Templates = Callable[[Collection[str]], Awaitable[Sequence[cpb.ShardSpec]]]
"""Function that returns the shards which the application gives to journals."""


async def no_templates(_: Collection[str]) -> Sequence[cpb.ShardSpec]:
    """Return nothing: templates of an application without sources."""
    return []


def admit_id(claims: Claims, shard: str, known: cpb.ShardSpec | None) -> None:
    """Check that claims allow to delete or unassign a shard: by its id, and by what it is.

    Args:
        claims: the caller's, with a selector.
        shard: id of the shard.
        known: its spec, if it exists.

    Raises:
        UnauthenticatedError: they do not.
    """
    if not matches(claims.selector, label_set(((ID, shard),))) or (
        known is not None and not matches_shard(Matcher(claims.selector), known)
    ):
        raise _not_authorized(shard)


def admit_change(
    claims: Claims, change: cpb.ApplyRequest.Change, known: cpb.ShardSpec | None
) -> None:
    """Check that claims allow to change a shard, by its id and labels.

    An upsert must match by the new labels, and the shard that exists by its own: else a caller
    could put its label on any shard. Hints must not name logs of other shards: a recovery would
    play them.

    Args:
        claims: the caller's, with a selector.
        change: the change.
        known: current spec of the shard, if it exists.

    Raises:
        UnauthenticatedError: they do not.
    """
    if change.delete:
        admit_id(claims, change.delete, known)
        return
    matcher, shard = Matcher(claims.selector), change.upsert.id
    if not matches_shard(matcher, change.upsert) or (
        known is not None and not matches_shard(matcher, known)
    ):
        raise _not_authorized(shard)
    nodes = change.primary_hints.live_nodes
    if other := next((part.log for node in nodes for part in node.segments if part.log), ""):
        raise _beyond(shard, "hints of the log", other)


def is_unchanged(upsert: cpb.ShardSpec, known: cpb.ShardSpec | None) -> bool:
    """Return True if an upsert leaves the log and hints of a shard, and adds no source."""
    return known is not None and _first_beyond(upsert, [known]) is None


def admit_upsert(
    upsert: cpb.ShardSpec,
    known: cpb.ShardSpec | None,
    templates: Sequence[cpb.ShardSpec],
    others: Iterable[cpb.ShardSpec],
) -> None:
    """Check that log, hints and sources are those of the shard, or the application's for its id.

    Args:
        upsert: the new spec.
        known: current spec of the shard, if it exists.
        templates: shards that the application gives to the journals of the upsert.
        others: all other shards. None of their logs, hints and sources is given away, but for
            sources that the application gives to several shards.

    Raises:
        UnauthenticatedError: they are not.
    """
    own = [spec for spec in templates if spec.id == upsert.id]
    readers = Counter(journal for spec in templates for journal in _sources(spec))
    if known is not None:
        own.append(known)
    if beyond := _first_beyond(upsert, own):
        raise _beyond(upsert.id, *beyond)
    journals = _sources(upsert) - (set() if known is None else _sources(known))
    journals -= {journal for journal, count in readers.items() if count > 1}
    log, hints = recovery_log(upsert), primary_hint_key(upsert)
    for other in others:
        if log and log == recovery_log(other):
            raise _beyond(upsert.id, f"the log of {other.id},", log)
        if log and hints == primary_hint_key(other):
            raise _beyond(upsert.id, f"the hints of {other.id},", hints)
        if shared := journals & _sources(other):
            raise _beyond(upsert.id, f"the source of {other.id},", min(shared))


def _first_beyond(upsert: cpb.ShardSpec, own: Collection[cpb.ShardSpec]) -> tuple[str, str] | None:
    """Return the first field of an upsert, and its value, that none of a shard's specs has."""
    if not own:
        return "the new sources", ", ".join(sorted(_sources(upsert)))
    for name in ("recovery_log_prefix", "hint_prefix"):
        if getattr(upsert, name) not in {getattr(spec, name) for spec in own}:
            return name, getattr(upsert, name)
    if upsert.hint_backups > max(spec.hint_backups for spec in own):
        return "hint_backups", str(upsert.hint_backups)
    journals = _sources(upsert).difference(*map(_sources, own))
    return ("the source", min(journals)) if journals else None


def _sources(spec: cpb.ShardSpec) -> set[str]:
    return set(source_journals(spec))


def _not_authorized(shard: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        f"not authorized to {shard}; use a token whose selector matches the shard's id and labels,"
        " before and after the change"
    )


def _beyond(shard: str, name: str, value: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        f"a token with a selector does not allow {name} {value!r} for {shard}: log, hints and"
        " sources are those that the shard has, or that the application gives it for one of its"
        " sources; use a token without a selector"
    )


async def apply_shards(
    etcd: Etcd,
    keyspace: ConsumerKeySpace,
    changes: Sequence[cpb.ApplyRequest.Change],
    *,
    compares: Iterable[Compare] = (),
) -> AppliedItems:
    """Create, change and delete shards, with their hints, in one transaction.

    Args:
        etcd: the client.
        keyspace: the mirror.
        changes: valid changes.
        compares: further conditions.

    Raises:
        EtcdError: Etcd failed, or refused.
    """
    items = [
        ItemChange(
            change.delete or change.upsert.id,
            change.expect_mod_revision,
            None if change.delete else complete(change.upsert).SerializeToString(),
        )
        for change in changes
    ]
    written = [
        Put(primary_hint_key(change.upsert).encode(), fsm_hints.to_json(change.primary_hints))
        for change in changes
        if change.HasField("primary_hints")
    ]
    removed = [
        Delete(key.encode())
        for change in changes
        if change.delete_hints and (known := keyspace.item(change.delete)) is not None
        for key in hint_keys(known.value)
    ]
    return await apply_items(etcd, keyspace, items, compares=compares, others=[*written, *removed])


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
        faults: returns errors because of which source journals are not read, for listings.
        application: name of the application.

    Attributes:
        audit: log of changes, and of those that were refused.
    """

    def __init__(
        self,
        *,
        resolver: ShardResolver[Any],
        keyspace: ConsumerKeySpace,
        etcd: Etcd,
        local_id: pb.ProcessSpec.ID,
        peers: ShardPeers,
        authorization: Authorization,
        templates: Templates = no_templates,
        faults: Callable[[], Sequence[GazetteError]] = tuple,
        application: str = "",
    ) -> None:
        self._resolver = resolver
        self._keyspace = keyspace
        self._etcd = etcd
        self._local_id = local_id
        self._peers = peers
        self._authorization = authorization
        self._templates = templates
        self._faults = faults
        self._application = application
        self.audit = AuditLog()

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
                waits=not request.at_once,
            ) as resolution,
        ):
            if resolution.status == cpb.OK and resolution.shard is None:
                return await self._forward(request, resolution.header)
            response = cpb.StatResponse(status=resolution.status, header=resolution.header)
            shard: ServedShard | None = resolution.shard
            if shard is not None:
                response.read_through.update(shard.read_through)
                response.publish_at.update(shard.publish_at)
                response.watermark_us = shard.watermark_us
                response.recovered_bytes, response.recovery_bytes = shard.recovery
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
        if claims.allows_every_journal:
            response.faults.extend(map(str, self._faults()))
        if request.with_processes:
            response.application = self._application
            if claims.allows_every_journal:
                response.processes.extend(entry.value for entry in self._keyspace.members())
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
        """Create, change and delete shards, with their hints, in one transaction."""
        with self._recorded("Apply", call, map(_shard_of, request.changes)) as record:
            response = await self._apply(request, call)
            record.status = response.status
        return response

    async def _apply(self, request: cpb.ApplyRequest, call: Call) -> cpb.ApplyResponse:
        claims = self._authorization.verify(call, Capability.APPLY)
        validate_shard_rpc(request)
        for change in request.changes:
            if change.HasField("primary_hints"):  # else the next recovery would fail
                fsm_hints.validate(change.primary_hints, recovery_log(change.upsert))
        async with self._authorization.bound(claims, call):
            compares = await self._admit(claims, request.changes)
            applied = await apply_shards(
                self._etcd, self._keyspace, request.changes, compares=compares
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
        with self._recorded("Unassign", call, request.shards) as record:
            response = await self._unassign(request, call)
            record.status = response.status
        return response

    async def _unassign(self, request: cpb.UnassignRequest, call: Call) -> cpb.UnassignResponse:
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

    def note_refusal(self, method: str, call: Call, error: GazetteError) -> None:
        """Record a change that a gateway has refused."""
        if method in _CHANGES:
            self._record(method, call, str(error), (), is_refusal=True)

    @contextmanager
    def _recorded(self, method: str, call: Call, shards: Iterable[str]) -> Iterator[_Record]:
        """Record the outcome of a change in the audit log.

        Args:
            method: name of the call.
            call: metadata of the call.
            shards: ids of its shards.
        """
        record = _Record()
        outcome, is_refusal = "", False
        try:
            yield record
            outcome = cpb.Status.Name(record.status)
        except GazetteError as error:
            outcome, is_refusal = str(error), isinstance(error, UnauthenticatedError)
            raise
        finally:
            if outcome:
                self._record(method, call, outcome, shards, is_refusal=is_refusal)

    def _record(
        self, method: str, call: Call, outcome: str, shards: Iterable[str], *, is_refusal: bool
    ) -> None:
        subject, token_id = self._authorization.authority.identity(call.authorization)
        changed = AuditEvent(method, outcome, call.peer, "", subject, token_id, is_refusal)
        self.audit.record(changed._replace(shard=_named(shards)))

    def _header(self) -> pb.Header:
        """Return the header of answers without a route."""
        known = self._keyspace.member(self._local_id.zone, self._local_id.suffix) is not None
        return unrouted_header(self._local_id if known else None, self._keyspace.header)


_CHANGES = frozenset({"Apply", "Unassign"})


@dataclass(slots=True)
class _Record:
    """Outcome of a change, for the audit log."""

    status: cpb.Status = cpb.OK


def _shard_of(change: cpb.ApplyRequest.Change) -> str:
    return change.delete or change.upsert.id


def _named(shards: Iterable[str]) -> str:
    ids = list(shards)
    more = f" and {len(ids) - NAMES_MAX} more" if len(ids) > NAMES_MAX else ""
    return ", ".join(ids[:NAMES_MAX]) + more


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
    """Return the calls of ``/v1/shards/…``, for a ``JsonGateway``."""
    return {
        "/v1/shards/list": JsonUnary(Capability.LIST, cpb.ListRequest, service.list),
        "/v1/shards/stat": JsonUnary(Capability.READ, cpb.StatRequest, service.stat),
        "/v1/shards/hints": JsonUnary(Capability.READ, cpb.GetHintsRequest, service.get_hints),
        "/v1/shards/apply": JsonUnary(Capability.APPLY, cpb.ApplyRequest, service.apply),
        "/v1/shards/unassign": JsonUnary(Capability.APPLY, cpb.UnassignRequest, service.unassign),
    }


def state_methods(methods: Iterable[Method]) -> Mapping[str, JsonUnary]:
    """Return ``/v1/shards/state``, for a ``JsonGateway``, of the methods that a process serves."""
    served = {method.rpc.path: method.serve for method in methods}
    return {
        "/v1/shards/state": JsonUnary(Capability.READ, cpb.StateRequest, served[STATE.rpc]),
    }


def _encode(message: Message) -> bytes:
    return complete(message).SerializeToString()


_HEADER = "header"


def application_methods(
    methods: Iterable[EndpointMethod], calls: EndpointCalls, peers: ShardClient
) -> Iterator[grpc_server.Method]:
    """Return the methods to register with a :class:`~gazette_sdk.server.grpc_server.GrpcServer`.

    Args:
        methods: the application's methods.
        calls: resolves and runs calls.
        peers: other processes of the application.

    Raises:
        ConfigurationError: a method is declared twice.
    """
    paths: set[str] = set()
    for method in methods:
        if method.rpc in paths:
            raise ConfigurationError(f"{method.rpc} is declared twice; declare it once")
        paths.add(method.rpc)
        served = _ServedMethod(method, calls, peers)
        yield grpc_server.Method(served.rpc, served)


class _ServedMethod:
    """Method of an application, as the gRPC server calls it."""

    def __init__(self, method: EndpointMethod, calls: EndpointCalls, peers: ShardClient) -> None:
        _, service, name = method.rpc.split("/")
        self.rpc = Rpc(name, 0, method.request_type, method.response_type, service=service)
        self._method = method
        self._calls = calls
        self._peers = peers
        field = method.request_type.DESCRIPTOR.fields_by_name.get(_HEADER)
        self._has_header = field is not None and field.message_type is pb.Header.DESCRIPTOR

    async def __call__(self, request: Any, call: Call) -> Message:
        """Return the response to a request.

        Raises:
            CallError: there is none; it has a status code.
            Exception: the application's function raised it.
        """
        try:
            return await self._serve(request, call)
        except (
            ConfigurationError,
            MappingError,
            ShardStatusError,
            json_format.ParseError,
        ) as error:
            raise CallError(str(error), code=status_of(error).grpc) from error

    async def _serve(self, request: Any, call: Call) -> Message:
        method, calls = self._method, self._calls
        async with calls.admit(call, method.capability) as claims:
            if method.is_about_no_shard:
                return self._checked(await calls.run_alone(method.serve, request))
            shard = calls.named_shard(method.shard_of, request)
            if not shard:
                remedy = f"name the shard in the request of {method.rpc}"
                shard = await calls.shard_of(method.by, request, remedy)
            given = self._has_header and request.HasField(_HEADER)
            header = request.header if given else None
            async with calls.resolve(shard, claims, call, header) as resolution:
                if resolution.shard is None:
                    return await self._forward(request, shard, resolution.header)
                found = await calls.run(method.serve, resolution.shard, {}, request=request)
                return self._checked(found)

    async def _forward(self, request: Any, shard: str, header: pb.Header) -> Message:
        """Return the primary's response."""
        if self._has_header:
            forwarded = type(request)()
            forwarded.CopyFrom(request)
            forwarded.header.CopyFrom(header)
            request = forwarded
        response: Message = await self._peers.call(
            self.rpc,
            request,
            forwarded_claims(self._method.capability, shard),
            primary_of(shard, header),
            proxy_header=json_format.MessageToJson(header, indent=None),
        )
        return response

    def _checked(self, response: object) -> Message:
        """Return what the application's function returned, if it is a response.

        Raises:
            TypeError: it is something else.
        """
        if not isinstance(response, Message) or type(response) is not self._method.response_type:
            raise TypeError(
                f"{self._method.rpc} returned {type(response).__name__}, and not "
                f"{self._method.response_type.__name__}: correct the application"
            )
        return response
