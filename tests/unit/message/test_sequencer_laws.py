"""Laws of the sequencer: against a naive oracle, over histories that producers can write.

Producers write ascending clocks, in and outside of transactions; they die and are succeeded, which
rolls back or acknowledges a part; they append again what they appended before. Readers restart at
any point from a checkpoint, with rings of any size. Clocks of producers and readers may be wrong.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.runs import Message, Run
from gazette_sdk.message.sequencer import Sequencer
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, clock_of_unix_ns
from support.sequencing import content, deliveries, feed, run_of, states, unread

STEP = 10
UNKNOWN = 0x9


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    """Histories are full of what is worth a warning."""
    log = logging.getLogger("gazette_sdk.message.sequencer")
    log.disabled = True
    yield
    log.disabled = False


Stamp = tuple[int, int, int]
"""Producer, clock, flags."""


# ------------------------------------------------------------- the oracle


def oracle(messages: list[Message[int]]) -> list[int]:
    """Items delivered of one journal: keeps every message, sorts, and decides."""
    delivered: list[int] = []
    floors: dict[int, int] = {}
    kept: dict[int, list[Message[int]]] = defaultdict(list)
    for message in messages:
        producer, clock = message.producer, message.clock
        floor = floors.setdefault(producer, clock - 1)
        if clock == 0:
            delivered.append(message.item)
        elif message.flags == CONTINUE_TXN:
            if clock > floor:
                kept[producer].append(message)
        elif message.flags == ACK_TXN:
            once: dict[int, Message[int]] = {}
            for older in [*kept.pop(producer, []), message]:
                if floor < older.clock <= clock:
                    once.setdefault(older.clock, older)
            delivered += [once[at].item for at in sorted(once)]
            floors[producer] = clock
        elif clock > floor:
            kept.pop(producer, None)
            delivered.append(message.item)
            floors[producer] = clock
    return delivered


# ----------------------------------------------------------- the histories


@dataclass
class Writer:
    """One producer of one journal, and all who succeed it under its id."""

    producer: int
    written: list[Stamp]
    clock: int = 0
    acknowledged: int = 0
    open: list[int] = field(default_factory=list)
    repeatable: list[Stamp] = field(default_factory=list)

    def write(self, clock: int, flags: int) -> None:
        """Writes one message. What an acknowledgement dropped is never appended again."""
        stamp = (self.producer, clock, flags)
        self.written.append(stamp)
        if flags == ACK_TXN:
            is_whole = clock > max([self.acknowledged, *self.open])
            self.repeatable = [*self.repeatable, stamp] if is_whole else [stamp]
            self.open.clear()
            self.acknowledged = clock
            return
        self.repeatable.append(stamp)
        if clock > self.acknowledged:
            if flags == CONTINUE_TXN:
                self.open.append(clock)
            else:
                self.open.clear()
                self.acknowledged = clock

    def tick(self) -> int:
        self.clock += STEP
        return self.clock

    def act(self, action: str, count: int) -> None:
        match action:
            case "continue":
                for _ in range(count):
                    self.write(self.tick(), CONTINUE_TXN)
            case "transaction":
                for _ in range(count):
                    self.write(self.tick(), CONTINUE_TXN)
                self.write(self.tick(), ACK_TXN)
            case "acknowledge":
                self.write(self.tick(), ACK_TXN)
            case "outside":
                for _ in range(count):
                    self.write(self.tick(), OUTSIDE_TXN)
            case "unknown":
                self.write(self.tick(), UNKNOWN)
            case "partial" | "equal" if self.open:
                at = self.open[min(count, len(self.open)) - 1]
                self.clock = at + (STEP // 2 if action == "partial" else 0)
                self.write(self.clock, ACK_TXN)
            case "rollback" if self.acknowledged:
                self.clock = self.acknowledged
                self.write(self.clock, ACK_TXN)
            case "reset" if self.acknowledged > STEP:
                self.clock = self.acknowledged - count % STEP - 1
                self.write(self.clock, ACK_TXN)
            case "repeat" if self.repeatable:
                for _, clock, flags in self.repeatable[-count:]:
                    self.write(clock, flags)
            case "zero":
                self.written.append((0, 0, count % 4))
            case _:
                self.write(self.tick(), CONTINUE_TXN)


ACTIONS = (
    "continue",
    "transaction",
    "acknowledge",
    "outside",
    "unknown",
    "partial",
    "equal",
    "rollback",
    "reset",
    "repeat",
    "zero",
)
PLAIN = ("transaction", "outside", "transaction", "outside", "zero", "acknowledge")

acts = st.tuples(st.integers(0, 2), st.sampled_from(ACTIONS), st.integers(1, 6), st.integers(0, 9))
plain_acts = st.tuples(
    st.integers(0, 3), st.sampled_from(PLAIN), st.integers(1, 6), st.integers(0, 9)
)


def journal(
    name: str, chosen: list[Any], clocks: tuple[int, ...] = (0, 0, 0, 0)
) -> list[Message[int]]:
    """A journal's content: what writers, with clocks of their own, append, cut into each other."""
    writers: dict[int, Writer] = {}
    stamps: list[Stamp] = []
    for index, action, count, left in chosen:
        producer = 0x010000000000 + index * 0x1357
        waiting = writers.setdefault(producer, Writer(producer, [], clocks[index])).written
        writers[producer].act(action, count)
        # The rest of what it wrote is appended later, behind messages of others.
        cut = max(len(waiting) - left, 0)
        stamps += waiting[:cut]
        del waiting[:cut]
    for writer in writers.values():
        stamps += writer.written
    messages, begin = [], 0
    for item, (producer, clock, flags) in enumerate(stamps):
        begin += item % 3  # content that holds no message
        end = begin + 7 + clock % 5
        messages.append(Message(name, begin, end, producer, clock, flags, item))
        begin = end
    return messages


