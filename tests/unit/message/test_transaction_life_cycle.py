"""Transactions live within their block, their publisher and their process."""

from __future__ import annotations

import json
import os

import pytest

from gazette_sdk import Publisher
from gazette_sdk.errors import (
    ClosedError,
)
from support.published import TO, WAIT_S
from support.transactions import by_to, committed


def test_a_transaction_is_used_within_its_block_only(two):
    with Publisher(by_to, transport=two) as publisher:
        txn = publisher.transaction()
        with pytest.raises(ClosedError, match="begins with its block"):
            txn.publish({"to": "one/journal"})
        assert txn.journals == ()
        with txn:
            txn.publish({"to": "one/journal"})
        with pytest.raises(ClosedError, match="has ended"):
            txn.publish({"to": "one/journal"})
        with pytest.raises(ClosedError, match="has ended"):
            txn.publish_batch([{"to": "one/journal"}])
        with pytest.raises(ClosedError, match="has ended"):
            txn.__enter__()


def test_a_publisher_that_is_closed_ends_its_transactions(two):
    publisher = Publisher(by_to, transport=two)
    txn = publisher.transaction().__enter__()
    txn.publish({"to": "one/journal"})
    publisher.close()
    with pytest.raises(ClosedError):
        txn.__exit__(None, None, None)
    assert committed(two, "one/journal") == []
    with pytest.raises(ClosedError), publisher.transaction():
        pass


def test_a_forked_child_cannot_go_on_with_the_parents_transaction(transport):
    transport.create("a/journal")
    publisher = Publisher(TO, transport=transport)
    receiving, sending = os.pipe()
    txn = publisher.transaction()
    txn.__enter__()
    txn.publish({"from": "parent"}).result(WAIT_S)
    child = os.fork()
    if child == 0:
        said = []
        try:
            for attempt in (
                lambda: txn.publish({"from": "child"}),
                lambda: txn.__exit__(None, None, None),
            ):
                try:
                    attempt()
                except ClosedError as error:
                    said.append(str(error))
            txn.__exit__(KeyError, KeyError("mine"), None)  # leaves it to the parent
            try:
                publisher.transaction().__enter__()
            except ClosedError as error:
                said.append(str(error))
            said.append(transport.content_of("a/journal").decode())
        finally:
            os.write(sending, json.dumps(said).encode())
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        refused, not_ended, not_begun, content = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    for error in (refused, not_ended, not_begun):
        assert "make another Publisher in the child" in error
    assert content.count("\n") == 1
    txn.__exit__(None, None, None)
    publisher.close()
    assert committed(transport, "a/journal") == [{"from": "parent"}]
