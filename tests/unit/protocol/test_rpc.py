from __future__ import annotations

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.protocol.rules import RPCS
from support.vectors import build, cases, refuses

ID = {"zone": "zone", "suffix": "name"}
HEADER = {
    "process_id": ID,
    "route": {"primary": 0, "members": [ID]},
    "etcd": {"cluster_id": 12, "member_id": 34, "revision": 56, "raft_term": 78},
}
FRAGMENT = {"journal": "a/journal", "begin": 10, "end": 20, "compression_codec": "NONE"}
BAD_LABELS = [{"name": "in valid", "value": ""}]


@pytest.mark.parametrize("case", cases("broker", "rpc_validate"))
def test_messages_follow_the_vectors(case):
    message = build(getattr(pb, case["message"]), case["input"])
    with refuses(case["expect"]):
        rpc.validate(message)


@pytest.mark.parametrize(
    ("message_type", "given", "kind", "path"),
    [
        (pb.ReadRequest, {"journal": "good", "offset": -2}, "invalid_offset", ""),
        (
            pb.ReadRequest,
            {"journal": "good", "offset": 5, "end_offset": 4},
            "invalid_end_offset",
            "",
        ),
        (pb.ReadRequest, {"journal": "good;"}, "invalid_length", "Journal.metadata"),
        (pb.ReadRequest, {"journal": "good;me#ta"}, "invalid_token", "Journal.metadata"),
        (pb.ReadResponse, {"status": 16}, "invalid_status", "Status"),
        (pb.ReadResponse, {"content": "x", "header": {}}, "unexpected_header", ""),
        (
            pb.ReadResponse,
            {"content": "x", "fragment_url": "http://x"},
            "unexpected_fragment_url",
            "",
        ),
        (
            pb.ReadResponse,
            {"offset": 9, "write_head": 20, "fragment": FRAGMENT},
            "invalid_offset",
            "",
        ),
        (
            pb.ReadResponse,
            {"offset": 20, "write_head": 20, "fragment": FRAGMENT},
            "invalid_offset",
            "",
        ),
        (pb.ReadResponse, {"fragment_url": "http://x"}, "unexpected_fragment_url", ""),
        (pb.AppendRequest, {"journal": "/bad"}, "leading_slash", "Journal"),
        (pb.AppendRequest, {"journal": "good", "suspend": 5}, "invalid_suspend", "Suspend"),
        (
            pb.AppendRequest,
            {"journal": "good", "check_registers": {"exclude": BAD_LABELS}},
            "invalid_token",
            "CheckRegisters.Exclude.Labels[0].Name",
        ),
        (
            pb.AppendRequest,
            {"journal": "good", "union_registers": [{"name": "ab", "value": "", "prefix": True}]},
            "prefix_not_allowed",
            "UnionRegisters.Labels[0]",
        ),
        (pb.AppendRequest, {"do_not_proxy": True, "offset": 1}, "unexpected_do_not_proxy", ""),
        (
            pb.AppendRequest,
            {"union_registers": [], "subtract_registers": []},
            "unexpected_union_registers",
            "",
        ),
        (pb.AppendRequest, {"suspend": 3}, "unexpected_suspend", ""),
        (pb.AppendResponse, {"status": 1}, "invalid_primary", "Header.Route"),
        (pb.AppendResponse, {"status": 13, "header": HEADER}, "expected_registers", ""),
        (
            pb.AppendResponse,
            {"header": HEADER, "commit": {**FRAGMENT, "begin": 21}, "registers": []},
            "begin_after_end",
            "Commit",
        ),
        (pb.ReplicateRequest, {}, "expected_content_or_proposal", ""),
        (
            pb.ReplicateRequest,
            {"proposal": FRAGMENT, "header": {}},
            "invalid_primary",
            "Header.Route",
        ),
        (
            pb.ReplicateRequest,
            {"proposal": FRAGMENT, "registers": BAD_LABELS},
            "invalid_token",
            "Registers.Labels[0].Name",
        ),
        (
            pb.ReplicateRequest,
            {"proposal": FRAGMENT, "deprecated_journal": "other"},
            "journal_mismatch",
            "",
        ),
        (pb.ReplicateRequest, {"content": "x", "registers": []}, "unexpected_registers", ""),
        (pb.ReplicateResponse, {"status": 7}, "expected_header", ""),
        (pb.ReplicateResponse, {"status": 8}, "expected_fragment", ""),
        (pb.ReplicateResponse, {"fragment": FRAGMENT}, "unexpected_fragment", ""),
        (
            pb.ListRequest,
            {
                "selector": {
                    "include": [{"name": "prefix", "value": "a"}],
                    "exclude": [{"name": "prefix", "value": "b"}],
                }
            },
            "prefix_missing_slash",
            "Selector.Include",
        ),
        (
            pb.ListResponse,
            {"header": HEADER, "journals": [{}]},
            "invalid_length",
            "Journals[0].Spec.Name",
        ),
        (
            pb.ApplyRequest,
            {"changes": [{"upsert": {}, "delete": "a/journal"}]},
            "both_set",
            "Changes[0]",
        ),
        (
            pb.ApplyRequest,
            {
                "changes": [
                    {"expect_mod_revision": 1, "delete": "a/journal"},
                    {"expect_mod_revision": 1, "delete": "/x/y"},
                ]
            },
            "leading_slash",
            "Changes[1].Delete",
        ),
        (pb.FragmentsRequest, {"journal": "good", "page_limit": -1}, "invalid_page_limit", ""),
        (pb.FragmentsRequest, {"journal": "no"}, "invalid_length", "Journal"),
        (pb.FragmentStoreHealthResponse, {"status": -1}, "invalid_status", "Status"),
        (
            pb.FragmentStoreHealthRequest,
            {"fragment_store": "s3://bucket/", "check_delete": True, "check_delete_prefix": "a//"},
            "not_clean",
            "CheckDeletePrefix",
        ),
        (
            pb.FragmentStoreHealthRequest,
            {"fragment_store": "s3://bucket/", "check_delete": True, "check_delete_prefix": "/"},
            "invalid_length",
            "CheckDeletePrefix",
        ),
        (
            pb.FragmentStoreHealthRequest,
            {"fragment_store": "file:///../"},
            "traverses_outside",
            "FragmentStore",
        ),
    ],
)
def test_the_first_broken_rule_is_reported(message_type, given, kind, path):
    with pytest.raises(ValidationError) as caught:
        rpc.validate(build(message_type, given))
    assert (caught.value.kind, caught.value.path) == (kind, path)


