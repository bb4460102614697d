from __future__ import annotations

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS, RPCS_BY_NAME, SERVICE


def test_the_table_is_that_of_the_service_descriptor():
    described = pb.DESCRIPTOR.services_by_name["Journal"]
    assert described.full_name == SERVICE
    assert [rpc.name for rpc in RPCS] == [method.name for method in described.methods]
    for method in described.methods:
        rpc = RPCS_BY_NAME[method.name]
        assert rpc.path == f"/protocol.Journal/{method.name}"
        assert rpc.request_type.DESCRIPTOR is method.input_type
        assert rpc.response_type.DESCRIPTOR is method.output_type
        assert rpc.client_streams == method.client_streaming
        assert rpc.server_streams == method.server_streaming


def test_calls_are_numbered_from_one():
    assert [rpc.number for rpc in RPCS] == list(range(1, 8))
