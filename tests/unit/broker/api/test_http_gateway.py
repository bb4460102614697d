import asyncio
import gzip
import tempfile
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.api.http_gateway import (
    SMALL_BODY_BYTES,
    append_request,
    read_request,
    route_token,
)
from gazette_sdk.errors import (
    CallError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.http import parse_target
from gazette_sdk.transport.loop import run
from support.raw_http import exchange
from support.scripted_journals import (
    HEADER,
    FileSpan,
    ScriptedJournals,
    items,
    metadata,
    serving,
)
from support.vectors import build, cases, fragment, header


def ask(journals, *asked, **options):
    async def scenario():
        async with serving(journals) as server:
            return await exchange(server.endpoint, *asked, **options)

    return run(scenario(), 15)


def _scripted(case):
    """The journals of a vector: they answer what it says."""
    journals = ScriptedJournals()
    if "read_response" in case:
        given = dict(case["read_response"])
        response = build(
            pb.ReadResponse, {k: v for k, v in given.items() if k not in {"header", "fragment"}}
        )
        response.header.CopyFrom(header(given["header"]))
        response.fragment.CopyFrom(fragment(given["fragment"]))
        journals.on_read = lambda *_: items(response)
    if "status" in case and case["status"] != "OK":
        journals.on_read = lambda *_: items(pb.ReadResponse(status=case["status"], header=HEADER))
    if "append_response" in case:
        given = case["append_response"]
        response = pb.AppendResponse(
            header=header(given["header"]),
            commit=fragment(given["commit"]),
            registers=pb.LabelSet(),
        )

        async def answer(requests, _call):
            async for _ in requests:
                pass
            return response

        journals.on_append = answer
    return journals


@pytest.mark.parametrize("case", cases("broker", "http_gateway"))
def test_vector(case):
    url = case.get("url", "/a/journal")
    expect = case.get("expect", {})
    target = parse_target(url)
    if "read_request" in expect:
        assert read_request(case["method"], target) == build(pb.ReadRequest, expect["read_request"])
    if "append_request" in expect:
        assert append_request(target) == build(pb.AppendRequest, expect["append_request"])
    if expect.get("http") == 400 and case["method"] != "DELETE":
        with pytest.raises(ValidationError):
            append_request(target) if case["method"] == "PUT" else read_request(
                case["method"], target
            )
        return
    journals = _scripted(case)
    body = case["body"].encode() if "body" in case else b"" if case["method"] == "PUT" else None
    answer = ask(journals, case["method"], url, body=body)
    if "http" in expect:
        assert answer.status == expect["http"]
    for name, value in case.get("expect_headers", {}).items():
        assert answer.header(name) == value.strip(), name
    if "append_messages" in expect:
        opening, content, commit = expect["append_messages"]
        assert journals.appended == [
            [
                build(pb.AppendRequest, opening),
                content["content"].encode(),
                build(pb.AppendRequest, commit),
            ]
        ]
        assert answer.body == b""


@pytest.mark.parametrize(
    ("query", "offset", "block"),
    [
        ("", 0, False),
        ("offset=12", 12, False),
        ("offset=-1&block=on", -1, True),
        ("offset=%2B5&block=t", 5, True),
        ("OFFSET=12&Block=1", 12, True),
        ("offset=&block=", 0, False),
        ("offset=11&offset=12", 12, False),
        ("&&offset=3&", 3, False),
        ("offset=9223372036854775807", (1 << 63) - 1, False),
        ("block=F", 0, False),
        ("offset=007", 7, False),
    ],
)
def test_a_query_is_understood(query, offset, block):
    request = read_request("GET", parse_target(f"/a/journal?{query}"))
    assert (request.offset, request.block) == (offset, block)


@pytest.mark.parametrize(
    "query",
    [
        "nope=1",
        "offset=x",
        "offset=1.5",
        "offset=1e3",
        "offset=1_000",
        "offset=%D9%A3",
        "offset=-2",
        "offset=9223372036854775808",
        "offset=99999999999999999999999",
        "block=maybe",
        "block=yes",
        "end_offset=5",
        "metadata_only=true",
        "offset=12;block=false",
        "%zz=1",
        "offset=%4",
        "offset",
        "=1",
    ],
)
def test_a_wrong_query_is_refused(query):
    if query == "offset":
        assert read_request("GET", parse_target("/a/journal?offset")).offset == 0
        return
    with pytest.raises(ValidationError):
        read_request("GET", parse_target(f"/a/journal?{query}"))


@pytest.mark.parametrize("path", ["/", "/a", "/a/journal/", "/a b/c"])
def test_a_path_that_is_no_journal_is_refused(path):
    target = parse_target(path.replace(" ", "%20"))
    for parse in (append_request, lambda target: read_request("GET", target)):
        with pytest.raises(ValidationError):
            parse(target)


def test_a_put_takes_no_query():
    with pytest.raises(ValidationError, match="takes none"):
        append_request(parse_target("/a/journal?offset=3"))
    assert append_request(parse_target("/a/journal?")).journal == "a/journal"


def test_a_route_is_written_as_compact_text():
    route = pb.Route(
        members=[
            pb.ProcessSpec.ID(zone="a", suffix='x"\\'),
            pb.ProcessSpec.ID(zone="b", suffix="ü\n"),
        ],
        primary=1,
        endpoints=["http://x", "http://y"],
    )
    assert route_token(route) == (
        'members:<zone:"a" suffix:"x\\"\\\\" > members:<zone:"b" suffix:"\\303\\274\\n" > '
        'primary:1 endpoints:"http://x" endpoints:"http://y"'
    )


# --------------------------------------------------------------------- reads


def test_content_is_streamed_and_the_trailer_says_why_it_ended():
    journals = ScriptedJournals()
    journals.on_read = lambda *_: items(
        metadata(7),
        b"first line\n",
        metadata(18, header=None),
        b"second line\n",
        pb.ReadResponse(status=pb.OFFSET_NOT_YET_AVAILABLE, offset=30, write_head=30),
    )
    answer = ask(journals, "GET", "/a/journal?offset=7")
    assert answer.status_line == "HTTP/1.1 206 Partial Content"
    assert answer.body == b"first line\nsecond line\n"
    assert answer.chunk_sizes == [11, 12]
    assert answer.trailers == [("X-Close-Error", "OFFSET_NOT_YET_AVAILABLE")]
    assert answer.header("Content-Type") == "text/plain; charset=utf-8"
    assert answer.header("Content-Range") == "bytes 7-9223372036854775807/9223372036854775807"


@pytest.mark.parametrize(
    ("ending", "trailer"),
    [
        ((), "broker terminated RPC"),
        ((metadata(50),), "offset jump"),
        ((pb.ReadResponse(status=pb.SUSPENDED),), "SUSPENDED"),
        ((CallError("unexpected EOF"),), "unexpected EOF"),
        ((UnavailableError("a peer\r\nis gone"),), "a peer is gone"),
    ],
)
def test_every_end_is_named(ending, trailer):
    journals = ScriptedJournals()
    journals.on_read = lambda *_: items(metadata(), b"content", *ending)
    answer = ask(journals, "GET", "/a/journal")
    assert answer.trailers == [("X-Close-Error", trailer)]
    assert (answer.body, answer.complete) == (b"content", True)


def test_an_end_before_the_first_byte_has_no_media_type():
    journals = ScriptedJournals()
    journals.on_read = lambda *_: items(metadata(), CallError("unexpected EOF"))
    answer = ask(journals, "GET", "/a/journal")
    assert (answer.status, answer.body, answer.header("Content-Type")) == (206, b"", None)
    assert answer.trailers == [("X-Close-Error", "unexpected EOF")]


def test_files_are_streamed():
    with tempfile.TemporaryFile() as file:
        content = b"0123456789abcdef" * 30_000
        file.write(content)
        file.flush()
        journals = ScriptedJournals()
        journals.on_read = lambda *_: items(
            metadata(), FileSpan(file.fileno(), 16, len(content) - 16)
        )
        assert ask(journals, "GET", "/a/journal").body == content[16:]


def test_nothing_is_sent_before_content_comes():
    async def scenario():
        content = asyncio.Event()

        async def later(_request, _call):
            yield metadata()
            await content.wait()
            yield b"late"

        journals = ScriptedJournals()
        journals.on_read = later
        async with serving(journals) as server:
            early = await exchange(server.endpoint, "GET", "/a/journal", leave_after_s=0.1)
            content.set()
            answer = await exchange(server.endpoint, "GET", "/a/journal")
            return early, answer

    early, answer = run(scenario(), 10)
    assert early.status_line == ""
    assert answer.body == b"late"


def test_a_head_request_tells_without_content():
    journals = ScriptedJournals()
    seen: list[pb.ReadRequest] = []

    def look(request, _call):
        seen.append(request)
        return items(metadata(fragment_url="file:///x", write_head=30))

    journals.on_read = look
    answer = ask(journals, "HEAD", "/a/journal?offset=3")
    assert seen == [pb.ReadRequest(journal="a/journal", offset=3, metadata_only=True)]
    assert answer.status == 206
    assert answer.header("X-Fragment-Location") == "file:///x"
    assert answer.header("X-Write-Head") == "30"
    for absent in ("Trailer", "Content-Type", "Transfer-Encoding", "Content-Length"):
        assert answer.header(absent) is None, absent


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_error_status_has_headers_but_no_range(method):
    journals = ScriptedJournals()
    journals.on_read = lambda *_: items(
        pb.ReadResponse(status=pb.OFFSET_NOT_YET_AVAILABLE, header=HEADER, offset=23, write_head=23)
    )
    answer = ask(journals, method, "/a/journal?offset=23")
    assert answer.status == 416
    assert answer.header("Content-Length") == "25"
    assert answer.header("X-Write-Head") == "23"
    assert answer.header("Location") == "http://broker/path/a/journal"
    assert answer.header("X-Route-Token") == route_token(HEADER.route)
    assert answer.header("Content-Range") is None
    assert answer.body == (b"OFFSET_NOT_YET_AVAILABLE\n" if method == "GET" else b"")


def test_no_primary_is_no_location():
    route = pb.Route(members=HEADER.route.members, endpoints=HEADER.route.endpoints, primary=-1)
    journals = ScriptedJournals()
    journals.on_read = lambda *_: items(metadata(header=pb.Header(route=route)))
    answer = ask(journals, "HEAD", "/a/journal")
    assert answer.header("Location") is None
    assert "primary:-1" in answer.header("X-Route-Token")


def test_a_name_with_metadata_is_found_in_the_location():
    answer = ask(ScriptedJournals(), "HEAD", "/http/data%3Bmy%2Fmeta")
    assert answer.header("Location") == "http://broker/path/http/data;my/meta"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnauthenticatedError("no token"), 401),
        (ValidationError("wrong"), 400),
        (UnavailableError("peer gone"), 500),
    ],
)
def test_a_read_that_fails_before_it_begins_is_an_error(error, status):
    journals = ScriptedJournals()
    journals.on_read = lambda *_: items(error)
    answer = ask(journals, "GET", "/a/journal")
    assert (answer.status, answer.body.decode()) == (status, f"{error}\n")


