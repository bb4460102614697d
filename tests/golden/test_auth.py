"""Bearer tokens, as recorded of another broker: what is accepted, and which error otherwise."""

from __future__ import annotations

import base64
import hmac
import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gazette_sdk.transport.loop import run
from support.golden import TIMEOUT_S, recorded, running
from support.golden_compare import RECORDED_ENDPOINT, Replay
from support.raw_http import Answer, exchange

KEYS, *CASES = recorded("auth")
FIRST_KEY, SECOND_KEY = map(base64.b64decode, KEYS["auth_keys"].split(","))
HOUR_S = 3600
LIFE_S = 2
"""For how long the tokens of those calls live which end with their tokens."""

GRPC = {case["name"]: case for case in CASES if "code" in case}
HTTP = {case["name"]: case for case in CASES if "request" in case}
REFUSED_BY_OURS = {
    # The recorded gateway vouches for whoever asks; ours wants the caller's own token.
    "HTTP GET without a token",
    "HTTP PUT without a token",
    "HTTP GET with a wrong token",
}
NOT_TOKENS = {
    "no header": None,
    "not Bearer": "Basic abc",
    "bearer in lower case": "bearer {}",
    "no JWT": "Bearer abc",
}
RPC_OF = {
    "read": "Read",
    "append": "Append",
    "replicate": "Replicate",
    "fragments": "ListFragments",
    "store": "FragmentStoreHealth",
    "invalid": "Read",
    "blocked": "Read",
}
"""By the first word of a case's name; the others are told by their requests."""


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    directory = tmp_path_factory.mktemp("auth")
    with running(directory, auth_keys=KEYS["auth_keys"]) as broker:
        replay = Replay(broker)
        for name, case in GRPC.items():
            replay.run(rpc_of(case), case, token=header_of(case))
            if name == "apply inside the selector":
                broker.wait_until_served("acme/one")
        yield replay


@pytest.mark.parametrize("name", GRPC)
def test_calls_are_answered_as_recorded(replay: Replay, name: str) -> None:
    verdict = replay.check(name)
    wanted = re.search(r"missing required ([A-Z]+)", GRPC[name].get("message", ""))
    if wanted is not None:
        assert wanted.group(1) in verdict.outcome.message


@pytest.mark.parametrize("name", [name for name in GRPC if name.endswith("ends with the token")])
def test_a_call_ends_when_its_token_does(replay: Replay, name: str) -> None:
    assert LIFE_S - 1 <= replay.verdicts[name].outcome.seconds < LIFE_S + 3


@pytest.mark.parametrize("name", HTTP)
def test_http_is_answered_as_recorded(replay: Replay, name: str) -> None:
    case = HTTP[name]
    answer = ask(replay, case)
    if name in REFUSED_BY_OURS:
        assert answer.status == 401
        assert answer.header("WWW-Authenticate") == "Bearer"
        return
    assert answer.status_line == case["status_line"]
    names = {header.lower() for header, _ in answer.headers_beside(case["headers"])}
    assert names == {header.lower() for header, _ in case["headers"]}
    assert shown(answer.body, replay) == shown(case["body"].encode(), replay)


def test_http_with_a_token_is_answered(replay: Replay) -> None:
    """What the recorded gateway gives to anybody it gives to whoever may read."""
    case = HTTP["HTTP GET without a token"]
    answer = ask(replay, case, f"Authorization: {bearer({'cap': 8, 'exp': HOUR_S + time.time()})}")
    assert answer.status_line == case["status_line"]
    endpoint = replay.broker.endpoint
    there = {name: value.replace(RECORDED_ENDPOINT, endpoint) for name, value in case["headers"]}
    assert dict(answer.headers_beside(case["headers"])) | {"Date": "DATE"} == there
    assert answer.body.decode() == case["body"] == "hello\n"


# ------------------------------------------------------------------ tokens


def rpc_of(case: dict[str, Any]) -> str:
    word = case["name"].split(" ")[0].rstrip(",:")
    request = case["requests"][0]["json"]
    return RPC_OF.get(word, "Apply" if "changes" in request else "List")


def header_of(case: dict[str, Any]) -> str | None:
    """The authorization header of a case, made now."""
    name, given = case["name"], case["claims"]
    if given is None:
        text = NOT_TOKENS[name]
        return text and text.format(
            token_of({"cap": 2, "exp": int(time.time()) + HOUR_S}, FIRST_KEY)
        )
    now = time.time()
    claims = dict(given)
    claims["exp"] = expiry(name, given["exp"], now)
    if claims["exp"] is None:
        del claims["exp"]
    for future in {"iat", "nbf"} & set(claims):
        claims[future] = int(now) + HOUR_S
    return bearer(claims, name)


def expiry(name: str, recorded_exp: Any, now: float) -> int | None:
    if recorded_exp == "in an hour":
        return int(now) + HOUR_S
    if (ago := re.fullmatch(r"expired (\d) s ago", name)) is not None:
        # Rounded up: a part of a second that is dropped would be taken from the leeway.
        return math.ceil(now) - int(ago.group(1))
    if name.endswith("ends with the token"):
        return math.ceil(now) + LIFE_S
    assert recorded_exp is None
    return None


def bearer(claims: dict[str, Any], name: str = "") -> str:
    keys = {"second key": SECOND_KEY, "unknown key": b"an unknown key"}
    algorithm = name if name in {"HS384", "HS512"} else "HS256"
    return "Bearer " + token_of(claims, keys.get(name, FIRST_KEY), algorithm)


def token_of(claims: dict[str, Any], key: bytes, algorithm: str = "HS256") -> str:
    """A JWT, made by hand: no key is too short for what is to be tried."""
    head = {"alg": algorithm, "typ": "JWT"}
    parts = [base64url(json.dumps(part).encode()) for part in (head, claims)]
    digest = algorithm.replace("HS", "sha")
    signature = hmac.new(key, ".".join(parts).encode(), digest).digest()
    return ".".join((*parts, base64url(signature)))


def base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# ------------------------------------------------------------------ HTTP


def ask(replay: Replay, case: dict[str, Any], *headers: str) -> Answer:
    request = case["request"]
    token = bearer({"cap": 2, "exp": int(time.time()) + HOUR_S}).removeprefix("Bearer ")
    given = [header.replace("TOKEN", token) for header in request["headers"]]
    body = base64.b64decode(request["body_base64"]) if "body_base64" in request else None
    return run(
        exchange(
            replay.broker.endpoint,
            request["method"],
            request["target"],
            headers=(*given, *headers),
            body=body,
        ),
        TIMEOUT_S,
    )


def shown(body: bytes, replay: Replay) -> Any:
    """A JSON answer without what varies: revisions, ids of Etcd, the text of an error."""
    text = body.decode().replace(RECORDED_ENDPOINT, replay.broker.endpoint)
    varying = r'"(clusterId|memberId|revision|raftTerm|modRevision|createRevision)":"[1-9]\d*"'
    answer = json.loads(re.sub(varying, r'"\1":"SOME"', text))
    answer.get("error", {}).pop("message", None)
    return answer
