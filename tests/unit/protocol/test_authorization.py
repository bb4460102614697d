from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re

import pytest

from gazette_sdk.errors import ConfigurationError, UnauthenticatedError
from gazette_sdk.protocol import authorization
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import (
    AllowAll,
    Authority,
    Capability,
    FixedToken,
    authority_for,
    check_key_lengths,
    claims_for,
    may_be_limited,
    parse_keys,
)
from gazette_sdk.protocol.labels import format_selector, journal_selector, parse_selector
from gazette_sdk.protocol.rules import (
    DRAIN_RPC,
    EVENTS_RPC,
    HEADS_RPC,
    JOURNALS_PAGE_RPC,
    MEMBERS_RPC,
    REPORT_RPC,
    RPCS,
    SCALE_RPC,
    SHARDS_PAGE_RPC,
)
from gazette_sdk.transport.connect import connect
from support.vectors import cases, normal, selector

NOW = 1_800_000_000.0
KEYS = "c2VjcmV0,b3RoZXI="


@pytest.mark.parametrize("case", cases("broker", "auth"))
def test_authorities_follow_the_vectors(case):
    if "expect_key_count" in case:
        assert Authority(case["verifier_keys"]).key_count == case["expect_key_count"]
        return
    verifier = Authority(case["verifier_keys"])
    header = None
    if not case.get("no_token"):
        header = Authority(case["signer_keys"]).header(
            case["claims"]["cap"], parse_selector(case["claims"]["sel"]), 60, NOW
        )
    if case["expect"] == "ok":
        claims = verifier.verify(header, Capability(case["require"]), NOW)
        assert normal(claims.selector) == normal(selector(case["expect_selector"]))
        return
    with pytest.raises(UnauthenticatedError, match=case.get("missing", "authorization")):
        verifier.verify(header, Capability(case["require"]), NOW)


@pytest.mark.parametrize("case", cases("broker", "auth_tokens"))
def test_tokens_follow_the_vectors(case):
    authority = Authority(case["verifier_keys"])
    arguments = ("Bearer " + case["token"], Capability(case["require"]), case["verify_at_unix"])
    if case["expect"] != "ok":
        with pytest.raises(UnauthenticatedError):
            authority.verify(*arguments)
        return
    claims = authority.verify(*arguments)
    assert claims.capability == case["claims"]["cap"]
    assert claims.expires_at == case["claims"]["exp"]
    expected = [
        (label["name"], label["value"])
        for label in case["claims"].get("sel", {"include": {"labels": []}})["include"]["labels"]
    ]
    assert [(label.name, label.value) for label in claims.selector.include.labels] == expected


def token(claims, key=b"secret", algorithm="HS256", header=None):
    """A token made without the code under test."""

    def encode(raw: bytes) -> str:
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    head = json.dumps(header or {"alg": algorithm, "typ": "JWT"}).encode()
    body = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    signed = f"{encode(head)}.{encode(body)}"
    hashes = {"HS256": hashlib.sha256, "HS384": hashlib.sha384, "HS512": hashlib.sha512}
    made = hmac.new(key, signed.encode(), hashes[algorithm]).digest()
    return f"{signed}.{encode(made)}"


def verify(claims, now=NOW, required=Capability.READ, **arguments):
    return Authority(KEYS).verify("Bearer " + token(claims, **arguments), required, now)


def refused(*arguments, **keywords) -> str:
    with pytest.raises(UnauthenticatedError) as caught:
        verify(*arguments, **keywords)
    return str(caught.value)


def test_clocks_may_differ_by_five_seconds():
    verify({"cap": 8, "exp": NOW - 4})
    assert "expired" in refused({"cap": 8, "exp": NOW - 6})
    verify({"cap": 8, "exp": NOW + 60, "iat": NOW + 4, "nbf": NOW + 4})
    assert "future" in refused({"cap": 8, "exp": NOW + 60, "iat": NOW + 6})
    assert "not valid yet" in refused({"cap": 8, "exp": NOW + 60, "nbf": NOW + 6})


def test_a_token_is_verified_by_any_key_and_sha_384_is_accepted():
    good = {"cap": 8, "exp": NOW + 60}
    verify(good, key=b"other")
    verify(good, algorithm="HS384")
    assert "no configured key" in refused(good, key=b"third")
    refused(good, algorithm="HS512")
    refused(good, header={"alg": "none"})
    refused(good, algorithm="HS512", header={"alg": "HS256"})


