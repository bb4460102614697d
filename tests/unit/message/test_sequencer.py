"""The sequencer: scenarios of the conformance vectors, its table of states, and its bounds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gazette_sdk.errors import FramingError
from gazette_sdk.message import sequencer as sequencer_module
from gazette_sdk.message import sequencer as state
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState
from gazette_sdk.message.runs import Message
from gazette_sdk.message.sequencer import ReplayRange, Sequencer
from gazette_sdk.message.uuid import clock_of_unix_ns
from support.sequencing import (
    UNKNOWN,
    A,
    C,
    J,
    O,
    P,
    Q,
    at,
    deliveries,
    feed,
    history,
    items,
    states,
    with_open,
)
from support.vectors import cases, group

# ------------------------------------------------------------------- vectors


def _vector_message(given: dict[str, Any]) -> Message[str]:
    # Any distinct ids do; the message without UUID has none.
    producer = 0 if given["producer"] == "ZERO" else 0x010000000000 + ord(given["producer"])
    return Message(
        given["journal"],
        given["begin"],
        given["end"],
        producer,
        given.get("clock", 0),
        given.get("flags", 0),
        given["id"],
    )


@pytest.mark.parametrize("scenario", group("message", "sequencer"), ids=lambda s: s["name"])
def test_scenarios_go_as_recorded(scenario):
    by_id = {given["id"]: _vector_message(given) for given in scenario["messages"]}
    letters = {by_id[m["id"]].producer: m["producer"] for m in scenario["messages"]}
    sequencers: dict[str, Sequencer[str]] = {"": Sequencer(scenario["ring_buffer"])}
    replayed: dict[str, list[str]] = {"": []}
    saved: dict[str, Checkpoint] = {}
    for step in scenario["steps"]:
        name = step.get("seq", "")
        sequencer = sequencers.get(name)
        match step["op"]:
            case "queue":
                assert sequencer.queue(by_id[step["msg"]]) == step["expect"]
            case "has_pending":
                assert sequencer.has_pending == step["expect"]
            case "offsets":
                assert sequencer.offsets == step["expect"]
            case "nothing_to_dequeue":
                assert sequencer.step() is None
            case "replay":
                wanted = (step["expect_journal"], step["expect_begin"], step["expect_end"])
                assert sequencer.replay == wanted
                for served in step["serve"]:
                    if sequencer.offer(by_id[served]):
                        replayed[name].append(served)
                sequencer.end_replay()
            case "dequeue_all":
                dequeued = replayed[name]
                replayed[name] = []
                while (ready := sequencer.step()) is not None:
                    dequeued.append(ready.item)
                assert dequeued == step["expect"]
            case "checkpoint":
                found = sequencer.checkpoint(step.get("prune_horizon_ns", 0) / 1e9)
                assert found.offsets == step["expect_offsets"]
                numbers = {letter: number.to_bytes(6, "big") for number, letter in letters.items()}
                recorded = {
                    (s["journal"], numbers[s["producer"]], s["last_ack"], s["begin"])
                    for s in step["expect_states"]
                }
                is_pruned = "prune_horizon_ns" in step
                before = saved.get("", Checkpoint()) if is_pruned else Checkpoint()
                assert states(found) == with_open(recorded, before)
                saved[step.get("save_as", "")] = found
            case "restore":
                sequencers[name] = Sequencer(step["ring"], checkpoint=saved[step["from"]])
                replayed[name] = []
            case "states":
                for expected in step["expect"]:
                    known = sequencer._journals["test/journal"].producers[
                        0x010000000000 + ord(expected["producer"])
                    ]
                    assert known.min == expected["min_clock"]
                    assert known.max == expected["max_clock"]
                    assert known.begin == expected["begin"]
                    assert bool(known.span) == (expected["ring_start"] != -1)
            case "ring":
                assert len(sequencer._ring) == len(step["expect"])
            case other:
                pytest.fail(f"unknown step {other}")


def _due_for_replay() -> tuple[Sequencer[str], Message[str]]:
    """A sequencer which must read [102, 204) again, and the message there."""
    a1 = Message("test/journal", 102, 202, P, 2, C, "a2")
    sequencer: Sequencer[str] = Sequencer(1)
    sequencer.queue(a1)
    sequencer.queue(Message("test/journal", 204, 304, P, 3, A, "a3"))
    assert sequencer.replay == ("test/journal", 102, 204)
    return sequencer, a1


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in cases("message", "sequencer_replay_errors")
        if "returns the error" not in case.values[0]["replay_iterator"]
    ],
)
def test_replays_that_leave_their_range_are_refused(case):
    sequencer, message = _due_for_replay()
    text = case["replay_iterator"]
    if "wrong/journal" in text:
        message = message._replace(journal="wrong/journal")
    else:
        assert "end increased by 100 (302)" in text
        message = message._replace(end=message.end + 100)
    with pytest.raises(FramingError) as caught:
        sequencer.offer(message)
    assert str(caught.value) == case["first_step_error"]
    assert caught.value.journal == "test/journal"
    assert caught.value.offset == message.begin


def test_replays_that_begin_too_early_are_refused():
    sequencer, message = _due_for_replay()
    with pytest.raises(FramingError, match=r"wrong Begin \(101; expected >= 102\)"):
        sequencer.offer(message._replace(begin=101))


# ------------------------------------------------------- the table of states

# State by name: (min, max, begin, messages in the ring) of producer P before a message at 900.
IDLE = (10, 10, -1, 0)
OPEN = (10, 20, 100, 2)
EVICTED = (10, 20, 100, 0)
CUT = (10, 20, 100, 1)
RESTORED = (10, 10, 100, 0)

TABLE = [
    # state, flags, clock, outcome, (min, max, begin) once all is delivered, delivered clocks
    (IDLE, O, 9, "outsideAlreadyAcked", (10, 10, -1), []),
    (IDLE, O, 10, "outsideAlreadyAcked", (10, 10, -1), []),
    (IDLE, O, 11, "outsideCommit", (11, 11, -1), [11]),
    (IDLE, UNKNOWN, 10, "outsideAlreadyAcked", (10, 10, -1), []),
    (IDLE, UNKNOWN, 11, "outsideCommit", (11, 11, -1), [11]),
    (IDLE, C, 9, "continueAlreadyAcked", (10, 10, -1), []),
    (IDLE, C, 10, "continueAlreadyAcked", (10, 10, -1), []),
    (IDLE, C, 11, "continueBeginSpan", (10, 11, 900), []),
    (IDLE, A, 9, "ackRollback", (9, 9, -1), []),
    (IDLE, A, 10, "ackRollback", (10, 10, -1), []),
    (IDLE, A, 11, "ackEmpty", (11, 11, -1), [11]),
    (OPEN, O, 10, "outsideAlreadyAcked", (10, 20, 100), []),
    (OPEN, O, 11, "outsideCommit", (11, 11, -1), [11]),
    (OPEN, O, 21, "outsideCommit", (21, 21, -1), [21]),
    (OPEN, UNKNOWN, 21, "outsideCommit", (21, 21, -1), [21]),
    (OPEN, C, 10, "continueAlreadyAcked", (10, 20, 100), []),
    (OPEN, C, 11, "continueRingClockLarger", (10, 20, 100), []),
    (OPEN, C, 20, "continueRingClockLarger", (10, 20, 100), []),
    (OPEN, C, 21, "continueExtendSpan", (10, 21, 100), []),
    (OPEN, A, 9, "ackRollback", (9, 9, -1), []),
    (OPEN, A, 10, "ackRollback", (10, 10, -1), []),
    (OPEN, A, 14, "ackCommitRing", (14, 14, -1), [14]),
    (OPEN, A, 16, "ackCommitRing", (16, 16, -1), [15, 16]),
    (OPEN, A, 20, "ackCommitRing", (20, 20, -1), [15, 20]),
    (OPEN, A, 21, "ackCommitRing", (21, 21, -1), [15, 20, 21]),
    (CUT, O, 21, "outsideCommit", (21, 21, -1), [21]),
    (CUT, C, 20, "continueRingClockLarger", (10, 20, 100), []),
    (CUT, C, 21, "continueExtendSpan", (10, 21, 100), []),
    (CUT, A, 10, "ackRollback", (10, 10, -1), []),
    (CUT, A, 16, "ackCommitReplay", (16, 16, -1), [15, 16]),
    (CUT, A, 21, "ackCommitReplay", (21, 21, -1), [15, 20, 21]),
    (EVICTED, O, 21, "outsideCommit", (21, 21, -1), [21]),
    (EVICTED, C, 20, "continueRingClockLarger", (10, 20, 100), []),
    (EVICTED, C, 21, "continueExtendSpan", (10, 21, 100), []),
    (EVICTED, A, 10, "ackRollback", (10, 10, -1), []),
    (EVICTED, A, 16, "ackCommitReplay", (16, 16, -1), [15, 16]),
    (EVICTED, A, 20, "ackCommitReplay", (20, 20, -1), [15, 20]),
    (EVICTED, A, 21, "ackCommitReplay", (21, 21, -1), [15, 20, 21]),
    (RESTORED, O, 11, "outsideCommit", (11, 11, -1), [11]),
    (RESTORED, C, 10, "continueAlreadyAcked", (10, 10, 100), []),
    (RESTORED, C, 15, "continueExtendSpan", (10, 15, 100), []),
    (RESTORED, A, 9, "ackRollback", (9, 9, -1), []),
    (RESTORED, A, 21, "ackCommitReplay", (21, 21, -1), [15, 20, 21]),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}, {row[1]}, {row[2]}")
def test_every_state_takes_every_message_as_the_table_says(row):
    state, flags, clock, outcome, after, clocks = row
    low, _, begin, kept = state
    sequence = [at(1, 15, C), at(2, 20, C)]
    sequencer: Sequencer[str] = Sequencer(
        3, checkpoint=Checkpoint({J: 100}, [ProducerState(J, P.to_bytes(6, "big"), low, -1)])
    )
    if begin != -1:
        for message in sequence:
            sequencer.queue(message)
        # Others fill the slot that is left, then take those of the sequence.
        others = {2: 0, 1: 2, 0: 3}[kept]
        assert (
            len(list(feed(sequencer, {}, (at(3 + i, 1, O, Q + i) for i in range(others)))))
            == others
        )
    if state is RESTORED:
        sequencer = Sequencer(3, checkpoint=sequencer.checkpoint())
    known = sequencer._journals[J].producers[P]
    assert (known.min, known.max, known.begin, len(known.span or ())) == state

    message = at(9, clock, flags)
    before = dict(sequencer.offsets)
    assert sequencer.queue(message) == outcome
    if sequencer.delivering:
        assert sequencer.offsets == before
    assert (sequencer.replay is not None) == (outcome == "ackCommitReplay")
    delivered = list(deliveries(sequencer, {J: [*sequence, message]}))
    assert [ready.clock for ready in delivered] == clocks
    assert sequencer.offsets == {J: 1000}
    known = sequencer._journals[J].producers[P]
    assert (known.min, known.max, known.begin) == after
    assert known.begin != -1 or not known.span
    assert not sequencer.delivering


def _documented() -> dict[tuple[str, str, bool], str]:
    """The table of the module's docstring: by message, clock and openness, the decision."""
    _, _, rows, _ = re.split(r"\n=[= ]+\n", sequencer_module.__doc__)
    found = {}
    for row in rows.splitlines():
        message, clock, idle, is_open = re.split(r"  +", row)
        found[message, clock, False], found[message, clock, True] = idle, is_open
    return found


