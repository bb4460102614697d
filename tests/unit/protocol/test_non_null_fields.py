from __future__ import annotations

import base64

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as non_null_fields
from gazette_sdk.protocol.rules import RPCS, RPCS_BY_NAME, complete
from support.vectors import GOLDEN, build, cases, golden, normal


@pytest.mark.parametrize("case", cases("broker", "wire_bytes"))
def test_bytes_follow_the_vectors(case):
    message_type = getattr(pb, case["message"])
    decoded = message_type.FromString(bytes.fromhex(case["hex"]))
    expected = build(message_type, case["value"])
    assert normal(decoded) == normal(expected)
    assert complete(expected).SerializeToString().hex() == case["hex"]


REQUESTS = tuple(rpc.request_type for rpc in RPCS)
RESPONSES = tuple(rpc.response_type for rpc in RPCS)
OF_FILE = {
    "grpc_append.json": ("Append", "List", "ListFragments", "Read"),
    "grpc_apply.json": ("Apply",),
    "grpc_list.json": ("List",),
    "grpc_list_fragments.json": ("ListFragments",),
    "grpc_read.json": ("Read",),
    "grpc_store_health.json": ("FragmentStoreHealth",),
}


def candidates(file: str, keys: tuple[str, ...], event: str | None):
    """Types that a recorded message may have, by its file and where it stands in it."""
    if event is not None:  # proxying has traces of any call, the others of Replicate
        replicate = RPCS_BY_NAME["Replicate"]
        return (
            REQUESTS + RESPONSES
            if file == "proxying.json"
            else (replicate.request_type, replicate.response_type)
        )
    if file in OF_FILE:
        rpcs = [RPCS_BY_NAME[name] for name in OF_FILE[file]]
        return [rpc.request_type if "requests" in keys else rpc.response_type for rpc in rpcs]
    return REQUESTS if "requests" in keys else RESPONSES


def recorded(value, keys=()):
    if isinstance(value, list):
        for item in value:
            yield from recorded(item, keys)
    elif isinstance(value, dict):
        if "json" in value and "wire" in value:
            yield keys, value
        else:
            for key, item in value.items():
                yield from recorded(item, (*keys, key))


def stated_as(message_type, statement):
    try:
        return json_format.ParseDict(statement, message_type())
    except json_format.ParseError:
        return None


def decoded_as(message_type, sent):
    try:
        message = message_type.FromString(sent)
    except DecodeError:
        return None
    message.DiscardUnknownFields()
    return message


def without_empty_non_null(message):
    """Drops what `complete` must bring back: empty sub-messages that are always written."""
    for field, value in list(message.ListFields()):
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        for item in value if field.is_repeated else [value]:
            without_empty_non_null(item)
        if (
            not field.is_repeated
            and not value.ListFields()
            and field.name in non_null_fields._NON_NULL.get(message.DESCRIPTOR.full_name, ())
        ):
            message.ClearField(field.name)
    return message


@pytest.mark.parametrize("file", sorted(path.name for path in (GOLDEN / "broker").glob("*.json")))
def test_recorded_messages_decode_to_their_json_and_encode_to_their_bytes(file):
    for keys, message in recorded(golden(f"broker/{file}")):
        sent = base64.b64decode(message["wire"])
        types = candidates(file, keys, message.get("event"))
        if message["json"] is None:
            assert not any(decoded_as(message_type, sent) for message_type in types)
            continue
        found = [
            stated
            for message_type in types
            if (stated := stated_as(message_type, message["json"])) is not None
            and stated == decoded_as(message_type, sent)
        ]
        assert found, (file, keys, message)
        if "responses" in keys:
            assert any(
                complete(without_empty_non_null(stated)).SerializeToString() == sent
                for stated in found
            ), (file, keys, message)


def test_there_are_enough_recorded_messages_to_compare():
    count = sum(
        1
        for path in (GOLDEN / "broker").glob("*.json")
        for _ in recorded(golden(f"broker/{path.name}"))
    )
    assert count > 1000


def test_what_is_written_though_empty():
    response = complete(pb.AppendResponse(commit=pb.Fragment(), registers=pb.LabelSet()))
    assert response.HasField("header")
    assert response.header.HasField("process_id")
    assert response.header.HasField("route")
    assert response.header.HasField("etcd")
    assert response.commit.HasField("sum")
    listing = complete(pb.ListResponse(journals=[pb.ListResponse.Journal()]))
    assert listing.journals[0].spec.fragment.HasField("retention")
    assert listing.journals[0].HasField("route")
    assert not listing.journals[0].spec.HasField("suspend")
    assert complete(pb.ReadRequest()).SerializeToString() == b""


def test_an_absent_and_an_empty_sum_are_equal_once_complete():
    absent, empty = pb.Fragment(begin=1), pb.Fragment(begin=1, sum=pb.SHA1Sum())
    assert complete(absent) == complete(empty)


def test_a_route_of_no_members_writes_its_primary():
    assert pb.Route(primary=-1).SerializeToString().hex() == "10ffffffffffffffffff01"


def test_fields_that_are_always_written_exist():
    for name, fields in non_null_fields._NON_NULL.items():
        descriptor = pb.DESCRIPTOR.pool.FindMessageTypeByName(name)
        for field in fields:
            assert descriptor.fields_by_name[field].message_type is not None