@pytest.mark.parametrize(
    "claims",
    [
        b"[]",
        b"no json",
        b"\xff",
        {"cap": 8},
        {"cap": 8, "exp": None},
        {"cap": 8, "exp": "4102444800"},
        {"cap": 8, "exp": True},
        {"cap": "8", "exp": 4102444800},
        {"cap": -1, "exp": 4102444800},
        {"cap": 1 << 32, "exp": 4102444800},
        {"cap": 8.5, "exp": 4102444800},
        b'{"cap":8,"exp":NaN}',
        b'{"cap":1e999,"exp":4102444800}',
        {"cap": 8, "exp": 4102444800, "sel": "name=x"},
        {"cap": 8, "exp": 4102444800, "sel": {"include": []}},
        {"cap": 8, "exp": 4102444800, "sel": {"include": {"labels": ["x"]}}},
        {"cap": 8, "exp": 4102444800, "sel": {"include": {"labels": [{"name": 5}]}}},
        {"cap": 8, "exp": 4102444800, "sel": {"include": {"labels": [{"name": "\ud800"}]}}},
        {"cap": 8, "exp": 4102444800, "sel": {"exclude": {"labels": 5}}},
        {"cap": 8, "exp": 4102444800, "sel": {"includes": {"labels": []}}},
        {"cap": 8, "exp": 4102444800, "sel": {"exclude": {"label": [{"name": "topic"}]}}},
        {"cap": 8, "exp": 4102444800, "sel": {"include": {"labels": [{"name": "aa", "val": "x"}]}}},
    ],
)
def test_malformed_claims_are_refused(claims):
    assert refused(claims).startswith("invalid token")


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "....", "é.é.é", "e30.e30.e30"])
def test_what_is_no_token_is_refused(text):
    with pytest.raises(UnauthenticatedError):
        Authority(KEYS).verify("Bearer " + text, Capability.READ, NOW)


def test_failures_come_in_order():
    authority = Authority(KEYS)
    for header, text in [
        (None, "missing"),
        ("", "must begin"),
        ("bearer x", "must begin"),
        ("Basic x", "must begin"),
        ("Bearer x", "invalid token"),
        ("Bearer " + token({"cap": 0, "exp": 1}), "expired"),
        ("Bearer " + token({"cap": 2, "exp": NOW + 9}), "capability APPEND"),
    ]:
        with pytest.raises(UnauthenticatedError, match=text):
            authority.verify(header, Capability.APPEND, NOW)


def test_a_missing_capability_is_named_in_order():
    both = Capability.APPEND | Capability.LIST
    with pytest.raises(UnauthenticatedError, match="LIST"):
        Authority(KEYS).verify("Bearer " + token({"cap": 8, "exp": NOW + 9}), both, NOW)
    with pytest.raises(UnauthenticatedError, match="0x10000"):
        Authority(KEYS).verify(
            "Bearer " + token({"cap": 8, "exp": NOW + 9}), Capability(1 << 16), NOW
        )


def test_a_null_selector_matches_all():
    claims = verify(
        {"cap": 8, "exp": NOW + 9, "sel": {"include": {"labels": None}, "exclude": None}}
    )
    assert claims.selector == pb.LabelSelector()


def test_a_signed_selector_survives():
    authority = Authority(KEYS)
    given = parse_selector("name:prefix=a/,topic in (x,y),!draft")
    claims = authority.verify(
        authority.header(Capability.ALL, given, 60, NOW), Capability.READ, NOW + 30
    )
    assert format_selector(claims.selector) == format_selector(given)
    assert claims.capability == Capability.ALL
    assert claims.expires_at == NOW + 60


def test_a_token_that_was_verified_before_still_expires():
    authority = Authority(KEYS)
    header = authority.header(Capability.READ, pb.LabelSelector(), 10, NOW)
    authority.verify(header, Capability.READ, NOW)
    authority.verify(header, Capability.READ, NOW + 14)
    with pytest.raises(UnauthenticatedError, match="expired"):
        authority.verify(header, Capability.READ, NOW + 15)


def test_remembered_tokens_are_bounded(monkeypatch):
    monkeypatch.setattr(authorization, "_VERIFIED_TOKENS_MOST", 3)
    authority = Authority(KEYS)
    for number in range(10):
        header = authority.header(Capability.READ, pb.LabelSelector(), number + 60, NOW)
        authority.verify(header, Capability.READ, NOW)
    assert len(authority._verified) == 3


def test_pass_through_admits_only_requests_without_a_header():
    authority = Authority("AA== " + KEYS)
    claims = authority.verify(None, Capability.APPEND, NOW)
    assert claims.capability == Capability.APPEND
    assert claims.expires_at == NOW + 3600
    with pytest.raises(UnauthenticatedError):
        authority.verify("Bearer x", Capability.APPEND, NOW)


@pytest.mark.parametrize("keys", ["", " , ", "AA==", "not base64!", "c2VjcmV0,x"])
def test_bad_keys_are_a_configuration_error(keys):
    with pytest.raises(ConfigurationError) as caught:
        parse_keys(keys)
    assert "secret" not in str(caught.value)
    assert "c2VjcmV0" not in str(caught.value)


def test_without_keys_everything_is_allowed():
    for keys in (None, ""):
        authority = authority_for(keys)
        assert isinstance(authority, AllowAll)
        claims = authority.verify("whatever", Capability.APPLY, NOW)
        assert (claims.capability, claims.expires_at) == (Capability.ALL, math.inf)
        assert authority.header(2, pb.LabelSelector(), 1, NOW) is None
    assert isinstance(authority_for(KEYS), Authority)


@pytest.mark.parametrize("keys", [" ", "\n", ",", " , ", "AA==", " AA=="])
def test_keys_that_are_blank_are_refused(keys):
    with pytest.raises(ConfigurationError, match="openssl rand"):
        authority_for(keys)