def test_the_docstring_says_the_same():
    documented, seen = _documented(), set()
    for (low, high, begin, _), flags, clock, outcome, after, _ in TABLE:
        message = {C: "continue", A: "acknowledge"}.get(flags, "outside")
        if clock <= low:
            place = "up to min"
        elif message != "continue":
            place = "after min"
        else:
            place = "min to max" if clock <= high else "after max"
        decision = documented[message, place, begin != -1]
        assert outcome in re.findall(r"\w+", decision)
        assert ("discards" in decision) == (
            begin != -1 and after[2] == -1 and not outcome.startswith("ackCommit")
        )
        seen.add((message, place, begin != -1))
    assert documented.keys() - seen == {("continue", "min to max", False)}, "max is min"


def test_producers_seen_first_are_accepted_whatever_their_clock():
    for flags, outcome in ((O, "outsideCommit"), (C, "continueBeginSpan"), (A, "ackEmpty")):
        assert Sequencer().queue(at(0, (1 << 64) - 1, flags)) == outcome
        assert Sequencer().queue(at(0, 1, flags)) == outcome


@pytest.mark.parametrize("flags", [O, C, A, UNKNOWN])
def test_messages_without_uuid_are_always_delivered_and_leave_no_trace(flags):
    sequencer: Sequencer[str] = Sequencer()
    for index in range(3):
        assert sequencer.queue(at(index, 0, flags, 0)) == "outsideCommit"
        assert items(deliveries(sequencer, {})) == [f"{index}"]
        assert sequencer.offsets == {J: index * 100 + 100}
    assert sequencer.checkpoint() == Checkpoint({J: 300}, [])


