"""The machine and its consumer, against a loop that consumes one message at a time.

The oracle is the loop of shard section 7, on a virtual clock: after each message it looks at the
clock, at the transaction before, and at the input. The machine consumes in slices and batches, and
has to make the same transactions at the same times.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk import shard
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.uuid import Envelope
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.transaction import consume
from gazette_sdk.shard.transaction.consume import MessageConsumer
from gazette_sdk.shard.transaction.failure import BadRecords
from gazette_sdk.shard.transaction.machine import Action, Current, Prior, TransactionMachine
from gazette_sdk.shard.transaction.transaction import Transaction
from gazette_sdk.testing.handler_runs import MemoryOutput

TICK_S = 1 / 1024
"""Unit of virtual time: sums of its multiples are exact, and nearly a millisecond."""


@dataclass(frozen=True)
class Message:
    """A message of the input. Times are in ticks.

    Attributes:
        arrives_at: when it can be polled.
        cost: time that its handler takes.
        is_pending: behind it a sequence is open whose acknowledgement was not read.
        defers: its handler defers it, unless it is the first of its transaction.
    """

    arrives_at: int
    cost: int
    is_pending: bool
    defers: bool


@dataclass(frozen=True)
class Settings:
    """Settings of a run. Times are in ticks; commits and acknowledgements take turns."""

    min_ticks: int
    max_ticks: int
    waits_for_acks: bool
    overlaps_commit: bool
    batch_count: int
    commits: tuple[int, ...]
    acknowledgements: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """A transaction: its messages, and when it began and started to commit."""

    messages: tuple[int, ...]
    began: int
    started: int


# ------------------------------------------------------------------ the oracle


def oracle(messages: list[Message], given: Settings) -> list[Made]:
    """The transactions that one message at a time makes."""
    made: list[Made] = []
    durations = zip(itertools.cycle(given.commits), itertools.cycle(given.acknowledgements))
    now = index = began = 0
    committed_at = acknowledged_at = -1
    current: list[int] = []
    is_reading = True
    while True:
        is_committing, has_prior = now < committed_at, now < acknowledged_at
        max_at, min_at = began + given.max_ticks, began + given.min_ticks
        is_reading = is_reading and not (current and now >= max_at)
        may_consume = is_reading and (given.overlaps_commit or not is_committing)
        has_more = index < len(messages)
        if may_consume and has_more and messages[index].arrives_at <= now:
            if messages[index].defers and current:
                is_reading = False
                continue
            began = began if current else now
            current.append(index)
            now += messages[index].cost
            index += 1
            continue
        is_pending = bool(current) and messages[current[-1]].is_pending
        events = [
            committed_at if is_committing else acknowledged_at if has_prior else math.inf,
            messages[index].arrives_at if may_consume and has_more else math.inf,
            min_at if current and now < min_at else math.inf,
            max_at if current and is_reading else math.inf,
        ]
        waits_for_ack = given.waits_for_acks and is_reading and is_pending
        if has_prior or not current or now < min_at or waits_for_ack:
            if min(events) == math.inf:
                return made
            now = max(now, int(min(events)))
            continue
        made.append(Made(tuple(current), began, now))
        commit, acknowledgement = next(durations)
        committed_at, acknowledged_at = now + commit, now + commit + acknowledgement
        current, is_reading = [], True


# ------------------------------------------------------------- what is tested


class Clock:
    """Virtual time, in whole ticks."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> float:
        return self.now * TICK_S


class Store:
    """A store of nothing."""

    is_full = False

    def begin(self) -> None:
        pass

    def start_commit(self, checkpoint: Checkpoint) -> list[object]:
        return []


class Feed:
    """The messages that have arrived, in batches."""

    on_undecodable = None
    ended = False

    def __init__(self, messages: list[Message], clock: Clock, batch_count: int) -> None:
        self._messages, self._clock, self._batch_count = messages, clock, batch_count
        self.polled = 0
        self.last: Message | None = None  # that was consumed, since the last checkpoint

    @property
    def has_pending(self) -> bool:
        return self.last is not None and self.last.is_pending

    @property
    def next_arrival(self) -> int | None:
        left = self._messages[self.polled :]
        return left[0].arrives_at if left else None

    def poll(self) -> list[Envelope[int]] | None:
        arrived = [
            Envelope("a/journal", number, number + 1, number)
            for number, message in enumerate(self._messages[self.polled :], self.polled)
            if message.arrives_at <= self._clock.now
        ][: self._batch_count]
        self.polled += len(arrived)
        return arrived or None

    def checkpoint(self, left: int) -> Checkpoint:
        self.last = None
        return Checkpoint({"a/journal": self.polled - left})