def test_a_read_that_a_stop_ends_before_it_begins_is_an_error():
    journals = ScriptedJournals()
    journals.on_read = lambda *_: items()
    answer = ask(journals, "GET", "/a/journal?block=true")
    assert answer.status == 500
    assert b"stopping" in answer.body


def test_a_client_that_leaves_ends_its_read():
    async def scenario():
        closed = asyncio.Event()

        async def blocked(_request, _call):
            try:
                yield metadata()
                yield b"content"
                await asyncio.Event().wait()
            finally:
                closed.set()

        journals = ScriptedJournals()
        journals.on_read = blocked
        async with serving(journals) as server:
            answer = await exchange(
                server.endpoint, "GET", "/a/journal", leave_after=b"content\r\n"
            )
            await asyncio.wait_for(closed.wait(), 5)
            return answer

    answer = run(scenario(), 10)
    assert (answer.body, answer.complete) == (b"content", False)


# -------------------------------------------------------------------- writes


def test_the_callers_token_is_passed_on():
    journals = ScriptedJournals()
    for method in ("GET", "HEAD"):
        ask(journals, method, "/a/journal", headers=("Authorization: Bearer x",))
    ask(journals, "PUT", "/a/journal", headers=("Authorization: Bearer x",), body=b"y")
    ask(journals, "GET", "/a/journal")
    assert [call.authorization for call in journals.calls] == ["Bearer x"] * 3 + [None]