def test_messages_without_uuid_are_not_replayed_as_those_of_the_zero_producer():
    messages = history((10, C, 0), (0, O, 0), (20, A, 0))
    sequencer: Sequencer[str] = Sequencer(1)
    assert items(feed(sequencer, {J: messages}, messages)) == ["1", "0", "2"]


def test_journals_are_sequenced_by_themselves():
    messages = [at(0, 5, C), at(0, 6, C, journal="b"), at(1, 7, A, journal="b"), at(1, 6, A)]
    sequencer: Sequencer[str] = Sequencer()
    delivered = list(feed(sequencer, {}, messages))
    assert [(message.journal, message.begin) for message in delivered] == [
        ("b", 0),
        ("b", 100),
        (J, 0),
        (J, 100),
    ]


# ------------------------------------------------------------------ the ring


def test_what_a_ring_of_bytes_gave_up_is_read_again():
    messages = history(*((clock, C) for clock in range(1, 10)), (10, A))
    sequencer: Sequencer[str] = Sequencer(ring_bytes_max=300)
    delivered = feed(sequencer, {J: messages}, messages[:-1])
    assert not list(delivered)
    assert len(sequencer._journals[J].producers[P].span or ()) == 4
    assert sequencer.queue(messages[-1]) == "ackCommitReplay"
    assert sequencer.replay == ReplayRange(J, 0, 600)
    assert items(deliveries(sequencer, {J: messages})) == [f"{index}" for index in range(10)]
    assert sequencer._ring_bytes == 0


