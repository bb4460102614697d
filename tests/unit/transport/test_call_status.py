"""Errors of calls that ended with a gRPC status."""

import pytest

from gazette_sdk.protocol.rules import SERVICE, SHARD_RPCS_BY_NAME
from gazette_sdk.transport.wire import call_error


@pytest.mark.parametrize(
    ("service", "process"),
    [
        (SERVICE, "broker"),
        (SHARD_RPCS_BY_NAME["List"].service, "consumer"),
        ("word_count.Words", "consumer"),
    ],
)
def test_a_missing_method_asks_whether_the_right_process_was_called(service: str, process: str):
    error = call_error(
        "UNIMPLEMENTED",
        "Method not found!",
        method="List",
        where="http://localhost:8080",
        journal=None,
        service=service,
    )
    assert str(error).endswith(f"is this the address of a Gazette {process}?")
