"""The driver of replacements: journals whose replica their primary does not reach go on without it.

A link is cut if the peer was silent for the bound of answers although it was waited for, and does
not accept a connection either, or let an answer be missed. The peer may be frozen, or the link may
be cut: it stays a member of the cluster, and only leaves the journals of this primary. The
allocator keeps what is assigned.

Where one link is cut, and no other member accepts a connection, it is this broker that is cut off:
it hands its journals over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from gazette_sdk.broker.failover.decision import Input
from gazette_sdk.broker.failover.links import Links
from gazette_sdk.broker.failover.probe import DIAL_TIMEOUT_S
from gazette_sdk.broker.failover.replacement import (
    Action,
    Candidate,
    Decision,
    decide,
    hand_over,
    replace,
    unchanged,
)
from gazette_sdk.broker.replication.peer_streams import PeerStreams
from gazette_sdk.cluster.broker_keys import BrokerAssignment, BrokerKeySpace, JournalAllocation
from gazette_sdk.cluster.etcd import Compare, Etcd
from gazette_sdk.errors import DeadlineExceededError, EtcdError
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["Rebuilder"]

_log = logging.getLogger(__name__)


class Rebuilder:
    """Replaces replicas that this broker, as their journals' primary, does not reach.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster.
        allocation: the allocator's rules.
        local_id: this broker.
        streams: Replicate streams of this broker to others.
        ttl_s: of leases: a journal is changed once in this time at most.
        dial: dials an endpoint.
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
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._allocation = allocation
        self._local_id = local_id
        self._streams = streams
        self._ttl_s = ttl_s
        self._dial = dial
        # Slightly less than the bound of an answer, so that one missed answer suffices.
        self._links = Links(streams.answer_timeout_s * 0.95)
        self._changed_at: dict[str, float] = {}
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

    async def aclose(self) -> None:
        """Cancel what is going on, and begin nothing more."""
        self._is_closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _settled(self, name: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)

    # ------------------------------------------------------------------ one link

    async def _settle(self, name: tuple[str, str], *, missed_answer: bool) -> None:
        """Wait until a link works again, its peer has left, or our journals go on without it."""
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
            if await self._replace_everywhere(name):
                return
            missed_answer = False
            await asyncio.sleep(self._ttl_s / 10)
        self._links.worked(name)

    def _is_cut(self, name: tuple[str, str]) -> bool:
        now = asyncio.get_running_loop().time()
        return self._links.is_cut(name, now, heard_at=self._streams.heard_at(*name))

    async def _replace_everywhere(self, name: tuple[str, str]) -> bool:
        """Replace a peer in all journals that we lead. Return False if some journal has to wait."""
        journals = [
            assignment.item
            for assignment in self._keyspace.local_assignments(
                self._local_id.zone, self._local_id.suffix
            )
            if assignment.slot == 0
        ]
        candidates: Sequence[Candidate] | None = None
        is_done = True
        for journal in journals:
            assignments = self._keyspace.assignments(journal)
            if not any((a.zone, a.suffix) == name for a in assignments):
                continue
            if candidates is None:
                candidates = await self._candidates()
            is_done &= await self._change(journal, candidates)
        return is_done

    async def _candidates(self) -> Sequence[Candidate]:
        """Return the other members that have room."""
        found: list[tuple[str, str, float]] = []
        dials: list[Awaitable[bool]] = []
        for member in self._keyspace.members():
            name = member.zone, member.suffix
            limit = self._allocation.item_limit(member.value)
            held = len(self._keyspace.local_assignments(*name))
            is_exiting = self._allocation.is_exiting(member.value)
            if member.value.process_spec.id != self._local_id and held < limit and not is_exiting:
                found.append((*name, held / limit))
                dials.append(self._reaches(name, member.value.process_spec.endpoint))
        results = await asyncio.gather(*dials)
        return [
            Candidate(zone, suffix, load, is_reached=is_reached)
            for (zone, suffix, load), is_reached in zip(found, results, strict=True)
        ]

    async def _reaches(self, name: tuple[str, str], endpoint: str) -> bool:
        """Return True if a member is reached. One whose link is cut is not dialled for that."""
        if self._is_cut(name):
            return False
        begun = asyncio.get_running_loop().time()
        is_reached = await self._dial(endpoint) is Input.REACHED
        return (is_reached or self._streams.heard_at(*name) >= begun) and not self._is_cut(name)

    # --------------------------------------------------------------- one journal

    async def _change(self, journal: str, candidates: Sequence[Candidate]) -> bool:
        """Decide about one journal. Return False if it has to be looked at again."""
        now = asyncio.get_running_loop().time()
        changed_at = self._changed_at.get(journal)
        if changed_at is not None and now - changed_at < self._ttl_s:
            return False
        keyspace = self._keyspace
        item, assignments = keyspace.item(journal), keyspace.assignments(journal)
        primary = next((a for a in assignments if self._is_ours(a) and a.slot == 0), None)
        if item is None or primary is None:
            return True
        members = {(a.zone, a.suffix) for a in assignments}
        decision = decide(
            assignments,
            primary,
            {name for name in members if self._is_cut(name)},
            [c for c in candidates if (c.zone, c.suffix) not in members],
            desired=self._allocation.desired_replication(item.value),
            unreached={(c.zone, c.suffix) for c in candidates if not c.is_reached},
        )
        if decision.action is Action.NOTHING:
            return False
        self._changed_at[journal] = now
        return await self._write(journal, assignments, primary, decision)

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
            assert key is not None, "a substitute takes our place"
            change = f"is handed to {peer.suffix}, since we reach no replica"
            first = keyspace.assignment_key(journal, peer.zone, peer.suffix, 0)
            operations = hand_over(primary, peer, first, key, lease)
        else:
            change = f"goes on without {peer.suffix}, which we do not reach"
            operations = replace(peer, key, lease)
        try:
            is_written = (await self._etcd.txn(compares, operations)).succeeded
        except EtcdError as error:
            _log.warning("the replicas of %s were not changed: %s", journal, error)
            return False
        if is_written:
            _log.warning("%s %s", journal, change)
        return is_written

    def _is_ours(self, assignment: BrokerAssignment) -> bool:
        return (assignment.zone, assignment.suffix) == (
            self._local_id.zone,
            self._local_id.suffix,
        )
