"""Transactions that end badly: what is rolled back, and who is told."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from gazette_sdk import Publisher
from gazette_sdk.errors import (
    NotAllowedError,
    ValidationError,
)
from gazette_sdk.message.receipt import ReceiptTimeoutError
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.queue import PendingAppend
from support.published import TO, WAIT_S
from support.transactions import by_to, committed, flags, transact, written


def test_an_exception_rolls_back_and_propagates(two):
    with Publisher(by_to, transport=two) as publisher:
        with pytest.raises(KeyError) as caught:
            transact(publisher, {"to": "one/journal", "n": 1}, error=KeyError("mine"))
        assert not hasattr(caught.value, "__notes__")
        transact(publisher, {"to": "one/journal", "n": 2})
        with pytest.raises(KeyError):
            transact(publisher, {"to": "one/journal", "n": 1}, error=KeyError("mine"))
        transact(publisher, {"to": "one/journal", "n": 3})
    found = written(two, "one/journal")
    assert len({each.producer for each in found}) == 1  # a clean roll-back: the producer goes on
    assert [each.flags for each in found] == [1, 2] * 4
    first, rolled, _, acknowledged, _, rolled_again, _, _ = [each.clock for each in found]
    assert rolled == first - 1
    assert rolled_again == acknowledged
    assert [m["n"] for m in committed(two, "one/journal")] == [2, 3]


def test_a_refused_message_rolls_back_if_it_is_not_caught(transport):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(ValidationError):
            transact(publisher, {"good": 1}, {"bad": object()})
        with publisher.transaction() as txn:
            txn.publish({"good": 2})
            with pytest.raises(ValidationError):
                txn.publish({"bad": object()})
    assert committed(transport, "a/journal") == [{"good": 2}]


def test_after_a_failed_attempt_the_producer_of_a_rolled_back_transaction_is_not_used_again(
    transport,
):
    transport.create("a/journal")
    transport.append_faults = ["lost"]
    with Publisher(TO, transport=transport) as publisher:
        txn = publisher.transaction().__enter__()
        txn.publish({"n": 1}).result(WAIT_S)
        txn.__exit__(KeyError, KeyError("mine"), None)
        with publisher.transaction() as txn:
            txn.publish({"n": 2})
    found = written(transport, "a/journal")
    assert [each.message.get("n") for each in found] == [1, 1, None, 2, None]
    assert found[0].producer == found[2].producer != found[3].producer
    assert committed(transport, "a/journal") == [{"n": 2}]


def test_a_failed_append_rolls_back_and_is_raised(two):
    with Publisher(by_to, transport=two) as publisher:
        two.append_faults = [pb.NOT_ALLOWED]
        with pytest.raises(NotAllowedError):
            transact(publisher, *({"to": f"{name}/journal", "n": 1} for name in ("one", "two")))
        publisher.flush(WAIT_S)  # it was told already
        with publisher.transaction() as txn:
            txn.publish({"to": "one/journal", "n": 2})
    assert committed(two, "two/journal") == []
    assert committed(two, "one/journal") == [{"to": "one/journal", "n": 2}]


def test_a_transaction_ends_early_when_an_append_has_failed(transport):
    transport.create("a/journal")
    transport.append_faults = [pb.NOT_ALLOWED]
    with Publisher(TO, transport=transport) as publisher:

        def endless(txn):
            first = txn.publish({"n": 0})
            with pytest.raises(NotAllowedError):
                first.result(WAIT_S)
            txn.publish({"n": 1})

        with pytest.raises(NotAllowedError), publisher.transaction() as txn:
            endless(txn)
    assert committed(transport, "a/journal") == []


def test_a_failed_append_before_the_acknowledgement_in_the_only_journal_rolls_back(transport):
    transport.create("a/journal")
    transport.append_faults = [pb.NOT_ALLOWED]
    with Publisher(TO, transport=transport) as publisher:
        txn = publisher.transaction().__enter__()
        with pytest.raises(NotAllowedError):
            txn.publish({"n": 0}).result(WAIT_S)
        with pytest.raises(NotAllowedError):
            txn.__exit__(None, None, None)
        publisher.close()
    assert flags(transport, "a/journal") == [ACK_TXN]  # of the roll-back, harmless alone
    assert committed(transport, "a/journal") == []


def test_messages_and_acknowledgement_that_are_lost_together_are_not_in_doubt(gated):
    with Publisher(TO, transport=gated) as publisher:
        gated.append_faults = [pb.NOT_ALLOWED]
        thread = threading.Timer(0.05, gated.opened)
        thread.start()
        with pytest.raises(NotAllowedError) as caught, publisher.transaction() as txn:
            txn.publish({"n": 0})
        thread.join()
        assert "was not acknowledged" in caught.value.__notes__[0]
    assert gated.content_of("a/journal") == b""


def test_who_is_interrupted_does_not_wait_for_the_roll_back(gated):
    publisher = Publisher(TO, transport=gated)
    with pytest.raises(KeyboardInterrupt):
        transact(publisher, {"n": 0}, error=KeyboardInterrupt())
    gated.opened()
    publisher.close()
    assert flags(gated, "a/journal") == [CONTINUE_TXN, ACK_TXN]
    assert committed(gated, "a/journal") == []


def test_a_roll_back_that_cannot_be_written_in_time_is_noted(gated, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.transaction.ROLLBACK_TIMEOUT_S", 0.05)
    publisher = Publisher(TO, transport=gated)
    with pytest.raises(KeyError) as caught:
        transact(publisher, {"n": 0}, error=KeyError("mine"))
    assert "never see" in caught.value.__notes__[0]
    gated.opened()
    with publisher.transaction() as txn:
        txn.publish({"n": 1})
    publisher.close()
    assert len({each.producer for each in written(gated, "a/journal")}) == 2
    assert committed(gated, "a/journal") == [{"n": 1}]


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupt_in_the_end_of_a_block_leaves_a_whole(transport, monkeypatch, saved):
    transport.create("a/journal")
    wait = PendingAppend.wait
    with Publisher(TO, transport=transport) as publisher:
        waits = itertools.count()

        def interrupted(append, timeout_s=None):
            if next(waits) == 0:
                raise KeyboardInterrupt
            return wait(append, timeout_s)

        monkeypatch.setattr(PendingAppend, "wait", interrupted)
        save = (lambda _: None) if saved else None  # which of the two waits is interrupted
        with pytest.raises(KeyboardInterrupt):
            transact(publisher, {"n": 1}, save=save)
        transact(publisher, {"n": 2})
    found = written(transport, "a/journal")
    assert [each.flags for each in found] == [CONTINUE_TXN, ACK_TXN] * 2
    assert found[0].producer != found[2].producer
    expected = [{"n": 2}] if saved else [{"n": 1}, {"n": 2}]
    assert committed(transport, "a/journal") == expected


def test_a_commit_that_takes_too_long_is_rolled_back(two, on_loop):
    two.append_gate = on_loop(asyncio.Event)
    publisher = Publisher(by_to, transport=two)
    messages = [{"to": f"{name}/journal", "n": 1} for name in ("one", "two")]
    with pytest.raises(ReceiptTimeoutError, match=r"within 0.05 s.*rolled back"):
        transact(publisher, *messages, timeout=0.05)
    on_loop(two.append_gate.set)
    publisher.close()
    for journal in ("one/journal", "two/journal"):
        assert flags(two, journal) == [CONTINUE_TXN, ACK_TXN]
        assert committed(two, journal) == []
