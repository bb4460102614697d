import asyncio
import base64
import json
import time

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import CallError, UnauthenticatedError, UnavailableError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.durations import from_seconds
from gazette_sdk.protocol.rules import complete
from gazette_sdk.server.json_gateway import (
    BODY_BYTES_MAX,
    JsonGateway,
    JsonStream,
    JsonUnary,
    _json,
    message_json,
)
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.raw_http import exchange
from support.scripted_journals import HEADER, ScriptedJournals, items, metadata, serving
from support.vectors import golden

CASES = golden("broker/http_json_v1.json")
ORIGIN = "http://ui.example"


AUTHORITY = Authority(base64.b64encode(b"a secret of the cluster").decode())


def ask(journals, target, body=b"", *headers, method="POST", **options):
    async def scenario():
        async with serving(journals, allow_origins=(ORIGIN,)) as server:
            return await exchange(
                server.endpoint, method, target, body=body, headers=headers, **options
            )

    return run(scenario(), 15)


def _replay(case):
    """Journals which answer as the recorded broker did, from its JSON; and what was asked."""
    journals = ScriptedJournals()
    asked: list[object] = []
    is_list = case["request"]["target"].endswith("list")
    kind = pb.ListResponse if is_list else pb.ReadResponse
    results: list[object] = []
    lines = case["body"].splitlines() if isinstance(case["body"], str) else []
    for line in lines:
        recorded = json.loads(line)
        if "result" in recorded:
            results.append(json_format.ParseDict(recorded["result"], kind()))
        elif "error" in recorded:
            results.append(CallError(recorded["error"]["message"]))
    if case.get("complete") is False:
        results.append(None)
    if not isinstance(case["body"], str):
        results.append(kind())

    async def answer(request, _call):
        asked.append(request)
        for result in results:
            if result is None:
                await asyncio.Event().wait()
            if isinstance(result, BaseException):
                raise result
            yield result

    journals.on_list = journals.on_read = answer
    return journals, asked


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_recorded_answers_are_given_byte_by_byte(case):
    """Whatever a broker answers through gRPC has the recorded form as JSON."""
    journals, _ = _replay(case)
    request = case["request"]
    body = base64.b64decode(request.get("body_base64", ""))
    is_open = case.get("complete") is False
    last = case["body"].encode()[-20:] if is_open else None
    answer = ask(
        journals,
        request["target"].replace("/apply", "/append"),  # ours has the first, and none has this
        body or None,
        *request["headers"],
        method=request["method"],
        leave_after=last,
    )
    assert answer.status_line == case["status_line"]
    recorded = {name.lower(): value for name, value in case["headers"]}
    shown = {name.lower(): value for name, value in answer.headers_beside(case["headers"])}
    for varying in ("date", "content-length"):
        recorded.pop(varying, None)
        shown.pop(varying, None)
    if request["method"] == "OPTIONS":
        shown.pop("content-type", None)
    assert shown == recorded
    if answer.status == 400:
        refusal = json.loads(answer.body)
        assert (refusal["code"], refusal["details"]) == (3, [])
        assert refusal["message"]
    elif isinstance(case["body"], str):
        assert answer.body.decode() == case["body"]


def test_requests_are_understood_in_both_spellings():
    for case in CASES:
        if case["status_line"] != "HTTP/1.1 200 OK" or "body_base64" not in case["request"]:
            continue
        journals, asked = _replay({**case, "complete": True})
        request = case["request"]
        body = base64.b64decode(request["body_base64"])
        ask(journals, request["target"], body)
        kind = pb.ListRequest if request["target"].endswith("list") else pb.ReadRequest
        assert asked == [json_format.Parse(body, kind(), ignore_unknown_fields=True)]


def test_every_field_is_written():
    spec = pb.JournalSpec(
        name="a/journal",
        flags=4,
        fragment=pb.JournalSpec.Fragment(
            length=1 << 40,
            refresh_interval=from_seconds(60),
            flush_interval=from_seconds(1.5),
            compression_codec=pb.GZIP,
        ),
        suspend=pb.JournalSpec.Suspend(level="PARTIAL", offset=5),
    )
    assert json.loads(_json(message_json(complete(spec)))) == {
        "name": "a/journal",
        "replication": 0,
        "labels": {"labels": []},
        "fragment": {
            "length": "1099511627776",
            "compressionCodec": "GZIP",
            "stores": [],
            "refreshInterval": "60s",
            "retention": "0s",
            "flushInterval": "1.500s",
            "pathPostfixTemplate": "",
        },
        "flags": 4,
        "maxAppendRate": "0",
        "suspend": {"level": "PARTIAL", "offset": "5"},
    }


def test_an_unknown_enum_value_is_a_number():
    assert message_json(pb.ReadResponse(status=99))["status"] == 99


@given(st.text(), st.integers(-(1 << 63), (1 << 63) - 1), st.binary())
def test_what_is_written_can_be_read_back(text, number, content):
    message = pb.ReadResponse(fragment_url=text, offset=number, content=content, header=HEADER)
    written = _json(message_json(message))
    assert not set(b"<>&") & set(written)
    assert json_format.Parse(written, pb.ReadResponse()) == message


