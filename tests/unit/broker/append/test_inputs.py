from __future__ import annotations

import pytest

from gazette_sdk.broker.append.machine import (
    APPEND,
    Input,
    State,
    Terms,
    judge_preconditions,
    judge_replicas,
    judge_resolution,
    next_proposal,
    step,
)
from gazette_sdk.broker.fragments.index import Summary
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of
from gazette_sdk.protocol.journal_spec import may_write
from gazette_sdk.protocol.labels import parse_selector
from support.brokers import journal_spec
from support.vectors import cases, label_set


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
    found = judge_replicas(case["members"], case["replication"], is_local=case["we_are_primary"])
    after = step(State.AWAIT_REPLICAS, found).next
    expect = case["expect"].partition(" ")[0]
    assert after.name == {
        "ValidatePreconditions": "VALIDATE_PRECONDITIONS",
        "Proxy": "PROXY",
        "Error": "ERROR",
    }.get(expect, expect)


@pytest.mark.parametrize(
    ("is_local", "is_consistent", "expected"),
    [
        (True, True, Input.LATER),
        (True, False, Input.LATER),
        (False, True, Input.LATER),
        (False, False, Input.REMOTE),  # the allocator removes none before they have synchronized
    ],
)
def test_too_many_members_are_waited_for_once_they_have_synchronized(
    is_local, is_consistent, expected
):
    given = judge_replicas(3, 2, is_local=is_local, is_consistent=is_consistent)
    assert given is expected


def terms_of(**changes):
    return Terms(journal_spec("a/journal", **changes))


def test_terms_are_what_the_spec_says():
    spec = journal_spec(
        "a/journal",
        max_append_rate=7000,
        length=4096,
        flush_interval_s=120,
        compression_codec=pb.GZIP,
        stores=["s3://first/", "s3://second/"],
    )
    spec.suspend.offset = 17
    terms = Terms(spec)
    assert terms.spec is spec
    assert (terms.max_append_rate, terms.suspended_at, terms.store) == (7000, 17, "s3://first/")
    assert (terms.fragment_length, terms.flush_interval_s, terms.codec) == (4096, 120, pb.GZIP)
    assert terms_of().store is None


@pytest.mark.parametrize("flags", pb.JournalSpec.Flag.values())
def test_terms_allow_content_as_the_flags_do(flags):
    spec = journal_spec("a/journal", flags=flags)
    assert Terms(spec).may_write == may_write(spec)


def judged(
    *,
    request=None,
    spec=None,
    registers=None,
    spool_begin=0,
    head=0,
    index_begin=0,
    index_end=0,
    index_mod_time=0,
    now=1_700_000_000.0,
    is_followed=False,
):
    return judge_preconditions(
        request or pb.AppendRequest(journal="a/journal"),
        terms_of() if spec is None else Terms(spec),
        registers or pb.LabelSet(),
        pb.Fragment(journal="a/journal", begin=spool_begin, end=head),
        Summary(index_begin, index_end, index_mod_time),
        now=now,
        is_followed=is_followed,
    )


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
    verdict = judged(
        request=request,
        registers=label_set(case.get("registers")),
        head=case["spool_end"],
        index_begin=begin,
        index_end=end,
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
    assert judged(spec=spec, index_end=5).roll_to == 1024


def test_an_index_that_is_ahead_does_not_stop_barriers_of_a_read_only_journal():
    spec = journal_spec("a/journal", flags=pb.JournalSpec.Flag.Value("O_RDONLY"))
    verdict = judged(spec=spec, head=10, spool_begin=10, index_end=20)
    assert (verdict.input, verdict.status) == (Input.AGREED, pb.OK)


@pytest.mark.parametrize("is_followed", [False, True])
def test_stored_bytes_behind_a_known_head_are_gone_on_behind(is_followed):
    verdict = judged(head=20, index_end=30, is_followed=is_followed)
    if is_followed:
        assert (verdict.input, verdict.roll_to) == (Input.ROLL, 30)
    else:
        assert (verdict.input, verdict.status) == (Input.REFUSED, pb.INDEX_HAS_GREATER_OFFSET)


def test_the_first_fragment_is_closed_by_what_follows_it():
    verdict = judged(head=123, index_end=123)
    assert (verdict.input, verdict.roll_to) == (Input.AGREED, 123)
    later = judged(head=200, spool_begin=123, index_end=200)
    assert (later.input, later.roll_to) == (Input.AGREED, 0)


# -------------------------------------------------------------- roll decision


@pytest.mark.parametrize("case", cases("broker", "maybe_roll_fragment"))
def test_the_roll_decision(case):
    begin, end = case["spool"]
    spool = pb.Fragment(
        journal="a/journal", begin=begin, end=end, compression_codec=pb.NONE, sum=sum_of(b"x" * 20)
    )
    terms = terms_of(
        length=case["length"],
        flush_interval_s=case["flush_interval_s"],
        compression_codec=pb.SNAPPY,
    )
    proposal = next_proposal(
        spool, case["first_append"], terms, roll_to=case["roll_to"], now=case["now"]
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
    proposal = next_proposal(spool, first, terms_of(flush_interval_s=3600), roll_to=0, now=now)
    assert (proposal.begin == 10) == rolls


def test_a_flush_interval_below_a_second_is_off():
    spool = pb.Fragment(journal="a/journal", begin=0, end=10)
    assert next_proposal(spool, 1.0, terms_of(flush_interval_s=0.5), roll_to=0, now=1e9) is spool


def test_a_spool_is_never_rolled_back_behind_its_end():
    spool = pb.Fragment(journal="a/journal", begin=5, end=10)
    with pytest.raises(AssertionError, match="never rolled back"):
        next_proposal(spool, None, terms_of(), roll_to=7, now=0)


def test_registers_that_do_not_match_come_before_everything_else():
    request = pb.AppendRequest(journal="a/journal", offset=99)
    request.check_registers.CopyFrom(parse_selector("owner=me"))
    held = label_set([{"name": "owner", "value": "you"}])
    verdict = judged(request=request, registers=held, index_end=7)
    assert (verdict.input, verdict.status) == (Input.REFUSED, pb.REGISTER_MISMATCH)


def test_a_suspension_is_written_first_and_closes_the_fragment():
    request = pb.AppendRequest(journal="a/journal", suspend=pb.AppendRequest.SUSPEND_NOW)
    verdict = judged(request=request, head=10, index_end=10)
    assert (verdict.input, verdict.roll_to) == (Input.SUSPENSION, 10)
    assert verdict.suspend == pb.JournalSpec.Suspend(
        level=pb.JournalSpec.Suspend.PARTIAL, offset=10
    )


@pytest.mark.parametrize(
    ("mode", "input_"),
    [
        (pb.AppendRequest.SUSPEND_NO_RESUME, Input.REFUSED),
        (pb.AppendRequest.SUSPEND_NOW, Input.AGREED),
    ],
)
def test_a_suspended_journal_answers_suspended_at_once_or_in_the_end(mode, input_):
    spec = journal_spec("a/journal")
    spec.suspend.level = pb.JournalSpec.Suspend.PARTIAL
    request = pb.AppendRequest(journal="a/journal", suspend=mode)
    verdict = judged(request=request, spec=spec, head=10, index_end=10)
    assert (verdict.input, verdict.status) == (input_, pb.SUSPENDED)