def histories(acts: Any = acts, size: int = 25) -> st.SearchStrategy[list[Any]]:
    return st.lists(acts, min_size=1, max_size=size)


rings = st.tuples(st.integers(1, 8) | st.just(8192), st.none() | st.integers(0, 100))


def sequencer_of(
    ring: tuple[int, int | None], checkpoint: Checkpoint | None, unix_s: float = 0
) -> Sequencer[int]:
    return Sequencer(
        ring[0],
        ring_bytes_max=ring[1],
        checkpoint=checkpoint,
        time_ns=lambda: round(unix_s * 1e9),
    )


def mixed(messages: list[Message[int]], seed: int) -> list[Message[int]]:
    """Messages of many journals, each journal's in order, as a reader may meet them."""
    by_journal: dict[str, list[Message[int]]] = defaultdict(list)
    for message in messages:
        by_journal[message.journal].append(message)
    order = [message.journal for message in messages]
    random.Random(seed).shuffle(order)
    waiting = {name: iter(listed) for name, listed in by_journal.items()}
    return [next(waiting[name]) for name in order]


def assert_delivered(
    delivered: list[Message[int]], journals: dict[str, list[Message[int]]]
) -> None:
    for name, messages in journals.items():
        assert [m.item for m in delivered if m.journal == name] == oracle(messages), name


# ---------------------------------------------------------------- the laws


@settings(max_examples=150)
@given(histories(), histories(), rings, st.integers(0, 1 << 16))
def test_what_is_delivered_is_what_the_oracle_says(first, second, ring, seed):
    journals = {"a": journal("a", first), "b": journal("b", second)}
    sequencer = sequencer_of(ring, None)
    delivered = list(feed(sequencer, journals, mixed([*journals["a"], *journals["b"]], seed)))
    assert_delivered(delivered, journals)
    assert sequencer.checkpoint().offsets == {
        name: messages[-1].end for name, messages in journals.items()
    }


restarts = st.lists(st.tuples(st.integers(1, 30), st.booleans(), rings), max_size=6)
runs = st.tuples(rings, restarts, st.integers(0, 1 << 16))


@settings(max_examples=300)
@given(histories(), histories(), rings, restarts, st.integers(0, 1 << 16))
def test_readers_that_restart_deliver_everything_once(first, second, ring, restarts, seed):
    journals = {"a": journal("a", first), "b": journal("b", second)}
    assert_delivered(read_with_restarts(journals, ring, restarts, seed), journals)


def read_with_restarts(
    journals: dict[str, list[Message[int]]],
    ring: tuple[int, int | None],
    restarts: list[Any],
    seed: int,
    *,
    unix_s: float = 0,
    horizon_s: float = 0,
) -> list[Message[int]]:
    """What readers deliver, each of which begins at the checkpoint of the one before."""
    delivered: list[Message[int]] = []
    checkpoint = Checkpoint()
    for events, is_processed, next_ring in [*restarts, (1 << 30, True, ring)]:
        checkpoint = read_until(
            sequencer_of(ring, checkpoint, unix_s),
            journals,
            mixed(unread(checkpoint, journals), seed),
            events,
            delivered,
            is_processed=is_processed,
            horizon_s=horizon_s,
        )
        ring, seed = next_ring, seed + 1
    return delivered


NOW_S = 1_800_000_000
HORIZON_S = 86400.0
DAYS = (-20_000, -400, -2, 2, 400, 20_000)
"""Days by which wrong clocks are wrong."""