def test_content_comes_in_lines_of_bounded_size():
    journals = ScriptedJournals()
    journals.on_read = lambda *_: items(metadata(5), b"x" * 70_000)
    answer = ask(journals, "/v1/journals/read", b'{"journal": "a/journal"}')
    _, *lines = [json.loads(line)["result"] for line in answer.body.splitlines()]
    assert [len(base64.b64decode(line["content"])) for line in lines] == [32736, 32736, 4528]
    assert [line["offset"] for line in lines] == ["5", "32741", "65477"]


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (UnauthenticatedError("no token"), 16, 401),
        (ValidationError("wrong"), 2, 500),
        (UnavailableError("gone"), 14, 503),
        (CallError("odd", code="INVALID_ARGUMENT"), 3, 400),
    ],
)
def test_an_error_before_the_first_message_is_the_answer(error, code, status):
    journals = ScriptedJournals()
    journals.on_list = lambda *_: items(error)
    answer = ask(journals, "/v1/journals/list", b"{}", "Authorization: Bearer x")
    shown = json.loads(answer.body)["error"]
    assert answer.status == shown["httpCode"] == status
    assert (shown["grpcCode"], shown["message"], shown["details"]) == (code, str(error), [])
    assert journals.calls[0].authorization == "Bearer x"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"x"',
        b"{} {}",
        b"\xff",
        b'{"offset": "x"}',
        b'{"offset": 1.5}',
        b"nope",
        b"[" * 16_000,
    ],
)
def test_a_body_that_is_no_request_is_refused(body):
    answer = ask(ScriptedJournals(), "/v1/journals/read", body)
    assert answer.status == 400
    assert json.loads(answer.body)["code"] == 3


def test_a_body_that_is_too_large_is_refused():
    body = b'{"journal": "' + b"x" * (5 << 20) + b'"}'
    assert ask(ScriptedJournals(), "/v1/journals/read", body).status == 413


def test_an_empty_body_is_the_default_request():
    seen: list[object] = []
    journals = ScriptedJournals()

    def remember(request, _call):
        seen.append(request)
        return items(pb.ListResponse(header=HEADER))

    journals.on_list = remember
    for body in (None, b"", b" \n"):
        assert ask(journals, "/v1/journals/list", body).status == 200
    assert seen == [pb.ListRequest()] * 3


def test_origins_are_allowed_on_every_kind_of_answer():
    for target, body in (("/v1/journals/list", b"{}"), ("/v1/journals/list", b"{"), ("/v1/x", b"")):
        allowed = ask(ScriptedJournals(), target, body, f"Origin: {ORIGIN}")
        assert allowed.header("Access-Control-Allow-Origin") == ORIGIN
        other = ask(ScriptedJournals(), target, body, "Origin: http://other.example")
        assert other.header("Access-Control-Allow-Origin") is None


def test_without_an_origin_nothing_is_allowed_even_when_nothing_is_configured():
    answer = ask(ScriptedJournals(), "/v1/journals/list", b"{}", "Origin: ")
    assert answer.header("Access-Control-Allow-Origin") is None


@pytest.mark.parametrize("name", ["list", "read"])
@pytest.mark.parametrize("capability", [None, Capability.APPEND])
def test_a_request_without_a_good_token_is_refused_before_its_body_is_read(name, capability):
    async def scenario():
        async with serving(ScriptedJournals(), authority=AUTHORITY) as server:
            headers = ["Content-Length: 2000000"]
            if capability is not None:
                token = AUTHORITY.sign(capability, pb.LabelSelector(), 60, time.time())
                headers.append(f"Authorization: Bearer {token}")
            return await exchange(
                *(server.endpoint, "POST", f"/v1/journals/{name}"),
                headers=tuple(headers),
                body=b"{",  # the rest of it never comes
                leave_after=b"grpcCode",
            )

    answer = run(scenario(), 5)
    assert answer.status == 401
    assert b'"grpcCode":16' in answer.body


def test_a_long_body_is_refused_unparsed():
    labels = [{"name": "a", "value": str(number)} for number in range(40_000)]
    body = json.dumps({"selector": {"include": {"labels": labels}}}).encode()
    assert len(body) > 1_000_000
    journals = ScriptedJournals()
    began_s = time.monotonic()
    answer = ask(journals, "/v1/journals/list", body, leave_after=b"selector")
    assert answer.status == 413
    assert b"longer than 16384 bytes; send a shorter request" in answer.body
    assert time.monotonic() - began_s < 1
    assert not journals.calls


def ask_calls(methods, target, *, body=b"", method="GET"):
    async def scenario():
        server = Server()
        server.http.mount("/v1/", JsonGateway(methods))
        await server.start()
        try:
            return await exchange(server.endpoint, method, target, body=body)
        finally:
            await server.stop(0)

    return run(scenario(), 15)