def test_a_message_longer_than_the_ring_of_bytes_is_kept_until_the_next():
    messages = history((1, C), (2, A))
    sequencer: Sequencer[str] = Sequencer(ring_bytes_max=1)
    sequencer.queue(messages[0])
    assert sequencer.queue(messages[1]) == "ackCommitRing"
    assert items(deliveries(sequencer, {})) == ["0", "1"]


def test_bytes_are_counted_whatever_becomes_of_messages():
    messages = history(
        (10, C), (20, C), (15, A), (30, C), (15, A), (40, C), (50, O), (60, C), (70, C, Q), (80, A)
    )
    for ring in range(1, 6):
        sequencer: Sequencer[str] = Sequencer(ring)
        for message in messages:
            list(feed(sequencer, {J: messages}, [message]))
            spans = (p.span or () for p in sequencer._journals[J].producers.values())
            kept = sum(len(span) for span in spans)
            assert sequencer._ring_bytes == 100 * kept
            assert len(sequencer._ring) <= ring


def test_a_ring_has_at_least_one_slot():
    for size in (0, -5):
        sequencer: Sequencer[str] = Sequencer(size)
        messages = history((1, C), (2, A))
        assert sequencer.queue(messages[0]) == "continueBeginSpan"
        assert sequencer.queue(messages[1]) == "ackCommitReplay"


