"""Heads of journals: how far they reach, how much of them is in no store, and how fast they grow.

A broker answers from memory for the journals that it holds, and asks the others for theirs: one
call for each of them, with the caller's token. A broker of another implementation has no such call;
journals that only such brokers hold are read for their metadata, each by a call of its own.

Nothing is counted by appends: the rate is the difference of two answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from gazette_sdk.broker.fragments.persister import Persister
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.resolver import Resolver
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalEntry
from gazette_sdk.errors import STATUS_NAMES, CallError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.journal_spec import may_read
from gazette_sdk.protocol.labels import Matcher, rewrite_prefix
from gazette_sdk.protocol.rules import HEADS_RPC
from gazette_sdk.server.authorization import Call
from gazette_sdk.transport.loop import LoopSlices
from gazette_sdk.transport.member_calls import TIME_LIMIT_S, MemberAnswer, MemberCalls

HEADS_MAX = 500
"""Greatest number of journals of one call."""

RATE_WINDOW_S = 10.0
"""Time over which the rate of a journal is taken, where it was asked for so long."""

RATE_SPACING_S = 1.0
"""Least time between two heads that are kept for the rate."""

RATE_FORGOTTEN_S = 60.0
"""Age of a head that says nothing about the rate of now."""

CONCURRENT_READS_MAX = 32
"""Journals whose metadata are read at the same time, where brokers have no better call."""

HeadOf = clpb.HeadsResponse.Head
ReplicaOf = clpb.HeadsResponse.Replica


class Rates:
    """Rates of journals, of the heads that were asked for.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._heads: dict[tuple[str, int], deque[tuple[float, int]]] = {}
        self._swept_s = now()

    def __len__(self) -> int:
        return len(self._heads)

    def rate(self, journal: str, create_revision: int, head: int) -> float | None:
        """Return the bytes of each second up to this head; None if no earlier one is known."""
        now_s = self._now()
        self._sweep(now_s)
        heads = self._heads.setdefault((journal, create_revision), deque())
        while heads and (now_s - heads[0][0] > RATE_FORGOTTEN_S or heads[0][1] > head):
            heads.popleft()
        while len(heads) > 1 and now_s - heads[1][0] >= RATE_WINDOW_S:
            heads.popleft()
        if not heads:
            heads.append((now_s, head))
            return None
        first_s, first_head = heads[0]
        if now_s - heads[-1][0] >= RATE_SPACING_S:
            heads.append((now_s, head))
        elapsed_s = now_s - first_s
        return (head - first_head) / elapsed_s if elapsed_s >= RATE_SPACING_S else None

    def _sweep(self, now_s: float) -> None:
        """Forget journals that no one asks for any more."""
        if now_s - self._swept_s < RATE_FORGOTTEN_S:
            return
        self._swept_s = now_s
        for key, heads in list(self._heads.items()):
            if not heads or now_s - heads[-1][0] > RATE_FORGOTTEN_S:
                del self._heads[key]


