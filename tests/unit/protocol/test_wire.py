from __future__ import annotations

import base64
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from support.vectors import GOLDEN, build, cases, golden, normal

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.service import RPCS_BY_NAME
from gazette_sdk.protocol.wire import complete


@pytest.mark.parametrize("case", cases("broker", "wire_bytes"))
def test_bytes_follow_the_vectors(case):
    message_type = getattr(pb, case["message"])
    decoded = message_type.FromString(bytes.fromhex(case["hex"]))
    expected = build(message_type, case["value"])
    assert normal(decoded) == normal(expected)
    assert complete(expected).SerializeToString().hex() == case["hex"]


def recorded_messages():
    """Every gRPC message of the golden recordings, with the type its case's method gives it."""
    for path in sorted((GOLDEN / "broker").glob("*.json")):
        yield from _recorded(golden(f"broker/{path.name}"), path, None)


def _recorded(value, path: Path, method: str | None):
    if isinstance(value, list):
        for item in value:
            yield from _recorded(item, path, method)
        return
    if not isinstance(value, dict):
        return
    method = value.get("method", method)
    method = method.rsplit("/", 1)[-1] if isinstance(method, str) else None
    for key, item in value.items():
        if method in RPCS_BY_NAME and key in {"requests", "responses", "request", "response"}:
            rpc = RPCS_BY_NAME[method]
            message_type = rpc.request_type if key.startswith("request") else rpc.response_type
            for index, message in enumerate(item if isinstance(item, list) else [item]):
                if isinstance(message, dict) and "wire" in message:
                    where = f"{path.name}: {value.get('name', '')} {key}[{index}]"
                    yield where, message_type, message, key.startswith("response")
        else:
            yield from _recorded(item, path, method)


def test_recorded_messages_decode_to_their_json_and_responses_encode_to_their_bytes():
    requests = responses = 0
    for where, message_type, message, is_response in recorded_messages():
        wire = base64.b64decode(message["wire"])
        if message["json"] is None:
            with pytest.raises(DecodeError):
                message_type.FromString(wire)
            continue
        decoded = message_type.FromString(wire)
        stated = json_format.ParseDict(message["json"], message_type())
        assert normal(decoded) == normal(stated), where
        if is_response:
            responses += 1
            assert complete(normal(decoded, keep=present(decoded))).SerializeToString(
                deterministic=True
            ) == wire, where
        else:
            requests += 1
    assert (requests, responses) > (100, 100), (requests, responses)
