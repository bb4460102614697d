"""Transactions: what is written when they end well, end badly, and end in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import os
import threading
from dataclasses import dataclass
from operator import itemgetter

import pytest

from gazette_sdk import GazetteError, JsonMessage, Publisher, Reader, mapping
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    MappingError,
    NotAllowedError,
    ValidationError,
)
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.receipt import ReceiptTimeoutError
from gazette_sdk.message.publishing.transaction import TransactionInDoubtError
from gazette_sdk.message.uuid import parse_uuid, uuid_of_text
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport
from support.vectors import group

WAIT_S = 10.0

TO = mapping.direct("a/journal")


def by_to(message):
    return message["to"]


@dataclass(frozen=True)
class Written:
    producer: bytes
    clock: int
    flags: int
    message: dict


def written(transport: MemoryTransport, journal: str) -> list[Written]:
    found = []
    for line in transport.content_of(journal).splitlines():
        message = json.loads(line)
        found.append(Written(*parse_uuid(uuid_of_text(message.pop("UUID"))), message))
    return found


def flags(transport: MemoryTransport, journal: str) -> list[int]:
    return [each.flags for each in written(transport, journal)]


def committed(transport: MemoryTransport, journal: str) -> list:
    return [e.message for e in Reader(dict, name=journal, transport=transport)]


@pytest.fixture
def two(transport):
    """A transport with two journals."""
    transport.create("one/journal")
    transport.create("two/journal")
    return transport


@pytest.fixture
def gated(transport, on_loop):
    """A transport with one journal, whose appends wait until ``opened()`` is called."""
    transport.create("a/journal")
    transport.append_gate = on_loop(asyncio.Event)
    transport.opened = lambda: on_loop(transport.append_gate.set)
    return transport


def begun(transport: MemoryTransport, count: int) -> None:
    async def wait():
        async with asyncio.timeout(WAIT_S):
            await transport.until(lambda: transport.appends_begun >= count)

    run(wait())


def transact(publisher, *messages, error=None, **options):
    """A transaction of some messages, which then ends well, or by an error."""
    with publisher.transaction(**options) as txn:
        for message in messages:
            txn.publish(message)
        if error is not None:
            raise error
    return txn


# -------------------------------------------------------------------- vectors


def test_transactions_carry_the_clocks_of_the_vectors(transport):
    case = group("message", "publisher")[1]
    for journal in case["expect"]:
        transport.create(journal)
    with Publisher(transport=transport, clock=Clock(case["clock_start"])) as publisher:
        built = []
        txn = publisher.transaction(save=built.append)
        txn.__enter__()
        for call in case["calls"]:
            words = call.split(" ", 2)
            if words[0] == "uncommitted":
                message = {"str": json.loads(words[2])}
                txn.publish(message, mapping=mapping.direct(words[1]))
            else:
                txn.__exit__(None, None, None)
                txn = publisher.transaction(save=built.append).__enter__()
        txn.__exit__(None, None, None)
    assert [list(intents) for intents in built] == [
        ["journal/one", "journal/two"],
        ["journal/three", "journal/one"],
    ]
    for journal, expected in case["expect"].items():
        found = [
            {"clock": each.clock, "flags": each.flags, **each.message}
            for each in written(transport, journal)
        ]
        assert found == expected
        assert len({each.producer for each in written(transport, journal)}) == 1


# ----------------------------------------------------------------- a good end


def test_a_transaction_is_acknowledged_in_each_of_its_journals(two):
    with Publisher(by_to, transport=two) as publisher:
        with publisher.transaction() as txn:
            for n in range(3):
                txn.publish({"to": "one/journal", "n": n})
                txn.publish({"to": "two/journal", "n": n})
            assert txn.journals == ("one/journal", "two/journal")
            assert not txn.intents
        assert list(txn.intents) == ["one/journal", "two/journal"]
        for journal in txn.intents:
            assert flags(two, journal) == [CONTINUE_TXN] * 3 + [ACK_TXN]
            assert two.content_of(journal).endswith(txn.intents[journal])
            clocks = [each.clock for each in written(two, journal)]
            assert clocks == sorted(set(clocks))
            assert [message["n"] for message in committed(two, journal)] == [0, 1, 2]
        first = written(two, "one/journal")[0].producer
        assert first != publisher.producer
        with publisher.transaction() as txn:  # the same producer goes on
            txn.publish({"to": "one/journal", "n": 3})
        assert {each.producer for each in written(two, "one/journal")} == {first}


def test_a_transaction_of_one_journal_costs_one_append(gated):
    gated.opened()
    with Publisher(TO, transport=gated) as publisher:
        publisher.publish({"n": -1}).result(WAIT_S)
        gated.append_gate.clear()
        publisher.publish({"n": -1})
        begun(gated, 2)
        ended = threading.Event()

        def work():
            with publisher.transaction() as txn:
                for n in range(10):
                    txn.publish({"n": n})
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        sequences = publisher._sender
        while sum(batch.count for batch in sequences.pending()) < 12:
            assert not ended.wait(0.01)
        gated.opened()
        assert ended.wait(WAIT_S)
        thread.join()
    assert [content.count(b"\n") for _, content in gated.appends] == [1, 1, 11]
    assert flags(gated, "a/journal") == [OUTSIDE_TXN] * 2 + [CONTINUE_TXN] * 10 + [ACK_TXN]


def test_nothing_is_acknowledged_before_all_is_durable_and_saved(two):
    seen = []

    def save(intents):
        seen.append(intents)
        assert flags(two, "one/journal") == flags(two, "two/journal") == [CONTINUE_TXN]

    with Publisher(by_to, transport=two) as publisher:
        with publisher.transaction(save=save) as txn:
            txn.publish({"to": "one/journal"})
            txn.publish({"to": "two/journal"})
        assert seen == [txn.intents]
    assert flags(two, "one/journal") == flags(two, "two/journal") == [CONTINUE_TXN, ACK_TXN]


def test_an_empty_transaction_does_nothing(two):
    saved = []
    with Publisher(by_to, transport=two) as publisher:
        with publisher.transaction(save=saved.append) as txn:
            pass
        assert not txn.intents
        with pytest.raises(KeyError), publisher.transaction():
            raise KeyError("mine")
    assert saved == []
    assert two.appends == []


def test_concurrent_transactions_have_their_own_producers(two):
    with Publisher(by_to, transport=two) as publisher:
        outer, inner = publisher.transaction(), publisher.transaction()
        with outer, inner:
            outer.publish({"to": "one/journal", "from": "outer"})
            inner.publish({"to": "one/journal", "from": "inner"})
            publisher.publish({"to": "one/journal", "from": "outside"})
            publisher.flush(WAIT_S)
        found = written(two, "one/journal")
        assert len({each.producer for each in found}) == 3
        assert len(committed(two, "one/journal")) == 3


def test_threads_may_share_a_transaction(transport):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher, publisher.transaction() as txn:

        def work(thread):
            for n in range(100):
                txn.publish({"thread": thread, "n": n})

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    clocks = [each.clock for each in written(transport, "a/journal")]
    assert len(clocks) == 401
    assert clocks == sorted(set(clocks))
    assert len(committed(transport, "a/journal")) == 400


def test_a_message_s_own_acknowledgement_is_written(transport):
    @dataclass
    class Keyed(JsonMessage):
        key: str

        def new_acknowledgement(self, journal):
            return Keyed(f"end of {journal}")

    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher, publisher.transaction() as txn:
        txn.publish(Keyed("k"))
    assert written(transport, "a/journal")[-1].message == {"key": "end of a/journal"}


def test_batches_are_part_of_a_transaction(two):
    with Publisher(by_to, transport=two) as publisher, publisher.transaction() as txn:
        txn.publish_batch(
            [{"to": f"{name}/journal", "n": n} for n in range(5) for name in ("two", "one")]
        )
        txn.publish({"to": "one/journal", "n": 5})
        assert txn.journals == ("two/journal", "one/journal")
    assert flags(two, "one/journal") == [CONTINUE_TXN] * 6 + [ACK_TXN]
    assert [m["n"] for m in committed(two, "one/journal")] == list(range(6))
    assert [m["n"] for m in committed(two, "two/journal")] == list(range(5))


# ------------------------------------------------------------------ roll-back


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
    monkeypatch.setattr("gazette_sdk.message.publishing.transaction.ROLLBACK_TIMEOUT_S", 0.05)
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
    wait = concurrent.futures.wait
    with Publisher(TO, transport=transport) as publisher:
        waits = itertools.count()

        def interrupted(futures, timeout=None):
            if next(waits) == 0:
                raise KeyboardInterrupt
            return wait(futures, timeout)

        monkeypatch.setattr(
            "gazette_sdk.message.publishing.transaction.concurrent.futures.wait", interrupted
        )
        save = (lambda _: None) if saved else None  # which of the two waits is interrupted
        with pytest.raises(KeyboardInterrupt):
            transact(publisher, {"n": 1}, save=save)
        transact(publisher, {"n": 2})
    found = written(transport, "a/journal")
    assert [each.flags for each in found] == [CONTINUE_TXN, ACK_TXN] * 2
    assert found[0].producer != found[2].producer
    expected = [{"n": 2}] if saved else [{"n": 1}, {"n": 2}]
    assert committed(transport, "a/journal") == expected


def test_an_acknowledgement_of_csv_has_the_columns_of_its_journal(transport):
    transport.create("a/journal", content_type="text/csv")
    with Publisher(TO, transport=transport) as publisher, publisher.transaction() as txn:
        txn.publish(["", "a", "b"])
        txn.publish_batch([["", "c,d", "e"]])
    lines = transport.content_of("a/journal").decode().splitlines()
    assert [line.partition(",")[2] for line in lines] == ["a,b", '"c,d",e', ","]


# -------------------------------------------------------------- save, in doubt


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


# ------------------------------------------------------------------ coroutines


def test_in_a_coroutine_save_may_be_one(two):
    order = []

    async def save(intents):
        await asyncio.sleep(0)
        order.append((list(intents), flags(two, "one/journal")))

    async def publish():
        async with Publisher(by_to, transport=two) as publisher:
            async with publisher.transaction(save=save) as txn:
                txn.publish({"to": "one/journal", "n": 1})

            async def fail():
                async with publisher.transaction(save=save) as txn:
                    txn.publish({"to": "one/journal", "n": 2})
                    raise KeyError("mine")

            with pytest.raises(KeyError):
                await fail()

    asyncio.run(publish())
    assert order == [(["one/journal"], [CONTINUE_TXN])]
    assert [m["n"] for m in committed(two, "one/journal")] == [1]


def test_on_the_sdks_own_loop_transactions_wait_for_listings(transport):
    for index in range(2):
        transport.create(f"orders/part-{index}", topic="orders")
    by_n = mapping.modulo("topic=orders", key=itemgetter("n"))

    async def publish():
        publisher = Publisher(by_n, transport=transport)
        async with asyncio.timeout(WAIT_S):
            async with publisher.transaction() as txn:
                receipt = txn.publish({"n": 0})
                batch = txn.publish_batch([{"n": n} for n in range(1, 9)])
                assert not receipt.done()
                assert not batch.done()
                assert batch.count == 8
            assert receipt.done()
            assert sum(each.count for each in batch.landed.values()) == 8

            async def fail():
                async with publisher.transaction() as txn:
                    txn.publish({"n": 9})
                    txn.publish({"n": 10}, mapping=mapping.direct("no/journal"))

            with pytest.raises(MappingError):
                await fail()
            with pytest.raises(GazetteError, match="async with"), publisher.transaction():
                pass
            again = publisher.acknowledge(txn.intents)
            assert await again is again
            await publisher.aclose()

    run(publish(), WAIT_S)
    found = [m["n"] for j in range(2) for m in committed(transport, f"orders/part-{j}")]
    assert sorted(found) == list(range(9))


def test_on_the_sdks_own_loop_intents_wait_for_their_journals(two):
    with (
        Publisher(by_to, transport=two) as publisher,
        publisher.transaction(save=lambda _: None) as txn,
    ):
        txn.publish({"to": "one/journal"})
        txn.publish({"to": "two/journal"})

    async def publish():
        publisher = Publisher(transport=two)
        async with asyncio.timeout(WAIT_S):
            receipt = publisher.acknowledge(txn.intents)
            assert not receipt.done()
            assert receipt.count == 2
            assert (await receipt).journals == ("one/journal", "two/journal")
            lost = publisher.acknowledge({"no/journal": b"{}\n"})
            with pytest.raises(MappingError, match="intents name a journal"):
                await lost
            with pytest.raises(MappingError):
                await publisher.aclose()

    run(publish(), WAIT_S)
    assert flags(two, "one/journal") == [CONTINUE_TXN, ACK_TXN, ACK_TXN]
    assert len(committed(two, "one/journal")) == 1


def test_an_interrupted_commit_is_rolled_back_without_waiting(gated):
    async def publish():
        publisher = Publisher(by_to, transport=gated)

        async def transact():
            async with publisher.transaction(save=lambda _: None) as txn:
                txn.publish({"to": "a/journal"})

        task = asyncio.create_task(transact())
        await asyncio.to_thread(begun, gated, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gated.opened()
        await publisher.aclose()

    asyncio.run(publish())
    assert flags(gated, "a/journal") == [CONTINUE_TXN, ACK_TXN]
    assert committed(gated, "a/journal") == []


def test_an_interruption_while_acknowledging_says_that_it_is_decided(gated):
    async def publish():
        publisher = Publisher(by_to, transport=gated)

        async def transact():
            async with publisher.transaction() as txn:
                txn.publish({"to": "a/journal"})

        task = asyncio.create_task(transact())
        await asyncio.to_thread(begun, gated, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert "was being acknowledged" in caught.value.__notes__[0]
        gated.opened()
        await publisher.aclose()

    asyncio.run(publish())
    assert committed(gated, "a/journal") == [{"to": "a/journal"}]


def test_plain_code_cannot_await_what_save_returns(two):
    async def save(_):
        raise AssertionError("nobody awaits it")

    with (
        Publisher(by_to, transport=two) as publisher,
        pytest.raises(ConfigurationError, match="async with"),
        publisher.transaction(save=save) as txn,
    ):
        txn.publish({"to": "one/journal"})


# ----------------------------------------------------------------- life cycle


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
            with publisher.transaction() as own:
                own.publish({"from": "child"})
            said.append(transport.content_of("a/journal").decode())
        finally:
            os.write(sending, json.dumps(said).encode())
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        refused, not_ended, content = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    assert "before the process was forked" in refused
    assert "before the process was forked" in not_ended
    assert content.count("\n") == 3
    txn.__exit__(None, None, None)
    publisher.close()
    assert committed(transport, "a/journal") == [{"from": "parent"}]


def test_clocks_never_go_back(transport, monkeypatch):
    times = iter([10**18, 10**18 - 10**15, 10**18 - 2 * 10**15, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0])
    monkeypatch.setattr("gazette_sdk.message.uuid.time.time_ns", lambda: next(times))
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish({"n": 0})
        publisher.publish({"n": 1})
        publisher.publish_batch([{"n": n} for n in range(2, 10)])
        publisher.publish({"n": 10})
        with publisher.transaction() as txn:
            txn.publish({"n": 11})
            txn.publish_batch([{"n": 12}, {"n": 13}])
    for kind in ({OUTSIDE_TXN}, {CONTINUE_TXN, ACK_TXN}):
        clocks = [each.clock for each in written(transport, "a/journal") if each.flags in kind]
        assert clocks == sorted(set(clocks))
    assert [m["n"] for m in committed(transport, "a/journal")] == list(range(14))
