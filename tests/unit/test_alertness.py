"""Looking for what is awaited, before sleeping."""

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.alertness import SKIPPED_MAX, Alertness


def test_who_sees_what_comes_goes_on_looking():
    alertness = Alertness()
    for _ in range(1000):
        assert alertness.looks()
        alertness.seen()


def test_who_misses_it_looks_ever_more_seldom():
    alertness = Alertness()
    skipped = []
    for _ in range(12):
        assert alertness.looks()
        alertness.missed()
        count = 0
        while not alertness.looks():
            count += 1
        skipped.append(count)
        # That last look is the next round's: it is repeated, as nothing was told of it.
    assert skipped == [1, 2, 4, 8, 16, 32, 64, 128, *[SKIPPED_MAX] * 4]


def test_one_that_is_seen_makes_all_good():
    alertness = Alertness()
    for _ in range(5):
        alertness.missed()
    while not alertness.looks():
        pass
    alertness.seen()
    alertness.missed()
    assert [alertness.looks() for _ in range(3)] == [False, True, True]


@given(st.lists(st.booleans(), min_size=600, max_size=2000))
def test_it_never_stops_looking_for_good(comes):
    alertness = Alertness()
    asleep = 0
    for came in comes:
        if not alertness.looks():
            asleep += 1
            assert asleep <= SKIPPED_MAX
            continue
        asleep = 0
        if came:
            alertness.seen()
        else:
            alertness.missed()