@pytest.mark.parametrize(
    "headers", [(), ("Transfer-Encoding: chunked",), ("Expect: 100-continue",)]
)
def test_a_body_of_every_kind_is_one_append(headers):
    journals = ScriptedJournals()
    answer = ask(journals, "PUT", "/a/journal", body=b"some content", headers=headers)
    assert answer.status == 204
    assert b"".join(journals.appended[0][1:-1]) == b"some content"
    assert answer.header("x-commit-begin") == "100"
    assert answer.header("x-commit-end") == answer.header("x-write-head") == "112"
    assert len(answer.header("x-commit-sha1-sum")) == 40
    assert answer.interim == ("HTTP/1.1 100 Continue\r\n\r\n" if "Expect" in str(headers) else "")
    for absent in ("Content-Type", "Content-Length"):
        assert answer.header(absent) is None


def test_a_large_body_is_streamed():
    journals = ScriptedJournals()
    body = bytes(range(256)) * 40_000
    assert ask(journals, "PUT", "/a/journal", body=body).status == 204
    assert b"".join(journals.appended[0][1:-1]) == body
    assert max(map(len, journals.appended[0][1:-1])) < 1 << 20


def test_a_body_that_breaks_off_does_not_commit():
    async def scenario():
        ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        taken: list[object] = []

        async def take(requests, _call):
            try:
                async for item in requests:
                    taken.append(item)  # noqa: PERF401 - it raises at the end
            except BaseException as error:
                ended.set_result(error)
                raise

        journals = ScriptedJournals()
        journals.on_append = take
        async with serving(journals) as server:
            answer = await exchange(
                server.endpoint,
                "PUT",
                "/a/journal",
                body=b"hello",
                headers=("Content-Length: 100000",),
                leave_after_s=0.1,
            )
            await asyncio.wait_for(asyncio.shield(ended), 5)
        assert taken[-1] != pb.AppendRequest()
        return answer

    assert run(scenario(), 10).status_line == ""


