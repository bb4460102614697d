"""Every decision over every combination of facts, every (state, input), and the vectors."""

from __future__ import annotations

import itertools
import math

import pytest

from gazette_sdk.shard.transaction.machine import (
    SLICE_S,
    Action,
    Current,
    Decision,
    Prior,
    TransactionMachine,
)
from support.vectors import group

MIN_S, MAX_S = 0.5, 2.0
BEGAN = 100.0
ERROR = RuntimeError("bad")


def new_machine(*, waits=True, overlaps=True, min_s=MIN_S, max_s=MAX_S):
    return TransactionMachine(
        min_s=min_s, max_s=max_s, waits_for_acks=waits, overlaps_commit=overlaps
    )


# --------------------------------------------------------- every decision

NOWS = {"before min": 100.1, "between": 101.0, "at max": 102.0, "behind max": 150.0}


def expected(m, now, waits, overlaps):
    """The rules in the words of the specification, written down a second time."""
    if m.failure is not None:
        if not m._aborts:
            return Action.FAIL
        return Action.ABORT if m.prior is Prior.NONE else Action.WAIT
    empty = m.current is Current.EMPTY
    reading = m.current is not Current.CLOSED and (empty or now < BEGAN + MAX_S)
    fires = m.timer_at <= now and (empty or not m.ended)
    if (m.available or fires) and reading and (overlaps or m.prior is not Prior.COMMITTING):
        return Action.CONSUME
    if empty and m.prior is Prior.NONE and m.ended:
        return Action.END
    must_block = (
        m.prior is not Prior.NONE
        or empty
        or now < BEGAN + MIN_S
        or (waits and reading and not m.ended and m.has_pending)
    )
    return Action.WAIT if must_block else Action.START_COMMIT


TIMERS = {"no timer": math.inf, "a timer due": BEGAN, "a later timer": 200.0}

COMBINATIONS = list(
    itertools.product(
        Current, Prior, NOWS, (False, True), (False, True), (False, True), (True, False),
        (True, False), (None, "fails", "aborts"), TIMERS,
    )
)  # fmt: skip


def test_every_combination_of_facts_is_decided_as_the_rules_say():
    for facts in COMBINATIONS:
        current, prior, when, available, pending, ended, waits, overlaps, failure, timer = facts
        machine = new_machine(waits=waits, overlaps=overlaps)
        machine.current, machine.prior, machine.began = current, prior, BEGAN
        machine.available, machine.has_pending, machine.ended = available, pending, ended
        machine.timer_at = TIMERS[timer]
        if failure:
            machine.failed(ERROR, aborts=failure == "aborts")
        wanted = expected(machine, NOWS[when], waits, overlaps)
        decision = machine.decide(NOWS[when])
        assert decision.action is wanted, facts
        check_wait(machine, decision, NOWS[when], facts)


def check_wait(machine, decision, now, facts):
    """A wait ends: something is waited for, and none of it holds already."""
    if decision.action is Action.CONSUME:
        assert now < decision.until <= now + SLICE_S, facts
    if decision.action is not Action.WAIT:
        return
    assert decision.waits_for_prior == (machine.prior is not Prior.NONE), facts
    assert decision.until is None or decision.until > now, facts
    assert not (decision.waits_for_input and (machine.available or machine.ended)), facts
    assert decision.waits_for_prior or decision.waits_for_input or decision.until, facts
    if machine.failure is None and (machine.current, machine.prior) == (Current.EMPTY, Prior.NONE):
        assert decision.until == (machine.timer_at if machine.timer_at < math.inf else None), facts
    if decision.is_idle:
        assert (machine.current, machine.prior) == (Current.EMPTY, Prior.NONE), facts


# --------------------------------------------------- every (state, input)


def at(current, prior, failure=None):
    machine = new_machine()
    machine.current, machine.prior, machine.began = current, prior, BEGAN
    if failure is not None:
        machine.failed(ERROR, aborts=failure)
    return machine


STATES = list(itertools.product(Current, Prior))