class Run:
    """The machine and its consumer, driven as a runner does, on a virtual clock."""

    def __init__(self, messages: list[Message], given: Settings) -> None:
        self.clock = Clock()
        self.feed = Feed(messages, self.clock, given.batch_count)
        self.machine = TransactionMachine(
            min_s=given.min_ticks * TICK_S,
            max_s=given.max_ticks * TICK_S,
            waits_for_acks=given.waits_for_acks,
            overlaps_commit=given.overlaps_commit,
        )
        self._messages, self._given = messages, given
        self._current: list[int] = []
        application = shard.handler(message=list, store=shard.JsonStore)(self._handle)
        output = MemoryOutput()
        txn = Transaction(shard.Shard("s", cpb.ShardSpec(), None, "s"), Store(), output)
        self.consumer = MessageConsumer(
            application,
            txn,
            output,
            self.machine,
            recorder=None,
            bad=BadRecords("fail"),
            on_step=lambda _step: None,
        )
        self.consumer.read(self.feed)

    def _handle(self, txn: Transaction[object], number: int) -> None:
        message = self._messages[number]
        if message.defers and self._current:
            txn.defer()
        if self._current:
            assert self.machine.began + self._given.max_ticks * TICK_S > self.clock.monotonic()
        assert self._given.overlaps_commit or self.machine.prior is not Prior.COMMITTING
        self._current.append(number)
        self.feed.last = message
        self.clock.now += message.cost

    def made(self) -> list[Made]:
        """Run to the end, and return the transactions."""
        made: list[Made] = []
        durations = zip(
            itertools.cycle(self._given.commits), itertools.cycle(self._given.acknowledgements)
        )
        machine, clock = self.machine, self.clock
        prior_ends: list[int] = []
        machine.available = True
        is_awaited = False
        while True:
            while prior_ends and prior_ends[0] <= clock.now:
                prior_ends.pop(0)
                if machine.prior is Prior.COMMITTING:
                    machine.committed()
                else:
                    machine.acknowledged()
            arrival = self.feed.next_arrival
            if is_awaited and arrival is not None and arrival <= clock.now:
                is_awaited, machine.available = False, True
            decision = machine.decide(clock.monotonic())
            if decision.action is not Action.WAIT:
                assert decision.action in {Action.CONSUME, Action.START_COMMIT}
                prepared = self.consumer.turn()
                if prepared is not None:
                    assert machine.prior is Prior.NONE
                    began = int(machine.began / TICK_S)
                    made.append(Made(tuple(self._current), began, clock.now))
                    assert prepared.checkpoint.offsets == {"a/journal": self._current[-1] + 1}
                    self._current = []
                    machine.commit_started()
                    commit, acknowledgement = next(durations)
                    prior_ends = [clock.now + commit, clock.now + commit + acknowledgement]
                continue
            is_awaited = is_awaited or decision.waits_for_input
            events = [] if not prior_ends else [prior_ends[0]]
            if is_awaited and arrival is not None:
                events.append(arrival)
            if decision.until is not None:
                events.append(int(decision.until / TICK_S))
            if not events:
                assert machine.current is Current.EMPTY
                return made
            clock.now = max(clock.now, min(events))


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 5, 40]),  # behind the last arrival
        st.sampled_from([0, 0, 1, 3, 25, 70]),
        st.booleans(),
        st.sampled_from([False, False, False, False, True]),
    ),
    max_size=25,
)
SETTINGS = st.builds(
    Settings,
    min_ticks=st.sampled_from([0, 0, 10, 60]),
    max_ticks=st.sampled_from([1, 20, 50, 1000]),
    waits_for_acks=st.booleans(),
    overlaps_commit=st.booleans(),
    batch_count=st.sampled_from([1, 3, 100]),
    commits=st.lists(st.sampled_from([0, 1, 15, 90]), min_size=1, max_size=3).map(tuple),
    acknowledgements=st.lists(st.sampled_from([0, 2, 30]), min_size=1, max_size=3).map(tuple),
)


@settings(max_examples=200, deadline=None)
@given(MESSAGES, SETTINGS)
def test_transactions_are_those_of_one_message_at_a_time(drawn, chosen):
    arrivals = itertools.accumulate(gap for gap, *_ in drawn)
    messages = [Message(at, *rest) for at, (_, *rest) in zip(arrivals, drawn, strict=True)]
    run = Run(messages, chosen)
    with mock.patch.object(consume, "time", run.clock):
        made = run.made()
    assert made == oracle(messages, chosen)
    assert [n for each in made for n in each.messages] == list(range(len(messages)))
