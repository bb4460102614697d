"""Calls of functions over a shard's store."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
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
from gazette_sdk.shard.consumer.endpoint_calls import EndpointCalls, status_of

TIMEOUT_S = 30.0


def test_a_function_that_nobody_waits_for_has_the_store_until_it_returns():
    shard = SimpleNamespace(handle=SimpleNamespace(id="shard"), store=SimpleNamespace(value=7))
    begun, may_end = threading.Event(), threading.Event()

    def serve(query, key):
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        return query.store.value, query.shard.id, query.request, key

    async def work(workers):
        calls = EndpointCalls(None, transport=None, workers=workers, authorization=None)
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

    with ThreadPoolExecutor(1) as workers:
        asyncio.run(work(workers))


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

    async def work(workers):
        calls = EndpointCalls(
            None, transport=None, workers=workers, authorization=None, exits=exits.append
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
    with ThreadPoolExecutor(1) as workers, expected:
        asyncio.run(work(workers))
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
        (ValueError("a mistake"), 500, "UNKNOWN"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_errors_have_the_same_meaning_on_both_wires(error, http, grpc):
    assert status_of(error) == (http, grpc)
