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
)
from gazette_sdk.transport.loop import run
from support.published import BY_KEY, WAIT_S, Order, begun, lines


def test_without_a_transport_the_address_of_the_environment_is_used(transport, monkeypatch):
    transport.create("a/journal")
    monkeypatch.setattr("gazette_sdk.message.publishing.link.connect", lambda: transport)
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


def test_a_publisher_that_is_dropped_ends_its_watches(transport):
    transport.create("orders/part-000", topic="orders")
    publisher = Publisher(BY_KEY, transport=transport)
    publisher.publish(Order("ada", 1)).result(WAIT_S)
    tasks = list(publisher._sender.link().watches._tasks.values())
    del publisher

    async def ended():
        gc.collect()
        _, late = await asyncio.wait(tasks, timeout=WAIT_S)
        assert not late

    run(ended())


def test_a_forked_child_goes_on_as_another_producer(gated):
    publisher = Publisher(mapping.direct("a/journal"), transport=gated)
    pending = publisher.publish({"from": "parent"})
    begun(gated, 1)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gated.append_gate = None
            try:
                pending.result(WAIT_S)
                lost = "no error"
            except ClosedError as error:
                lost = str(error)
            receipt = publisher.publish({"from": "child"})
            receipt.result(WAIT_S)
            content = gated.content_of("a/journal").decode()
            said = {"producer": publisher.producer.hex(), "lost": lost, "content": content}
            os.write(sending, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        said = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    assert said["producer"] != publisher.producer.hex()
    assert said["content"].count("\n") == 1
    assert said["producer"] in said["content"].replace("-", "")
    assert "the parent sends it" in said["lost"]
    gated.opened()
    pending.result(WAIT_S)
    publisher.close()