@dataclass(frozen=True, slots=True)
class LocalHeads:
    """Heads of the journals that this broker holds.

    Attributes:
        resolver: has the replicas.
        persister: has the closed spools.
        local_id: this broker.
        rates: rates of journals.
        now: Unix time in seconds.
    """

    resolver: Resolver
    persister: Persister
    local_id: pb.ProcessSpec.ID
    rates: Rates = field(default_factory=Rates)
    now: Callable[[], float] = time.time

    def head(self, journal: str) -> HeadOf | None:
        """Return the head of a journal; None if this broker has no replica of it."""
        replica = self.resolver.replica(journal)
        if replica is None:
            return None
        index, found = replica.index, HeadOf(journal=journal)
        is_listed = index.first_refresh.is_set()
        if not is_listed and not replica.head_is_known:
            why = index.refresh_failure or "they were not listed yet"
            found.error = f"the end of what its stores have is not known: {why}"
            return found
        extent = index.extent()
        found.head = extent.head
        if index.spool_end() >= 0:
            found.registers.CopyFrom(replica.spool.peek().registers)
        if is_listed:
            found.begin, found.size = extent.begin, extent.size_bytes
        unstored = index.unstored()
        found.unstored = unstored.length_bytes()
        if unstored and (age_s := self._oldest_unstored_s(replica)) is not None:
            found.oldest_unstored_s = age_s
        rate = self.rates.rate(journal, replica.create_revision, extent.head)
        if rate is not None:
            found.rate = rate
        found.replicas.append(
            ReplicaOf(
                member=self.local_id,
                head=extent.head,
                unstored=found.unstored,
                synced=replica.is_primary or replica.is_synchronized,
            )
        )
        return found

    def unstored(self, replica: Replica) -> tuple[int, float | None]:
        """Return the bytes of a replica that are in no store, and the age of the oldest of them.

        The age is None if there are none, or if it is not known.
        """
        length_bytes = replica.index.unstored().length_bytes()
        return length_bytes, self._oldest_unstored_s(replica) if length_bytes else None

    def _oldest_unstored_s(self, replica: Replica) -> float | None:
        """Return the age of the oldest byte of spools, open or closed; None for none."""
        spools = self.persister.unstored(replica.journal, replica.create_revision)
        begun_s = [spool.first_append_time.timestamp() for spool in spools]
        if replica.index.spool_end() >= 0:
            open_s = replica.spool.peek().first_append_s
            if open_s is not None:
                begun_s.append(open_s)
        return max(0.0, self.now() - min(begun_s)) if begun_s else None


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of any journals of the cluster.

    Attributes:
        keyspace: mirror of Etcd.
        local_id: this broker.
        local: heads of the journals that it holds.
        members: calls the other brokers.
        read: reads metadata, as the caller, of journals whose brokers have no better call.
    """

    keyspace: BrokerKeySpace
    local_id: pb.ProcessSpec.ID
    local: LocalHeads
    members: MemberCalls
    read: Callable[[pb.ReadRequest, Call], AsyncGenerator[object]]

    async def answer(
        self, request: clpb.HeadsRequest, claims: Claims, call: Call
    ) -> Sequence[HeadOf]:
        """Return the heads of a request's journals, as far as the caller may read them.

        Raises:
            CallError: there are too many.
        """
        if len(request.journals) > HEADS_MAX:
            raise CallError(
                f"{len(request.journals)} journals are too many for one call: name at most "
                f"{HEADS_MAX}, and call again for more",
                code="INVALID_ARGUMENT",
            )
        allowed = Matcher(rewrite_prefix(claims.selector))
        items = []
        for name in dict.fromkeys(request.journals):
            item = self.keyspace.item(name)
            if item is not None and may_read(item.value) and allowed.journal(item.value):
                items.append(item)
        if request.local:
            return [head for _, head in await self._local([item.id for item in items])]
        found = await self.find(items, call)
        return [found[item.id] for item in items]

    async def find(
        self, items: Sequence[JournalEntry], call: Call, *, primaries_only: bool = False
    ) -> Mapping[str, HeadOf]:
        """Return the heads of journals that the caller may read, by name.

        Args:
            items: the journals.
            call: that of the caller, whose token is passed on.
            primaries_only: ask the primary of each journal alone, not all of its brokers.
        """
        wanted = _Wanted(primaries_only=primaries_only)
        slices = LoopSlices()
        for item in items:
            await slices.rest()
            wanted.add(self.keyspace, item)
        ours = (self.local_id.zone, self.local_id.suffix)
        answers: dict[str, list[HeadOf]] = {}
        for name, head in await self._local(wanted.names.pop(ours, ())):
            answers.setdefault(name, []).append(head)
        asked = await self.members.ask(HEADS_RPC, self._requests(wanted.names), call)
        has_foreign: set[str] = set()
        why: dict[str, str] = {}
        for names, answer in zip(_chunks(wanted.names), asked, strict=True):
            _note(names[1], answer, answers, has_foreign, why)
        merged: dict[str, HeadOf] = {}
        foreign: list[str] = []
        for item in items:
            await slices.rest()
            primary = wanted.primaries.get(item.id)
            head = merged[item.id] = _merged(item, answers.get(item.id, ()), primary, why)
            if not head.HasField("head") and item.id in has_foreign:
                foreign.append(item.id)
        await self._read_all(foreign, merged, call)
        return merged

    async def _local(self, names: Iterable[str]) -> list[tuple[str, HeadOf]]:
        """Return the heads of journals that this broker holds."""
        slices, found = LoopSlices(), []
        for name in names:
            await slices.rest()
            head = self.local.head(name)
            if head is not None:
                found.append((name, head))
        return found

    def _requests(
        self, names: Mapping[tuple[str, str], Sequence[str]]
    ) -> Iterable[tuple[pb.ProcessSpec, clpb.HeadsRequest]]:
        for (zone, suffix), some in _chunks(names):
            member = self.keyspace.member(zone, suffix)
            process_id = pb.ProcessSpec.ID(zone=zone, suffix=suffix)
            spec = pb.ProcessSpec(id=process_id) if member is None else member.value.process_spec
            yield spec, clpb.HeadsRequest(journals=some, local=True)

    async def _read_all(
        self, names: Sequence[str], merged: Mapping[str, HeadOf], call: Call
    ) -> None:
        """Read metadata of journals, for as long as a call of one broker may take."""
        room = asyncio.Semaphore(CONCURRENT_READS_MAX)

        async def read(name: str) -> None:
            async with room:
                await self._read(merged[name], call)

        reads = [asyncio.create_task(read(name)) for name in names]
        if not reads:
            return
        try:
            await asyncio.wait(reads, timeout=TIME_LIMIT_S)
        finally:
            for each in reads:
                each.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    async def _read(self, found: HeadOf, call: Call) -> None:
        """Read the metadata of a journal from its begin."""
        request = pb.ReadRequest(journal=found.journal, offset=0, metadata_only=True)
        try:
            async with aclosing(self.read(request, call)) as items:
                first = await anext(items, None)
        except GazetteError as error:
            found.error = str(error)
            return
        if not isinstance(first, pb.ReadResponse):
            return
        if first.status not in {pb.OK, pb.OFFSET_NOT_YET_AVAILABLE}:
            found.error = STATUS_NAMES[first.status]
            return
        found.error = ""
        found.head = first.write_head
        if first.status == pb.OK or first.offset >= first.write_head:
            found.begin = min(first.offset, first.write_head)
            found.size = found.head - found.begin


class _Wanted:
    """Journals to ask for at each broker.

    Attributes:
        names: names of journals, by zone and suffix of brokers.
        primaries: zone and suffix of the primary, by journal.
    """

    def __init__(self, *, primaries_only: bool) -> None:
        self.names: dict[tuple[str, str], list[str]] = {}
        self.primaries: dict[str, tuple[str, str]] = {}
        self._primaries_only = primaries_only

    def add(self, keyspace: BrokerKeySpace, item: JournalEntry) -> None:
        """Add a journal."""
        assignments = keyspace.assignments(item.id)
        for each in assignments:
            if each.slot == 0:
                self.primaries[item.id] = (each.zone, each.suffix)
        asked = assignments
        if self._primaries_only:
            asked = sorted(assignments, key=lambda each: each.slot)[:1]
        for zone, suffix in dict.fromkeys((each.zone, each.suffix) for each in asked):
            self.names.setdefault((zone, suffix), []).append(item.id)


def _chunks(
    names: Mapping[tuple[str, str], Sequence[str]],
) -> Iterable[tuple[tuple[str, str], Sequence[str]]]:
    """Yield the journals of each broker, as many as one call may name."""
    for member, of_member in names.items():
        for begin in range(0, len(of_member), HEADS_MAX):
            yield member, of_member[begin : begin + HEADS_MAX]


def _note(
    names: Sequence[str],
    answer: MemberAnswer,
    answers: dict[str, list[HeadOf]],
    has_foreign: set[str],
    why: dict[str, str],
) -> None:
    """Note the answer of a broker, or why there is none."""
    if answer.has_no_such_call:
        has_foreign.update(names)
    reason = str(answer.error)
    if isinstance(answer.response, clpb.HeadsResponse):
        for head in answer.response.heads:
            answers.setdefault(head.journal, []).append(head)
        member = answer.member.id
        reason = f"broker {member.zone}/{member.suffix} does not hold it yet, or any more"
    for name in names:
        why.setdefault(name, reason)


def _merged(
    item: JournalEntry,
    answers: Sequence[HeadOf],
    primary: tuple[str, str] | None,
    why: Mapping[str, str],
) -> HeadOf:
    """Return the head of a journal, of the answers of its brokers.

    The primary's counts: it uploads, and it has what others may lack. Without its answer it is that
    of the broker that reaches furthest.
    """
    if item.value.suspend.level == pb.JournalSpec.Suspend.FULL:
        return HeadOf(journal=item.id, head=item.value.suspend.offset, unstored=0)
    known = [each for each in answers if each.HasField("head")]
    if not known:
        error = next((each.error for each in answers if each.error), "")
        error = error or why.get(item.id) or "no broker holds it"
        return HeadOf(journal=item.id, error=error)
    of_primary = [
        each
        for each in known
        if (each.replicas[0].member.zone, each.replicas[0].member.suffix) == primary
    ]
    best = of_primary[0] if of_primary else max(known, key=lambda each: each.head)
    merged = HeadOf()
    merged.CopyFrom(best)
    merged.replicas.extend(each.replicas[0] for each in known if each is not best and each.replicas)
    merged.replicas.sort(key=lambda each: (each.member.zone, each.member.suffix))
    return merged