@pytest.mark.parametrize(("current", "prior"), STATES)
def test_every_input_in_every_state(current, prior):
    table = {
        "consumed": (Current.OPEN, prior) if current is Current.EMPTY else None,
        "close": (Current.CLOSED, prior) if current is not Current.EMPTY else None,
        "commit_started": (
            (Current.EMPTY, Prior.COMMITTING)
            if current is not Current.EMPTY and prior is Prior.NONE
            else None
        ),
        "committed": (current, Prior.ACKNOWLEDGING) if prior is Prior.COMMITTING else None,
        "acknowledged": (current, Prior.NONE) if prior is Prior.ACKNOWLEDGING else None,
        "recovered": (
            (current, Prior.ACKNOWLEDGING)
            if prior is Prior.NONE and current is Current.EMPTY
            else None
        ),
        "restarted": (Current.EMPTY, Prior.NONE) if prior is Prior.NONE else None,
    }
    for name, wanted in table.items():
        machine = at(current, prior)
        arguments = (BEGAN,) if name == "consumed" else ()
        if wanted is None:
            with pytest.raises(AssertionError):
                getattr(machine, name)(*arguments)
        else:
            getattr(machine, name)(*arguments)
            assert (machine.current, machine.prior) == wanted, name


@pytest.mark.parametrize(("current", "prior"), STATES)
@pytest.mark.parametrize("first", [None, True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_failure_that_ends_the_shard_prevails(current, prior, first, second):
    machine = at(current, prior, first)
    machine.failed(KeyError("second"), aborts=second)
    aborts = second if first is None else first and second
    action = machine.decide(BEGAN + 1).action
    if not aborts:
        assert action is Action.FAIL
    else:
        assert action is (Action.ABORT if prior is Prior.NONE else Action.WAIT)
    with pytest.raises(AssertionError):
        machine.commit_started()


def test_consuming_while_a_store_that_does_not_overlap_commits_is_refused():
    machine = new_machine(overlaps=False)
    machine.prior = Prior.COMMITTING
    with pytest.raises(AssertionError):
        machine.consumed(BEGAN)


# ----------------------------------------------------------------- vectors


def test_the_vectors_are_those_that_follow():
    sources = [
        case["source"].rpartition(":")[2] for case in group("message", "transactions")["scenarios"]
    ]
    assert sources == [
        "TestTxnPriorSyncsThenMinDurElapses",
        "TestTxnMinDurElapsesThenPriorSyncs",
        "TestTxnDoesntStartUntilFirstACK",
        "TestTxnReadChannelDrain",
        "TestTxnMaxDurWithinDequeueSequence",
        "TestAppDeferWithinDequeueSequence",
        "TestRunTxnsAppErrorCases",  # of the runner
    ]


def consume(machine, now):
    """Consume what is available, as a worker would."""
    machine.available = True
    decision = machine.decide(now)
    assert decision.action is Action.CONSUME
    if machine.current is Current.EMPTY:
        machine.consumed(now)
    machine.available = False


def test_prior_syncs_then_min_elapses():
    machine = new_machine(min_s=1.0, max_s=3.0)
    machine.prior = Prior.COMMITTING
    assert machine.decide(0.0).waits_for_prior
    machine.committed()
    machine.acknowledged()
    assert machine.decide(1.0).is_idle
    consume(machine, 2.0)
    assert machine.decide(2.0) == Decision(Action.WAIT, 3.0, waits_for_input=True)
    consume(machine, 2.5)
    assert machine.decide(2.5) == Decision(Action.WAIT, 3.0, waits_for_input=True)
    consume(machine, 3.0)
    assert machine.decide(3.0).action is Action.START_COMMIT


def test_min_elapses_then_prior_syncs():
    machine = new_machine(min_s=1.0, max_s=5.0)
    machine.prior = Prior.COMMITTING
    consume(machine, 2.0)
    consume(machine, 3.5)
    wanted = Decision(Action.WAIT, 7.0, waits_for_prior=True, waits_for_input=True)
    assert machine.decide(3.5) == wanted
    machine.committed()
    assert machine.decide(3.6) == wanted
    machine.acknowledged()
    consume(machine, 3.7)
    assert machine.decide(3.7).action is Action.START_COMMIT


def test_a_transaction_does_not_start_before_the_first_acknowledgement():
    machine = new_machine(min_s=1.0, max_s=3.0)
    machine.has_pending = True  # three messages whose acknowledgement was not read
    assert machine.decide(1.0) == Decision(Action.WAIT, waits_for_input=True, is_idle=True)
    machine.has_pending = False
    consume(machine, 2.0)
    machine.has_pending = True  # another one
    assert machine.decide(3.0) == Decision(Action.WAIT, 5.0, waits_for_input=True)
    machine.has_pending = False
    consume(machine, 4.0)
    assert machine.decide(4.0).action is Action.START_COMMIT


def test_a_cycle_does_not_wait_for_its_own_acknowledgement():
    machine = new_machine(waits=False, min_s=0.0)
    consume(machine, 2.0)
    machine.has_pending = True
    assert machine.decide(2.0).action is Action.START_COMMIT


def test_input_that_ends_is_drained_and_then_restored():
    machine = new_machine(min_s=1.0, max_s=3.0)
    machine.prior = Prior.COMMITTING
    consume(machine, 2.0)
    machine.ended = machine.has_pending = True
    assert machine.decide(2.0) == Decision(Action.WAIT, None, waits_for_prior=True)
    machine.committed()
    machine.acknowledged()
    assert machine.decide(2.1) == Decision(Action.WAIT, 3.0)
    assert machine.decide(3.0).action is Action.START_COMMIT
    machine.commit_started()
    assert machine.decide(3.0).waits_for_prior
    machine.committed()
    machine.acknowledged()
    assert machine.decide(3.1).action is Action.END
    machine.restarted()
    assert machine.decide(3.1).is_idle


def test_a_timer_opens_a_transaction_and_is_waited_for_where_it_would_fire():
    machine = new_machine(min_s=0.0, overlaps=False)
    machine.timer_at = 5.0
    assert machine.decide(1.0) == Decision(Action.WAIT, 5.0, waits_for_input=True, is_idle=True)
    consume(machine, 5.0)
    machine.timer_at = math.inf
    assert machine.decide(5.0).action is Action.START_COMMIT
    machine.commit_started()
    machine.timer_at = 5.5
    assert machine.decide(6.0) == Decision(Action.WAIT, waits_for_prior=True), "no overlap"
    machine.committed()
    assert machine.decide(6.0).action is Action.CONSUME, "also before the acknowledgements"


def test_max_within_a_sequence_cuts_it_and_the_next_transaction_begins_at_once():
    machine = new_machine(min_s=0.0, max_s=1.0)
    machine.prior = Prior.COMMITTING
    consume(machine, 2.0)
    machine.available = machine.has_pending = True  # the second message
    assert machine.decide(3.0) == Decision(Action.WAIT, None, waits_for_prior=True)
    machine.committed()
    machine.acknowledged()
    assert machine.decide(3.0).action is Action.START_COMMIT
    machine.commit_started()
    assert machine.decide(3.0).action is Action.CONSUME


def test_a_deferred_message_closes_its_transaction():
    machine = new_machine(min_s=1.0, max_s=9.0)
    machine.prior = Prior.COMMITTING
    consume(machine, 2.0)
    machine.close()
    machine.available = True
    assert machine.decide(2.0) == Decision(Action.WAIT, None, waits_for_prior=True)
    machine.committed()
    machine.acknowledged()
    assert machine.decide(2.0) == Decision(Action.WAIT, 3.0)
    assert machine.decide(3.0).action is Action.START_COMMIT
    machine.commit_started()
    assert machine.decide(3.0).action is Action.CONSUME


def test_a_least_time_above_the_greatest_prevails():
    machine = new_machine(min_s=5.0, max_s=1.0)
    consume(machine, 2.0)
    assert machine.decide(3.5) == Decision(Action.WAIT, 7.0)
    assert machine.decide(7.0).action is Action.START_COMMIT
