from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.brokers import journal_spec
from support.vectors import cases, label_set

from gazette_sdk.broker.append_machine import (
    APPEND,
    CONTENT,
    ENDS,
    ContentEffect,
    ContentInput,
    ContentState,
    Effect,
    Facts,
    Input,
    State,
    UnexpectedInputError,
    content_step,
    judge_preconditions,
    judge_replicas,
    judge_resolution,
    next_proposal,
    step,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of
from gazette_sdk.protocol.selectors import parse_selector

HOLDING = {
    State.START_PIPELINE,
    State.SEND_SYNC,
    State.RECV_SYNC,
    State.UPDATE_ASSIGNMENTS,
    State.VALIDATE_PRECONDITIONS,
    State.STREAM_CONTENT,
}
"""States which are entered with the pipeline's slot in hand."""

# ------------------------------------------------------------------ tables


@pytest.mark.parametrize(("state", "given_"), list(itertools.product(State, Input)))
def test_every_input_in_every_state_has_its_step_or_is_refused(state, given_):
    if (state, given_) in APPEND:
        effects, after = step(state, given_)
        assert isinstance(after, State)
        assert all(isinstance(effect, Effect) for effect in effects)
        assert state not in ENDS
    else:
        with pytest.raises(UnexpectedInputError, match=given_.name):
            step(state, given_)


@pytest.mark.parametrize(("state", "given_"), list(itertools.product(ContentState, ContentInput)))
def test_every_event_of_a_stream_has_its_step_until_it_is_decided(state, given_):
    if state is ContentState.DONE:
        with pytest.raises(UnexpectedInputError):
            content_step(state, given_)
        return
    effect, after, _ = content_step(state, given_)
    assert (after is ContentState.DONE) == (
        effect in (ContentEffect.COMMIT, ContentEffect.ROLL_BACK, ContentEffect.DENY)
    )
    if effect is ContentEffect.COMMIT:
        assert (state, given_) == (ContentState.INTENT, ContentInput.END)


def test_every_state_is_reached_and_leads_to_an_end():
    reached = {State.RESOLVE}
    while more := {s.next for (at, _), s in APPEND.items() if at in reached} - reached:
        reached |= more
    assert reached == set(State)
    leading = set(ENDS)
    while more := {at for (at, _), s in APPEND.items() if s.next in leading} - leading:
        leading |= more
    assert leading == set(State)


def test_every_state_that_waits_can_be_cancelled():
    pure = {State.AWAIT_REPLICAS}
    for state in set(State) - set(ENDS) - pure:
        assert (state, Input.CANCELLED) in APPEND


def test_no_end_is_reached_with_the_pipeline_in_hand():
    for (state, _), (effects, after) in APPEND.items():
        if after in ENDS and (state in HOLDING or state is State.UPDATE_SUSPEND):
            assert effects[-1] is Effect.RELEASE
        if after is State.READ_ACKS:
            assert effects == (Effect.RELEASE,), "the next append may follow meanwhile"


def test_whoever_waits_for_another_primary_has_let_go_of_the_pipeline():
    assert Effect.RELEASE in APPEND[State.RESOLVE, Input.REMOTE].effects


@given(st.lists(st.sampled_from(list(ContentInput)), max_size=8))
def test_a_stream_commits_only_as_content_then_the_empty_message_then_its_end(events):
    state, effect = ContentState.OPEN, ContentEffect.WAIT
    seen = []
    for event in events:
        seen.append(event)
        effect, state, _ = content_step(state, event)
        if state is ContentState.DONE:
            break
    is_whole = (
        seen[-2:] == [ContentInput.EMPTY, ContentInput.END]
        and set(seen[:-2]) <= {ContentInput.CHUNK}
    )
    assert (effect is ContentEffect.COMMIT) == is_whole


# --------------------------------------------------------------- judgements


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("status", [pb.OK, pb.JOURNAL_NOT_FOUND, pb.SUSPENDED])
@pytest.mark.parametrize("mode", pb.AppendRequest.Suspend.values())
def test_a_resolution_leads_where_its_status_and_place_say(status, mode, is_local, holds):
    found = judge_resolution(status, mode, is_local=is_local, holds_pipeline=holds)
    if status == pb.SUSPENDED and mode == pb.AppendRequest.SUSPEND_RESUME:
        assert found is Input.SUSPENSION
    elif status != pb.OK:
        assert found is Input.REFUSED
    elif not is_local:
        assert found is Input.REMOTE
    else:
        assert found is (Input.HELD if holds else Input.LOCAL)
    assert (State.RESOLVE, found) in APPEND


@pytest.mark.parametrize("case", cases("broker", "await_replicas"))
def test_replicas_are_awaited(case):
    found = judge_replicas(
        case["members"], case["replication"], is_local=case["we_are_primary"]
    )
    after = step(State.AWAIT_REPLICAS, found).next
    expect = case["expect"].partition(" ")[0]
    assert after.name == {
        "ValidatePreconditions": "VALIDATE_PRECONDITIONS",
        "Proxy": "PROXY",
        "Error": "ERROR",
    }.get(expect, expect)


def test_too_many_members_are_waited_for():
    assert judge_replicas(3, 2, is_local=True) is Input.LATER


def facts(**changes):
    defaults = {
        "request": pb.AppendRequest(journal="a/journal"),
        "spec": journal_spec("a/journal"),
        "registers": pb.LabelSet(),
        "spool_begin": 0,
        "head": 0,
        "index_begin": 0,
        "index_end": 0,
        "index_mod_time": 0,
        "now": 1_700_000_000.0,
    }
    return Facts(**{**defaults, **changes})


@pytest.mark.parametrize(
    "case",
    [  # those that wait for the index or the store stand with `store_health`
        p
        for p in cases("broker", "append_preconditions")
        if "index" in p.values[0] and "store" not in p.values[0]
    ],
)
def test_preconditions(case):
    request = pb.AppendRequest(journal="a/journal", offset=case.get("offset", 0))
    if "check" in case:
        request.check_registers.CopyFrom(parse_selector(case["check"]))
    begin, end = case["index"][0] if case["index"] else (0, 0)
    verdict = judge_preconditions(
        facts(
            request=request,
            registers=label_set(case.get("registers")),
            head=case["spool_end"],
            index_begin=begin,
            index_end=end,
        )
    )
    expect = case["expect"]
    names = {"StreamContent": "STREAM_CONTENT", "Error": "ERROR", "SendSync": "SEND_SYNC"}
    assert step(State.VALIDATE_PRECONDITIONS, verdict.input).next.name == names[expect["next"]]
    assert verdict.status == pb.Status.Value(expect.get("status", "OK"))
    if "roll_to" in expect:
        assert verdict.roll_to == expect["roll_to"]


def test_a_suspended_offset_is_rolled_to_before_anything_is_compared_with_the_index():
    spec = journal_spec("a/journal")
    spec.suspend.offset = 1024
    assert judge_preconditions(facts(spec=spec, index_end=5)).roll_to == 1024


def test_an_index_that_is_ahead_does_not_stop_barriers_of_a_read_only_journal():
    spec = journal_spec("a/journal", flags=pb.JournalSpec.Flag.Value("O_RDONLY"))
    verdict = judge_preconditions(facts(spec=spec, head=10, spool_begin=10, index_end=20))
    assert (verdict.input, verdict.status) == (Input.AGREED, pb.OK)


def test_the_first_fragment_is_closed_by_what_follows_it():
    verdict = judge_preconditions(facts(head=123, index_end=123))
    assert (verdict.input, verdict.roll_to) == (Input.AGREED, 123)
    later = judge_preconditions(facts(head=200, spool_begin=123, index_end=200))
    assert (later.input, later.roll_to) == (Input.AGREED, 0)


# -------------------------------------------------------------- roll decision


@pytest.mark.parametrize("case", cases("broker", "maybe_roll_fragment"))
def test_the_roll_decision(case):
    begin, end = case["spool"]
    spool = pb.Fragment(
        journal="a/journal", begin=begin, end=end, compression_codec=pb.NONE, sum=sum_of(b"x" * 20)
    )
    spec = journal_spec(
        "a/journal",
        length=case["length"],
        flush_interval_s=case["flush_interval_s"],
        compression_codec=pb.SNAPPY,
    ).fragment
    proposal = next_proposal(
        spool, case["first_append"], spec, roll_to=case["roll_to"], now=case["now"]
    )
    assert [proposal.begin, proposal.end] == case["expect"]
    if proposal.begin == proposal.end:
        assert proposal.compression_codec == pb.SNAPPY
        assert proposal.sum == pb.SHA1Sum()
        assert proposal.HasField("sum")
    else:
        assert proposal is spool


@pytest.mark.parametrize(
    ("first", "now", "rolls"), [(3599.0, 3601.0, True), (3601.0, 7199.0, False), (None, 9e9, False)]
)
def test_flush_boundaries_are_aligned_to_the_interval(first, now, rolls):
    spool = pb.Fragment(journal="a/journal", begin=0, end=10)
    spec = journal_spec("a/journal", flush_interval_s=3600).fragment
    proposal = next_proposal(spool, first, spec, roll_to=0, now=now)
    assert (proposal.begin == 10) == rolls


def test_a_flush_interval_below_a_second_is_off():
    spool = pb.Fragment(journal="a/journal", begin=0, end=10)
    spec = journal_spec("a/journal", flush_interval_s=0.5).fragment
    assert next_proposal(spool, 1.0, spec, roll_to=0, now=1e9) is spool


def test_a_spool_is_never_rolled_back_behind_its_end():
    spool = pb.Fragment(journal="a/journal", begin=5, end=10)
    with pytest.raises(AssertionError, match="never rolled back"):
        next_proposal(spool, None, journal_spec("a/journal").fragment, roll_to=7, now=0)
