"""Transactions that end in between: intents which are saved, acknowledged later, in doubt."""

from __future__ import annotations

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import (
    ClosedError,
    MappingError,
    NotAllowedError,
    UserCodeError,
    ValidationError,
)
from gazette_sdk.message.sender import AckIntents
from gazette_sdk.message.transaction import TransactionInDoubtError
from gazette_sdk.message.uuid import CONTINUE_TXN
from gazette_sdk.protocol import broker_pb2 as pb
from support.published import TO, WAIT_S
from support.transactions import by_to, committed, flags, transact, written


def test_a_failed_save_neither_acknowledges_nor_rolls_back(two):
    kept = []

    def save(intents):
        kept.append(intents)
        raise OSError("disk full")

    with Publisher(by_to, transport=two) as publisher:
        with pytest.raises(OSError, match="disk full"), publisher.transaction(save=save) as txn:
            txn.publish({"to": "one/journal", "n": 1})
        assert flags(two, "one/journal") == [CONTINUE_TXN]
        with publisher.transaction() as txn:
            txn.publish({"to": "one/journal", "n": 2})
        found = written(two, "one/journal")
        assert found[0].producer != found[1].producer
        assert [m["n"] for m in committed(two, "one/journal")] == [2]
        # It had saved them after all.
        receipt = publisher.acknowledge(AckIntents.from_bytes(kept[0].to_bytes()))
        assert receipt.result(WAIT_S).journals == ("one/journal",)
        assert sorted(m["n"] for m in committed(two, "one/journal")) == [1, 2]


def test_a_save_of_which_nothing_has_run_has_failed(two):
    def save(intents):
        yield intents

    refused = pytest.raises(UserCodeError, match="save returned a generator")
    with Publisher(mapping.direct("one/journal"), transport=two) as publisher:
        with refused, publisher.transaction(save=save) as txn:
            txn.publish({"n": 1})
        assert not txn.intents
    assert committed(two, "one/journal") == []


def test_after_a_save_what_cannot_be_acknowledged_is_in_doubt(two, on_loop):
    with Publisher(by_to, transport=two) as publisher:

        def save(_):
            two.append_faults = [pb.NOT_ALLOWED]

        messages = [{"to": f"{name}/journal", "n": 1} for name in ("one", "two")]
        with pytest.raises(TransactionInDoubtError, match="is decided") as caught:
            transact(publisher, *messages, save=save)
        assert isinstance(caught.value.__cause__, NotAllowedError)
        visible = committed(two, "one/journal") + committed(two, "two/journal")
        assert len(visible) == 1
        for _ in range(2):
            publisher.acknowledge(caught.value.intents.to_bytes()).result(WAIT_S)
        assert len(committed(two, "one/journal")) == len(committed(two, "two/journal")) == 1


@pytest.mark.parametrize("saved", [False, True])
def test_what_is_decided_when_the_publisher_is_closed_is_told(two, saved):
    publisher = Publisher(by_to, transport=two)
    messages = [{"to": f"{name}/journal", "n": 1} for name in ("one", "two")]
    if saved:
        with pytest.raises(TransactionInDoubtError, match="publisher was closed") as caught:
            transact(publisher, *messages, save=lambda _: publisher.close())
        with Publisher(transport=two) as another:
            another.acknowledge(caught.value.intents)
        assert len(committed(two, "one/journal")) == len(committed(two, "two/journal")) == 1
        return
    txn = publisher.transaction().__enter__()
    for message in messages:
        txn.publish(message)
    publisher.close()
    with pytest.raises(ClosedError):
        txn.__exit__(None, None, None)
    assert committed(two, "one/journal") == committed(two, "two/journal") == []


def test_acknowledging_in_vain_says_so(two):
    with Publisher(transport=two) as publisher:
        with pytest.raises(MappingError, match=r"intents name .*no/journal") as caught:
            publisher.acknowledge({"no/journal": b"{}\n"})
        assert caught.value.journal == "no/journal"
        with pytest.raises(ValidationError, match="no stored acknowledgement intents"):
            publisher.acknowledge(b"\xff")
        two.append_faults = [pb.NOT_ALLOWED]
        receipt = publisher.acknowledge({"one/journal": b"{}\n"})
        with pytest.raises(NotAllowedError):
            receipt.result(WAIT_S)
        with pytest.raises(NotAllowedError):
            publisher.flush(WAIT_S)


@pytest.mark.parametrize("frame", [b"", b"{}", b"{}\n{}", b"text without an end", None, "{}\n"])
def test_what_is_no_frame_of_its_journal_is_no_acknowledgement(two, frame):
    with Publisher(transport=two) as publisher:
        with pytest.raises(ValidationError, match="one/journal: the acknowledgement is no frame"):
            publisher.acknowledge({"one/journal": frame})
        for intents in (None, "text", [b"{}\n"]):
            with pytest.raises(ValidationError, match="is no acknowledgement intents"):
                publisher.acknowledge(intents)
    assert two.content_of("one/journal") == b""


def test_an_acknowledgement_that_takes_too_long_is_in_doubt(gated):
    publisher = Publisher(TO, transport=gated)
    with (
        pytest.raises(
            TransactionInDoubtError, match=r"not known yet \(no answer within 0.05 s, and still"
        ),
        publisher.transaction(timeout=0.05) as txn,
    ):
        receipt = txn.publish({"n": 1})
    gated.opened()
    receipt.result(WAIT_S)
    publisher.close()
    assert committed(gated, "a/journal") == [{"n": 1}]
