"""Calls of functions over a shard's store."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest

from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    DeadlineExceededError,
    MappingError,
    ShardStatusError,
    UnauthenticatedError,
    UnavailableError,
    UserCodeError,
)
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.server.authorization import Call
from gazette_sdk.shard.consumer.endpoints import EndpointCalls, Queries, status_of
from gazette_sdk.shard.stores.sqlite_store import SqliteStore

TIMEOUT_S = 30.0


@contextmanager
def closing_queries(**bounds):
    queries = Queries(**bounds)
    yield queries
    queries.shut_down()


def test_a_function_that_nobody_waits_for_has_the_store_until_it_returns():
    shard = SimpleNamespace(handle=SimpleNamespace(id="shard"), store=SimpleNamespace(value=7))
    begun, may_end = threading.Event(), threading.Event()

    def serve(query, key):
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        return query.store.value, query.shard.id, query.request, key

    async def work(queries):
        calls = EndpointCalls(None, transport=None, queries=queries, authorization=None)
        running = calls.run(serve, shard, {"key": "a"}, request="request")
        given_up = asyncio.ensure_future(running)
        await asyncio.to_thread(begun.wait, TIMEOUT_S)
        given_up.cancel()
        await asyncio.wait([given_up], timeout=0.05)
        assert not given_up.done()
        may_end.set()
        await asyncio.wait([given_up], timeout=TIMEOUT_S)
        assert given_up.cancelled()
        answer = await calls.run(serve, shard, {"key": "a"}, request="request")
        assert answer == (7, "shard", "request", "a")

    with closing_queries() as queries:
        asyncio.run(work(queries))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("about", ["shard", "no shard", "mapping", "shard_of"])
@pytest.mark.parametrize("kind", [StopIteration, asyncio.CancelledError, SystemExit])
def test_a_function_that_raises_what_ends_a_task_answers_with_an_error(is_async, about, kind):
    shard = SimpleNamespace(handle=SimpleNamespace(id="shard"), store=SimpleNamespace(value=7))
    exits = []

    def fail(*_):
        raise kind

    async def fail_later(*_):
        raise kind

    async def work(queries):
        calls = EndpointCalls(
            None, transport=None, queries=queries, authorization=None, exits=exits.append
        )
        serve = fail_later if is_async else fail
        async with asyncio.timeout(TIMEOUT_S):
            if about == "shard":
                await calls.run(serve, shard, {}, request="request")
            elif about == "no shard":
                await calls.run_alone(serve, "request")
            elif about == "mapping":
                await calls.shard_of(fail, "request", "name it")
            else:
                calls.named_shard(fail, "request")

    # Python makes a RuntimeError of a StopIteration that leaves a coroutine.
    expected = pytest.raises((UserCodeError, RuntimeError), match=kind.__name__)
    with closing_queries() as queries, expected:
        asyncio.run(work(queries))
    assert len(exits) == (kind is SystemExit)


@pytest.mark.parametrize(
    ("error", "http", "grpc"),
    [
        (ShardStatusError(cpb.SHARD_NOT_FOUND), 404, "NOT_FOUND"),
        (ShardStatusError(cpb.NO_SHARD_PRIMARY), 503, "UNAVAILABLE"),
        (MappingError("no shard"), 503, "UNAVAILABLE"),
        (UnavailableError("gone"), 503, "UNAVAILABLE"),
        (UnauthenticatedError("no token"), 401, "UNAUTHENTICATED"),
        (DeadlineExceededError("late"), 504, "DEADLINE_EXCEEDED"),
        (ConfigurationError("no name"), 400, "INVALID_ARGUMENT"),
        (CallError("refused", code="FAILED_PRECONDITION"), 500, "FAILED_PRECONDITION"),
        (CallError("too many", code="RESOURCE_EXHAUSTED"), 429, "RESOURCE_EXHAUSTED"),
        (ValueError("a mistake"), 500, "UNKNOWN"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_errors_have_the_same_meaning_on_both_wires(error, http, grpc):
    assert status_of(error) == (http, grpc)


# ------------------------------------------------------------- bounds and interrupts

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def loop_without_end(query):
    while True:
        pass


def swallow(query):
    while True:
        with suppress(Exception):
            loop_without_end(query)


def select_without_end(query):
    query.store.execute(ENDLESS).fetchone()


async def wait_without_end(query):
    await asyncio.Event().wait()


@pytest.mark.parametrize("serve", [loop_without_end, swallow, select_without_end, wait_without_end])
@pytest.mark.parametrize("ending", ["caller", "time"])
def test_a_query_whose_caller_leaves_or_whose_time_is_over_is_interrupted(serve, ending, tmp_path):
    store = SqliteStore(tmp_path)
    store.restore()
    shard = SimpleNamespace(handle=SimpleNamespace(id="shard"), store=store)

    async def work(queries):
        calls = EndpointCalls(None, transport=None, queries=queries, authorization=None)
        call = Call(peer="10.0.0.1")

        async def ask():
            with queries.counted(call):
                await calls.run(serve, shard, {}, request="request")

        async with asyncio.timeout(TIMEOUT_S):
            asking = asyncio.create_task(ask())
            if ending == "caller":
                await asyncio.sleep(0)  # it begins
                assert queries._count == 1
                asking.cancel()
                await asyncio.wait([asking])
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asking, 0.05)
            assert queries._count == 0  # its place is free, and with it its thread
            assert await calls.run_alone(lambda request: request, "again") == "again"

    with closing_queries(count_max=1, of_peer_max=1) as queries:
        asyncio.run(work(queries))
    store.destroy()


def test_a_peer_and_all_peers_have_a_bound_of_queries():
    with closing_queries(count_max=3, of_peer_max=2) as queries, ExitStack() as stack:
        one, other = Call(peer="10.0.0.1"), Call(peer="10.0.0.2")
        forwarded = Call(peer="10.0.0.1", proxy_header="{}")
        for call in (one, one):
            stack.enter_context(queries.counted(call))
        with pytest.raises(CallError, match=r"10\.0\.0\.1 has 2 calls in progress") as caught:
            stack.enter_context(queries.counted(one))
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        with queries.counted(forwarded):
            pass
        stack.enter_context(queries.counted(other))
        for call in (one, other, forwarded):
            with pytest.raises(CallError, match="3 queries are in progress") as caught:
                stack.enter_context(queries.counted(call))
            assert status_of(caught.value) == (429, "RESOURCE_EXHAUSTED")
    with queries.counted(one):
        pass
