"""Decisions to spin or to sleep."""

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.adaptive_spin import SKIPPED_MAX, AdaptiveSpin


def test_spins_go_on_while_events_are_found():
    spin = AdaptiveSpin()
    for _ in range(1000):
        assert spin.should_spin()
        spin.found()


def test_spins_in_vain_become_more_seldom():
    spin = AdaptiveSpin()
    skipped = []
    for _ in range(12):
        assert spin.should_spin()
        spin.missed()
        count = 0
        while not spin.should_spin():
            count += 1
        skipped.append(count)
        # That last answer is for the next round, which asks again after no result.
    assert skipped == [1, 2, 4, 8, 16, 32, 64, 128, *[SKIPPED_MAX] * 4]


def test_one_found_event_makes_spins_frequent_again():
    spin = AdaptiveSpin()
    for _ in range(5):
        spin.missed()
    while not spin.should_spin():
        pass
    spin.found()
    spin.missed()
    assert [spin.should_spin() for _ in range(3)] == [False, True, True]


@given(st.lists(st.booleans(), min_size=600, max_size=2000))
def test_it_never_stops_looking_for_good(comes):
    spin = AdaptiveSpin()
    asleep = 0
    for came in comes:
        if not spin.should_spin():
            asleep += 1
            assert asleep <= SKIPPED_MAX
            continue
        asleep = 0
        if came:
            spin.found()
        else:
            spin.missed()
