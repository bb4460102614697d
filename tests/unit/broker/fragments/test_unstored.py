from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.fragments.refresh import Holding, missing_of
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb

MEMBERS = [pb.ProcessSpec.ID(zone="zone", suffix=f"peer-{number}") for number in range(3)]


def span(begin, end):
    return pb.Fragment(journal="a/journal", begin=begin, end=end)


SPANS = st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda s: span(s[0], s[0] + s[1]))


@given(
    holdings=st.lists(st.builds(Holding, st.sampled_from(MEMBERS), SPANS), max_size=12),
    have=st.lists(SPANS, max_size=5),
    end=st.integers(0, 40),
)
def test_what_is_missing_adds_every_byte_that_all_agree_on(holdings, have, end):
    there = CoverSet(have)
    missing = missing_of(holdings, there.copy(), end)
    whole = CoverSet([*have, *(holding.fragment for holding in missing)])
    for holding in holdings:
        fragment = holding.fragment
        if fragment.end <= end:
            assert whole.covers(fragment.begin, fragment.end)
    for holding in missing:
        assert holding.fragment.end <= end
        assert not there.covers(holding.fragment.begin, holding.fragment.end)
    begins = [holding.fragment.begin for holding in missing]
    assert begins == sorted(begins)


def test_a_fragment_that_two_peers_have_is_copied_once_and_one_within_another_is_not():
    found = missing_of(
        [
            Holding(MEMBERS[0], span(10, 20)),
            Holding(MEMBERS[1], span(10, 20)),
            Holding(MEMBERS[1], span(0, 10)),
            Holding(MEMBERS[2], span(10, 15)),
            Holding(MEMBERS[2], span(20, 30)),
        ],
        CoverSet([span(0, 10)]),
        25,
    )
    assert found == [Holding(MEMBERS[0], span(10, 20))]
