"""A publisher's transport, its end, and its life in a forked process."""

from __future__ import annotations

import asyncio
import gc
import json
import os

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import (
    ClosedError,
    GazetteError,
)
from gazette_sdk.transport.loop import run
from support.published import BY_KEY, WAIT_S, Order, begun, lines


def test_without_a_transport_the_address_of_the_environment_is_used(transport, monkeypatch):
    transport.create("a/journal")
    monkeypatch.setattr("gazette_sdk.message.sender.connect", lambda: transport)
    with Publisher(mapping=mapping.direct("a/journal")) as publisher:
        publisher.publish({"a": 1}).result(WAIT_S)
        assert not transport.closed
    assert transport.closed


def test_a_closed_publisher_refuses_and_closes_once(transport):
    transport.create("a/journal")
    publisher = Publisher(mapping.direct("a/journal"), transport=transport)
    publisher.publish({"a": 1})
    publisher.close()
    publisher.close()
    asyncio.run(publisher.aclose())
    with pytest.raises(ClosedError):
        publisher.publish({"a": 2})
    assert len(lines(transport, "a/journal")) == 1
    assert not transport.closed  # it is the caller's


def test_with_refuses_a_publisher_of_the_event_loop_that_runs_here(transport):
    async def use():
        transport.create("a/journal")
        publisher = Publisher(mapping.direct("a/journal"), transport=transport)
        await publisher.publish({"n": 1})
        with pytest.raises(GazetteError, match="`async with publisher`"):
            publisher.__enter__()
        async with publisher:
            await publisher.publish({"n": 2})
        assert [line["n"] for line in lines(transport, "a/journal")] == [1, 2]

    run(use(), WAIT_S)


def test_close_on_the_publishers_event_loop_raises_and_closes_the_connection(
    transport, monkeypatch
):
    async def use():
        transport.create("a/journal")
        monkeypatch.setattr("gazette_sdk.message.sender.connect", lambda: transport)
        publisher = Publisher(mapping.direct("a/journal"))
        await publisher.publish({"n": 1})
        closed = asyncio.Event()
        aclose = transport.aclose

        async def closing():
            await aclose()
            closed.set()

        transport.aclose = closing
        with pytest.raises(GazetteError, match="await aclose"):
            publisher.close()
        with pytest.raises(ClosedError):
            publisher.publish({"n": 2})
        await asyncio.wait_for(closed.wait(), WAIT_S)
        assert transport.closed

    run(use(), WAIT_S)


def test_with_in_a_coroutine_works_on_the_background_loop_and_closes(transport, monkeypatch):
    async def use():
        transport.create("a/journal")
        monkeypatch.setattr("gazette_sdk.message.sender.connect", lambda: transport)
        with Publisher(mapping.direct("a/journal")) as publisher:
            publisher.publish({"n": 1}).result(WAIT_S)
        assert transport.closed

    asyncio.run(use())


def test_a_publisher_that_is_dropped_ends_its_watches(transport):
    transport.create("orders/part-000", topic="orders")
    publisher = Publisher(BY_KEY, transport=transport)
    publisher.publish(Order("ada", 1)).result(WAIT_S)
    tasks = list(publisher._sender.connection().watches._tasks.values())
    del publisher

    async def ended():
        gc.collect()
        _, late = await asyncio.wait(tasks, timeout=WAIT_S)
        assert not late

    run(ended())


def test_a_forked_child_is_refused_and_the_parent_sends_what_it_was_given(gated):
    publisher = Publisher(mapping.direct("a/journal"), transport=gated)
    pending = publisher.publish({"from": "parent"})
    begun(gated, 1)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        try:
            for attempt in (
                lambda: pending.result(WAIT_S),
                lambda: publisher.publish({"from": "child"}),
            ):
                try:
                    attempt()
                    said.append("no error")
                except ClosedError as error:
                    said.append(str(error))
            publisher.close()
            gated.append_gate = None
            with Publisher(mapping.direct("a/journal"), transport=gated) as own:
                own.publish({"from": "child"}).result(WAIT_S)
            said.append(gated.content_of("a/journal").decode())
        finally:
            os.write(sending, json.dumps(said).encode())
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        lost, refused, content = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    assert "make another Publisher in the child" in lost
    assert "make another Publisher in the child" in refused
    assert content.count("\n") == 1
    gated.opened()
    pending.result(WAIT_S)
    publisher.close()
    assert len(lines(gated, "a/journal")) == 1
