import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from types import SimpleNamespace

import pytest

from gazette_sdk.errors import CallError, DeadlineExceededError, GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.rules import EVENTS_RPC, HEADS_RPC
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.member_calls import MemberCalls

US = pb.ProcessSpec.ID(zone="a", suffix="us-1")
CALL = Call(authorization="Bearer of-the-caller")


class _Members:
    """A mirror with brokers at endpoints, by their suffixes; and this broker."""

    def __init__(self, **endpoints: str) -> None:
        self._specs = [
            pb.ProcessSpec(id=pb.ProcessSpec.ID(zone="a", suffix=suffix), endpoint=endpoint)
            for suffix, endpoint in {**endpoints, US.suffix: "http://127.0.0.1:1"}.items()
        ]

    def members(self):
        return [
            SimpleNamespace(value=pb.BrokerSpec(process_spec=spec), zone="a", suffix=spec.id.suffix)
            for spec in self._specs
        ]


@asynccontextmanager
async def serving(*methods: Method) -> AsyncIterator[str]:
    server = Server()
    server.grpc.add(methods)
    await server.start()
    try:
        yield server.endpoint
    finally:
        await server.stop(0)


def calls_of(members: _Members, **options: float) -> MemberCalls:
    return MemberCalls(members, US, endpoint="http://127.0.0.1:1", **options)  # type: ignore[arg-type]


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_each_member_answers_or_says_why_it_does_not():
    """The token of the caller is passed on, and slow members delay no answer beyond the limit."""

    async def heads(request, call):
        return clpb.HeadsResponse(heads=[clpb.HeadsResponse.Head(journal=call.authorization)])

    async def silent(_request, _call):
        await asyncio.Event().wait()

    async def scenario():
        async with AsyncExitStack() as stack:
            good = await stack.enter_async_context(serving(Method(HEADS_RPC, heads)))
            slow = await stack.enter_async_context(serving(Method(HEADS_RPC, silent)))
            foreign = await stack.enter_async_context(serving())
            members = _Members(good=good, slow=slow, foreign=foreign, down=closed_port())
            calls = calls_of(members, time_limit_s=0.5)
            stack.push_async_callback(calls.aclose)
            started_s = asyncio.get_running_loop().time()
            answers = await calls.ask_all(HEADS_RPC, clpb.HeadsRequest(local=True), CALL)
            return answers, asyncio.get_running_loop().time() - started_s

    answers, took_s = run(scenario(), 20)
    assert took_s < 5
    by_name = {answer.member.id.suffix: answer for answer in answers}
    assert list(by_name) == ["good", "slow", "foreign", "down"], "this broker is not called"
    assert by_name["good"].response.heads[0].journal == "Bearer of-the-caller"
    assert by_name["good"].error is None
    assert isinstance(by_name["slow"].error, DeadlineExceededError)
    assert by_name["foreign"].has_no_such_call
    assert "of this SDK" in str(by_name["foreign"].error)
    assert isinstance(by_name["down"].error, UnavailableError | DeadlineExceededError)
    assert not by_name["down"].has_no_such_call


def test_a_stream_of_a_member_ends_with_its_error():
    async def events(request, call):
        yield clpb.Event(id=f"{request.after} {call.authorization}")
        raise CallError("too slow", code="RESOURCE_EXHAUSTED")

    async def scenario():
        async with serving(Method(EVENTS_RPC, events)) as endpoint:
            calls = calls_of(_Members(good=endpoint))
            [member] = calls.others()
            request = clpb.EventsRequest(after="a:1")
            try:
                async with aclosing(calls.stream(EVENTS_RPC, request, member, CALL)) as items:
                    first = await anext(items)
                    with pytest.raises(CallError, match="too slow"):
                        await anext(items)
            finally:
                await calls.aclose()
            return first.id

    assert run(scenario(), 20) == "a:1 Bearer of-the-caller"


def test_a_token_that_came_by_tls_is_not_sent_on_without_it():
    async def scenario():
        calls = MemberCalls(
            _Members(far="http://far:1"),  # type: ignore[arg-type]
            US,
            endpoint="https://here:1",
        )
        [member] = calls.others()
        try:
            [answer] = await calls.ask_all(HEADS_RPC, clpb.HeadsRequest(), CALL)
            with pytest.raises(GazetteError, match="token is not sent to http://far:1"):
                await anext(calls.stream(EVENTS_RPC, clpb.EventsRequest(), member, CALL))
        finally:
            await calls.aclose()
        return answer

    answer = run(scenario(), 20)
    assert answer.response is None
    assert "token is not sent to http://far:1" in str(answer.error)
