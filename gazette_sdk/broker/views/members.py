"""Members of the cluster and of its applications, as Etcd and they themselves describe them.

What Etcd says is in the broker's mirror; the rest each member says itself, called with the token of
the caller and a time limit. Who does not answer is listed with the error. Members of other
implementations have no such call, and are listed with what Etcd says.

Consumers are found by their member keys in Etcd (:class:`ConsumerDirectory`), or at addresses that
are configured.

A broker is drained by a call of its own, which does what SIGTERM does.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import time
from collections.abc import Callable, Mapping, Sequence

from google.protobuf.message import Message

from gazette_sdk.broker.process import Broker
from gazette_sdk.broker.views.problems import BROKER, MemberFacts
from gazette_sdk.cluster.consumer_keys import ConsumerDirectory
from gazette_sdk.errors import CallError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.rules import DRAIN_RPC, MEMBERS_RPC, SHARD_RPCS_BY_NAME, Rpc
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.members import LoopLag, ProcessView, verify_view
from gazette_sdk.transport.loop import LoopSlices
from gazette_sdk.transport.member_calls import MemberAnswer, MemberCalls
from gazette_sdk.transport.wire import Tls

SHARDS_TIMEOUT_S = 2.0
"""Time limit of a call of an application about its shards."""

_log = logging.getLogger(__name__)

Processes = Mapping[str, Sequence[cpb.ConsumerSpec]]
"""Processes by the names of their applications."""

_NO_SHARD = "-"
"""Id that no shard has, in the selector of a list of processes alone."""

_OF_ETCD = ("id", "component", "endpoint", "limit", "exiting")
_OF_BROKERS = ("replicas", "primaries")
"""Fields of a description that Etcd has, and is asked for."""


class ClusterMembers:
    """Members of the cluster, as one of its brokers sees them.

    Args:
        broker: the broker, which has started.
        lag: lag of its event loop, with the rates of its appended and read bytes.
        drain: has this process drain and end, as SIGTERM does; None if it is part of a program.
    """

    def __init__(
        self, broker: Broker, lag: LoopLag, drain: Callable[[], None] | None = None
    ) -> None:
        config = broker.config
        self._broker = broker
        self._keyspace = broker.keyspace
        self._lag = lag
        self._drain = drain
        self._id = pb.ProcessSpec.ID(zone=config.zone, suffix=config.suffix)
        self._process = ProcessView(BROKER, broker.member, broker.authority, lag)
        self._directory = ConsumerDirectory(broker.etcd, config.consumers_prefix)
        self._shard_calls = MemberCalls(
            self._keyspace,
            self._id,
            endpoint=config.endpoint,
            tls=config.peer_tls,
            time_limit_s=SHARDS_TIMEOUT_S,
        )
        self._tls: tuple[tuple[int, ...], ssl.SSLContext] | None = None

    async def aclose(self) -> None:
        """Close the connections to applications."""
        await self._shard_calls.aclose()

    async def answer(self, request: clpb.MembersRequest, call: Call) -> clpb.MembersResponse:
        """Return the members of the cluster and of its applications, or this broker alone.

        Raises:
            UnauthenticatedError: the token lacks LIST, or has a selector.
        """
        claims = verify_view(self._broker.authority, call.authorization)
        response = clpb.MembersResponse(header=self._broker.listing.header())
        if request.local:
            response.members.append(await self._local(claims, details=request.details))
        else:
            found = await self.describe(
                await self.processes(call), claims, call, details=request.details
            )
            response.members.extend(each.member for each in found)
        return response

    async def drain(self, request: clpb.DrainRequest, call: Call) -> clpb.DrainResponse:
        """Have a broker drain and end, as SIGTERM does: this one, or another one by its own call.

        The answer comes at once: the broker's journals move to others after it.

        Raises:
            UnauthenticatedError: the token lacks APPLY, or has a selector.
            CallError: there is no such broker, its process has started since, or it cannot be
                asked.
        """
        broker = self._broker
        claims = broker.authority.verify(call.authorization, Capability.APPLY, time.time())
        if not claims.allows_every_journal:
            raise UnauthenticatedError(
                "this call ends a broker: use a token with the capability APPLY and without a "
                "selector"
            )
        if request.HasField("id") and request.id != self._id:
            return await self._drain_other(request, call)
        name = f"{self._id.zone}/{self._id.suffix}"
        if request.started_us not in {0, self._lag.started_us}:
            raise CallError(
                f"{name} has started again since: it is not the process that is meant",
                code="ABORTED",
            )
        if self._drain is None:
            raise CallError(
                f"{name} is part of another program, and ends with it: end that program",
                code="FAILED_PRECONDITION",
            )
        subject, _ = broker.authority.identity(call.authorization)
        _log.info("asked to drain", extra={"peer": call.peer, "subject": subject})
        self._drain()
        held = self._keyspace.local_assignments(self._id.zone, self._id.suffix)
        return clpb.DrainResponse(header=broker.listing.header(), replicas=len(held))

    async def _drain_other(self, request: clpb.DrainRequest, call: Call) -> clpb.DrainResponse:
        """Ask another broker to drain.

        Raises:
            CallError: there is no such broker, or it has no such call.
            GazetteError: it did not accept.
        """
        name = f"{request.id.zone}/{request.id.suffix}"
        endpoint = self._keyspace.endpoint(request.id.zone, request.id.suffix)
        if endpoint is None:
            raise CallError(
                f"there is no broker {name}: `gazctl brokers list` has all", code="NOT_FOUND"
            )
        process = pb.ProcessSpec(id=request.id, endpoint=endpoint)
        [answer] = await self._broker.member_calls.ask(DRAIN_RPC, [(process, request)], call)
        if isinstance(answer.response, clpb.DrainResponse):
            return answer.response
        if answer.has_no_such_call:
            raise CallError(
                f"{name} cannot be asked to drain: it is of an older version, or of another "
                "implementation; end its process with SIGTERM",
                code="FAILED_PRECONDITION",
            )
        assert answer.error is not None
        raise answer.error

    async def find(self, zone: str, suffix: str) -> str | None:
        """Return the endpoint of a member of Etcd, a broker or else a process of an application.

        None if Etcd has no such member.
        """
        endpoint = self._keyspace.endpoint(zone, suffix)
        if endpoint is not None:
            return endpoint
        for specs in (await self._directory.applications()).values():
            for spec in specs:
                process = spec.process_spec
                if (process.id.zone, process.id.suffix) == (zone, suffix):
                    return str(process.endpoint)
        return None

    def tls_context(self) -> ssl.SSLContext:
        """Return the context of HTTP connections to members; a new one when a file has changed."""
        tls = self._broker.config.peer_tls or Tls()
        stamps = tls.stamps()
        if self._tls is None or self._tls[0] != stamps:
            self._tls = stamps, tls.context(["http/1.1"])
        return self._tls[1]

    # -------------------------------------------------------- all members

    async def describe(
        self, processes: Processes, claims: Claims, call: Call, *, details: bool
    ) -> Sequence[MemberFacts]:
        """Return all members, each as Etcd and its own answer describe it.

        Args:
            processes: processes of applications.
            claims: of the caller.
            call: that of the caller, whose token is passed on.
            details: ask for stores, and bytes that are in none.
        """
        counts = await self._counts()
        known: list[clpb.Member] = []
        for entry in self._keyspace.members():
            member = _known(BROKER, entry.value, entry.value.journal_limit)
            member.replicas, member.primaries = counts.get((entry.zone, entry.suffix), (0, 0))
            known.append(member)
        for application, specs in processes.items():
            known += (_known(application, spec, spec.shard_limit) for spec in specs)
        request = clpb.MembersRequest(local=True, details=details)
        described = (self._described(each, request, claims, call) for each in known)
        return await asyncio.gather(*described)

    async def _described(
        self, known: clpb.Member, request: clpb.MembersRequest, claims: Claims, call: Call
    ) -> MemberFacts:
        """Return what a member says of itself, with what Etcd says of it."""
        sent_s = time.time()
        if known.component == BROKER and known.id == self._id:
            said = await self._local(claims, details=request.details)
        else:
            process = pb.ProcessSpec(id=known.id, endpoint=known.endpoint)
            [answer] = await self._broker.member_calls.ask(MEMBERS_RPC, [(process, request)], call)
            known.refuses_token = isinstance(answer.error, UnauthenticatedError)
            if answer.error is not None and not answer.has_no_such_call:
                known.error = str(answer.error)
            if not isinstance(answer.response, clpb.MembersResponse) or not answer.response.members:
                return MemberFacts(known)
            said = answer.response.members[0]
        member = clpb.Member()
        member.CopyFrom(said)
        of_etcd = (*_OF_ETCD, *_OF_BROKERS) if known.component == BROKER else _OF_ETCD
        for name in of_etcd:
            member.ClearField(name)
        member.MergeFrom(known)
        return MemberFacts(member, said.clock_us / 1e6 - (sent_s + time.time()) / 2)

    async def _counts(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """Return the numbers of replicas and primaries of each broker."""
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        slices = LoopSlices()
        for each in self._keyspace.all_assignments():
            await slices.rest()
            replicas, primaries = counts.get((each.zone, each.suffix), (0, 0))
            counts[each.zone, each.suffix] = replicas + 1, primaries + (each.slot == 0)
        return counts

    # -------------------------------------------------------- this broker

    async def _local(self, claims: Claims, *, details: bool) -> clpb.Member:
        """Return the description of this broker."""
        broker = self._broker
        entry = self._keyspace.member(self._id.zone, self._id.suffix)
        process = pb.ProcessSpec(id=self._id, endpoint=broker.config.endpoint)
        member = self._process.describe(process)
        if entry is not None:
            member.limit, member.exiting = entry.value.journal_limit, entry.value.exiting
        held = self._keyspace.local_assignments(self._id.zone, self._id.suffix)
        member.replicas = len(held)
        member.primaries = sum(each.slot == 0 for each in held)
        member.disk_free = (await asyncio.to_thread(shutil.disk_usage, broker.spool_root)).free
        may_read = bool(claims.capability & Capability.READ)
        if may_read:
            member.append_bytes, member.read_bytes = self._lag.counters()
            if (rates := self._lag.rates()) is not None:
                member.append_rate, member.read_rate = rates
        if details:
            self._add_stores(member)
            if may_read:
                await self._add_unstored(member)
        return member

    def _add_stores(self, member: clpb.Member) -> None:
        """Add the stores that this broker uses."""
        loop = asyncio.get_running_loop()
        for health in self._broker.stores.healths():
            store = member.stores.add(url=health.url)
            if not health.checked_at:
                continue  # the first check has not ended
            store.healthy = health.error is None
            if health.error is not None:
                ago_s = loop.time() - (health.failing_since or loop.time())
                store.error = health.error
                store.since_us = round((time.time() - ago_s) * 1e6)

    async def _add_unstored(self, member: clpb.Member) -> None:
        """Add the bytes that are in no store, of the journals that this broker leads."""
        member.unstored = 0
        by_store: dict[str, int] = {}
        slices = LoopSlices()
        for replica in self._broker.resolver.replicas:
            await slices.rest()
            if not replica.is_primary:
                continue
            unstored, age_s = self._broker.local_heads.unstored(replica)
            if not unstored:
                continue
            member.unstored += unstored
            item = self._keyspace.item(replica.journal)
            for url in item.value.fragment.stores[:1] if item is not None else ():
                by_store[url] = by_store.get(url, 0) + unstored
            if age_s is not None and age_s > member.oldest_unstored_s:
                member.oldest_unstored_s = age_s
                member.oldest_unstored_journal = replica.journal
        known = {store.url: store for store in member.stores}
        for url, unstored in by_store.items():
            (known.get(url) or member.stores.add(url=url)).unstored = unstored

    # -------------------------------------------------------- applications

    async def processes(self, call: Call) -> Processes:
        """Return the processes of all applications that are known.

        Args:
            call: that of the caller, whose token is passed on.
        """
        found = dict(await self._directory.applications())
        configured = [
            (name, _process_at(url))
            for name, url in self._broker.config.applications
            if not found.get(name)
        ]
        request = cpb.ListRequest(with_processes=True)
        request.selector.include.labels.add(name="id", value=_NO_SHARD)
        answers = await asyncio.gather(
            *(self.ask_application("List", process, request, call) for _, process in configured)
        )
        for (name, process), answer in zip(configured, answers, strict=True):
            listed = answer.response
            specs = listed.processes if isinstance(listed, cpb.ListResponse) else ()
            found[name] = list(specs) or [cpb.ConsumerSpec(process_spec=process)]
        return found

    async def ask_application(
        self, rpc: Rpc | str, process: pb.ProcessSpec, request: Message, call: Call
    ) -> MemberAnswer:
        """Return the answer of a process of an application.

        Args:
            rpc: the call, or the name of one of the shard service.
            process: the process.
            request: the request.
            call: that of the caller, whose token is passed on.
        """
        if isinstance(rpc, str):
            rpc = SHARD_RPCS_BY_NAME[rpc]
        [answer] = await self._shard_calls.ask(rpc, [(process, request)], call)
        return answer


def _known(component: str, spec: pb.BrokerSpec | cpb.ConsumerSpec, limit: int) -> clpb.Member:
    """Return a member as Etcd describes it."""
    process = spec.process_spec
    return clpb.Member(
        id=process.id,
        component=component,
        endpoint=process.endpoint,
        limit=limit,
        exiting=spec.exiting,
    )


def _process_at(url: str) -> pb.ProcessSpec:
    """Return a process of which only the address is known."""
    return pb.ProcessSpec(endpoint=url)
