"""What a publisher cannot write: messages it refuses, appends that fail, and who is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from gazette_sdk import GazetteError, JsonMessage, Publisher, mapping
from gazette_sdk.errors import (
    ClosedError,
    JournalNotFoundError,
    NotAllowedError,
    ValidationError,
)
from gazette_sdk.message.receipt import ReceiptTimeoutError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.published import WAIT_S, begun, lines


def test_a_message_that_fails_validation_is_refused_before_it_is_mapped(transport):
    @dataclass
    class Checked(JsonMessage):
        cents: int

        def validate(self):
            raise ValueError("never valid")

    consulted = []
    with (
        Publisher(mapping=consulted.append, transport=transport) as publisher,
        pytest.raises(ValueError, match="never valid"),
    ):
        publisher.publish(Checked(1))
    assert consulted == []


def test_an_append_whose_answer_was_lost_is_made_again(transport):
    transport.create("a/journal")
    transport.append_faults = ["lost", "unavailable", pb.NO_JOURNAL_PRIMARY_BROKER]
    with Publisher(mapping.direct("a/journal"), transport=transport) as publisher:
        receipt = publisher.publish({"n": 1})
        receipt.result(WAIT_S)
    content = transport.content_of("a/journal")
    assert content == content[: len(content) // 2] * 2
    assert (receipt.begin, receipt.end) == (len(content) // 2, len(content))


def test_a_terminal_failure_reaches_receipts_and_flush_and_what_stood_behind_it(gated):
    gated.append_faults = [pb.NOT_ALLOWED]
    publisher = Publisher(mapping.direct("a/journal"), transport=gated)
    first = publisher.publish({"n": 0})
    begun(gated, 1)
    behind = publisher.publish({"n": 1})
    gated.opened()
    for receipt in (first, behind):
        with pytest.raises(NotAllowedError) as caught:
            receipt.result(WAIT_S)
        assert caught.value.journal == "a/journal"
        assert repr(receipt) == "<Receipt a/journal: failed>"
        with pytest.raises(NotAllowedError):
            _ = receipt.begin
    with pytest.raises(NotAllowedError):
        publisher.flush(WAIT_S)
    publisher.flush(WAIT_S)  # it was told once
    assert publisher.publish({"n": 2}).result(WAIT_S).begin == 0  # and the journal is tried again
    publisher.close()
    assert [line["n"] for line in lines(gated, "a/journal")] == [2]


def test_a_failure_during_the_body_does_not_hide_the_bodys_own(transport):
    transport.create("a/journal")
    transport.append_faults = [pb.NOT_ALLOWED]

    def publish():
        with Publisher(mapping.direct("a/journal"), transport=transport) as publisher:
            publisher.publish({"n": 1})
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        publish()
    assert "NOT_ALLOWED" in caught.value.__notes__[0]


def test_a_failure_reaches_the_end_of_the_with_block(transport):
    transport.create("a/journal")
    transport.append_faults = [pb.NOT_ALLOWED]
    with (
        pytest.raises(NotAllowedError),
        Publisher(mapping.direct("a/journal"), transport=transport) as publisher,
    ):
        publisher.publish({"n": 1})


def test_waiting_too_short_says_what_the_last_attempt_said(gated):
    publisher = Publisher(mapping.direct("a/journal"), transport=gated)
    gated.append_faults = ["unavailable"] * 100
    receipt = publisher.publish({"n": 1})
    gated.opened()
    begun(gated, 2)
    with pytest.raises(ReceiptTimeoutError, match="the broker went away") as caught:
        receipt.result(timeout=0.01)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, GazetteError)
    with pytest.raises(ReceiptTimeoutError, match="not everything was acknowledged"):
        publisher.close(timeout=0.01)
    with pytest.raises(ClosedError):
        receipt.result(WAIT_S)


def test_a_message_that_cannot_be_encoded_leaves_nothing(transport):
    transport.create("a/journal")
    publisher = Publisher(mapping.direct("a/journal"), transport=transport)
    with pytest.raises(ValidationError, match="cannot be encoded"):
        publisher.publish({"bad": object()})
    publisher.publish({"good": 1})
    publisher.close()
    assert [sorted(line) for line in lines(transport, "a/journal")] == [["UUID", "good"]]


def test_a_class_without_uuid_is_refused_before_it_is_mapped(transport):
    with (
        Publisher(mapping=lambda _: 1 / 0, transport=transport) as publisher,
        pytest.raises(ValidationError, match="JsonMessage"),
    ):
        publisher.publish("text")


def test_what_cannot_be_sent_in_time_is_given_up(gated):
    async def publish():
        publisher = Publisher(mapping.direct("a/journal"), transport=gated)
        receipts = [publisher.publish({"n": n}) for n in range(2)]
        async with asyncio.timeout(WAIT_S):
            await gated.until(lambda: gated.appends_begun > 0)
        receipts.append(publisher.publish({"n": 2}))
        with pytest.raises(ReceiptTimeoutError):
            await publisher.aclose(timeout=0.01)
        for receipt in receipts:
            with pytest.raises(ClosedError):
                await receipt

    run(publish(), WAIT_S)
    assert lines(gated, "a/journal") == []


def test_a_coroutine_is_told_of_failures_at_the_end_of_its_block(transport):
    transport.create("a/journal")

    async def publish(error):
        transport.append_faults = [pb.NOT_ALLOWED]
        async with Publisher(mapping.direct("a/journal"), transport=transport) as publisher:
            publisher.publish({"n": 1})
            if error is not None:
                raise error

    with pytest.raises(NotAllowedError):
        asyncio.run(publish(None))
    with pytest.raises(KeyError) as caught:
        asyncio.run(publish(KeyError("mine")))
    assert "NOT_ALLOWED" in caught.value.__notes__[0]


def test_a_deleted_journal_fails_its_messages(transport, on_loop):
    transport.create("a/journal")
    publisher = Publisher(mapping.direct("a/journal"), transport=transport)
    publisher.publish({"a": 1}).result(WAIT_S)
    on_loop(transport.delete, "a/journal")
    with pytest.raises(JournalNotFoundError):
        publisher.publish({"a": 2}).result(WAIT_S)
    with pytest.raises(JournalNotFoundError):
        publisher.close()
