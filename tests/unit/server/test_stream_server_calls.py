"""Calls at a server of the stream transport: every method, errors, and the order of calls."""

from __future__ import annotations

import urllib.request

import pytest

from gazette_sdk.errors import (
    CallError,
    CorruptFragmentError,
    JournalNotFoundError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import NOT_RUN, PIPELINE_MAX
from gazette_sdk.protocol.stream_frames import (
    END_FRAME,
    Kind,
    Method,
    StatusLine,
    encode,
    encode_call,
)
from gazette_sdk.server.authorization import FOREIGN_CHUNK_BYTES, MAX_CHUNK_BYTES
from gazette_sdk.server.metrics import metrics_text
from support.raw_stream import RawStream, append_frames, head_of
from support.scripted_journals import HEADER, ScriptedJournals, items
from support.stream_servers import LIMIT_S, Waiting, apply_call, stream_server, until

# ------------------------------------------------------------------ calls


def test_every_method_is_served():
    journals = ScriptedJournals()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        assert client.hello is not None
        assert client.hello.wire_version == 1
        assert client.call(Method.APPLY, pb.ApplyRequest()).header == HEADER
        assert client.append("a/journal", b"some ", b"content").commit.end == 112
        (taken,) = journals.appended
        assert taken == [
            pb.AppendRequest(journal="a/journal"),
            b"some ",
            b"content",
            pb.AppendRequest(),
        ]
        assert client.read("a/journal") == b"content"
        client.send(encode_call(Method.LIST, b""))
        (frame,), status = client.answer()
        assert pb.ListResponse.FromString(frame.payload).header == HEADER
        assert status == StatusLine(0)
        assert client.call(Method.LIST_FRAGMENTS, pb.FragmentsRequest()).header == HEADER
        assert (
            client.call(Method.FRAGMENT_STORE_HEALTH, pb.FragmentStoreHealthRequest()).header
            == HEADER
        )


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (UnauthenticatedError("no token"), 16, ""),
        (UnavailableError("a peer is gone"), 14, ""),
        (ValidationError("too short", path="journal"), 2, ""),
        (JournalNotFoundError(journal="a/b"), 2, ""),
        (CallError("of a peer", code="INTERNAL"), 13, ""),
        (CallError("odd", code="OK"), 2, ""),
        (CallError("odd", code="NO_SUCH_CODE"), 2, ""),
        (CorruptFragmentError("it is broken"), 2, "CorruptFragmentError"),
    ],
)
@pytest.mark.parametrize("method", [Method.LIST, Method.READ, Method.APPEND, Method.REPLICATE])
def test_errors_become_the_codes_of_grpc(error, code, kind, method):
    async def fail(_requests, _call):
        raise error

    journals = ScriptedJournals()
    journals.on_list = journals.on_read = journals.on_replicate = lambda *_: items(error)
    journals.on_append = fail
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(method, b""))
        assert client.answer() == ([], StatusLine(code, str(error), kind))
        client.call(Method.APPLY, pb.ApplyRequest())  # nothing else is harmed


def test_an_unexpected_error_is_logged_and_answered(caplog):
    journals = ScriptedJournals()
    journals.on_list = lambda *_: items(ZeroDivisionError("oops"))
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(Method.LIST, b""))
        assert client.status() == StatusLine(2, "ZeroDivisionError: oops")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("method", [Method.LIST, Method.APPLY, Method.APPEND, Method.READ])
def test_bytes_that_are_no_message_are_internal_errors(method):
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(method, b"\xff\xff\xff"))
        assert client.status().code == 13


def test_unknown_methods_are_unimplemented():
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        for number in (99, Method.SHARD_LIST):
            client.send(encode_call(number, b"whatever"))
            status = client.status()
            assert (status.code, status.kind) == (12, NOT_RUN)
        client.call(Method.APPLY, pb.ApplyRequest())


def test_a_call_knows_its_token_its_deadline_and_its_chunk_size():
    journals = ScriptedJournals()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        for head in (
            b"",
            head_of(token="Bearer x", timeout_ms=60_000),
            head_of(gazette_chunk_bytes="1"),
            head_of(gazette_chunk_bytes="131072"),
        ):
            client.call(Method.APPLY, pb.ApplyRequest(), head)
        client.send(apply_call(head_of(gazette_chunk_bytes="many")))
        assert client.status().code == 3
    plain, with_token, *sizes = journals.calls
    assert (plain.authorization, plain.timeout_s, plain.chunk_bytes) == (
        None,
        None,
        MAX_CHUNK_BYTES,
    )
    assert with_token.authorization == "Bearer x"
    assert 50 < with_token.timeout_s <= 60
    assert [call.chunk_bytes for call in sizes] == [FOREIGN_CHUNK_BYTES, 131072]


