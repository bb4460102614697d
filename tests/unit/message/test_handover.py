"""Who appends: the machine over every (holder, input), and the habit that it is used for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.message.publishing.handover import TABLE, Effect, Habit, Holder, Input

NOBODY, AWAY, LOOP, CALLER = Holder
NOTHING, WAKE, SEND, RECEIVE, IMPOSSIBLE = Effect

EXPECTED = {
    NOBODY: "WAKE>LOOP SEND>CALLER NOTHING NOTHING IMPOSSIBLE IMPOSSIBLE IMPOSSIBLE",
    AWAY: "WAKE>LOOP RECEIVE>CALLER RECEIVE>CALLER WAKE>LOOP IMPOSSIBLE IMPOSSIBLE IMPOSSIBLE",
    LOOP: "NOTHING NOTHING NOTHING NOTHING IMPOSSIBLE NOTHING>NOBODY IMPOSSIBLE",
    CALLER: "NOTHING NOTHING NOTHING NOTHING NOTHING>AWAY NOTHING>NOBODY WAKE>LOOP",
}
"""By holder, the effect of each input in order, and the next holder where it changes."""


@pytest.mark.parametrize("holder", Holder)
@pytest.mark.parametrize("happened", Input)
def test_each_input_of_each_holder(holder, happened):
    effect, _, after = EXPECTED[holder].split()[happened].partition(">")
    expected = (Effect[effect], Holder[after] if after else holder)
    assert TABLE[holder][happened] == expected


class Journal:
    """An outbox and all who may append its messages, run by the machine's words alone.

    A message is in one place at a time: ``waiting``, ``taken`` by a caller to be sent, sent and
    ``away``, ``received`` by a caller who looks for its answer, ``handed`` on to the event loop,
    or ``appended``.
    """

    def __init__(self):
        self.holder = NOBODY
        self.waiting = []
        self.taken = []
        self.away = []
        self.received = []
        self.handed = []
        self.appended = []
        self.count = 0
        self.loops = 0
        self.publishes = False  # the caller who receives has a message to send behind that

    def feed(self, happened):
        effect, self.holder = TABLE[self.holder][happened]
        assert effect is not IMPOSSIBLE
        if effect is WAKE:
            self.loops += 1
            assert self.loops == 1, "two tasks of one journal"
        elif effect is SEND:
            assert not any([self.away, self.received, self.taken, self.handed]), "two appends"
            self.taken, self.waiting = self.waiting, []
        elif effect is RECEIVE:
            assert self.away, "nothing is to be received"
            assert not any([self.received, self.taken, self.handed]), "two appends"
            self.received, self.away = self.away, []
            self.publishes = happened is Input.ADDED_TO_SEND
        return effect

    def add(self, happened):
        self.waiting.append(self.count)
        self.count += 1
        self.feed(happened)

    def loop_appends(self):
        if not self.loops:
            return
        assert not any([self.received, self.taken]), "two appends"
        self.appended += self.away + self.handed + self.waiting
        self.away, self.handed, self.waiting = [], [], []
        self.loops = 0
        self.feed(Input.EMPTIED)

    def caller_goes_on(self):
        """The caller does well what is next for it to do."""
        if self.holder is not CALLER:
            return
        if self.received:
            self.appended += self.received
            self.received = []
            if self.publishes:
                self.taken, self.waiting = self.waiting, []
            else:
                self.feed(Input.HANDED_ON if self.waiting else Input.EMPTIED)
        elif self.waiting:
            self.handed, self.taken = self.taken, []
            self.feed(Input.HANDED_ON)
        else:
            self.away, self.taken = self.taken, []
            self.feed(Input.SENT)

    def caller_hands_on(self):
        """The caller fails, has no time, or is interrupted."""
        if self.holder is CALLER:
            self.handed = self.received + self.taken
            self.received, self.taken = [], []
            self.feed(Input.HANDED_ON)

    def check(self):
        under_way = [self.taken, self.away, self.received, self.handed]
        assert sum(map(bool, under_way)) <= 1, "two appends"
        if self.waiting or any(under_way):
            assert self.holder is not NOBODY
        assert (self.holder is LOOP) == (self.loops == 1)
        assert (self.holder is CALLER) == bool(self.taken or self.received)
        if self.holder is AWAY:
            assert self.away
            assert not self.waiting, "it would wait behind what nobody may look for"


@given(st.lists(st.sampled_from(["a", "s", "s", "c", "i", "l", "n", "n", "h"])))
def test_order_is_kept_nothing_is_left_and_one_appends_at_a_time(steps):
    journal = Journal()
    for step in steps:
        match step:
            case "a":
                journal.add(Input.ADDED)
            case "s":
                journal.add(Input.ADDED_TO_SEND)
            case "c":
                journal.feed(Input.CLAIMED)
            case "i":
                journal.feed(Input.CALLED_IN)
            case "l":
                journal.loop_appends()
            case "n":
                journal.caller_goes_on()
            case "h":
                journal.caller_hands_on()
        journal.check()
    while journal.holder is CALLER:
        journal.caller_goes_on()
        journal.check()
    journal.feed(Input.CALLED_IN)
    journal.loop_appends()
    journal.check()
    assert journal.holder is NOBODY
    assert journal.appended == list(range(journal.count))


def test_messages_one_by_one_never_wake_the_loop():
    journal = Journal()
    for _ in range(5):
        journal.add(Input.ADDED_TO_SEND)
        while journal.holder is CALLER:
            journal.caller_goes_on()
    assert journal.holder is AWAY
    assert journal.appended == [0, 1, 2, 3]
    journal.feed(Input.CLAIMED)
    journal.caller_goes_on()
    assert (journal.holder, journal.loops) == (NOBODY, 0)
    assert journal.appended == [0, 1, 2, 3, 4]


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


def test_an_early_message_strains_an_old_habit_and_ends_it_at_last():
    habit = Habit()
    for _ in range(100):
        habit.kept()
    habit.strained()
    assert habit.is_formed
    habit.strained()
    assert not habit.is_formed


def test_an_early_message_ends_a_new_habit():
    habit = Habit()
    for _ in range(Habit.FORMED_COUNT):
        habit.kept()
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


def test_an_answer_that_nobody_looks_for_ends_trust_but_not_the_habit():
    habit = Habit()
    for _ in range(Habit.FORMED_COUNT):
        habit.kept()
    habit.lasts()
    habit.lasts()
    assert habit.trust == 4
    habit.slackened()
    assert (habit.trust, habit.is_formed) == (1, True)
    habit.lasts()
    assert habit.trust == 2
