import asyncio
import contextlib
import logging
import time

import grpc
import grpc.aio
import pytest

from gazette_sdk.errors import (
    CallError,
    JournalNotFoundError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.server import grpc_server as grpc_module
from gazette_sdk.server import splice
from gazette_sdk.server.authorization import FOREIGN_CHUNK_BYTES, MAX_CHUNK_BYTES
from gazette_sdk.server.metrics import metrics_text
from gazette_sdk.transport.loop import run
from support import raw_grpc
from support.scripted_journals import HEADER, ScriptedJournals, items, metadata, serving, stub
from support.spools import until


def channel_to(server, **options) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.listener.port}", **options)


async def _refused(call, responses: list | None = None) -> grpc.aio.AioRpcError:
    """The error of a call, whose responses before it are collected."""
    try:
        if hasattr(call, "__aiter__"):
            async for response in call:
                if responses is not None:
                    responses.append(response)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call was not refused")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnauthenticatedError("no token"), grpc.StatusCode.UNAUTHENTICATED),
        (UnavailableError("a peer is gone"), grpc.StatusCode.UNAVAILABLE),
        (ValidationError("too short", path="journal"), grpc.StatusCode.UNKNOWN),
        (JournalNotFoundError(journal="a/b"), grpc.StatusCode.UNKNOWN),
        (CallError("of a peer", code="INTERNAL"), grpc.StatusCode.INTERNAL),
        (CallError("odd", code="OK"), grpc.StatusCode.UNKNOWN),
        (CallError("odd", code="NO_SUCH_CODE"), grpc.StatusCode.UNKNOWN),
    ],
)
@pytest.mark.parametrize("name", ["List", "Read", "Append", "Replicate"])
def test_errors_become_status_codes(error, code, name):
    async def fail(_requests, _call):
        raise error

    async def scenario():
        journals = ScriptedJournals()
        journals.on_list = journals.on_read = journals.on_replicate = lambda *_: items(error)
        journals.on_append = fail
        async with serving(journals) as server, channel_to(server) as channel:
            call = stub(channel, name)
            if name in {"Append", "Replicate"}:
                refused = await _refused(call(iter(())))
            else:
                refused = await _refused(call(call_request(name)))
            assert (refused.code(), refused.details()) == (code, str(error))

    run(scenario(), 10)


def call_request(name: str):
    return {"List": pb.ListRequest(), "Read": pb.ReadRequest()}[name]


def test_an_unexpected_error_is_logged_and_answered(caplog):
    async def scenario():
        journals = ScriptedJournals()
        journals.on_list = lambda *_: items(ZeroDivisionError("oops"))
        async with serving(journals) as server, channel_to(server) as channel:
            refused = await _refused(stub(channel, "List")(pb.ListRequest()))
            assert refused.code() is grpc.StatusCode.UNKNOWN
            assert refused.details() == "ZeroDivisionError: oops"

    with caplog.at_level(logging.ERROR):
        run(scenario(), 10)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("name", ["List", "Apply", "Append", "Replicate"])
def test_bytes_that_are_no_message_are_internal_errors(name):
    async def scenario():
        async with serving(ScriptedJournals()) as server, channel_to(server) as channel:
            call = stub(channel, name, raw=True)
            wire = b"\xff\xff\xff"
            refused = await _refused(
                call(iter([wire])) if name in {"Append", "Replicate"} else call(wire)
            )
            assert refused.code() is grpc.StatusCode.INTERNAL

    run(scenario(), 10)


@pytest.mark.parametrize("name", ["Apply", "Append"])
def test_a_message_over_the_limit_exhausts_resources(name):
    async def scenario():
        async with (
            serving(ScriptedJournals(), max_receive_bytes=10_000) as server,
            channel_to(server) as channel,
        ):
            call = stub(channel, name, raw=True)
            wire = pb.AppendRequest(content=b"x" * 10_001).SerializeToString()
            refused = await _refused(call(iter([wire])) if name == "Append" else call(wire))
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(scenario(), 10)