# ------------------------------------------------------------- wrong use


def test_nothing_is_queued_while_a_sequence_is_delivered():
    sequencer: Sequencer[str] = Sequencer()
    sequencer.queue(at(0, 1, O))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="step"):
            sequencer.queue(at(1, 2, O))
        sequencer.step()
    assert sequencer.step() is None
    sequencer.queue(at(1, 2, O))


def test_what_must_be_read_again_cannot_be_left_out():
    sequencer, message = _due_for_replay()
    with pytest.raises(RuntimeError, match="read again first"):
        sequencer.step()
    assert sequencer.offer(message)
    sequencer.end_replay()
    assert sequencer.step() is not None
    assert sequencer.step() is None


def test_nothing_is_read_again_unasked():
    sequencer: Sequencer[str] = Sequencer()
    with pytest.raises(RuntimeError):
        sequencer.offer(at(0, 1, C))
    with pytest.raises(RuntimeError):
        sequencer.end_replay()
    assert sequencer.step() is None


# ------------------------------------------------------------- checkpoints


def test_a_checkpoint_within_the_first_message_does_not_lose_it():
    sequencer: Sequencer[str] = Sequencer()
    sequencer.offsets[J] = -1  # read from the write head on
    sequencer.queue(at(7, 1, O))
    assert sequencer.step() is not None
    assert sequencer.checkpoint().offsets == {J: 700}
    assert sequencer.checkpoint(outstanding_is_processed=True) == Checkpoint(
        {J: 800}, [ProducerState(J, P.to_bytes(6, "big"), 1, -1)]
    )


def test_the_message_that_is_out_counts_as_processed_if_asked():
    messages = history((10, C), (20, C), (30, C), (35, A))
    producer = P.to_bytes(6, "big")
    expected = {
        8: [(300, 10, 100), (300, 20, 200), (300, 30, 300), (400, 35, -1)],
        2: [(300, 10, 100), (300, 20, 200), (300, 30, 300), (400, 35, -1)],
    }
    for ring, rows in expected.items():
        sequencer: Sequencer[str] = Sequencer(ring)
        found = [
            sequencer.checkpoint(outstanding_is_processed=True)
            for _ in feed(sequencer, {J: messages}, messages)
        ]
        assert found == [
            Checkpoint({J: offset}, [ProducerState(J, producer, last, begin)])
            for offset, last, begin in rows
        ]


def test_a_processed_message_without_uuid_is_passed():
    sequencer: Sequencer[str] = Sequencer()
    sequencer.queue(at(0, 0, O, 0))
    sequencer.step()
    assert sequencer.checkpoint(outstanding_is_processed=True) == Checkpoint({J: 100}, [])
    assert sequencer.checkpoint().offsets == {J: 0}


def test_a_sequence_which_was_acknowledged_by_a_queued_clock_ends_behind_it():
    messages = history((10, C), (20, C), (20, A))
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, messages[:2]))
    sequencer.queue(messages[2])
    assert sequencer.step() is not None
    assert sequencer.step() is not None
    found = sequencer.checkpoint(outstanding_is_processed=True)
    assert found == Checkpoint({J: 300}, [ProducerState(J, P.to_bytes(6, "big"), 20, -1)])


def test_offsets_of_a_checkpoint_are_a_copy():
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, [at(0, 1, O)]))
    found = sequencer.checkpoint()
    list(feed(sequencer, {}, [at(1, 2, O)]))
    assert found.offsets == {J: 100}