right = st.integers(-3600, 240)
ahead = right | st.sampled_from(DAYS[3:]).map(lambda days: days * 86400)
wrong = ahead | st.sampled_from(DAYS[:3]).map(lambda days: days * 86400)


def clocks_of(clocks: Any) -> st.SearchStrategy[tuple[int, ...]]:
    """Clocks of four writers, from seconds by which they are wrong."""
    each = clocks.map(lambda seconds: clock_of_unix_ns((NOW_S + seconds) * 10**9))
    return st.tuples(each, each, each, each)


def journals_of(
    first: list[Any], second: list[Any], clocks: tuple[int, ...]
) -> dict[str, list[Message[int]]]:
    return {"a": journal("a", first, clocks), "b": journal("b", second, clocks[::-1])}


@settings(max_examples=300)
@given(
    histories(),
    histories(),
    runs,
    clocks_of(ahead),
    right | st.sampled_from(DAYS[:3]).map(lambda days: days * 86400),
)
def test_clocks_that_are_ahead_change_nothing(first, second, run, clocks, reader):
    """Neither do readers' clocks that are slow."""
    journals = journals_of(first, second, clocks)
    delivered = read_with_restarts(journals, *run, unix_s=NOW_S + reader, horizon_s=HORIZON_S)
    assert_delivered(delivered, journals)


ONCE = ("continue", "transaction", "acknowledge", "outside", "partial", "equal")
once_acts = st.tuples(
    st.integers(0, 3), st.sampled_from(ONCE), st.integers(1, 6), st.integers(0, 9)
)


@settings(max_examples=300)
@given(
    histories(once_acts),
    histories(once_acts),
    runs,
    clocks_of(wrong),
    wrong,
)
def test_wrong_clocks_lose_no_transaction(first, second, run, clocks, reader):
    """What is appended once is delivered once, however wrong clocks are."""
    journals = journals_of(first, second, clocks)
    delivered = read_with_restarts(journals, *run, unix_s=NOW_S + reader, horizon_s=HORIZON_S)
    assert_delivered(delivered, journals)


def read_until(
    sequencer: Sequencer[int],
    journals: dict[str, list[Message[int]]],
    messages: list[Message[int]],
    events: int,
    delivered: list[Message[int]],
    *,
    is_processed: bool,
    horizon_s: float = 0,
) -> Checkpoint:
    """Reads until so many messages were queued or delivered; returns the stored checkpoint."""
    for message in messages:
        sequencer.queue(message)
        for ready in deliveries(sequencer, journals):
            events -= 1
            if events or is_processed:
                delivered.append(ready)
            if not events:
                break
        else:
            events -= 1
        if events <= 0:
            break
        sequencer.prune(horizon_s)
    found = sequencer.checkpoint(horizon_s, outstanding_is_processed=is_processed)
    restored = Checkpoint.from_bytes(found.to_bytes())
    assert restored.offsets == found.offsets
    assert states(restored) == states(found)
    return restored


def feed_in_bulk(
    sequencer: Sequencer[int], run: Run[int], journals: dict[str, list[Message[int]]]
) -> list[Message[int]]:
    """What is delivered of a run: plain parts as they stand, the rest one by one."""
    delivered: list[Message[int]] = []
    messages = run.messages()
    at = 0
    while at < len(run):
        count = sequencer.plain_count(run, at)
        sequencer.commit_run(run, at, at + count)
        delivered += messages[at : at + count]
        at += count
        if at < len(run):
            delivered += feed(sequencer, journals, messages[at : at + 1])
            at += 1
    return delivered


@settings(max_examples=150)
@given(histories(), histories(acts | plain_acts), st.integers(1, 40), rings)
def test_plain_parts_in_bulk_leave_what_queueing_leaves(first, second, run_max, ring):
    journals = {"a": journal("a", first), "b": journal("b", second)}
    bulk = sequencer_of(ring, None)
    single: Sequencer[int] = Sequencer()
    at = dict.fromkeys(journals, 0)
    while any(at[name] < len(journals[name]) for name in journals):
        for name, messages in journals.items():
            part = messages[at[name] : at[name] + run_max]
            at[name] += len(part)
            if not part:
                continue
            expected = list(feed(single, journals, part))
            assert feed_in_bulk(bulk, run_of(part), journals) == expected
            assert known(bulk) == known(single)
            assert bulk.has_pending == single.has_pending
    if ring[0] == 8192 and ring[1] is None:
        for name in journals:
            counted, one_by_one = bulk._journals[name], single._journals[name]
            assert counted.counts == one_by_one.counts
            assert counted.unknown == one_by_one.unknown
            assert counted.uncounted == one_by_one.uncounted


