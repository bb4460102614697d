from __future__ import annotations

import math

import pytest

from gazette_sdk.broker.failover.decision import FORGET_BOUNDS, Links

PEER = ("zone", "peer")
NEVER = -math.inf


def test_a_link_is_cut_when_it_failed_for_the_whole_bound():
    links = Links(2.0)
    assert not links.is_cut(PEER, 10, heard_at=NEVER)
    assert links.wait_s(PEER, 10) == 0
    links.failed(PEER, 10, waited_s=0, heard_at=5)
    assert links.wait_s(PEER, 11) == 1
    assert not links.is_cut(PEER, 11.9, heard_at=5)
    links.failed(PEER, 11.9, waited_s=0, heard_at=5)  # the clock goes on
    assert links.is_cut(PEER, 12, heard_at=5)
    assert links.wait_s(PEER, 12) == 0


def test_the_wait_for_an_answer_counts():
    links = Links(2.0)
    links.failed(PEER, 10, waited_s=2, heard_at=NEVER)
    assert links.is_cut(PEER, 10, heard_at=NEVER)
    assert links.wait_s(PEER, 10) == 0


@pytest.mark.parametrize(
    ("failures", "cut_at"),
    [
        # (when it failed, how long it had waited)
        ([(10, 0)], 12),
        ([(10, 1)], 11),
        ([(10, 1.5), (11, 1)], 10.5),
        ([(10, 0), (11.5, 1.5)], 12),
        ([(10, 1), (10.5, 2.5)], 10.5),  # another stream had begun to wait before
        ([(10, 9)], 10),
    ],
)
def test_the_wait_that_began_first_counts(failures, cut_at):
    links = Links(2.0)
    for at, waited_s in failures:
        links.failed(PEER, at, waited_s=waited_s, heard_at=NEVER)
    last = failures[-1][0]
    assert links.wait_s(PEER, last) == max(0, cut_at - last)
    assert not links.is_cut(PEER, cut_at - 0.1, heard_at=NEVER) or cut_at == last
    assert links.is_cut(PEER, max(cut_at, last), heard_at=NEVER)


def test_an_answer_that_came_while_another_was_missed_shows_a_live_link():
    links = Links(2.0)
    links.failed(PEER, 10, waited_s=2, heard_at=9)
    assert not links.is_cut(PEER, 10, heard_at=9)
    assert links.is_cut(PEER, 11, heard_at=9)
    assert not links.is_cut(PEER, 11, heard_at=10.5)


def test_a_failure_behind_an_answer_begins_a_new_silence():
    links = Links(2.0)
    links.failed(PEER, 10, waited_s=0, heard_at=5)
    links.failed(PEER, 13, waited_s=0, heard_at=12)
    assert not links.is_cut(PEER, 13, heard_at=12)
    assert links.is_cut(PEER, 15, heard_at=12)


def test_a_failure_is_forgotten():
    links = Links(2.0)
    links.failed(PEER, 10, waited_s=0, heard_at=NEVER)
    assert links.is_cut(PEER, 10 + FORGET_BOUNDS * 2, heard_at=NEVER)
    assert not links.is_cut(PEER, 10.1 + FORGET_BOUNDS * 2, heard_at=NEVER)
    links.failed(PEER, 30, waited_s=0, heard_at=NEVER)
    assert not links.is_cut(PEER, 31, heard_at=NEVER)
    links.worked(PEER)
    links.worked(PEER)
    assert not links.is_cut(PEER, 33, heard_at=NEVER)
