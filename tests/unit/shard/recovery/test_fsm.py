"""The state machine of a recovery log."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.fsm import FSM, Applied
from gazette_sdk.shard.recovery.hints import flatten
from support.recovery_logs import NAMES, content, hints, operations, recording, segment
from support.vectors import group

VECTORS = group("message", "fsm")

OUTCOMES = {
    "ok": Applied.APPLIED,
    "NotHintedAuthor": Applied.NOT_HINTED_AUTHOR,
    "WrongSeqNo": Applied.WRONG_SEQ_NO,
    "ChecksumMismatch": Applied.CHECKSUM_MISMATCH,
    "LinkExists": Applied.LINK_EXISTS,
    "PropertyExists": Applied.PROPERTY_EXISTS,
    "FnodeNotTracked": Applied.FNODE_NOT_TRACKED,
    "ExpectedHintedFnode": Applied.EXPECTED_HINTED_FNODE,
    "NoSuchLink": Applied.NO_SUCH_LINK,
}


def operation_of(step: dict[str, Any]) -> pb.RecordedOp:
    operation = pb.RecordedOp(
        seq_no=step["seq_no"], checksum=step["checksum"], author=step["author"]
    )
    kind = step["kind"]
    if kind == "create":
        operation.create.path = step["path"]
    elif kind == "property":
        operation.property.path, operation.property.content = step["path"], step["content"]
    elif kind == "write":
        operation.write.fnode = step["fnode"]
    elif kind in ("link", "unlink"):
        link = getattr(operation, kind)
        link.fnode, link.path = step["fnode"], step["path"]
    return operation


def apply(fsm: FSM, operation: pb.RecordedOp, message: bytes = b"message") -> Applied:
    return fsm.apply(operation, message, log="a/log", first_offset=1, last_offset=2)


def state_of(fsm: FSM) -> dict[str, Any]:
    return copy.deepcopy(vars(fsm))


@pytest.mark.parametrize("scenario", VECTORS["scenarios"], ids=lambda each: each["name"])
def test_scenarios_go_as_the_vectors_say(scenario: dict[str, Any]) -> None:
    fsm = FSM(hints(scenario["hints"]))
    fsm.next_seq_no = scenario.get("force_next_seq_no", fsm.next_seq_no)
    fsm.next_checksum = scenario.get("force_next_checksum", fsm.next_checksum)
    for step in scenario["steps"]:
        if step["op"] == "apply":
            before = state_of(fsm)
            outcome = fsm.apply(
                operation_of(step),
                step["frame"].encode(),
                log=step["log"],
                first_offset=step["first_offset"],
                last_offset=step["last_offset"],
            )
            assert outcome is OUTCOMES[step["expect"]], step
            if outcome not in (Applied.APPLIED, Applied.FNODE_NOT_TRACKED):
                assert state_of(fsm) == before
        elif step["op"] == "state":
            assert fsm.next_seq_no == step["next_seq_no"]
            assert fsm.next_checksum == step["next_checksum"]
            assert fsm.last_log == step["last_log"]
            assert fsm.links == step["links"]
            assert fsm.properties == step["properties"]
            assert sorted(fsm.live_nodes) == step["live_fnodes"]
        else:
            assert fsm.hints(step["log"]) == hints(step["expect"])


def test_hints_are_flattened_as_the_vectors_say() -> None:
    case = VECTORS["flatten_hints"]
    given = hints(case["hints"])
    fnodes, segments = flatten(given)
    assert fnodes == case["expect_fnodes"]
    assert list(segments) == [segment(value) for value in case["expect_segments"]]

    mutations = case["cumulative_error_mutations"]
    given.live_nodes[2].segments[0].log = "whoops"
    with pytest.raises(ValidationError, match=mutations[0]["error"]):
        flatten(given)
    given.live_nodes.add(fnode=13, segments=[pb.Segment(first_seq_no=14)])
    with pytest.raises(ValidationError, match=mutations[1]["error_prefix"]):
        flatten(given)
    given.live_nodes[1].segments[0].author = 3
    with pytest.raises(ValidationError, match=mutations[2]["error_prefix"]):
        flatten(given)
    first = pb.FnodeSegments()
    first.CopyFrom(given.live_nodes[0])
    given.live_nodes[0].CopyFrom(given.live_nodes[1])
    given.live_nodes[1].CopyFrom(first)
    with pytest.raises(ValidationError, match=mutations[3]["error_prefix"]):
        flatten(given)


def test_hints_without_a_log_are_refused() -> None:
    with pytest.raises(ValidationError, match=VECTORS["new_fsm_without_log_error"]):
        FSM(pb.FSMHints())


@pytest.mark.parametrize("name", NAMES)
def test_recorded_logs_give_the_recorded_hints(name: str) -> None:
    described = recording(name)
    for played in described["played"].values():
        fsm = FSM(pb.FSMHints(log=described["log"]))
        for each in operations(content(name)):
            fsm.apply(
                each.operation,
                each.message,
                log=described["log"],
                first_offset=each.begin,
                last_offset=each.end,
            )
        assert fsm.hints(described["log"]) == hints(played["hints"])
        assert (fsm.next_seq_no, fsm.next_checksum) == (
            played["next_seq_no"],
            played["next_checksum"],
        )
        assert fsm.links == played["links"]
        assert fsm.properties == played["properties"]
        assert fsm.last_log == played["last_log"]


def test_sizes_are_those_of_the_restored_files() -> None:
    for name in NAMES:
        described = recording(name)
        fsm = FSM(pb.FSMHints(log=described["log"]))
        for each in operations(content(name)):
            apply(fsm, each.operation, each.message)
        sizes = {path: fsm.live_nodes[fnode].size_bytes for path, fnode in fsm.links.items()}
        sizes |= {path: len(value.encode()) for path, value in fsm.properties.items()}
        assert sizes == {each["path"]: each["size"] for each in described["recovered_files"]}


def test_a_link_to_a_path_in_use_is_refused() -> None:
    fsm = FSM(pb.FSMHints(log="a/log", properties=[pb.Property(path="/p", content="x")]))
    create = pb.RecordedOp(seq_no=1, author=1, create=pb.RecordedOp.Create(path="/a"))
    assert apply(fsm, create) is Applied.APPLIED
    for path, expected in (("/a", Applied.LINK_EXISTS), ("/p", Applied.PROPERTY_EXISTS)):
        for kind in ("create", "link"):
            step = {"seq_no": 2, "checksum": fsm.next_checksum, "author": 1, "kind": kind}
            assert apply(fsm, operation_of({**step, "fnode": 1, "path": path})) is expected


def test_a_link_to_an_unknown_file_is_not_tracked() -> None:
    fsm = FSM(pb.FSMHints(log="a/log"))
    step = {"seq_no": 1, "checksum": 0, "author": 1, "kind": "link", "fnode": 7, "path": "/a"}
    assert apply(fsm, operation_of(step)) is Applied.FNODE_NOT_TRACKED
    assert fsm.next_seq_no == 2
    assert not fsm.links


def test_an_operation_that_changes_nothing_continues_the_history() -> None:
    fsm = FSM(pb.FSMHints(log="a/log"))
    assert apply(fsm, pb.RecordedOp(seq_no=1, author=5)) is Applied.APPLIED
    assert fsm.next_seq_no == 2
    assert not fsm.live_nodes


def test_a_wrong_checksum_is_refused() -> None:
    fsm = FSM(pb.FSMHints(log="a/log"))
    assert apply(fsm, pb.RecordedOp(seq_no=1, checksum=1, author=5)) is Applied.CHECKSUM_MISMATCH
    assert fsm.next_seq_no == 1


def test_a_hinted_property_is_newer_than_changes_within_hinted_segments() -> None:
    segments = [
        pb.Segment(author=1, first_seq_no=1, last_seq_no=3),
        pb.Segment(author=1, first_seq_no=5, last_seq_no=5),
    ]
    given = pb.FSMHints(
        log="a/log",
        live_nodes=[pb.FnodeSegments(fnode=1, segments=segments)],
        properties=[pb.Property(path="/p", content="as of operation 4")],
    )
    fsm = FSM(given)
    steps = [
        {"kind": "create", "path": "/a"},
        {"kind": "property", "path": "/p", "content": "old"},
        {"kind": "write", "fnode": 1},
        {"kind": "write", "fnode": 1},
        {"kind": "property", "path": "/p", "content": "new"},
    ]
    for seq_no, step in zip((1, 2, 3, 5, 6), steps, strict=True):
        assert fsm.properties["/p"] == "as of operation 4"
        numbers = {"seq_no": seq_no, "checksum": fsm.next_checksum, "author": 1}
        assert apply(fsm, operation_of({**numbers, **step})) is Applied.APPLIED
    assert fsm.properties["/p"] == "new"


def test_a_file_within_hinted_segments_that_hints_do_not_name_is_not_tracked() -> None:
    """Its removal is in a gap. The path may be another file's by then, or a property."""
    segments = [
        pb.Segment(author=1, first_seq_no=1, last_seq_no=3),
        pb.Segment(author=1, first_seq_no=6, last_seq_no=6),
    ]
    given = pb.FSMHints(
        log="a/log",
        live_nodes=[pb.FnodeSegments(fnode=1, segments=segments)],
        properties=[pb.Property(path="/p", content="p")],
    )
    for path in ("/gone", "/p"):
        fsm = FSM(given)
        steps = [
            ({"kind": "create", "path": "/a"}, Applied.APPLIED),
            ({"kind": "create", "path": path}, Applied.FNODE_NOT_TRACKED),
            ({"kind": "write", "fnode": 1}, Applied.APPLIED),
            ({"kind": "link", "fnode": 1, "path": "/gone"}, Applied.APPLIED),
        ]
        for seq_no, (step, outcome) in zip((1, 2, 3, 6), steps, strict=True):
            numbers = {"seq_no": seq_no, "checksum": fsm.next_checksum, "author": 1}
            assert apply(fsm, operation_of({**numbers, **step})) is outcome
        assert fsm.links == {"/a": 1, "/gone": 1}