def test_calls_are_counted_as_those_of_grpc():
    name = 'grpc_server_handled_total{grpc_type="client_stream",grpc_service="protocol.Journal"'
    name += ',grpc_method="Append",grpc_code="OK"}'

    def count() -> float:
        found = [line for line in metrics_text().splitlines() if line.startswith(name)]
        return float(found[0].rpartition(" ")[2]) if found else 0

    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        before = count()
        client.append("a/journal", b"content")
        until(lambda: count() == before + 1)


def test_calls_under_way_are_listed():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", b"1"))
        assert waiting.begun.wait(LIMIT_S)
        with urllib.request.urlopen(f"{server.endpoint}/debug/requests") as page:
            assert b"/protocol.Journal/Append" in page.read()
        waiting.let_go()
        assert client.status().code == 0
        until(lambda: not server.grpc.active)


def test_bytes_may_arrive_one_by_one():
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        for byte in b"".join(append_frames("a/b", b"some", b"content")):
            client.send(bytes((byte,)))
        assert client.response(Method.APPEND).commit.end == 111


def test_a_replication_gets_content_as_bytes():
    seen: list[pb.ReplicateRequest | bytes] = []

    async def replicate(items, _call):
        async for item in items:
            seen.append(item)
            if not isinstance(item, bytes):
                yield pb.ReplicateResponse(header=HEADER)

    journals = ScriptedJournals()
    journals.on_replicate = replicate
    request = pb.ReplicateRequest(proposal=pb.Fragment(journal="a/b"), acknowledge=True)
    proposal = request.SerializeToString()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(Method.REPLICATE, proposal))
        assert pb.ReplicateResponse.FromString(client.frame().payload).header == HEADER
        for _ in range(2):
            client.send(encode(Kind.CONTENT, b"12345"), encode(Kind.CONTENT, b"678"))
            client.send(encode(Kind.MESSAGE, proposal))
            assert client.frame().kind == Kind.MESSAGE
        client.send(END_FRAME)
        assert client.answer() == ([], StatusLine(0))
    assert seen == [request, *[b"12345", b"678", request] * 2]


# ------------------------------------------------------------- order, pipelining


def test_more_calls_than_may_be_open_are_answered_in_their_order():
    journals = ScriptedJournals()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        count = 3 * PIPELINE_MAX
        client.send(*(frame for n in range(count) for frame in append_frames("a/b", b"%d" % n)))
        lengths = [client.response(Method.APPEND).commit.end - 100 for _ in range(count)]
        assert lengths == [len(b"%d" % n) for n in range(count)]
    assert [taken[1] for taken in journals.appended] == [b"%d" % n for n in range(count)]


def test_calls_after_success_stop_at_the_first_failure():
    journals = ScriptedJournals()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        chained = head_of(after_success=True)
        refused = pb.AppendResponse(status=pb.NOT_ALLOWED)
        collect = journals.collect

        async def append(requests, call):
            opening = await anext(requests)
            if opening.journal == "refused":
                return refused
            if opening.journal == "broken":
                raise UnavailableError("gone")
            return await collect(after(opening, requests), call)

        async def after(opening, requests):
            yield opening
            async for item in requests:
                yield item

        journals.on_append = append
        for bad in ("refused", "broken"):
            client.send(
                *append_frames("a", b"1", head=chained),
                *append_frames("b", b"2", head=chained),
                *append_frames(bad, b"3", head=chained),
                *append_frames("c", b"4", head=chained),
                *append_frames("d", b"5", head=chained),
                *append_frames("e", b"6"),
            )
            outcomes = [client.status() for _ in range(6)]
            assert [outcome.code for outcome in outcomes] == [
                0,
                0,
                0 if bad == "refused" else 14,
                10,
                10,
                0,
            ]
            assert [outcome.kind for outcome in outcomes[3:5]] == [NOT_RUN, NOT_RUN]
    assert [taken[0].journal for taken in journals.appended] == ["a", "b", "e"] * 2
