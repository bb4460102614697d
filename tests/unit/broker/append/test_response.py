from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.append.response import Committed, Told
from gazette_sdk.broker.resolver import Resolution
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.non_null_fields import complete
from support.scripted_journals import HEADER

COUNTS = st.integers(0, 2**63 - 1)


def resolution(header=HEADER):
    return Resolution(
        journal="a/journal",
        status=pb.OK,
        header=header,
        encoded_header=complete(header).SerializeToString(),
        spec=None,
        item=None,
        assignments=[],
        replica=None,
        invalidated=None,
        is_local=True,
    )


@given(
    span=st.tuples(COUNTS, COUNTS),
    part=st.integers(0, 2**32 - 1),
    chunks=st.tuples(COUNTS, COUNTS),
    labels=st.dictionaries(st.sampled_from(["a", "b"]), st.text("xyz", max_size=300)),
    long_route=st.booleans(),
)
def test_what_is_encoded_is_the_message(span, part, chunks, labels, long_route):
    header = pb.Header()
    header.CopyFrom(HEADER)
    if long_route:
        header.route.endpoints.append("http://" + "x" * 20_000)
    commit = pb.Fragment(
        journal="a/journal",
        begin=span[0],
        end=span[1],
        sum=pb.SHA1Sum(part3=part),
        compression_codec=pb.SNAPPY,
    )
    answer = Committed(resolution(header), commit, label_set(**labels), *chunks)
    assert answer.status == pb.OK
    message = answer.message()
    assert message.commit == commit
    assert message.header == header
    assert (message.total_chunks, message.delayed_chunks) == chunks
    assert answer.encoded() == complete(message).SerializeToString()


@pytest.mark.parametrize("status", [pb.OK, pb.REGISTER_MISMATCH, pb.FRAGMENT_STORE_UNHEALTHY])
def test_a_message_is_told_as_it_is(status):
    message = pb.AppendResponse(status=status, header=HEADER, store_health_error="why")
    answer = Told(message)
    assert answer.status == status
    assert answer.message() is message
    assert answer.encoded() == complete(message).SerializeToString()
