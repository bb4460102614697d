"""The numbers and types of the contract, compared with the generated messages."""

from __future__ import annotations

import pytest

from gazette_sdk import errors
from gazette_sdk.protocol import broker_pb2 as pb

# Scalars by their proto name, messages and enums by theirs, `*` for repeated.
MESSAGES = {
    "Label": "1 name string, 2 value string, 3 prefix bool",
    "LabelSet": "1 labels *Label",
    "LabelSelector": "1 include LabelSet, 2 exclude LabelSet",
    "JournalSpec": "1 name string, 2 replication int32, 3 labels LabelSet, "
    "4 fragment JournalSpec.Fragment, 6 flags uint32, 7 max_append_rate int64, "
    "8 suspend JournalSpec.Suspend",
    "JournalSpec.Fragment": "1 length int64, 2 compression_codec CompressionCodec, "
    "3 stores *string, 4 refresh_interval Duration, 5 retention Duration, "
    "6 flush_interval Duration, 7 path_postfix_template string",
    "JournalSpec.Suspend": "1 level JournalSpec.Suspend.Level, 2 offset int64",
    "ProcessSpec.ID": "1 zone string, 2 suffix string",
    "ProcessSpec": "1 id ProcessSpec.ID, 2 endpoint string",
    "BrokerSpec": "1 process_spec ProcessSpec, 2 journal_limit uint32, 3 exiting bool",
    "Fragment": "1 journal string, 2 begin int64, 3 end int64, 4 sum SHA1Sum, "
    "5 compression_codec CompressionCodec, 6 backing_store string, 7 mod_time int64, "
    "8 path_postfix string",
    "SHA1Sum": "1 part1 fixed64, 2 part2 fixed64, 3 part3 fixed32",
    "Route": "1 members *ProcessSpec.ID, 2 primary int32, 3 endpoints *string, "
    "101 stored_end int64",
    "Header": "1 process_id ProcessSpec.ID, 2 route Route, 3 etcd Header.Etcd",
    "Header.Etcd": "1 cluster_id uint64, 2 member_id uint64, 3 revision int64, 4 raft_term uint64",
    "ReadRequest": "1 header Header, 2 journal string, 3 offset int64, 4 block bool, "
    "5 do_not_proxy bool, 6 metadata_only bool, 7 end_offset int64, 8 begin_mod_time int64, "
    "9 min_etcd_revision int64, 100 include_unacknowledged bool",
    "ReadResponse": "1 status Status, 2 header Header, 3 offset int64, 4 write_head int64, "
    "5 fragment Fragment, 6 fragment_url string, 7 content bytes, 101 spool_end int64, "
    "102 unverified_end int64",
    "AppendRequest": "1 header Header, 2 journal string, 3 do_not_proxy bool, 4 content bytes, "
    "5 offset int64, 6 check_registers LabelSelector, 7 union_registers LabelSet, "
    "8 subtract_registers LabelSet, 9 suspend AppendRequest.Suspend, 10 min_etcd_revision int64",
    "AppendResponse": "1 status Status, 2 header Header, 3 commit Fragment, "
    "4 registers LabelSet, 5 total_chunks int64, 6 delayed_chunks int64, "
    "7 store_health_error string",
    "ReplicateRequest": "1 header Header, 2 deprecated_journal string, 3 proposal Fragment, "
    "4 content bytes, 5 content_delta int64, 6 acknowledge bool, 7 registers LabelSet, "
    "100 acknowledged_through int64, 101 stored_through int64, 102 traceparent string",
    "ReplicateResponse": "1 status Status, 2 header Header, 3 fragment Fragment, "
    "4 registers LabelSet",
    "ListRequest": "1 selector LabelSelector, 4 watch bool, 5 watch_resume Header, "
    "101 count_brokers bool",
    "ListResponse": "1 status Status, 2 header Header, 3 journals *ListResponse.Journal, "
    "101 brokers int32",
    "ListResponse.Journal": "1 spec JournalSpec, 2 mod_revision int64, 3 route Route, "
    "4 create_revision int64, 101 waiting ListResponse.Waiting",
    "ListResponse.Waiting": "1 brokers *ProcessSpec.ID",
    "ApplyRequest": "1 changes *ApplyRequest.Change",
    "ApplyRequest.Change": "1 expect_mod_revision int64, 2 upsert JournalSpec, 3 delete string",
    "ApplyResponse": "1 status Status, 2 header Header",
    "FragmentsRequest": "1 header Header, 2 journal string, 3 begin_mod_time int64, "
    "4 end_mod_time int64, 5 next_page_token int64, 6 page_limit int32, "
    "7 signatureTTL Duration, 8 do_not_proxy bool, 100 unstored_only bool, "
    "101 do_not_wait bool, 102 torn_only bool, 103 list_again bool",
    "FragmentsResponse": "1 status Status, 2 header Header, "
    "3 fragments *FragmentsResponse._Fragment, 4 next_page_token int64",
    "FragmentsResponse._Fragment": "1 spec Fragment, 2 signed_url string",
    "FragmentStoreHealthRequest": "1 fragment_store string, 2 check_delete bool, "
    "3 check_delete_prefix string, 101 count_uploads bool",
    "FragmentStoreHealthResponse": "1 status Status, 2 header Header, "
    "3 store_health_error string, 101 outdated_uploads uint32",
}

SCALARS = {
    3: "int64",
    4: "uint64",
    5: "int32",
    6: "fixed64",
    7: "fixed32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
}

ENUMS = {
    "Status": list(errors.STATUS_NAMES),
    "CompressionCodec": [
        "INVALID",
        "NONE",
        "GZIP",
        "ZSTANDARD",
        "SNAPPY",
        "GZIP_OFFLOAD_DECOMPRESSION",
    ],
    "JournalSpec.Suspend.Level": ["NONE", "PARTIAL", "FULL"],
    "AppendRequest.Suspend": [
        "SUSPEND_RESUME",
        "SUSPEND_NO_RESUME",
        "SUSPEND_IF_FLUSHED",
        "SUSPEND_NOW",
        "SUSPEND_KEEP",
    ],
}


def stated(field) -> str:
    inner = field.message_type or field.enum_type
    named = inner.full_name.removeprefix("protocol.") if inner else SCALARS[field.type]
    named = named.removeprefix("google.protobuf.")
    return f"{field.number} {field.name} {'*' if field.is_repeated else ''}{named}"


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_have_the_fields_of_the_contract(name):
    descriptor = pb.DESCRIPTOR.pool.FindMessageTypeByName(f"protocol.{name}")
    assert ", ".join(stated(field) for field in descriptor.fields) == MESSAGES[name]


def test_no_message_is_missing():
    def nested(descriptor):
        yield descriptor.full_name.removeprefix("protocol.")
        for inner in descriptor.nested_types:
            yield from nested(inner)

    found = {n for top in pb.DESCRIPTOR.message_types_by_name.values() for n in nested(top)}
    assert found == MESSAGES.keys()


@pytest.mark.parametrize("name", ENUMS)
def test_enums_are_numbered_from_zero(name):
    values = pb.DESCRIPTOR.pool.FindEnumTypeByName(f"protocol.{name}").values
    assert [(value.name, value.number) for value in values] == [
        (value, number) for number, value in enumerate(ENUMS[name])
    ]


def test_flags_are_bits():
    assert dict(pb.JournalSpec.Flag.items()) == {
        "NOT_SPECIFIED": 0,
        "O_RDONLY": 1,
        "O_WRONLY": 2,
        "O_RDWR": 4,
    }