def known(sequencer: Sequencer[int]) -> Any:
    """All that a sequencer knows but its ring."""
    return sequencer.offsets, {
        name: {number: (p.min, p.max, p.begin) for number, p in found.producers.items()}
        for name, found in sequencer._journals.items()
    }


@settings(max_examples=100)
@given(histories(), histories(plain_acts, 8), rings)
def test_a_checkpoint_within_a_plain_part_goes_on_exactly_there(first, second, ring):
    messages = journal("a", [*first, *second])
    journals = {"a": messages}
    run = run_of(messages)
    sequencer: Sequencer[int] = Sequencer()
    delivered: list[int] = []
    at = 0
    expected = oracle(messages)
    while at < len(run):
        count = sequencer.plain_count(run, at)
        before = known(sequencer)
        for taken in range(at, at + count + 1):
            found = sequencer.checkpoint_within(run, at, taken)
            assert known(sequencer) == before
            restored = sequencer_of(ring, Checkpoint.from_bytes(found.to_bytes()))
            rest = list(feed(restored, journals, unread(found, journals)))
            taken_items = [message.item for message in messages[at:taken]]
            assert [*delivered, *taken_items, *(m.item for m in rest)] == expected
        delivered += [message.item for message in messages[at : at + count]]
        sequencer.commit_run(run, at, at + count)
        if count:
            # In full, it is what a checkpoint says once all of it is committed.
            full = sequencer.checkpoint()
            assert found.offsets == full.offsets
            assert states(found) == states(full)
        at += count
        if at < len(run):
            delivered += [m.item for m in feed(sequencer, journals, messages[at : at + 1])]
            at += 1
    assert delivered == expected


@settings(max_examples=150)
@given(histories(), histories(), rings, st.integers(0, 1 << 16))
def test_finishing_a_sequence_leaves_what_its_steps_leave(first, second, ring, seed):
    """The positions within it are those of a sequencer that is stepped to there."""
    listed = {"one": journal("one", first), "two": journal("two", second)}
    stepped, finished = sequencer_of(ring, None), sequencer_of(ring, None)
    for message in mixed([*listed["one"], *listed["two"]], seed):
        assert stepped.queue(message) == finished.queue(message)
        assert stepped.replay == finished.replay
        if stepped.delivering is None:
            continue
        if stepped.replay is not None:
            for again in content(listed, stepped.replay):
                assert stepped.offer(again) == finished.offer(again)
            stepped.end_replay()
            finished.end_replay()
        upcoming = finished.upcoming()
        for processed in upcoming:
            assert stepped.step() == processed
            position = finished.position_behind(processed)
            assert position == stepped.position
            assert_same_checkpoint(
                stepped.checkpoint(outstanding_is_processed=True), finished.checkpoint_at(position)
            )
        assert stepped.step() is None
        finished.finish(upcoming)
        assert known(stepped) == known(finished)
        assert stepped.offsets == finished.offsets
        assert stepped.has_pending == finished.has_pending
        assert stepped._ring_bytes == finished._ring_bytes


def assert_same_checkpoint(one, other):
    assert one.offsets == other.offsets
    assert states(one) == states(other)


@given(histories(plain_acts), st.integers(0, 2), st.integers(0, 400))
def test_a_checkpoint_within_forgets_whom_a_checkpoint_forgets(chosen, cut, units):
    messages = journal("a", [(*act[:3], 0) for act in chosen])
    run = run_of(messages)
    start = len(messages) // 2 if cut else 0
    bulk: Sequencer[int] = Sequencer()
    list(feed(bulk, {}, messages[:start]))
    single: Sequencer[int] = Sequencer()
    list(feed(single, {}, messages[:start]))
    stop = start + bulk.plain_count(run, start)
    list(feed(single, {}, messages[start:stop]))
    horizon_s = units * 1e-7
    found = bulk.checkpoint_within(run, start, stop, horizon_s)
    expected = single.checkpoint(horizon_s)
    assert found.offsets == expected.offsets or start == stop
    assert states(found) == states(expected)


@given(histories(), st.integers(1, 8))
def test_replays_are_as_long_as_they_need_to_be(chosen, ring):
    messages = journal("a", chosen)
    sequencer: Sequencer[int] = Sequencer(ring)
    for message in messages:
        sequencer.queue(message)
        wanted = sequencer.replay
        if wanted is not None:
            assert wanted.begin < wanted.end <= message.begin
            again = content({"a": messages}, wanted)
            assert (again[0].begin, again[0].producer) == (wanted.begin, message.producer)
            # The range does not cut a message.
            assert all(m.end <= wanted.end or m.begin >= wanted.end for m in messages)
        list(deliveries(sequencer, {"a": messages}))