def test_an_unknown_method_is_unimplemented():
    async def scenario():
        async with serving(ScriptedJournals()) as server, channel_to(server) as channel:
            refused = await _refused(channel.unary_unary("/protocol.Journal/Nope")(b""))
            assert refused.code() is grpc.StatusCode.UNIMPLEMENTED

    run(scenario(), 10)


def test_a_call_has_its_token_its_deadline_and_its_chunk_size():
    async def scenario():
        journals = ScriptedJournals()
        async with serving(journals) as server, channel_to(server) as channel:
            call = stub(channel, "ListFragments")
            await call(pb.FragmentsRequest())
            await call(pb.FragmentsRequest(), timeout=60, metadata=(("authorization", "Bearer x"),))
            for asked in ("1", "131072", "999999999999999999999999"):
                await call(pb.FragmentsRequest(), metadata=(("gazette-chunk-bytes", asked),))
            refused = await _refused(
                call(pb.FragmentsRequest(), metadata=(("gazette-chunk-bytes", "many"),))
            )
            assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        plain, with_token, *sizes = journals.calls
        assert (plain.authorization, plain.timeout_s) == (None, None)
        assert plain.chunk_bytes == FOREIGN_CHUNK_BYTES
        assert with_token.authorization == "Bearer x"
        assert 50 < with_token.timeout_s < 62  # wire timeouts are rounded up
        assert [call.chunk_bytes for call in sizes] == [
            FOREIGN_CHUNK_BYTES,
            131072,
            MAX_CHUNK_BYTES,
        ]

    run(scenario(), 10)


REFUSED_CALLS = 300


