"""Transactions which others decide over: prepared, and settled when their fate is known."""

from __future__ import annotations

import pytest

from gazette_sdk import Publisher
from gazette_sdk.errors import ClosedError, ConfigurationError, GazetteError, NotAllowedError
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import on_sdk_loop, run
from support.published import TO, WAIT_S
from support.transactions import by_to, committed, flags, transact, written

BOTH = [{"to": f"{name}/journal", "n": 1} for name in ("one", "two")]


def prepare(publisher, *messages, error=None, **options):
    with publisher.transaction(**options) as txn:
        for message in messages:
            txn.publish(message)
        prepared = txn.prepare()
        with pytest.raises(ClosedError, match="has ended"):
            txn.publish({"n": 0})
        with pytest.raises(ClosedError, match="has ended"):
            txn.prepare()
        if error is not None:
            raise error
        return prepared


def test_what_is_prepared_is_durable_and_neither_acknowledged_nor_rolled_back(two):
    with Publisher(by_to, transport=two) as publisher:
        prepared = prepare(publisher, *BOTH)
        assert list(prepared.intents) == ["one/journal", "two/journal"]
        assert flags(two, "one/journal") == flags(two, "two/journal") == [CONTINUE_TXN]
    assert flags(two, "one/journal") == flags(two, "two/journal") == [CONTINUE_TXN]
    with Publisher(transport=two) as another:
        another.acknowledge(prepared.intents.to_bytes())
    assert committed(two, "one/journal") == BOTH[:1]
    assert committed(two, "two/journal") == BOTH[1:]


def test_messages_of_one_journal_are_durable_too_before_it_is_prepared(gated):
    with Publisher(TO, transport=gated) as publisher:
        with pytest.raises(GazetteError, match="could not be committed within"):
            prepare(publisher, {"n": 1}, timeout=0.05)
        gated.opened()
    assert committed(gated, "a/journal") == []


def test_a_producer_is_used_again_only_when_its_transaction_is_settled(two):
    with Publisher(by_to, transport=two) as publisher:
        prepared = prepare(publisher, BOTH[0])
        transact(publisher, BOTH[0])
        publisher.acknowledge(prepared.intents).result(WAIT_S)
        assert publisher.settle(prepared, acknowledged=True)
        with pytest.raises(ClosedError, match="settled already"):
            publisher.settle(prepared, acknowledged=True)
        open_at_once = [publisher.transaction().__enter__() for _ in range(3)]
        for txn in open_at_once:
            txn.publish(BOTH[0])
        for txn in open_at_once:
            txn.__exit__(None, None, None)
    producers = [each.producer for each in written(two, "one/journal")]
    assert producers[0] != producers[1]  # the first is lent while it is prepared
    assert set(producers[:2]) < set(producers[4:])  # both are used again, and a third
    assert len(set(producers)) == 3
    assert len(committed(two, "one/journal")) == 5


def test_a_transaction_that_never_will_be_acknowledged_is_rolled_back(two):
    with Publisher(by_to, transport=two) as publisher:
        transact(publisher, *BOTH)
        prepared = prepare(publisher, *BOTH)
        assert publisher.settle(prepared, acknowledged=False)
        transact(publisher, *BOTH)
    found = written(two, "one/journal")
    assert [each.flags for each in found] == [CONTINUE_TXN, ACK_TXN] * 3
    assert len({each.producer for each in found}) == 1
    assert found[3].clock == found[1].clock  # a pure roll-back
    assert len(committed(two, "one/journal")) == len(committed(two, "two/journal")) == 2


def test_a_producer_whose_roll_back_fails_is_not_used_again(two):
    with Publisher(by_to, transport=two) as publisher:
        prepared = prepare(publisher, BOTH[0])
        two.append_faults = [pb.NOT_ALLOWED]
        assert not publisher.settle(prepared, acknowledged=False)
        transact(publisher, BOTH[1])
    [rest] = {each.producer for each in written(two, "two/journal")}
    assert rest != written(two, "one/journal")[0].producer


@pytest.mark.parametrize("end", ["acknowledgement", "roll-back"])
def test_a_producer_whose_last_frame_was_sent_twice_is_not_used_again(two, end):
    with Publisher(by_to, transport=two) as publisher:
        txn = publisher.transaction().__enter__()
        txn.publish(BOTH[0]).result(WAIT_S)
        two.append_faults = ["lost"]
        if end == "roll-back":
            txn.__exit__(KeyError, KeyError("mine"), None)
        else:
            txn.__exit__(None, None, None)
        transact(publisher, BOTH[0])
    found = written(two, "one/journal")
    assert [each.flags for each in found] == [1, 2, 2, 1, 2]
    assert found[2].producer != found[3].producer


def test_an_empty_transaction_is_prepared_and_settled(two):
    with Publisher(by_to, transport=two) as publisher:
        for acknowledged in (True, False):
            prepared = prepare(publisher)
            assert not prepared.intents
            publisher.settle(prepared, acknowledged=acknowledged)
    assert two.appends == []


def test_a_transaction_whose_messages_fail_is_rolled_back_and_not_prepared(two):
    with Publisher(by_to, transport=two) as publisher:
        two.append_faults = [pb.NOT_ALLOWED]
        with pytest.raises(NotAllowedError):
            prepare(publisher, *BOTH)
        transact(publisher, BOTH[1])
    assert committed(two, "one/journal") == []
    assert committed(two, "two/journal") == BOTH[1:]


def test_an_exception_behind_its_preparation_rolls_nothing_back(two):
    with Publisher(by_to, transport=two) as publisher, pytest.raises(KeyError):
        prepare(publisher, BOTH[0], error=KeyError("mine"))
    assert flags(two, "one/journal") == [CONTINUE_TXN]


def test_a_transaction_that_saves_its_intents_is_not_prepared(two):
    with (
        Publisher(by_to, transport=two) as publisher,
        pytest.raises(ConfigurationError, match="save= belongs to"),
    ):
        prepare(publisher, BOTH[0], save=lambda _: None)
    assert committed(two, "one/journal") == []


def test_only_its_own_open_publisher_settles_a_transaction(two):
    with Publisher(by_to, transport=two) as publisher, Publisher(transport=two) as another:
        prepared = prepare(publisher, BOTH[0])
        with pytest.raises(ConfigurationError, match="another publisher"):
            another.settle(prepared, acknowledged=True)
    with pytest.raises(ClosedError):
        publisher.settle(prepared, acknowledged=True)


def test_a_coroutine_prepares_and_settles(two):
    async def work():
        async with Publisher(by_to, transport=two) as publisher:
            async with publisher.transaction() as txn:
                txn.publish(BOTH[0])
                with pytest.raises(GazetteError, match=r"await txn\.aprepare"):
                    txn.prepare()
                prepared = await txn.aprepare()
            with pytest.raises(GazetteError, match="asettle"):
                publisher.settle(prepared, acknowledged=False)
            await publisher.asettle(prepared, acknowledged=False)
            async with publisher.transaction() as txn:
                txn.publish(BOTH[1])

    run(on_sdk_loop(work()), WAIT_S)
    assert flags(two, "one/journal") == [CONTINUE_TXN, ACK_TXN]
    assert committed(two, "two/journal") == BOTH[1:]