def test_the_producer_being_delivered_is_not_forgotten():
    new, old = 1 << 50, 1 << 20
    sequencer: Sequencer[str] = Sequencer()
    messages = history((new, O, Q), (old, C), (old + 160, A))
    list(feed(sequencer, {}, messages[:2]))
    sequencer.queue(messages[2])
    assert sequencer.step() is not None
    found = sequencer.checkpoint(1.0)
    assert states(found) == {
        (J, P.to_bytes(6, "big"), old - 1, 100),
        (J, Q.to_bytes(6, "big"), new, -1),
    }
    restored: Sequencer[str] = Sequencer(checkpoint=found)
    assert items(feed(restored, {J: messages}, messages[2:])) == ["1", "2"]
    assert items(deliveries(sequencer, {})) == ["2"]
    assert states(sequencer.checkpoint(1.0)) == {(J, Q.to_bytes(6, "big"), new, -1)}


@pytest.mark.parametrize("ring", [1, 8192])
def test_a_transaction_that_is_open_is_delivered_however_old_it_is(ring):
    sequencer: Sequencer[str] = Sequencer(ring)
    messages = history((160, C), (320, C), (1 << 50, O, Q), (480, A))
    journals = {J: messages}
    list(feed(sequencer, journals, messages[:3]))
    restored: Sequencer[str] = Sequencer(ring, checkpoint=sequencer.checkpoint(1.0))
    for each in (sequencer, restored):
        assert items(feed(each, journals, messages[3:])) == ["0", "1", "3"]


NOW_S = 1_800_000_000


def _clock(seconds: float) -> int:
    return clock_of_unix_ns(round((NOW_S + seconds) * 1e9))


@pytest.mark.parametrize(
    ("age_s", "ahead_s", "is_kept"),
    [
        (3600 - 1, 0, True),
        (3600 + 1, 0, False),  # an hour of the newest of the journal
        (3600 + 299, 300, False),  # a clock that is a little ahead counts
        (3600 - 301, 400 * 86400, True),  # and a wrong one as much as that
        (3600 - 299, 400 * 86400, False),
        (3600 - 1, 400 * 86400, False),
        (10, 400 * 86400, True),
    ],
)
def test_a_clock_ahead_of_this_machine_ages_the_others_by_minutes_only(age_s, ahead_s, is_kept):
    sequencer: Sequencer[str] = Sequencer(time_ns=lambda: NOW_S * 10**9)
    first, newest = history((_clock(-age_s), O), (_clock(ahead_s), O, Q))
    list(feed(sequencer, {}, [first, newest]))
    restored: Sequencer[str] = Sequencer(checkpoint=sequencer.checkpoint(3600.0))
    for each in (sequencer, restored):
        again = items(feed(each, {}, [at(2, first.clock, O)]))
        assert again == ([] if is_kept else ["2"])


def test_a_journal_keeps_a_number_of_producers_and_all_with_an_open_transaction(monkeypatch):
    monkeypatch.setattr(state, "PRODUCERS_MAX", 3)
    sequencer: Sequencer[str] = Sequencer(time_ns=lambda: NOW_S * 10**9)
    stamps = [(_clock(i), C, 0x10 + i) for i in range(5)]
    stamps += [(_clock(i), O, 0x20 + i) for i in range(5)]
    stamps += [(_clock(86400 + i), O, 0x30 + i) for i in range(5)]
    messages = history(*stamps)
    list(feed(sequencer, {}, messages))
    kept = {int.from_bytes(s.producer, "big") for s in sequencer.checkpoint().producers}
    # The oldest go first; before them those whose clocks are ahead, as these never age.
    assert kept == {*range(0x10, 0x15), *range(0x22, 0x25)}
    assert set(sequencer._journals[J].producers) == kept


def test_many_open_transactions_are_kept_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(sequencer_module, "PRODUCERS_MAX", 2)
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, history(*((160, C, number) for number in range(1, 6)))))
    assert len(sequencer.checkpoint(1.0).producers) == 5
    assert "more than 2 producers have an open transaction" in caplog.text


