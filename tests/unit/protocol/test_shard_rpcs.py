from __future__ import annotations

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.shard_spec import validate_shard_rpc

HEADER = {
    "process_id": {"zone": "zone", "suffix": "name"},
    "route": {"primary": -1},
    "etcd": {"cluster_id": 1, "member_id": 2, "revision": 3, "raft_term": 4},
}


def a_spec(**changes):
    spec = cpb.ShardSpec(id="a-shard", recovery_log_prefix="logs", hint_prefix="/hints", **changes)
    spec.max_txn_duration.seconds = 1
    return spec


def hints(**changes):
    segment = {
        "author": 1,
        "first_seq_no": 1,
        "first_offset": 10,
        "last_seq_no": 2,
        "last_offset": 20,
    } | changes
    made = cpb.ApplyRequest.Change().primary_hints
    made.log = "logs/a-shard"
    made.live_nodes.add(fnode=1).segments.add(**segment)
    return made


def refused(message):
    with pytest.raises(ValidationError) as caught:
        validate_shard_rpc(message)
    return caught.value.path, caught.value.kind


def test_stat_requests():
    validate_shard_rpc(
        cpb.StatRequest(header=HEADER, shard="a-shard", read_through={"a/journal;meta": 5})
    )
    without_cluster = pb.Header(**HEADER)
    without_cluster.etcd.cluster_id = 0
    request = cpb.StatRequest(header=without_cluster, shard="a-shard")
    assert refused(request) == ("Header.Etcd", "invalid_cluster_id")
    assert refused(cpb.StatRequest(shard="invalid shard")) == ("Shard", "invalid_token")
    path, kind = refused(cpb.StatRequest(shard="a-shard", read_through={"a journal": 1}))
    assert (path, kind) == ("ReadThrough.Offsets[a journal]", "invalid_token")
    path, kind = refused(cpb.StatRequest(shard="a-shard", read_through={"a/journal": -1}))
    assert (path, kind) == ("ReadThrough.Offsets[a/journal]", "invalid_offset")


def test_stat_responses():
    validate_shard_rpc(cpb.StatResponse(header=HEADER, read_through={"a/journal": 0}))
    assert refused(cpb.StatResponse(status=9101, header=HEADER)) == ("Status", "invalid_status")
    path, _ = refused(cpb.StatResponse(header=HEADER, read_through={"a/journal": -123}))
    assert path == "ReadThrough.Offsets[a/journal]"
    path, _ = refused(cpb.StatResponse(header=HEADER, publish_at={"other/journal": -456}))
    assert path == "PublishAt.Offsets[other/journal]"


def test_list_requests_and_responses():
    request = cpb.ListRequest()
    validate_shard_rpc(request)
    request.selector.include.labels.add(name="bad label")
    assert refused(request) == ("Selector.Include.Labels[0].Name", "invalid_token")

    response = cpb.ListResponse(header=HEADER)
    shard = response.shards.add(spec=a_spec(), mod_revision=1, route={"primary": -1})
    validate_shard_rpc(response)
    shard.mod_revision = 0
    assert refused(response) == ("Shards[0]", "invalid_mod_revision")
    shard.mod_revision = 1
    shard.route.members.add(zone="zone", suffix="name")
    assert refused(response) == ("Shards[0]", "status_length")
    shard.status.add(code=cpb.ReplicaStatus.FAILED)
    assert refused(response) == ("Shards[0].Status[0]", "expected_errors")
    shard.status[0].errors.append("why")
    validate_shard_rpc(response)
    shard.spec.id = "zz"
    assert refused(response) == ("Shards[0].Spec.Id", "invalid_length")


@pytest.mark.parametrize(
    ("change", "path", "kind"),
    [
        ({"upsert": a_spec(), "delete": "a-shard"}, "", "both_set"),
        (
            {"upsert": a_spec(), "expect_mod_revision": -2},
            "",
            "invalid_expect_mod_revision",
        ),
        (
            {"upsert": a_spec(), "primary_hints": hints(author=0)},
            "PrimaryHints.Segment",
            "invalid_author",
        ),
        ({"delete": "a-shard", "expect_mod_revision": 0}, "", "invalid_expect_mod_revision"),
        (
            {"delete": "a-shard", "expect_mod_revision": 1, "primary_hints": hints()},
            "",
            "unexpected_hints",
        ),
        ({}, "", "neither_set"),
        ({"upsert": a_spec(hint_backups=-1)}, "Upsert", "invalid_hint_backups"),
        ({"upsert": a_spec(), "primary_hints": {}}, "PrimaryHints.Log", "hints_of_another_log"),
        (
            {"upsert": a_spec(), "primary_hints": {"log": "logs/other"}},
            "PrimaryHints.Log",
            "hints_of_another_log",
        ),
        *(
            ({"upsert": a_spec(), "primary_hints": hints(**segment)}, "PrimaryHints.Segment", kind)
            for segment, kind in (
                ({"first_seq_no": 0}, "invalid_first_seq_no"),
                ({"first_offset": -1}, "invalid_first_offset"),
                ({"last_seq_no": 0}, "invalid_last_seq_no"),
                ({"last_offset": 10}, "invalid_last_offset"),
            )
        ),
        (
            {"upsert": a_spec(), "primary_hints": hints(log="logs/a-shard")},
            "PrimaryHints",
            "redundant_log",
        ),
    ],
)
def test_changes_that_are_refused(change, path, kind):
    request = cpb.ApplyRequest(changes=[cpb.ApplyRequest.Change(**change)])
    assert refused(request) == (f"Changes[0].{path}".rstrip("."), kind)


def test_changes_that_are_accepted():
    validate_shard_rpc(
        cpb.ApplyRequest(
            changes=[
                {"upsert": a_spec()},
                {"upsert": a_spec(), "expect_mod_revision": -1, "primary_hints": hints()},
                {"delete": "a-shard", "expect_mod_revision": -1},
                {"delete": "a-shard", "expect_mod_revision": 5},
            ]
        )
    )
    validate_shard_rpc(cpb.ApplyResponse(header=HEADER))


def test_get_hints_and_unassign():
    validate_shard_rpc(cpb.GetHintsRequest(shard="a-shard"))
    validate_shard_rpc(cpb.GetHintsResponse(header=HEADER))
    assert refused(cpb.GetHintsRequest(shard="")) == ("Shard", "invalid_length")
    validate_shard_rpc(cpb.UnassignRequest(shards=["a-shard"]))
    assert refused(cpb.UnassignRequest(shards=["a-shard", "bad id"])) == (
        "Shards[1]",
        "invalid_token",
    )
    validate_shard_rpc(cpb.UnassignResponse(shards=["a-shard"]))
    assert refused(cpb.UnassignResponse(status=9101)) == ("Status", "invalid_status")
    assert refused(cpb.UnassignResponse(status=4)) == ("Status", "bad_status")
    assert refused(cpb.UnassignResponse(shards=["zz"])) == ("Shards[0]", "invalid_length")


def test_other_messages_are_refused():
    with pytest.raises(TypeError, match="no message of the shard service"):
        validate_shard_rpc(pb.ListRequest())
