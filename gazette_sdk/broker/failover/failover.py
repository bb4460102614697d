"""Fail-over of one broker: its parts, and how they get evidence.

:class:`Rebuilder`: journals continue without a replica that their primary cannot reach. A link is
cut if the peer was silent for the bound of answers although it was waited for, and does not accept
a connection either, or let an answer be missed. The peer may be frozen, or the link may be cut: it
stays a member of the cluster, and only leaves the journals of this primary. The allocator keeps
what is assigned.

Where one link is cut, no replica answers a dial, and too few other members do, but replicas answer
a challenge in Etcd, it is this broker that is cut off: it hands its journals over. Replicas that do
not answer in Etcd either are dead, and get nothing.

The allocator may assign a journal to the broker that was replaced again, before that one announces
that it takes none. So links that are cut are watched on, and a replica in excess that takes no
journals leaves at once. A broker that leads nothing has no links: it dials the others when it loses
an assignment.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gazette_sdk.broker.failover.decision import (
    Action,
    Candidate,
    Decision,
    Links,
    decide,
    hand_over,
    replace,
    unchanged,
)
from gazette_sdk.broker.failover.pause_guard import PauseGuard
from gazette_sdk.broker.replication.peer_stream import PeerStreams
from gazette_sdk.cluster.broker_keys import (
    BrokerAssignment,
    BrokerEntry,
    BrokerKeySpace,
    JournalAllocation,
)
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare
from gazette_sdk.cluster.items import AssignmentEntry
from gazette_sdk.cluster.lease import LeaseLife
from gazette_sdk.cluster.verification import DIAL_TIMEOUT_S, Input, Verifier, dial
from gazette_sdk.errors import DeadlineExceededError, EtcdError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.retries import run_together

SURVEY_DIALS = 2
"""Dials of a member at a time, by a broker that seems to be cut off itself."""

SURVEY_ROUNDS = 2
"""Times that it dials a member before it takes it for unreached."""


class Failover:
    """Verifier of suspected brokers, rebuilder of journals, and guard of this broker's lease.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster, observed from the construction on.
        local_id: this broker.
        lease: id of its lease.
        ttl_s: the lease's time to live.
        answer_timeout_s: bound of a peer's answer.
        allocation: the allocator's rules.
        offer: announces whether this broker takes journals.

    Attributes:
        streams: Replicate streams of this broker to others.
        known_lease: knowledge about this broker's lease.
        hand_over_s: longest silence of a journal's former primary before streams and calls end.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        *,
        local_id: pb.ProcessSpec.ID,
        lease: int,
        life: LeaseLife,
        ttl_s: float,
        answer_timeout_s: float,
        allocation: JournalAllocation,
        offer: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.streams = streams = PeerStreams(answer_timeout_s, self._stream_broke)
        self.hand_over_s = answer_timeout_s / 5
        self._guard = PauseGuard(etcd, lease, life, ttl_s)
        self.known_lease = self._guard.known
        self._verifier = Verifier(
            etcd, keyspace, local_id, lease, dial=dial, kind="broker", on_left=self._left
        )
        self._rebuilder = Rebuilder(
            etcd,
            keyspace,
            allocation,
            local_id,
            streams,
            ttl_s=ttl_s,
            dial=dial,
            is_silent=self._verifier.is_silent,
            offer=offer,
        )
        self._keyspace = keyspace
        keyspace.observers += [self._verifier.observe, self._observe]

    async def run(self) -> None:
        """Answer challenges and guard the lease, until cancelled."""
        await run_together(self._verifier.run(), self._guard.run())

    async def has_lease(self) -> bool:
        """Return True if this broker's lease is alive; see :meth:`PauseGuard.has_lease`."""
        return await self._guard.has_lease()

    async def end_changes(self) -> None:
        """Change no journals any more: the broker stops. Challenges are answered on."""
        await self._rebuilder.aclose()

    def suspect(self, peer: pb.ProcessSpec.ID, reason: object) -> None:
        """Verify that a broker lives, because of a stream or a call that broke."""
        self._verifier.suspect(peer, reason)

    def _observe(self) -> None:
        """End calls to primaries that lead no more, if these do not answer; look at our losses."""
        for _, old, new in self._keyspace.changes:
            if new is None and isinstance(old, AssignmentEntry):
                self._rebuilder.lost(old)
                if old.slot == 0:
                    self.streams.lead_no_more(old.zone, old.suffix, old.item, self.hand_over_s)

    def _left(self, zone: str, suffix: str, error: GazetteError) -> None:
        """Break the streams and calls to a broker that is no member, so that none waits for it."""
        self.streams.fail(zone, suffix, error)
        self._rebuilder.left(zone, suffix)

    def _stream_broke(self, peer: pb.ProcessSpec.ID, error: GazetteError, waited_s: float) -> None:
        self._verifier.suspect(peer, error)
        self._rebuilder.failed(peer, error, waited_s=waited_s)


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Survey:
    """Result of dialling all other members.

    Attributes:
        candidates: those that have room.
        unreached: those that were not reached.
        silent: those of them that do not answer in Etcd either, or announced that they are cut off.
    """

    candidates: Sequence[Candidate]
    unreached: frozenset[tuple[str, str]]
    silent: frozenset[tuple[str, str]]


