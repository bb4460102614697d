"""Who appends: the machine over every (holder, input), and the habit that it is used for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.message.publishing.handover import TABLE, Effect, Habit, Holder, Input

NOBODY, HELD, LOOP, CALLER = Holder
NOTHING, WAKE, HOLD, APPEND, IMPOSSIBLE = Effect

EXPECTED = {
    NOBODY: "WAKE>LOOP HOLD>HELD NOTHING NOTHING IMPOSSIBLE IMPOSSIBLE IMPOSSIBLE",
    HELD: "WAKE>LOOP WAKE>LOOP APPEND>CALLER WAKE>LOOP IMPOSSIBLE IMPOSSIBLE IMPOSSIBLE",
    LOOP: "NOTHING NOTHING NOTHING NOTHING NOTHING>NOBODY IMPOSSIBLE IMPOSSIBLE",
    CALLER: "NOTHING NOTHING NOTHING NOTHING NOTHING>NOBODY WAKE>LOOP WAKE>LOOP",
}
"""By holder, the effect of each input in order, and the next holder where it changes."""


@pytest.mark.parametrize("holder", Holder)
@pytest.mark.parametrize("happened", Input)
def test_each_input_of_each_holder(holder, happened):
    effect, _, after = EXPECTED[holder].split()[happened].partition(">")
    expected = (Effect[effect], Holder[after] if after else holder)
    assert TABLE[holder][happened] == expected


class Journal:
    """An outbox and all who may append its messages, run by the machine's words alone."""

    def __init__(self):
        self.holder = NOBODY
        self.waiting = []
        self.appended = []
        self.taken = []
        self.count = 0
        self.loops = 0
        self.looked_after = False

    def feed(self, happened):
        effect, self.holder = TABLE[self.holder][happened]
        assert effect is not IMPOSSIBLE
        if effect is WAKE:
            self.loops += 1
            assert self.loops == 1, "two tasks of one journal"
        elif effect is HOLD:
            self.looked_after = True
        elif effect is APPEND:
            assert not self.taken
            self.taken, self.waiting = self.waiting, []

    def add(self, happened):
        self.waiting.append(self.count)
        self.count += 1
        self.feed(happened)

    def loop_appends(self):
        if self.loops:
            self.appended += self.taken + self.waiting
            self.taken, self.waiting = [], []
            self.loops = 0
            self.feed(Input.EMPTIED)

    def caller_ends(self, *, well):
        if self.holder is not CALLER:
            return
        if not well:
            self.feed(Input.FAILED)
            return
        self.appended += self.taken
        self.taken = []
        self.feed(Input.LEFT if self.waiting else Input.EMPTIED)


@given(st.lists(st.sampled_from(["a", "h", "c", "i", "l", "w", "f"])))
def test_order_is_kept_nothing_is_left_and_one_appends_at_a_time(steps):
    journal = Journal()
    for step in steps:
        match step:
            case "a":
                journal.add(Input.ADDED)
            case "h":
                journal.add(Input.ADDED_TO_HOLD)
            case "c":
                journal.feed(Input.CLAIMED)
            case "i":
                journal.feed(Input.CALLED_IN)
            case "l":
                journal.loop_appends()
            case "w":
                journal.caller_ends(well=True)
            case "f":
                journal.caller_ends(well=False)
        if journal.waiting or journal.taken:
            assert journal.holder is not NOBODY
        assert (journal.holder is LOOP) == (journal.loops == 1)
        if journal.holder is HELD:
            assert journal.looked_after
            assert len(journal.waiting) == 1
    journal.feed(Input.CALLED_IN)
    journal.caller_ends(well=True)
    journal.loop_appends()
    assert journal.holder is NOBODY
    assert journal.appended == list(range(journal.count))


def test_a_habit_takes_some_messages_in_a_row():
    habit = Habit()
    for _ in range(Habit.FORMED_COUNT - 1):
        habit.kept()
    assert not habit.is_formed
    habit.kept()
    assert habit.is_formed
    habit.broken()
    assert not habit.is_formed
    habit.kept()
    assert not habit.is_formed


def test_a_late_caller_strains_an_old_habit_and_ends_it_at_last():
    habit = Habit()
    for _ in range(100):
        habit.kept()
    habit.strained()
    assert habit.is_formed
    habit.strained()
    assert not habit.is_formed


def test_trust_grows_while_the_habit_lasts_and_ends_with_its_first_breach():
    habit = Habit()
    habit.lasts()
    assert habit.trust == 1  # there is none yet
    for _ in range(Habit.FORMED_COUNT):
        habit.kept()
    assert habit.trust == 1
    grown = []
    for _ in range(6):
        habit.lasts()
        grown.append(habit.trust)
    assert grown == [2, 4, 8, Habit.TRUST_MAX, Habit.TRUST_MAX, Habit.TRUST_MAX]
    for _ in range(100):
        habit.kept()
    habit.strained()
    assert (habit.trust, habit.is_formed) == (1, True)
    habit.lasts()
    habit.broken()
    assert habit.trust == 1