@pytest.mark.parametrize("outcome", ["error", "response"])
def test_an_append_refused_while_its_client_sends_always_has_its_status(outcome):
    """Also when the answer comes long before the client has sent everything."""

    async def refuse(requests, _call):
        await anext(requests)
        if outcome == "error":
            raise ValidationError("refused early")
        return pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=HEADER)

    async def send():
        yield pb.AppendRequest(journal="a/journal")
        for _ in range(20):
            yield pb.AppendRequest(content=b"x" * 30_000)
        yield pb.AppendRequest()

    async def once(append) -> None:
        if outcome == "error":
            refused = await _refused(append(send()))
            assert (refused.code(), refused.details()) == (grpc.StatusCode.UNKNOWN, "refused early")
        else:
            assert (await append(send())).status == pb.JOURNAL_NOT_FOUND

    async def scenario():
        journals = ScriptedJournals()
        journals.on_append = refuse
        async with serving(journals) as server, channel_to(server) as channel:
            append = stub(channel, "Append")
            for _ in range(REFUSED_CALLS // 20):
                await asyncio.gather(*(once(append) for _ in range(20)))

    run(scenario(), 60)


def test_a_replication_refused_while_its_client_sends_always_has_its_status():
    async def refuse(requests, _call):
        yield pb.ReplicateResponse(status=pb.WRONG_ROUTE)
        await anext(requests)
        raise ValidationError("refused early")

    async def send():
        for _ in range(20):
            yield pb.ReplicateRequest(content=b"x" * 30_000)

    async def once(replicate) -> None:
        call = replicate(send())
        responses: list[pb.ReplicateResponse] = []
        refused = await _refused(call, responses)
        assert [response.status for response in responses] == [pb.WRONG_ROUTE]
        assert (refused.code(), refused.details()) == (grpc.StatusCode.UNKNOWN, "refused early")

    async def scenario():
        journals = ScriptedJournals()
        journals.on_replicate = refuse
        async with serving(journals) as server, channel_to(server) as channel:
            replicate = stub(channel, "Replicate")
            for _ in range(REFUSED_CALLS // 20):
                await asyncio.gather(*(once(replicate) for _ in range(20)))

    run(scenario(), 60)


def test_a_silent_client_is_refused_without_waiting_for_its_end():
    async def refuse(requests, _call):
        await anext(requests)
        raise ValidationError("refused")

    async def scenario():
        journals = ScriptedJournals()
        journals.on_append = refuse
        async with serving(journals) as server, channel_to(server) as channel:
            call = stub(channel, "Append")()
            await call.write(pb.AppendRequest(journal="a/journal"))
            begun_s = asyncio.get_running_loop().time()
            assert await asyncio.wait_for(call.code(), 5) is grpc.StatusCode.UNKNOWN
            took_s = asyncio.get_running_loop().time() - begun_s
            assert took_s < grpc_module.DRAIN_TIMEOUT_S / 2

    run(scenario(), 10)


def test_a_client_that_never_stops_sending_is_refused_within_a_bound(monkeypatch):
    monkeypatch.setattr(grpc_module, "DRAIN_TIMEOUT_S", 0.5)

    async def refuse(requests, _call):
        await anext(requests)
        raise ValidationError("refused")

    async def scenario():
        journals = ScriptedJournals()
        journals.on_append = refuse
        async with serving(journals) as server, channel_to(server) as channel:
            call = stub(channel, "Append")()

            async def send_for_ever():
                await call.write(pb.AppendRequest(journal="a/journal"))
                while not call.done():
                    await call.write(pb.AppendRequest(content=b"x" * 1000))

            sending = asyncio.create_task(send_for_ever())
            code = await asyncio.wait_for(call.code(), 5)
            # Against this client nothing helps: its own library may make INTERNAL of a write
            # that no longer got through.
            assert code in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
            await asyncio.wait((sending,), timeout=5)
            assert sending.done()
            assert not isinstance(sending.exception(), AssertionError)

    run(scenario(), 10)


def test_a_client_that_leaves_closes_the_service_generator():
    closed = asyncio.Event()

    async def blocked(_request, _call):
        try:
            yield metadata()
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def scenario():
        journals = ScriptedJournals()
        journals.on_read = blocked
        async with serving(journals) as server, channel_to(server) as channel:
            call = stub(channel, "Read")(pb.ReadRequest(journal="a/journal"))
            async for _ in call:
                break
            assert len(server.grpc.active) == 1
            call.cancel()
            await asyncio.wait_for(closed.wait(), 5)
            await until(lambda: not server.grpc.active)

    run(scenario(), 10)


def test_a_client_that_leaves_an_append_ends_it_without_a_commit():
    ended: list[str] = []
    begun = asyncio.Event()

    async def wait_for_commit(requests, _call):
        commit = False
        begun.set()
        try:
            async for item in requests:
                commit = item == pb.AppendRequest()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        ended.append("commit" if commit else "rolled back")
        return pb.AppendResponse(header=HEADER)

    async def scenario():
        journals = ScriptedJournals()
        journals.on_append = wait_for_commit
        async with serving(journals) as server, channel_to(server) as channel:
            call = stub(channel, "Append")()
            await call.write(pb.AppendRequest(journal="a/journal"))
            await call.write(pb.AppendRequest(content=b"x"))
            await begun.wait()
            call.cancel()
            await until(lambda: not server.grpc.active)
        assert ended in (["cancelled"], ["rolled back"])

    run(scenario(), 10)


def test_a_deadline_ends_a_blocked_call():
    async def blocked(_request, _call):
        yield metadata()
        await asyncio.Event().wait()

    async def scenario():
        journals = ScriptedJournals()
        journals.on_read = blocked
        async with serving(journals) as server, channel_to(server) as channel:
            refused = await _refused(stub(channel, "Read")(pb.ReadRequest(), timeout=0.2))
            assert refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: not server.grpc.active)

    run(scenario(), 10)


def test_a_stop_lets_calls_end_and_breaks_those_which_do_not():
    finish = asyncio.Event()

    async def until_told(_request, _call):
        yield metadata()
        await finish.wait()

    async def scenario():
        journals = ScriptedJournals()
        journals.on_read = until_told
        journals.on_list = lambda _request, _call: never()
        async with serving(journals) as server, channel_to(server) as channel:
            ending = stub(channel, "Read")(pb.ReadRequest())
            assert (await ending.read()).offset == 0
            stuck = stub(channel, "List")(pb.ListRequest())
            assert not (await stuck.read()).journals
            stopping = asyncio.create_task(server.stop(0.5))
            finish.set()
            assert await ending.read() is grpc.aio.EOF
            assert await ending.code() is grpc.StatusCode.OK
            await asyncio.wait_for(stopping, 5)
            assert await stuck.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}

    async def never():
        yield pb.ListResponse()
        await asyncio.Event().wait()

    run(scenario(), 15)