@pytest.mark.parametrize(
    ("message_type", "given"),
    [
        (pb.ReadRequest, {"journal": "good;meta", "offset": -1}),
        (pb.ReadResponse, {"status": 6, "offset": 7, "write_head": 7, "fragment_url": ""}),
        (pb.ReadResponse, {"offset": 10, "write_head": 20, "fragment": FRAGMENT}),
        (pb.AppendRequest, {"content": "x"}),
        (pb.AppendRequest, {"journal": "good", "suspend": 4}),
        (pb.ReplicateRequest, {"content": "x"}),
        (pb.ReplicateRequest, {"proposal": FRAGMENT}),
        (pb.ListRequest, {}),
        (pb.ListResponse, {"header": HEADER}),
        (pb.ApplyRequest, {}),
        (pb.FragmentStoreHealthRequest, {"fragment_store": "memory:///"}),
        (pb.FragmentStoreHealthResponse, {"header": HEADER}),
    ],
)
def test_good_messages_pass(message_type, given):
    rpc.validate(build(message_type, given))


def test_every_message_of_the_service_has_rules():
    for call in RPCS:
        for message_type in (call.request_type, call.response_type):
            assert message_type in rpc._VALIDATORS


def test_other_messages_have_no_rules():
    with pytest.raises(TypeError, match="Fragment is no message"):
        rpc.validate(pb.Fragment())
