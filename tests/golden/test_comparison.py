"""The comparison itself: what differs is found, and what varies is let pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf import json_format

from gazette_sdk.protocol import broker_pb2 as pb
from support.golden import Outcome, recorded, running, spec_of
from support.golden_compare import Replay, Revisions

LISTED = next(case for case in recorded("grpc_list") if case["name"] == "by name")


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with running(tmp_path_factory.mktemp("comparison")) as broker:
        broker.apply(spec_of("some/journal"))
        yield Replay(broker)


def ours(replay: Replay, change: Callable[[Any], None]) -> Outcome:
    """An answer as recorded, with our revisions and endpoint, and a change."""
    there = LISTED["responses"][0]
    response = pb.ListResponse()
    json_format.ParseDict(there["json"], response)
    header = replay.broker.keyspace.header
    response.header.etcd.CopyFrom(header)
    response.journals[0].route.endpoints[0] = replay.broker.endpoint
    response.journals[0].mod_revision = response.journals[0].create_revision = header.revision
    change(response)
    return Outcome([response.SerializeToString()], "OK")


def problems(replay: Replay, outcome: Outcome) -> list[str]:
    judging = Replay(replay.broker)
    judging.judge("List", LISTED, outcome)
    return judging.verdicts[LISTED["name"]].problems


def test_what_varies_is_no_difference(replay: Replay) -> None:
    assert problems(replay, ours(replay, lambda _response: None)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda response: setattr(response, "status", pb.NOT_ALLOWED),
        lambda response: setattr(response.header.etcd, "cluster_id", 7),
        lambda response: setattr(response.header.etcd, "raft_term", 0),
        lambda response: setattr(response.header.route, "primary", 0),
        lambda response: setattr(response.journals[0].spec, "replication", 2),
        lambda response: setattr(response.journals[0], "create_revision", 10**6),
        lambda response: response.journals[0].spec.labels.labels.pop(),
        lambda response: response.journals[0].spec.fragment.ClearField("retention"),
        lambda response: response.journals[0].route.endpoints.append("http://other"),
        lambda response: response.journals.add(),
    ],
)
def test_every_other_difference_is_found(replay: Replay, change: Callable[[Any], None]) -> None:
    assert problems(replay, ours(replay, change))


def test_a_code_and_a_missing_response_are_found(replay: Replay) -> None:
    assert problems(replay, Outcome([], "OK"))
    outcome = ours(replay, lambda _response: None)
    outcome.code = "UNKNOWN"
    assert problems(replay, outcome)


def test_bytes_of_another_order_are_found(replay: Replay) -> None:
    outcome = ours(replay, lambda _response: None)
    response = pb.ListResponse.FromString(outcome.responses[0])
    header = pb.ListResponse(header=response.header).SerializeToString()
    response.ClearField("header")
    outcome.responses[0] = response.SerializeToString() + header
    assert "bytes" in problems(replay, outcome)[0]


def test_revisions_have_to_be_ordered_alike() -> None:
    revisions = Revisions()
    assert revisions.note_key(3, 5) is None
    assert revisions.note_key(6, 9) is None
    assert revisions.note_key(3, 5) is None
    assert revisions.note_key(4, 7) is None
    assert revisions.note_key(5, 7) is not None
    assert revisions.note_key(6, 10) is not None
    assert revisions.note_header(10, 20) is None
    assert revisions.note_header(11, 19) is not None