class Rebuilder:
    """Replaces replicas that this broker, as their journals' primary, does not reach.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster.
        allocation: the allocator's rules.
        local_id: this broker.
        streams: Replicate streams of this broker to others.
        ttl_s: of leases: a journal gets another replica once in this time at most.
        dial: dials an endpoint.
        is_silent: challenges a member, and returns True if nothing answers for it.
        offer: announces whether this broker takes journals. While it is cut off it takes none: the
            allocator, of which it may be the leader, would assign them again.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        allocation: JournalAllocation,
        local_id: pb.ProcessSpec.ID,
        streams: PeerStreams,
        *,
        ttl_s: float,
        dial: Callable[[str], Awaitable[Input]],
        is_silent: Callable[[BrokerEntry], Awaitable[bool]],
        offer: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._allocation = allocation
        self._local_id = local_id
        self._streams = streams
        self._ttl_s = ttl_s
        self._dial = dial
        self._is_silent = is_silent
        self._offer = offer
        self._absence: asyncio.Task[None] | None = None
        self._doubt: asyncio.Task[None] | None = None
        self._withdrawing = asyncio.Lock()
        # Slightly less than the bound of an answer, so that one missed answer suffices.
        self._links = Links(streams.answer_timeout_s * 0.95)
        self._changed: dict[str, tuple[float, Action]] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._is_closed = False

    def failed(self, peer: pb.ProcessSpec.ID, error: object, *, waited_s: float) -> None:
        """Note that a stream to a peer broke, or could not be opened.

        Args:
            peer: the peer.
            error: of the stream.
            waited_s: how long the stream had waited for the peer.
        """
        name = peer.zone, peer.suffix
        if self._keyspace.member(*name) is None:
            return  # the next process of its id is another one
        now = asyncio.get_running_loop().time()
        heard_at = self._streams.heard_at(*name)
        self._links.failed(name, now, waited_s=waited_s, heard_at=heard_at)
        if name not in self._tasks and not self._is_closed:
            # A frozen peer accepts connections: an answer that it missed counts without a dial.
            # Any other error may be an answer, and comes late from a peer that had to wait itself.
            missed_answer = (
                isinstance(error, DeadlineExceededError) and self._links.wait_s(name, now) == 0
            )
            task = asyncio.get_running_loop().create_task(
                self._settle(name, missed_answer=missed_answer),
                name=f"link to {peer.zone}/{peer.suffix}",
            )
            self._tasks[name] = task
            task.add_done_callback(lambda done: self._settled(name, done))

    def left(self, zone: str, suffix: str) -> None:
        """Note that a broker is no member any more."""
        self._links.worked((zone, suffix))

    def lost(self, assignment: BrokerAssignment) -> None:
        """Dial the others, once in a lease at most, if this broker has lost a journal."""
        if not self._is_ours(assignment) or self._doubt is not None or self._is_closed:
            return
        if not any(map(self._is_ours, self._keyspace.assignments(assignment.item))):
            self._doubt = asyncio.get_running_loop().create_task(
                self._dispel(), name="survey of a broker that lost an assignment"
            )
            self._doubt.add_done_callback(_log_failure)

    async def aclose(self) -> None:
        """Cancel the verifications and replacements under way, and begin no more."""
        self._is_closed = True
        tasks = [*self._tasks.values(), *filter(None, (self._absence, self._doubt))]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _settled(self, name: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        _log_failure(task)

    # ------------------------------------------------------------------ one link

    async def _settle(self, name: tuple[str, str], *, missed_answer: bool) -> None:
        """Wait until a link works again, its peer has left, or nothing is awaited of it for long.

        Until then our journals continue without the peer, as often as it is assigned again.
        """
        loop = asyncio.get_running_loop()
        while (endpoint := self._keyspace.endpoint(*name)) is not None:
            if not missed_answer:
                # The dial takes the last part of the bound.
                await asyncio.sleep(self._links.wait_s(name, loop.time()) - DIAL_TIMEOUT_S)
                if await self._dial(endpoint) is Input.REACHED:
                    break
            await asyncio.sleep(self._links.wait_s(name, loop.time()))
            if not self._is_cut(name):
                return
            await self._replace_everywhere(name)
            missed_answer = False
            await asyncio.sleep(self._ttl_s / 10)
        self._links.worked(name)

    def _is_cut(self, name: tuple[str, str]) -> bool:
        now = asyncio.get_running_loop().time()
        return self._links.is_cut(name, now, heard_at=self._streams.heard_at(*name))

    async def _replace_everywhere(self, name: tuple[str, str]) -> None:
        """Replace a peer in all journals that we lead, except for those that have to wait."""
        journals = [
            assignment.item
            for assignment in self._keyspace.local_assignments(
                self._local_id.zone, self._local_id.suffix
            )
            if assignment.slot == 0
        ]
        survey: _Survey | None = None
        for journal in journals:
            assignments = self._keyspace.assignments(journal)
            if not any((a.zone, a.suffix) == name for a in assignments):
                continue
            if survey is None:
                survey = await self._survey()
            await self._change(journal, survey)

    async def _survey(self) -> _Survey:
        """Dial all other members, and challenge those that are not reached."""
        others = [
            member
            for member in self._keyspace.members()
            if member.value.process_spec.id != self._local_id
        ]
        reached = await asyncio.gather(*map(self._reaches, others))
        candidates = []
        for member, is_reached in zip(others, reached, strict=True):
            limit = self._allocation.item_limit(member.value)
            held = len(self._keyspace.local_assignments(member.zone, member.suffix))
            if held < limit and not self._allocation.is_exiting(member.value):
                candidates.append(
                    Candidate(member.zone, member.suffix, held / limit, is_reached=is_reached)
                )
        unreached = [m for m, is_reached in zip(others, reached, strict=True) if not is_reached]
        silent = await asyncio.gather(*map(self._is_known_to_be_silent, unreached))
        return _Survey(
            candidates,
            frozenset((m.zone, m.suffix) for m in unreached),
            frozenset((m.zone, m.suffix) for m, is_ in zip(unreached, silent, strict=True) if is_),
        )

    async def _is_known_to_be_silent(self, member: BrokerEntry) -> bool:
        if member.value.journal_limit == 0 and not member.value.exiting:
            return True  # it takes no journals until it reaches others
        try:
            return await self._is_silent(member)
        except EtcdError as error:
            peer = f"{member.zone}/{member.suffix}"
            _log.warning("broker %s was not challenged: %s", peer, error, extra={"peer": peer})
            return False

    async def _reaches(self, member: BrokerEntry) -> bool:
        """Return True if a member is reached. One whose link is cut is not dialled for that.

        It is dialled several times: with a few lost packets a healthy primary would take itself for
        cut off, and give its journals to the broker that is.
        """
        name, endpoint = (member.zone, member.suffix), member.value.process_spec.endpoint
        if self._is_cut(name):
            return False
        begun = asyncio.get_running_loop().time()
        for _ in range(SURVEY_ROUNDS):
            found = await asyncio.gather(*(self._dial(endpoint) for _ in range(SURVEY_DIALS)))
            if Input.REACHED in found or self._streams.heard_at(*name) >= begun:
                return not self._is_cut(name)
        return False

    # --------------------------------------------------------------- one journal

    async def _change(self, journal: str, survey: _Survey) -> None:
        """Decide about one journal, and change it."""
        keyspace = self._keyspace
        item, assignments = keyspace.item(journal), keyspace.assignments(journal)
        primary = next((a for a in assignments if self._is_ours(a) and a.slot == 0), None)
        if item is None or primary is None:
            return
        members = {(a.zone, a.suffix) for a in assignments}
        decision = decide(
            assignments,
            primary,
            {name for name in members if self._is_cut(name)},
            [c for c in survey.candidates if (c.zone, c.suffix) not in members],
            desired=self._allocation.desired_replication(item.value),
            unreached=survey.unreached,
            silent=survey.silent,
        )
        if decision.action is Action.NOTHING or self._has_to_wait(journal, decision):
            return
        if decision.action is Action.HAND_OVER and not await self._withdraw():
            return
        if await self._write(journal, assignments, primary, decision):
            self._changed[journal] = asyncio.get_running_loop().time(), decision.action

    async def _dispel(self) -> None:
        """Take no journals if most of the others that live are not reached, and we lead nothing.

        Of two brokers that do not reach each other neither is cut off. One that leads journals has
        links to their replicas, or no replicas: these journals do without the others.
        """
        local = self._local_id.zone, self._local_id.suffix
        try:
            others = len(self._keyspace.members()) - 1
            is_primary = any(a.slot == 0 for a in self._keyspace.local_assignments(*local))
            if self._absence is None and others > 1 and not is_primary:
                survey = await self._survey()
                if 2 * len(survey.unreached - survey.silent) > others - len(survey.silent):
                    await self._withdraw()
            await asyncio.sleep(self._ttl_s)
        finally:
            self._doubt = None

    async def _withdraw(self) -> bool:
        """Announce that this broker takes no journals until it reaches others again."""
        async with self._withdrawing:  # each link to a peer has a task
            if self._absence is None and not self._is_closed:
                try:
                    await self._offer(False)
                except EtcdError as error:
                    _log.warning("this broker is cut off, and still takes journals: %s", error)
                    return False
                self._absence = asyncio.get_running_loop().create_task(
                    self._return_later(), name="return of a broker that was cut off"
                )
                self._absence.add_done_callback(_log_failure)
        return True

    async def _return_later(self) -> None:
        """Take journals again, once most of the other members are reached, or there is none."""
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            local = self._local_id.zone, self._local_id.suffix
            endpoints = [
                member.value.process_spec.endpoint
                for member in self._keyspace.members()
                if (member.zone, member.suffix) != local
            ]
            found = await asyncio.gather(*map(self._dial, endpoints))
            if 2 * found.count(Input.REACHED) < len(endpoints):
                continue
            try:
                await self._offer(True)
            except EtcdError as error:
                _log.warning("this broker does not take journals again yet: %s", error)
            else:
                self._absence = None
                _log.warning(
                    "this broker reaches %d members again, and takes journals", len(endpoints)
                )
                return

    def _has_to_wait(self, journal: str, decision: Decision) -> bool:
        """Return True if we changed a journal a short time ago.

        A replacement does not delay that we give up our place: we may have been cut off since. Nor
        does it delay that a replica in excess leaves which the allocator does not assign again.
        """
        changed_at, changed = self._changed.get(journal, (-math.inf, Action.NOTHING))
        if asyncio.get_running_loop().time() - changed_at >= self._ttl_s:
            return False
        if decision.action is Action.HAND_OVER:
            return changed is Action.HAND_OVER
        return decision.substitute is not None or self._takes_journals(decision.peer)

    def _takes_journals(self, assignment: BrokerAssignment | None) -> bool:
        if assignment is None:
            return False
        member = self._keyspace.member(assignment.zone, assignment.suffix)
        return member is not None and self._allocation.item_limit(member.value) > 0

    async def _write(
        self,
        journal: str,
        assignments: Sequence[BrokerAssignment],
        primary: BrokerAssignment,
        decision: Decision,
    ) -> bool:
        keyspace, peer, substitute = self._keyspace, decision.peer, decision.substitute
        assert peer is not None
        item = keyspace.item(journal)
        assert item is not None
        compares = [Compare.mod_revision(item.key, item.mod_revision), *unchanged(assignments)]
        key, lease = None, 0
        if substitute is not None:
            member = keyspace.member(substitute.zone, substitute.suffix)
            if member is None:
                return False
            compares.append(Compare.mod_revision(member.key, member.mod_revision))
            key = keyspace.assignment_key(journal, substitute.zone, substitute.suffix, peer.slot)
            lease = member.lease
        if decision.action is Action.HAND_OVER:
            change = f"is handed to {peer.suffix}, since we reach too few brokers"
            first = keyspace.assignment_key(journal, peer.zone, peer.suffix, 0)
            operations = hand_over(primary, peer, first, key, lease)
        else:
            change = f"continues without {peer.suffix}, which we do not reach"
            operations = replace(peer, key, lease)
        try:
            is_written = (await self._etcd.txn(compares, operations)).succeeded
        except EtcdError as error:
            _log.warning(
                "the replicas of %s were not changed: %s",
                journal,
                error,
                extra={"journal": journal},
            )
            return False
        if is_written:
            _log.warning("%s %s", journal, change, extra={"journal": journal})
        return is_written

    def _is_ours(self, assignment: BrokerAssignment) -> bool:
        return (assignment.zone, assignment.suffix) == (
            self._local_id.zone,
            self._local_id.suffix,
        )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed", task.get_name(), exc_info=error)