def test_a_small_body_that_breaks_off_begins_no_append():
    async def scenario():
        journals = ScriptedJournals()
        async with serving(journals) as server:
            headers = ("Content-Length: 10",)
            await exchange(
                server.endpoint,
                "PUT",
                "/a/journal",
                body=b"hello",
                headers=headers,
                leave_after_s=0.1,
            )
            whole = await exchange(server.endpoint, "PUT", "/a/journal", body=b"whole")
            assert whole.status == 204
        assert [taken[1:-1] for taken in journals.appended] == [[b"whole"]]

    run(scenario(), 10)


@pytest.mark.parametrize("has_peers", [False, True])
def test_a_small_body_is_appended_at_once_where_nothing_is_to_be_waited_for(has_peers):
    class Ready(ScriptedJournals):
        def append_now(self, opening, content, call, earlier):
            request = pb.AppendRequest.FromString(opening)
            self.appended.append([request.journal, content, call.authorization, earlier])
            response = pb.AppendResponse(
                header=HEADER, commit=pb.Fragment(begin=100, end=100 + len(content))
            )
            self.acknowledged = not has_peers
            answers = [object()] if has_peers else []
            return SimpleNamespace(response=response.SerializeToString(), answers=answers)

        async def append_acknowledged(self, started):
            self.acknowledged = True
            return started.response

    journals = Ready()
    answer = ask(
        journals,
        "PUT",
        "/a/journal",
        body=b"y" * SMALL_BODY_BYTES,
        headers=("Authorization: Bearer x",),
    )
    assert answer.status == 204
    assert answer.header("x-commit-end") == str(100 + SMALL_BODY_BYTES)
    assert journals.appended == [["a/journal", b"y" * SMALL_BODY_BYTES, "Bearer x", None]]
    assert journals.acknowledged
    assert not journals.calls


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"y" * (SMALL_BODY_BYTES + 1), ()),
        (b"", ()),
        (b"y", ("Transfer-Encoding: chunked",)),
        (gzip.compress(b"y", mtime=0), ("Content-Encoding: gzip",)),
    ],
)
def test_any_other_body_is_an_append_as_it_comes(body, headers):
    class Refusing(ScriptedJournals):
        def append_now(self, *_):
            raise AssertionError("it is not at hand")

    assert ask(Refusing(), "PUT", "/a/journal", body=body, headers=headers).status == 204


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=HEADER), "JOURNAL_NOT_FOUND\n"),
        (
            pb.AppendResponse(
                status=pb.FRAGMENT_STORE_UNHEALTHY, header=HEADER, store_health_error="s3://x: gone"
            ),
            "FRAGMENT_STORE_UNHEALTHY: s3://x: gone\n",
        ),
    ],
)
def test_an_append_of_another_status_is_an_error(response, text):
    async def refuse(_requests, _call):
        return response

    journals = ScriptedJournals()
    journals.on_append = refuse
    answer = ask(journals, "PUT", "/a/journal", body=b"x")
    assert (answer.status, answer.body.decode()) == (500, text)


def test_an_append_without_authorization_is_told_so():
    async def refuse(_requests, _call):
        raise UnauthenticatedError("missing token")

    journals = ScriptedJournals()
    journals.on_append = refuse
    answer = ask(journals, "PUT", "/a/journal", body=b"x" * 300_000)
    assert (answer.status, answer.body) == (401, b"missing token\n")


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(method):
    answer = ask(ScriptedJournals(), method, "/a/journal")
    assert (answer.status, answer.body.decode()) == (400, f"unknown method: {method}\n")