def page_calls(*, allows_get=True, **options):
    """A call that answers with the request it got, in its rows."""
    asked = []

    async def page(request, _call):
        asked.append(request)
        return clpb.JournalsPageResponse(next=request.after)

    unary = JsonUnary(
        Capability.LIST, clpb.JournalsPageRequest, page, allows_get=allows_get, **options
    )
    return {"/v1/page": unary}, asked


def test_a_get_has_the_scalar_fields_of_the_request_as_parameters():
    methods, asked = page_calls()
    answer = ask_calls(
        methods,
        "/v1/page?after=a%2Fb&limit=7&descending=true&sort=BY_HEAD"
        "&states=JOURNAL_OK&states=JOURNAL_SHORT",
    )
    assert answer.status == 200
    assert json.loads(answer.body)["next"] == "a/b"
    assert asked == [
        clpb.JournalsPageRequest(
            after="a/b",
            limit=7,
            descending=True,
            sort=clpb.BY_HEAD,
            states=[clpb.JOURNAL_OK, clpb.JOURNAL_SHORT],
        )
    ]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("selector=a", "no parameter 'selector'; it has: after"),
        ("nothing=1", "no parameter 'nothing'"),
        ("limit=many", "limit"),
        ("descending=1", "must be true or false"),
    ],
)
def test_a_get_with_a_parameter_that_is_no_field_is_refused(query, text):
    methods, asked = page_calls()
    answer = ask_calls(methods, f"/v1/page?{query}")
    assert answer.status == 400
    assert text in json.loads(answer.body)["message"]
    assert not asked


def test_calls_that_may_change_something_are_not_made_by_get():
    methods, asked = page_calls(allows_get=False)
    assert ask_calls(methods, "/v1/page").status == 501
    assert not asked


def test_a_stream_is_read_by_get():
    async def events(request, _call):
        yield clpb.Event(id=request.after + "1")
        yield clpb.Event(id=request.after + "2")

    methods = {
        "/v1/events": JsonStream(Capability.LIST, clpb.EventsRequest, events, allows_get=True)
    }
    lines = ask_calls(methods, "/v1/events?after=a:").body.splitlines()
    assert [json.loads(line)["result"]["id"] for line in lines] == ["a:1", "a:2"]


def test_optional_fields_that_are_not_set_are_absent_and_zeros_are_not():
    row = clpb.JournalsPageResponse.Row(name="a", head=0, rate=0.0)
    written = message_json(row)
    assert written["head"] == "0"
    assert written["rate"] == 0.0
    assert written["replication"] == 0
    assert not {"primary", "begin", "size", "unstored"} & written.keys()


def test_a_call_may_take_a_longer_body():
    methods, asked = page_calls(body_bytes_max=4 * BODY_BYTES_MAX)
    long = json.dumps({"search": "a" * 2 * BODY_BYTES_MAX}).encode()
    assert ask_calls(methods, "/v1/page", body=long, method="POST").status == 200
    assert len(asked[0].search) == 2 * BODY_BYTES_MAX
    assert ask_calls(methods, "/v1/page", body=long * 3, method="POST").status == 413


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 200), (ORIGIN, 200), ("http://evil.example", 401), ("null", 401)],
)
def test_pages_of_other_origins_may_not_apply(origin, status):
    """A browser sends such a request without asking, whatever the answer allows."""
    journals = ScriptedJournals()
    headers = () if origin is None else (f"Origin: {origin}",)
    answer = ask(journals, "/v1/journals/apply", b"{}", *headers)
    assert answer.status == status
    assert len(journals.calls) == (status == 200)


def test_a_page_of_the_own_origin_may_apply():
    journals = ScriptedJournals()
    headers = ("Origin: http://localhost:1234",)
    answer = ask(journals, "/v1/journals/apply", b"{}", *headers, host="localhost:1234")
    assert answer.status == 200


@pytest.mark.parametrize("call", ["fragments", "store-health", "apply"])
def test_the_unary_calls_of_journals_are_made_as_json(call):
    journals = ScriptedJournals()
    answer = ask(journals, f"/v1/journals/{call}", b'{"journal": "a/b"}')
    assert answer.status == 200
    assert json.loads(answer.body)["status"] == "OK"
    assert len(journals.calls) == 1


def test_a_stream_by_get_begins_before_its_first_message():
    """A client waits for the headers, and there may be no event for long."""

    async def silent(_request, _call):
        await asyncio.Event().wait()
        yield

    async def scenario():
        methods = {
            "/v1/events": JsonStream(Capability.LIST, clpb.EventsRequest, silent, allows_get=True)
        }
        server = Server()
        server.http.mount("/v1/", JsonGateway(methods))
        await server.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            line = await reader.readline()
            writer.close()
            return line
        finally:
            await server.stop(0)

    assert run(scenario(), 15).startswith(b"HTTP/1.1 200")


def test_an_error_before_the_first_message_of_a_get_is_the_answer():
    async def refused(_request, _call):
        raise CallError("no such id", code="INVALID_ARGUMENT")
        yield

    methods = {
        "/v1/events": JsonStream(Capability.LIST, clpb.EventsRequest, refused, allows_get=True)
    }
    answer = ask_calls(methods, "/v1/events")
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"] == "no such id"