def test_calls_are_counted():
    def counted(name: str, method: str, **labels: str) -> float:
        wanted = [f'grpc_method="{method}"', *(f'{key}="{value}"' for key, value in labels.items())]
        lines = [
            line
            for line in metrics_text().splitlines()
            if line.startswith(name + "{") and all(label in line for label in wanted)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def scenario():
        journals = ScriptedJournals()
        journals.on_list = lambda *_: items(UnauthenticatedError("no"))
        async with serving(journals) as server, channel_to(server) as channel:
            before = [counted("grpc_server_msg_received_total", "Append")]
            before.append(counted("grpc_server_handled_total", "List", grpc_code="Unauthenticated"))
            before.append(counted("grpc_server_msg_sent_total", "Read", grpc_type="server_stream"))
            await stub(channel, "Append")(
                iter(
                    [
                        pb.AppendRequest(journal="a/b"),
                        pb.AppendRequest(content=b"x"),
                        pb.AppendRequest(),
                    ]
                )
            )
            await _refused(stub(channel, "List")(pb.ListRequest()))
            async for _ in stub(channel, "Read")(pb.ReadRequest()):
                pass
            await until(lambda: not server.grpc.active)
            assert counted("grpc_server_msg_received_total", "Append") == before[0] + 3
            assert (
                counted("grpc_server_handled_total", "List", grpc_code="Unauthenticated")
                == before[1] + 1
            )
            assert (
                counted("grpc_server_msg_sent_total", "Read", grpc_type="server_stream")
                == before[2] + 2
            )

    run(scenario(), 10)


# ---------------------------------------------------------------------- unknown clients

AUTHORITY = Authority("YSBzZWNyZXQga2V5IG9mIHRoZSB0ZXN0cw==")
LARGE = pb.ApplyRequest(changes=[pb.ApplyRequest.Change(delete="a/" + "b" * 400)] * 5000)


def authorization() -> tuple[tuple[str, str]]:
    token = AUTHORITY.header(Capability.ALL, pb.LabelSelector(), 60, time.time())
    return (("authorization", token),)


def test_a_large_first_request_with_a_good_token_is_served():
    async def scenario():
        journals = ScriptedJournals()
        async with serving(journals, authority=AUTHORITY) as server, channel_to(server) as channel:
            await stub(channel, "Apply")(LARGE, metadata=authorization())
            assert len(journals.calls) == 1

    run(scenario(), 10)


def test_many_first_calls_with_a_good_token_are_served():
    async def scenario():
        journals = ScriptedJournals()
        async with serving(journals, authority=AUTHORITY) as server, channel_to(server) as channel:
            apply = stub(channel, "Apply")
            calls = [apply(pb.ApplyRequest(), metadata=authorization()) for _ in range(300)]
            await asyncio.gather(*calls)

    run(scenario(), 20)


def test_a_large_request_without_a_good_token_is_unauthenticated_before_it_is_read(monkeypatch):
    monkeypatch.setattr(grpc_module, "UNKNOWN_REQUEST_TIMEOUT_S", 0.2)

    async def scenario():
        journals = ScriptedJournals()
        async with serving(journals, authority=AUTHORITY) as server, channel_to(server) as channel:
            refused = await _refused(stub(channel, "Apply")(LARGE))
            assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "missing authorization header" in refused.details()
            assert journals.calls == []

    run(scenario(), 10)


def test_a_connection_whose_calls_have_no_good_token_is_cut(monkeypatch):
    monkeypatch.setattr(splice, "UNKNOWN_TIMEOUT_S", 0.5)

    async def scenario():
        journals = ScriptedJournals()
        journals.on_list = lambda *_: items(UnauthenticatedError("no token"))
        async with serving(journals, authority=AUTHORITY) as server, channel_to(server) as channel:
            refused = await _refused(stub(channel, "List")(pb.ListRequest()))
            assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
            state = channel.get_state()
            assert state is grpc.ChannelConnectivity.READY
            await asyncio.wait_for(channel.wait_for_state_change(state), 5)

    run(scenario(), 10)


def test_without_keys_the_oldest_of_many_incomplete_requests_are_refused(monkeypatch):
    """Each is a message of 1,000 bytes of which one was sent."""
    monkeypatch.setattr(grpc_module, "INCOMPLETE_AGE_S", 0.1)

    async def scenario():
        journals = ScriptedJournals()
        journals.on_list = lambda *_: items(pb.ListResponse())
        async with serving(journals, max_receive_bytes=32 << 20) as server:  # two may stand still
            reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
            writer.write(raw_grpc.PREFACE)
            for stream in (1, 3, 5):
                writer.write(raw_grpc.call(stream, "/protocol.Journal/List"))
                writer.write(raw_grpc.half_message(stream, 1000, b"x"))
            ended = await asyncio.wait_for(raw_grpc.ended_stream(reader), 5)
            assert ended == 1
            async with channel_to(server) as channel:
                assert [item async for item in stub(channel, "List")(pb.ListRequest())]
            writer.transport.abort()

    run(scenario(), 10)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("sent_bytes", [None, -9])
def test_a_path_that_is_no_utf8_ends_its_connection_only(is_known, sent_bytes, caplog):
    """grpc.aio accepts no call of any client after it."""
    token = raw_grpc.literal(b"authorization", authorization()[0][1].encode()) if is_known else b""
    good = raw_grpc.literal(b":path", b"/protocol.Journal/List") + token
    bad = raw_grpc.literal(b":path", b"/\xe3rotocol.Journal/List") + token

    async def scenario():
        async with (
            serving(ScriptedJournals(), authority=AUTHORITY) as server,
            channel_to(server) as other,
        ):
            await stub(other, "Apply")(pb.ApplyRequest(), metadata=authorization())
            reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
            writer.write(raw_grpc.PREFACE + raw_grpc.frame(1, 4, 1, raw_grpc.fields(good)))
            writer.write(raw_grpc.half_message(1, 0, b"") if is_known else b"")
            writer.write(raw_grpc.frame(0, 1, 1))
            await asyncio.wait_for(raw_grpc.ended_stream(reader), 5)
            writer.write(raw_grpc.frame(1, 4, 3, raw_grpc.fields(bad) + b"\x82" * 9)[:sent_bytes])
            if sent_bytes is None:
                with contextlib.suppress(ConnectionResetError):
                    await asyncio.wait_for(reader.read(), 5)
            else:
                writer.write_eof()  # the server hangs up, and accepts what it has of a call
                await asyncio.wait_for(reader.read(), 5)
            writer.transport.abort()
            for channel in (other, channel_to(server)):
                await stub(channel, "Apply")(
                    pb.ApplyRequest(),
                    metadata=(*authorization(), ("trace-bin", bytes(range(256)))),
                    timeout=5,
                )
            await channel.close()

    with caplog.at_level(logging.WARNING):
        run(scenario(), 30)
    assert caplog.messages == []
