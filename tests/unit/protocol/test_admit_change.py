from __future__ import annotations

import asyncio
import base64
import math

import pytest

from gazette_sdk.errors import DeadlineExceededError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability, Claims, admit_change
from gazette_sdk.protocol.labels import label_set, parse_selector
from gazette_sdk.server.authorization import Authorization, Call
from support.brokers import journal_spec
from support.etcd import run
from support.vectors import cases

NOW = 1_700_000_000.0
AUTHORITY = Authority(base64.b64encode(b"a secret").decode())


def token(capability=Capability.ALL, ttl_s=60.0, of=""):
    selector = parse_selector(of) if of else pb.LabelSelector()
    return Call(authorization=AUTHORITY.header(capability, selector, ttl_s, NOW))


def test_capabilities_are_required():
    authorization = Authorization(AUTHORITY, now=lambda: NOW)
    assert authorization.verify(token(Capability.READ), Capability.READ).capability == 8
    with pytest.raises(UnauthenticatedError):
        authorization.verify(token(Capability.READ), Capability.APPEND)
    with pytest.raises(UnauthenticatedError):
        authorization.verify(Call(), Capability.READ)


def test_a_call_ends_with_its_token_or_its_callers_patience():
    authorization = Authorization(AUTHORITY, now=lambda: NOW)
    claims = authorization.verify(token(), Capability.READ)
    assert authorization.remaining_s(claims) == 60
    assert authorization.remaining_s(claims, Call(timeout_s=5)) == 5
    assert authorization.remaining_s(claims, Call(timeout_s=500)) == 60
    late = Authorization(AUTHORITY, now=lambda: NOW + 63)
    assert late.remaining_s(claims) == 0


def test_without_keys_nothing_ends():
    authorization = Authorization(AllowAll())
    claims = authorization.verify(Call(), Capability.APPLY)
    assert claims.expires_at == math.inf
    assert authorization.remaining_s(claims, Call()) is None


def test_what_takes_too_long_is_ended():
    async def scenario():
        authorization = Authorization(AllowAll())
        claims = authorization.verify(Call(), Capability.APPLY)
        with pytest.raises(DeadlineExceededError):
            async with authorization.bound(claims, Call(timeout_s=0.01)):
                await asyncio.Event().wait()
        async with authorization.bound(claims, Call(timeout_s=10)):
            pass
        async with authorization.bound(claims, Call()):
            pass
        with pytest.raises(TimeoutError, match="its own"):
            async with authorization.bound(claims, Call(timeout_s=10)):
                raise TimeoutError("its own")

    run(scenario())


@pytest.mark.parametrize("case", [p for p in cases("broker", "apply") if "claims" in p.values[0]])
def test_changes_outside_the_claims_are_refused(case):
    given = case["claims"]
    (raw,) = case["changes"]
    capability = sum(Capability[name] for name in given["capability"])
    authorization = Authorization(AUTHORITY, now=lambda: NOW)
    change = pb.ApplyRequest.Change(expect_mod_revision=raw.get("expect", 0))
    if "upsert" in raw:
        spec = journal_spec(raw["upsert"])
        spec.labels.CopyFrom(
            label_set((label["name"], label["value"]) for label in raw.get("labels", ()))
        )
        change.upsert.CopyFrom(spec)
    else:
        change.delete = raw["delete"]

    def admit():
        claims = authorization.verify(
            token(capability, of=given.get("selector", "")), Capability.APPLY
        )
        admit_change(claims, change)

    if "grpc_error" in case:
        with pytest.raises(UnauthenticatedError):
            admit()
    else:
        admit()


def test_an_upsert_is_looked_at_by_its_new_labels():
    claims = Claims(4, parse_selector("env=staging"), math.inf)
    change = pb.ApplyRequest.Change(upsert=journal_spec("a/journal", labels={"env": "staging"}))
    admit_change(claims, change)
