"""Agreement of peers, as their answers give it."""

from __future__ import annotations

import pytest

from gazette_sdk.broker.append.machine import Input
from gazette_sdk.broker.replication.pipeline import judge_sync
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from support.replication_peers import HEADER, PEERS
from support.vectors import build, cases, label_set

OK = pb.ReplicateResponse()


def answer_of(value):
    response = pb.ReplicateResponse(status=pb.Status.Value(value["status"]))
    if "route" in value:
        response.header.route.CopyFrom(build(pb.Route, value["route"]))
        response.header.etcd.revision = value["revision"]
    if "fragment" in value:
        response.fragment.CopyFrom(build(pb.Fragment, value["fragment"]))
        response.registers.CopyFrom(label_set(value["registers"]))
    return response


@pytest.mark.parametrize("case", cases("broker", "gather_sync"))
def test_synchronization_outcomes(case):
    peers = [
        pb.ProcessSpec.ID(zone="A", suffix="1"),
        pb.ProcessSpec.ID(zone="C", suffix="3"),
    ]
    route = pb.Route(
        members=[peers[0], pb.ProcessSpec.ID(zone="B", suffix="2"), peers[1]], primary=1
    )
    header = pb.Header(route=route, etcd=pb.Header.Etcd(revision=100))
    answers = [answer_of(case["responses"][name]) for name in "AC"]
    sync = judge_sync(header, peers, case["spool_end"], answers)
    expect = case["expect"]
    assert (sync.input is Input.FAILED) == expect["error"]
    assert sync.roll_to == expect["roll_to"]
    assert sync.read_through == expect["read_through_revision"]
    if expect["roll_registers"] is None:
        assert sync.registers is None
    else:
        assert sync.registers == label_set(expect["roll_registers"])
    if expect["error"]:
        assert ["AC"[index] for index in sync.failed] == expect["error_peers"]
        assert sync.error is not None
    else:
        assert sync.input is (Input.ROLL if expect["roll_to"] else Input.LATER)


def sync_of(*answers, head=10):
    return judge_sync(HEADER, PEERS, head, answers)


def mismatch(begin, end, registers=None):
    return pb.ReplicateResponse(
        status=pb.PROPOSAL_MISMATCH,
        fragment=pb.Fragment(begin=begin, end=end),
        registers=registers,
    )


def test_agreement_is_everybodys():
    assert sync_of(OK, OK).input is Input.AGREED
    assert sync_of(OK, UnavailableError("gone")).input is Input.FAILED
    assert sync_of(OK, pb.ReplicateResponse(status=pb.NOT_JOURNAL_BROKER)).input is Input.FAILED


def test_a_mismatch_at_offset_zero_is_answered_by_another_round():
    found = sync_of(mismatch(0, 0), OK, head=0)
    assert (found.input, found.roll_to, found.registers) == (Input.ROLL, 0, None)


def test_a_peer_behind_us_is_an_error():
    assert sync_of(mismatch(0, 5), OK).input is Input.FAILED


@pytest.mark.parametrize("swapped", [False, True])
def test_the_largest_end_wins_whatever_the_order(swapped):
    label = pb.LabelSet(labels=[pb.Label(name="a", value="1")])
    answers = [mismatch(0, 30, label), mismatch(0, 20)]
    found = sync_of(*(reversed(answers) if swapped else answers))
    assert (found.input, found.roll_to, found.registers) == (Input.ROLL, 30, label)


def test_the_largest_later_revision_is_resolved_at():
    def elsewhere(revision):
        response = pb.ReplicateResponse(status=pb.WRONG_ROUTE)
        response.header.etcd.revision = revision
        response.header.route.primary = -1
        return response

    found = sync_of(elsewhere(200), elsewhere(300))
    assert (found.input, found.read_through) == (Input.LATER, 300)
    assert sync_of(elsewhere(100), OK).input is Input.FAILED
