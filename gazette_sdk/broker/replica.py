"""Replica of one journal at one broker, for as long as the journal is assigned to it.

A replica owns the journal's fragment index, its spool and its pipeline (each in a slot, for one
owner at a time), and two loops: one lists the fragment stores, the other pulses. It begins when
an assignment appears and ends when that goes; see `resolver`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gazette_sdk.broker.append.content import FlowControl
from gazette_sdk.broker.append.machine import Terms
from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.metrics import TOPIC_APPEND_BYTES, UNSTORED_MISSING, WRITE_HEAD
from gazette_sdk.broker.replication.pipeline import Pipeline, Signal, Slot
from gazette_sdk.broker.spool.directory import JournalSpools
from gazette_sdk.broker.spool.files import CompletedSpool
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.cluster.broker_keys import BrokerAssignment, JournalEntry
from gazette_sdk.contexts import logged_context
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import value_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaParts:
    """Dependencies of a broker's replicas.

    Attributes:
        complete: takes each fragment that is closed: the persister's.
        refresh: lists the stores of a replica, for as long as it lives.
        pulse: pulses a replica, for as long as it lives.
        unconfirmed: takes each closed fragment of which it is not known whether all replicas have
            it; ``complete`` by default.
        copy_unstored: copies what is in no store and other replicas have, while that is wanted.
        min_append_rate: bytes per second a client has to sustain; 0 for no minimum.
        max_append_rate: bytes per second, for journals with a greater limit of their own; 0 for
            none.
    """

    complete: Callable[[CompletedSpool], None]
    refresh: Callable[[Replica], Coroutine[Any, Any, None]]
    pulse: Callable[[Replica], Coroutine[Any, Any, None]]
    min_append_rate: int
    max_append_rate: int
    copy_unstored: Callable[[Replica], Coroutine[Any, Any, None]] | None = None
    unconfirmed: Callable[[CompletedSpool], None] | None = None


class ReadyRoute(NamedTuple):
    """Route over which an append found all replicas there, synchronized, and known to Etcd.

    Attributes:
        resolution: that the append had resolved.
        pipeline: synchronized over its route.
        terms: of the journal's spec at that resolution.
        encoded_header: an encoded response that has nothing but the resolution's header.
    """

    resolution: object
    pipeline: Pipeline
    terms: Terms
    encoded_header: bytes


class Replica:
    """A replica of a journal.

    Args:
        journal: its name.
        create_revision: revision of Etcd at which the journal was created.
        storage: of its spools. The spool begins at the head that is recorded there.
        parts: what the broker gives.
        recovered: closed fragments that are not stored yet, of an earlier process or replica.
        predecessor: this broker's replica of the very same journal which is being shut down. The
            new one has no spool until that has ended, and continues where it ended: so that never
            two spools of a journal are written, and nothing is forgotten in between.
        ready: what has to fire before it has a spool: until then nothing is appended here, by a
            client or by a peer. It has fired where none is given.

    Attributes:
        journal: its name.
        is_primary: True if this broker is the journal's primary.
        index: the journal's fragments.
        spool: the fragment being written.
        pipeline: the primary's streams to the other replicas; ``None`` before there are any.
        signal: fires when what was resolved is old; the next one takes its place.
        flow: flow control of appends.
        ended: fires when the replica has been shut down: reads end.
        settled: the resolution whose route was found in every assignment.
        ready: the route that the last append through the machine found ready; ``None`` before,
            and after its pipeline was torn down.
        agreed: the spool's fragment when all replicas last had the same, if we were the primary;
            ``None`` before.
        proposed_end: greatest end to which other replicas were asked to agree, if we were the
            primary: they may continue there, whatever they have before it.
        kept_end: end of content that it kept at its end although others may replace it; 0 for none.
        head_is_known: True if the head is known without the stores: the spool began at the head
            that an earlier process recorded, or a primary or a peer had it.
        is_synchronized: True if the primary's stream has synchronized this replica.
        joined_revision: of Etcd as the primary saw it over whose route this replica was last
            synchronized; 0 before.
        copies_wanted: True if replicas agreed since :attr:`ReplicaParts.copy_unstored` last asked
            the others what they have.
        pulse_wanted: True if a pulse was wanted since the last one began.
        wake_pulse: makes a pulse at once; ``None`` while one runs, or none is made.
        write_head: the metric of the offset of the next byte.
        topic_bytes: the metric of bytes that are appended to the journal's topic.
    """

    def __init__(
        self,
        journal: str,
        create_revision: int,
        storage: JournalSpools,
        parts: ReplicaParts,
        *,
        recovered: Sequence[CompletedSpool] = (),
        predecessor: Replica | None = None,
        ready: Signal | None = None,
    ) -> None:
        self.journal = journal
        self.create_revision = create_revision
        self.is_primary = False
        self.index = Index()
        self.pipeline: Slot[Pipeline | None] = Slot(None)
        self.signal = Signal()
        self.ended = Signal()
        self.flow = FlowControl(
            min_rate=parts.min_append_rate, global_max_rate=parts.max_append_rate
        )
        self.settled: object | None = None
        self.ready: ReadyRoute | None = None
        self.agreed: pb.Fragment | None = None
        self.proposed_end = 0
        self.kept_end = 0
        self.head_is_known = False
        self.is_synchronized = False
        self.joined_revision = 0
        self.copies_wanted = False
        self.pulse_wanted = False
        self.wake_pulse: Callable[[], None] | None = None
        self._copying: asyncio.Task[None] | None = None
        self.write_head = WRITE_HEAD.cell(journal)
        self.topic_bytes = TOPIC_APPEND_BYTES.cell("")
        self._spec_revision = 0
        self._storage = storage
        self._parts = parts
        self._mark: object = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unconfirmed: list[CompletedSpool] = []
        self._ends_as_primary = False
        for spool in recovered:
            self.index.commit(spool.fragment, spool.file)
        if storage.persisted:
            self.index.hold(is_reported=False)
        self.spool: Slot[Spool]
        if predecessor is None and (ready is None or ready.fired):
            self.spool = Slot(self._new_spool())
            return
        self.spool = Slot()

        def begin() -> None:
            if predecessor is None:
                self.spool.put(self._new_spool())
            else:
                predecessor.ended.on_fire(lambda: self._succeed(predecessor))

        if ready is None:
            begin()
        else:
            ready.on_fire(begin)

    # ---------------------------------------------------------- assignments

    def continues(
        self,
        item: JournalEntry,
        assignment: BrokerAssignment,  # noqa: ARG002 - a new one of the same journal changes nothing
        *,
        is_primary: bool,
    ) -> bool:
        """Return True if it continues as the replica of ``item``.

        Not if the journal was deleted and created again: nothing of the old one may come back.
        And not if we are no longer its primary: the spool has to be closed, and stored.
        """
        return self.create_revision == item.create_revision and (is_primary or not self.is_primary)

    def update(
        self, item: JournalEntry, assignments: Sequence[BrokerAssignment], *, is_primary: bool
    ) -> None:
        """Note the journal's keys. Fire the signal if a resolution may have changed.

        Until all replicas agreed for the first time, nothing local can be read where the spec asks
        for several: an earlier process may have committed what no other broker has.
        """
        if self._mark is None and item.value.replication > 1:
            self.index.hold(end=0, is_reported=True)
        self.is_primary = is_primary
        if item.mod_revision != self._spec_revision:
            self._spec_revision = item.mod_revision
            self.topic_bytes = TOPIC_APPEND_BYTES.cell(value_of(item.value.labels, "topic"))
        mark = (
            [(entry.key, entry.mod_revision) for entry in assignments],
            list(item.value.fragment.stores),
        )
        if mark == self._mark:
            return
        is_first, self._mark = self._mark is None, mark
        if not is_first:
            self.invalidate()

    def invalidate(self) -> None:
        """Make all waiters for the spool or the pipeline resolve again."""
        old, self.signal = self.signal, Signal()
        old.fire()

    def stopping(self) -> None:
        """Make all waiters for the spool or the pipeline resolve again, for good."""
        self.signal.fire()

    # ---------------------------------------------------------- what is agreed

    def agree(self, fragment: pb.Fragment) -> None:
        """Note that all replicas have this fragment: closed fragments before it may be stored."""
        if self.agreed is not None and fragment.end < self.agreed.end:
            return  # of an append before the last one
        self.agreed = fragment
        if self._unconfirmed:
            waiting, self._unconfirmed = self._unconfirmed, []
            for spool in waiting:
                self._complete(spool)

    def acknowledge(self, fragment: pb.Fragment) -> None:
        """Note that all replicas have acknowledged an append which led to ``fragment``."""
        self.agree(fragment)
        self.index.acknowledge(fragment.end)
        self.head_is_known = fragment.end > 0
        self.write_head.value = fragment.end

    def show_commits(self, end: int) -> None:
        """Make local commits readable without waiting for peers.

        Args:
            end: of what is on disk, if durability is ``persisted``. Later commits are shown by
                further calls then, and by :meth:`acknowledge`; otherwise at once.
        """
        if self._storage.persisted:
            self.index.acknowledge(end)
        else:
            self.index.release()

    def synchronized(self, pipeline: Pipeline) -> None:
        """Note that the members of a written route have what they agreed on; see :meth:`agree`.

        Not before the route is written, with as many members as the journal's replication
        requires: if they were lost, others might continue without what only these have. But as soon
        as it is: these members continue after all of it, with this broker or without.
        """
        fragment, pipeline.synchronized = pipeline.synchronized, None
        if fragment is not None:
            self.joined_revision = pipeline.header.etcd.revision
            self.agree(fragment)
            self.index.acknowledge(fragment.end)
            pipeline.tell_acknowledged(fragment.end)

    def _complete(self, spool: CompletedSpool) -> None:
        """Store a closed fragment, if all replicas are known to have it."""
        agreed, end = self.agreed, spool.fragment.end
        if self._ends_as_primary:
            spool = replace(spool, primary=True)
        elif spool.primary and agreed is not None and end > agreed.end:
            self._unconfirmed.append(spool)
            return
        if end > self.index.acknowledged_end:
            self._leave_open(spool)
        else:
            self._parts.complete(spool)

    def _leave_open(self, spool: CompletedSpool) -> None:
        """Store a closed fragment once it is known that all replicas have it."""
        (self._parts.unconfirmed or self._parts.complete)(spool)

    async def _give_up_unconfirmed(self, spool: Spool) -> None:
        """Give up content that others may replace.

        Others may also continue after it: those that were asked to agree to its end. Then only we
        have these bytes, and readers wait for them. So they are kept, and the others are asked.
        """
        agreed, end = self.agreed, spool.fragment.end
        if agreed is None or agreed.end >= end:
            return
        _log.warning(
            "offsets %d to %d of %s are not stored: not all replicas acknowledged them",
            agreed.end, end, self.journal, extra={"journal": self.journal},
        )  # fmt: skip
        hold = self._parts.unconfirmed
        if hold is not None and self.proposed_end >= end > spool.fragment.begin:
            begin = max(agreed.end, spool.fragment.begin)
            try:
                kept = await asyncio.to_thread(spool.content_after, begin)
            except OSError as error:
                _log.warning("cannot keep them: %s", error, extra={"journal": self.journal})
            else:
                self.kept_end = end
                hold(kept)
        spool.reset_to(agreed)

    # ------------------------------------------------------ un-stored content

    @property
    def storage(self) -> JournalSpools:
        """Storage of the journal's spools."""
        return self._storage

    @property
    def agreed_begin(self) -> int:
        """Offset at which all replicas began a fragment; once the head is known."""
        return self.spool.peek().fragment.begin

    def want_pulse(self) -> None:
        """Ask for a pulse: now, or after the one that runs, which may have begun too early."""
        self.pulse_wanted = True
        if self.wake_pulse is not None:
            self.wake_pulse()

    def want_copies(self) -> None:
        """Fetch peers' fragments that are in no store and missing here. All have just agreed."""
        if self._parts.copy_unstored is not None:
            self.copies_wanted = True
            if self._copying is None or self._copying.done():
                self._copying = self.in_background(self._parts.copy_unstored(self))

    def adopt(self, spool: CompletedSpool) -> None:
        """Take a closed fragment that was copied from another replica."""
        self.index.commit(spool.fragment, spool.file)
        self._parts.complete(spool)

    # ------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Begin to list stores, and to pulse."""
        self.in_background(self._parts.refresh(self))
        self.in_background(self._parts.pulse(self))

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something which is cancelled when the replica ends."""
        task = asyncio.get_running_loop().create_task(
            work, name=f"replica of {self.journal}", context=logged_context(journal=self.journal)
        )
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def shut_down(
        self,
        *,
        is_replaced: Callable[[], bool] = lambda: False,
        continued_at: Callable[[], int] = lambda: 0,
    ) -> None:
        """End the replica, once the owners of its pipeline and its spool are done.

        The spool's fragment is closed and goes to the persister. Neither slot is free again.

        Content that we committed as the primary, and that others did not acknowledge, is given
        up, unless we have another replica of the journal, which the others synchronize with:
        brokers that continue without us may write other bytes at these offsets, and the store must
        not have both.

        Args:
            is_replaced: returns True if we have another replica of the journal.
            continued_at: returns the revision of a route over which others continue with the
                journal without us, so that our head is old; 0 if there is none. Both are called at
                the end.
        """
        pipeline = await self.pipeline.take()
        spool = await (self.spool.take() if pipeline is None else pipeline.tear_down())
        agreed = self.agreed
        if pipeline is not None and agreed is not None and agreed.end < spool.fragment.end:
            await pipeline.settled()
        if is_replaced():
            for closed in self._unconfirmed:
                self._parts.complete(closed)
        else:
            if self._parts.unconfirmed is not None:
                for closed in self._unconfirmed:
                    self._parts.unconfirmed(closed)
            await self._give_up_unconfirmed(spool)
        end = spool.fragment.end
        was_forgotten = self._storage.was_forgotten(spool.content_file, end)
        # A new primary that lacks the last append begins after it. Only this spool has it then, and
        # it must not wait as long as a replica's does.
        self._ends_as_primary = self.is_primary
        await spool.apply(
            pb.ReplicateRequest(
                proposal=pb.Fragment(
                    journal=self.journal,
                    begin=end,
                    end=end,
                    sum=pb.SHA1Sum(),
                    compression_codec=spool.fragment.compression_codec,
                ),
                registers=spool.registers,
            ),
            primary=False,
        )
        self._judge_head(continued_at(), was_forgotten=was_forgotten)
        self.ended.fire()
        if pipeline is not None:
            await pipeline.ended()  # our successor does not wait for it: a peer may be frozen
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        UNSTORED_MISSING.remove(self.journal)
        self.index.close()

    def _judge_head(self, continued_at: int, *, was_forgotten: bool) -> None:
        """Forget or doubt the head at the end, if others continue without us.

        Where we were synchronized after the route that shows it, our mirror may lack a newer one
        that has us.
        """
        if was_forgotten or continued_at > self.joined_revision:
            self._storage.forget_head()
        elif continued_at:
            self._storage.doubt_head()

    def _new_spool(self) -> Spool:
        head = self._storage.head
        if head is not None and head.end > 0:
            self.head_is_known = True  # it would be forgotten if others had continued the journal
        spool = Spool(
            self._storage, on_commit=self.index.add_unacknowledged, on_complete=self._complete
        )
        self.index.spool_end = lambda: spool.fragment.end
        return spool

    def _succeed(self, predecessor: Replica) -> None:
        for fragment, file in predecessor.index.local():
            self.index.add_unacknowledged(fragment, file)
        self.index.acknowledge(predecessor.index.readable_end)
        self.spool.put(self._new_spool())

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