def test_a_producer_is_as_new_as_what_is_queued_of_it():
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, history((16 * 100, C), (16 * 300, C), (16 * 250, O, Q), (160, O, 7))))
    # Ten units of 100 ns before the newest that was delivered.
    assert states(sequencer.checkpoint(1e-6)) == {
        (J, P.to_bytes(6, "big"), 16 * 100 - 1, 0),
        (J, Q.to_bytes(6, "big"), 16 * 250, -1),
    }


def test_a_horizon_beyond_all_clocks_forgets_nobody():
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, history((1, O), (500, O, Q))))
    assert len(sequencer.checkpoint(24 * 3600.0).producers) == 2


def test_pending_means_sequences_begun_since_the_last_checkpoint():
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, [at(0, 1, C)]))
    assert sequencer.has_pending
    sequencer.checkpoint()
    assert not sequencer.has_pending
    list(feed(sequencer, {}, [at(1, 2, C)]))
    assert not sequencer.has_pending
    list(feed(sequencer, {}, [at(2, 3, A), at(3, 4, C)]))
    assert sequencer.has_pending
    list(feed(sequencer, {}, [at(4, 3, A)]))
    assert not sequencer.has_pending


def test_pruning_forgets_producers_and_leaves_open_sequences_pending():
    sequencer: Sequencer[str] = Sequencer()
    old, idle, new = history((160, C), (160, O, 7), (160 * 10**9, C, Q))
    list(feed(sequencer, {}, [old, idle]))
    sequencer.prune(1.0)
    assert sequencer.has_pending
    assert list(sequencer._journals[J].producers) == [P, 7]
    list(feed(sequencer, {}, [new]))
    sequencer.prune(1.0)
    assert sequencer.has_pending
    assert list(sequencer._journals[J].producers) == [P, Q]
    list(feed(sequencer, {}, [at(3, 160 * 10**9, A, Q)]))
    assert sequencer.has_pending, "another one is open, and no checkpoint was taken since"


def test_upcoming_messages_are_those_of_the_next_steps():
    sequencer: Sequencer[str] = Sequencer()
    assert sequencer.upcoming() == []
    for message in history((1, C), (2, C), (3, A)):
        sequencer.queue(message)
    assert items(sequencer.upcoming()) == ["0", "1", "2"]
    assert sequencer.step().item == "0"
    assert items(sequencer.upcoming()) == ["1", "2"]
    assert items([sequencer.step(), sequencer.step()]) == ["1", "2"]
    assert sequencer.upcoming() == []


def test_upcoming_messages_follow_those_that_are_read_again():
    sequencer: Sequencer[str] = Sequencer(1)
    written = history((1, C), (2, C), (3, A))
    for message in written:
        sequencer.queue(message)
    with pytest.raises(RuntimeError, match="read again"):
        sequencer.upcoming()
    assert [sequencer.offer(message) for message in written[:2]] == [True, True]
    assert sequencer.position == (2, 3, 200)
    sequencer.end_replay()
    assert items(sequencer.upcoming()) == ["2"]
    assert sequencer.position == (2, 3, 200)


def test_a_forgotten_journal_begins_anew():
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, [at(0, 5, C), at(0, 5, C, journal="b")]))
    sequencer.forget(J)
    sequencer.forget("never/seen")
    assert sequencer.offsets == {"b": 100}
    assert sequencer.has_pending
    assert sequencer._ring_bytes == 100
    assert items(feed(sequencer, {}, [at(0, 4, C), at(1, 5, A)])) == ["0", "1"]


@pytest.mark.parametrize("stepped", [False, True])
def test_a_journal_may_be_forgotten_while_it_is_delivered(stepped):
    messages = history((1, C), (2, A))
    sequencer: Sequencer[str] = Sequencer()
    for message in messages:
        sequencer.queue(message)
    assert not stepped or sequencer.step() is not None
    sequencer.forget(J)
    assert not sequencer.delivering
    assert sequencer.step() is None
    assert sequencer.checkpoint() == Checkpoint()
    assert sequencer._ring_bytes == 0
    assert items(feed(sequencer, {}, messages)) == ["0", "1"]
