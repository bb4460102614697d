"""Calls of the shard service with tokens, as recorded of another consumer.

Tokens are signed anew, since the recorded ones have expired: with the same claims, and the same
times before and behind now.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time

import grpc
import pytest

from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.rules import SHARD_RPCS_BY_NAME
from support.etcd import EtcdFixture, run
from support.shard_services import assign, put_shard, served_shards, shard_spec
from support.vectors import golden

RECORDED = golden("consumer/rpc/authorization.json")
RECORDED_AT_S = 1795221542
KEY = RECORDED["key_text"].encode()
CALLS = [call for call in RECORDED["calls"] if "method" in call]
SHARD = "auth-000"
REQUESTS = {
    "Stat": cpb.StatRequest(shard=SHARD),
    "List": cpb.ListRequest(),
    "GetHints": cpb.GetHintsRequest(shard=SHARD),
    "Unassign": cpb.UnassignRequest(shards=[SHARD], dry_run=True),
}
MENDED = {"stat proxied from the other member": "OK"}
"""The recorded process forwarded without a token of its own."""

CAUSES = (
    *("segments", "signature", "Bearer", "expired", "exp", "issued", "not authorized to auth-000"),
    *("READ", "LIST", "APPLY", "missing"),
)
"""Words that both errors have. Ours say the remedy, too."""


def encoded(content):
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def signed_now(authorization):
    """A recorded header, as if it were signed now."""
    if authorization is None or authorization.count(".") != 2:
        return authorization
    head, payload, signature = authorization.removeprefix("Bearer ").split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    text = f"{head}.{payload}".encode()
    key = KEY
    if hmac.digest(key, text, hashlib.sha256) != base64.urlsafe_b64decode(signature + "=="):
        key = b"another key"
    for name in claims.keys() & {"iat", "exp"}:
        claims[name] += int(time.time()) - RECORDED_AT_S
    text = head.encode() + b"." + encoded(json.dumps(claims).encode())
    return f"Bearer {(text + b'.' + encoded(hmac.digest(key, text, hashlib.sha256))).decode()}"


async def answer(process, call):
    """The code, error, status and shards of a call."""
    rpc = SHARD_RPCS_BY_NAME[call["method"]]
    header = signed_now(call["authorization"])
    metadata = () if header is None else (("authorization", header),)
    async with grpc.aio.insecure_channel(process.endpoint.removeprefix("http://")) as channel:
        method = channel.unary_unary(
            rpc.path,
            request_serializer=rpc.request_type.SerializeToString,
            response_deserializer=rpc.response_type.FromString,
        )
        try:
            response = await method(REQUESTS[call["method"]], metadata=metadata, timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details(), None, None
    shards = [each.spec.id for each in response.shards] if call["method"] == "List" else None
    return "OK", "", cpb.Status.Name(response.status), shards


@pytest.fixture(scope="module")
def answers(etcd_server):
    """Answers of two processes to all calls; the first is the primary of the shard."""

    async def scenario(etcd):
        keys = base64.b64encode(KEY).decode()
        async with (
            served_shards(etcd.client, "aaaa", auth_keys=keys) as first,
            served_shards(etcd.client, "bbbb", auth_keys=keys) as second,
        ):
            await put_shard(first.etcd, shard_spec(SHARD, labels={"team": "red"}))
            await assign(first.etcd, SHARD, "aaaa", 0, code=cpb.ReplicaStatus.PRIMARY)
            for process in (first, second):
                await process.settle()
            await first.resolver.local.get(SHARD).change(is_ready=True)
            return {
                call["name"]: await answer(first if "auth-a" in call["asked"] else second, call)
                for call in CALLS
            }

    etcd = EtcdFixture(etcd_server)
    found = run(scenario(etcd))
    run(etcd.clear())
    return found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call["name"])
def test_a_token_is_judged_as_recorded(answers, call):
    code, details, status, shards = answers[call["name"]]
    error = call.get("grpc_error")
    if error is None or call["name"] in MENDED:
        assert (code, status) == ("OK", MENDED.get(call["name"], call.get("status"))), details
        assert shards == call.get("shards")
    else:
        assert code == error["code"]
        cause = next(cause for cause in CAUSES if cause in error["details"])
        assert cause in details