@pytest.mark.parametrize(("length", "is_enough"), [(1, False), (7, False), (8, True), (32, True)])
def test_a_short_key_is_refused(length, is_enough):
    keys = f"AA== {base64.b64encode(bytes(32)).decode()},{base64.b64encode(bytes(length)).decode()}"
    if length == 1:  # as the key AA== it would admit everybody
        keys = keys.removesuffix("AA==") + "AQ=="
    if is_enough:
        check_key_lengths(keys)
    else:
        with pytest.raises(ConfigurationError, match=f"key 2 has {length} bytes, less than 8"):
            check_key_lengths(keys)


def test_a_fixed_token_is_attached_and_not_shown():
    fixed = FixedToken("abc")
    assert fixed.header(2, pb.LabelSelector(), 1, NOW) == "Bearer abc"
    assert "abc" not in repr(fixed)


@pytest.mark.parametrize(
    ("request_", "capability", "text", "ttl_s"),
    [
        (
            pb.ListRequest(selector=parse_selector("prefix=a/,!xx")),
            Capability.LIST,
            "prefix=a/,!xx",
            3600,
        ),
        (pb.ApplyRequest(), Capability.APPLY, "", 60),
        (pb.ReadRequest(journal="a/j;m"), Capability.READ, "name=a/j", 3600),
        (pb.FragmentsRequest(journal="a/j;m"), Capability.READ, "name=a/j", 3600),
        (pb.AppendRequest(journal="a/j;m"), Capability.APPEND, "name=a/j", 3600),
        (
            pb.ReplicateRequest(proposal=pb.Fragment(journal="a/j")),
            Capability.REPLICATE,
            "name=a/j",
            3600,
        ),
        (pb.FragmentStoreHealthRequest(), Capability.READ | Capability.APPLY, "", 60),
    ],
)
def test_clients_sign_narrow_claims(request_, capability, text, ttl_s):
    wanted = claims_for(request_)
    assert (wanted.capability, format_selector(wanted.selector), wanted.ttl_s) == (
        capability,
        text,
        ttl_s,
    )


def test_every_call_can_be_signed_for():
    views = [
        JOURNALS_PAGE_RPC,
        HEADS_RPC,
        MEMBERS_RPC,
        REPORT_RPC,
        EVENTS_RPC,
        DRAIN_RPC,
        SHARDS_PAGE_RPC,
        SCALE_RPC,
    ]
    for rpc in [*RPCS, *views]:
        assert 0 < claims_for(rpc.request_type()).capability < Capability.ALL
    with pytest.raises(TypeError):
        claims_for(pb.Fragment())


def test_a_page_is_asked_for_with_the_selector_of_its_request():
    request = clpb.JournalsPageRequest(selector=parse_selector("topic=orders"))
    wanted = claims_for(request)
    assert wanted.capability == Capability.LIST | Capability.READ
    assert format_selector(wanted.selector) == "topic=orders"
    assert claims_for(clpb.HeadsRequest()).capability == Capability.READ
    assert claims_for(clpb.EventsRequest()).capability == Capability.LIST


def test_a_drain_is_asked_for_with_the_right_to_change_everything():
    wanted = claims_for(clpb.DrainRequest())
    assert (wanted.capability, wanted.ttl_s) == (Capability.APPLY, 60)
    assert format_selector(wanted.selector) == ""


@pytest.mark.parametrize(
    ("authorizer", "limited"),
    [
        (None, False),
        (AllowAll(), False),
        (Authority(KEYS), False),
        (FixedToken(Authority(KEYS).sign(2, pb.LabelSelector(), 60, 1000)), False),
        (FixedToken(Authority(KEYS).sign(2, journal_selector("a/b"), 60, 1000)), True),
        (FixedToken("opaque"), True),
        (FixedToken("a.b?.c"), True),
        (object(), True),
    ],
)
def test_a_token_with_a_selector_may_hide_journals(authorizer, limited):
    assert may_be_limited(authorizer) == limited


def test_a_transport_says_whether_its_token_may_hide_journals():
    token = Authority(KEYS).sign(2, journal_selector("a/b"), 60, NOW)
    assert connect("https://broker:8080", auth_token=token).may_hide_journals
    assert not connect("https://broker:8080", auth_keys=KEYS).may_hide_journals


def test_keys_are_named_by_their_ids_and_else_by_fingerprints():
    """Equal keys have equal names, and no name shows a key."""
    first, second = (base64.b64encode(text * 8).decode() for text in (b"one!", b"two!"))
    named = Authority(f"new:{first} {second}")
    assert named.key_ids[0] == "new"
    assert re.fullmatch(r"unnamed-[0-9a-f]{8}", named.key_ids[1])
    assert Authority(second).key_ids == named.key_ids[1:]
    assert Authority(f"{second},AA==").key_ids == (*named.key_ids[1:], "AA==")
    assert Authority(first).key_ids != Authority(second).key_ids
    assert AllowAll().key_ids == ()
    named.replace(f"newest:{second}")
    assert named.key_ids == ("newest",)
