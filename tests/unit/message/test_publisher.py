"""Publishing: order, clocks, batches, receipts, failures, back-pressure."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter

import pytest

from gazette_sdk import GazetteError, JsonMessage, Publisher, Reader, mapping
from gazette_sdk.errors import (
    BackPressureError,
    ClosedError,
    ConfigurationError,
    FramingError,
    JournalNotFoundError,
    MappingError,
    NotAllowedError,
    ValidationError,
)
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.flags import OUTSIDE_TXN
from gazette_sdk.message.publishing.receipt import ReceiptTimeoutError
from gazette_sdk.message.uuid import parse_uuid, uuid_of_text
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport
from support.vectors import group

WAIT_S = 10.0


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


BY_KEY = mapping.modulo("topic=orders", key=attrgetter("customer"))


def lines(transport: MemoryTransport, journal: str) -> list[dict]:
    return [json.loads(line) for line in transport.content_of(journal).splitlines()]


def clocks(transport: MemoryTransport, journal: str) -> list[int]:
    return [parse_uuid(uuid_of_text(line["UUID"])).clock for line in lines(transport, journal)]


@pytest.fixture
def gated(transport, on_loop):
    """A transport with one journal, whose appends wait until ``opened()`` is called."""
    transport.create("a/journal")
    transport.append_gate = on_loop(asyncio.Event)
    transport.opened = lambda: on_loop(transport.append_gate.set)
    return transport


def begun(transport: MemoryTransport, count: int) -> None:
    """Wait until so many appends were begun."""

    async def wait():
        async with asyncio.timeout(WAIT_S):
            await transport.until(lambda: transport.appends_begun >= count)

    run(wait())


# ------------------------------------------------------------------ contract


def test_messages_are_published_by_key_and_receipts_say_where(transport):
    for index in range(4):
        transport.create(f"orders/part-{index:03d}", topic="orders")
    with Publisher(mapping=BY_KEY, transport=transport) as publisher:
        receipts = [publisher.publish(Order(f"customer-{n % 7}", n)) for n in range(50)]
        assert receipts[0].result(timeout=WAIT_S) is receipts[0]
        assert receipts[0].journal.startswith("orders/part-00")
    for index, receipt in enumerate(receipts):
        assert receipt.done()
        frame = transport.content_of(receipt.journal)[receipt.begin : receipt.end]
        assert json.loads(frame)["cents"] == index
        assert receipt.length_bytes == receipt.end - receipt.begin
        assert repr(receipt) == f"<Receipt {receipt.journal}: [{receipt.begin}, {receipt.end})>"
    found = [
        (e.message, e.producer, e.flags) for e in Reader(Order, "topic=orders", transport=transport)
    ]
    assert sorted(message.cents for message, _, _ in found) == list(range(50))
    assert {producer for _, producer, _ in found} == {publisher.producer}
    assert {flags for _, _, flags in found} == {OUTSIDE_TXN}


def test_the_publisher_works_in_a_coroutine(transport):
    transport.create("orders/part-000", topic="orders")

    async def publish():
        async with Publisher(mapping=BY_KEY, transport=transport) as publisher:
            receipt = publisher.publish(Order("ada", 250))
            assert await asyncio.wait_for(receipt, WAIT_S) is receipt
            assert await receipt is receipt
            return receipt.journal, receipt.end

    assert asyncio.run(publish()) == (
        "orders/part-000",
        len(transport.content_of("orders/part-000")),
    )


def test_a_plain_publisher_works_inside_of_a_running_loop(transport):
    transport.create("orders/part-000", topic="orders")

    async def publish():
        with Publisher(mapping=BY_KEY, transport=transport) as publisher:
            return await asyncio.wait_for(publisher.publish(Order("ada", 1)), WAIT_S)

    assert asyncio.run(publish()).begin == 0


def test_on_the_sdks_own_loop_nothing_blocks_and_the_order_is_kept(transport):
    transport.create("orders/part-000", topic="orders")
    transport.create("a/journal")

    async def publish():
        async with asyncio.timeout(WAIT_S):
            publisher = Publisher(mapping=BY_KEY, transport=transport)
            receipts = [publisher.publish(Order("ada", cents)) for cents in range(5)]
            assert not receipts[0].done()
            assert "(not mapped)" in repr(receipts[0])
            with pytest.raises(GazetteError, match="not mapped yet"):
                _ = receipts[0].journal
            with pytest.raises(GazetteError, match="await receipt"):
                receipts[0].result()
            with pytest.raises(GazetteError, match="aflush"):
                publisher.flush()
            receipts.append(publisher.publish(Order("x", 9), mapping=mapping.direct("a/journal")))
            bad = publisher.publish(Order("x", 9), mapping=mapping.direct("no/journal"))
            for receipt in receipts:
                await receipt
            assert publisher.publish(Order("ada", 5)).journal == "orders/part-000"
            with pytest.raises(MappingError, match="no/journal"):
                await bad
            with pytest.raises(MappingError, match="no/journal"):
                await publisher.aflush()
            await publisher.aclose()

    run(publish(), WAIT_S)
    assert [line["cents"] for line in lines(transport, "orders/part-000")] == list(range(6))
    assert [line["cents"] for line in lines(transport, "a/journal")] == [9]


def test_without_a_transport_the_address_of_the_environment_is_used(transport, monkeypatch):
    transport.create("a/journal")
    monkeypatch.setattr("gazette_sdk.message.publishing.link.connect", lambda: transport)
    with Publisher(mapping=mapping.direct("a/journal")) as publisher:
        publisher.publish({"a": 1}).result(WAIT_S)
        assert not transport.closed
    assert transport.closed


# -------------------------------------------------------------------- vectors


def test_committed_messages_carry_the_clocks_of_the_vectors(transport):
    case = group("message", "publisher")[0]
    transport.create("a/journal")
    clock = Clock(case["clock_start"])
    with Publisher(mapping.direct("a/journal"), transport=transport, clock=clock) as publisher:
        for call in case["calls"]:
            _, journal, text = call.split(" ", 2)
            publisher.publish({"str": text}, mapping=mapping.direct(journal))
    for journal, expected in case["expect"].items():
        found = [
            {"clock": e.clock, "flags": e.flags, "str": e.message["str"]}
            for e in Reader(dict, name=journal, transport=transport)
        ]
        assert found == expected


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


# ---------------------------------------------------------------- clocks, batches


def test_what_is_published_during_an_append_becomes_the_next_append(gated):
    with Publisher(mapping.direct("a/journal"), transport=gated) as publisher:
        publisher.publish({"n": 0})
        begun(gated, 1)
        receipts = [publisher.publish({"n": n}) for n in range(1, 101)]
        assert not receipts[0].done()
        with pytest.raises(GazetteError, match="not acknowledged yet"):
            _ = receipts[0].begin
        assert repr(receipts[0]) == "<Receipt a/journal: pending>"
        gated.opened()
        publisher.flush(WAIT_S)
    assert [content.count(b"\n") for _, content in gated.appends] == [1, 100]
    assert [line["n"] for line in lines(gated, "a/journal")] == list(range(101))


def test_a_batch_has_a_bounded_size(gated, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.publishing.outbox.BATCH_BYTES_MAX", 1000)
    with Publisher(mapping.direct("a/journal"), transport=gated) as publisher:
        receipts = [publisher.publish({"n": n, "text": "x" * 300}) for n in range(20)]
        gated.opened()
        publisher.flush(WAIT_S)
        assert len({receipt.batch for receipt in receipts}) > 3
    assert [line["n"] for line in lines(gated, "a/journal")] == list(range(20))
    for receipt, following in pairwise(receipts):
        assert receipt.end == following.begin


def test_messages_of_many_threads_stand_in_the_order_of_their_clocks(transport):
    for index in range(3):
        transport.create(f"t/part-{index}", topic="t")
    by_thread = mapping.modulo("topic=t", key=itemgetter("n"))
    with Publisher(by_thread, transport=transport) as publisher:

        def work(thread):
            for n in range(300):
                publisher.publish({"thread": thread, "n": n})

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    total = 0
    for index in range(3):
        found = clocks(transport, f"t/part-{index}")
        assert all(one < other for one, other in pairwise(found))
        total += len(found)
    assert total == 1200


def test_two_publishers_have_two_producers(transport):
    first, second = Publisher(transport=transport), Publisher(transport=transport)
    assert first.producer != second.producer


# ------------------------------------------------------------------- failures


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


# -------------------------------------------------------------------- mapping


def test_a_mapping_is_any_callable(transport):
    transport.create("a/one")
    transport.create("a/two")
    with Publisher(lambda message: f"a/{message['to']}", transport=transport) as publisher:
        publisher.publish({"to": "one"})
        publisher.publish({"to": "two"})
    assert len(lines(transport, "a/one")) == len(lines(transport, "a/two")) == 1


def test_a_journal_that_does_not_exist_is_named_and_may_be_created_later(transport, on_loop):
    publisher = Publisher(mapping.direct("no/journal"), transport=transport)
    with pytest.raises(MappingError, match=r"'no/journal'.*does not exist.*gazctl") as caught:
        publisher.publish({"a": 1})
    assert caught.value.journal == "no/journal"
    on_loop(transport.create, "no/journal")
    publisher.publish({"a": 1}).result(WAIT_S)
    publisher.close()


def test_a_selector_without_journals_is_named_with_the_remedy(transport):
    with (
        Publisher(BY_KEY, transport=transport) as publisher,
        pytest.raises(MappingError, match=r"topic=orders.*gazctl journals apply"),
    ):
        publisher.publish(Order("ada", 1))


@pytest.mark.parametrize("returned", [None, 5, b"a/journal"])
def test_a_mapping_that_returns_no_name_is_refused(transport, returned):
    with (
        Publisher(lambda _: returned, transport=transport) as publisher,
        pytest.raises(MappingError, match="a journal's name"),
    ):
        publisher.publish({"a": 1})


def test_without_any_mapping_there_is_a_clear_error(transport):
    with (
        Publisher(transport=transport) as publisher,
        pytest.raises(MappingError, match="there is no mapping"),
    ):
        publisher.publish({"a": 1})


def test_new_partitions_are_used(transport, on_loop):
    transport.create("orders/part-000", topic="orders")
    anywhere = mapping.modulo("topic=orders", key=itemgetter("n"))
    with Publisher(anywhere, transport=transport) as publisher:
        publisher.publish({"n": 0}).result(WAIT_S)
        on_loop(transport.create, "orders/part-001", topic="orders")

        async def listed():
            watches = publisher._sender.link().watches
            async with asyncio.timeout(WAIT_S):
                while len(watches.current["topic=orders"].names) < 2:
                    await watches._changed.wait()

        run(listed())
        journals = {publisher.publish({"n": n}).journal for n in range(20)}
    assert journals == {"orders/part-000", "orders/part-001"}


@pytest.mark.parametrize(
    ("content_type", "text"),
    [(None, "content-type ()"), ("text/plain", "content-type (text/plain)")],
)
def test_a_journal_without_framing_is_named(transport, content_type, text):
    transport.create("a/journal", content_type=content_type)
    with (
        Publisher(mapping.direct("a/journal"), transport=transport) as publisher,
        pytest.raises(FramingError) as caught,
    ):
        publisher.publish({"a": 1})
    assert f"a/journal: unrecognized {text}" in str(caught.value)


def test_an_unanswered_listing_is_waited_for_within_a_bound():
    class Silent(MemoryTransport):
        async def list(self, request):
            await asyncio.Event().wait()
            yield pb.ListResponse()

    publisher = Publisher(BY_KEY, transport=Silent(), mapping_timeout_s=0.05)
    with pytest.raises(MappingError, match=r"within 0\.05 s.*GAZETTE_ADDRESS"):
        publisher.publish(Order("ada", 1))
    with pytest.raises(MappingError, match=r"within 0\.05 s.*GAZETTE_ADDRESS"):
        publisher.publish(Order("ada", 1), mapping=mapping.direct("a/journal"))
    publisher.close()


# -------------------------------------------------------------- back-pressure


def test_a_full_publisher_raises_where_that_is_wanted(gated):
    publisher = Publisher(
        mapping.direct("a/journal"), transport=gated, pending_bytes_max=300, when_full="raise"
    )
    receipt = publisher.publish({"text": "x" * 300})
    with pytest.raises(BackPressureError, match="not acknowledged yet"):
        publisher.publish({"text": "y"})
    gated.opened()
    receipt.result(WAIT_S)
    publisher.publish({"text": "y"}).result(WAIT_S)
    publisher.close()
    assert len(lines(gated, "a/journal")) == 2


def test_a_full_publisher_blocks_until_there_is_room(gated):
    publisher = Publisher(mapping.direct("a/journal"), transport=gated, pending_bytes_max=300)
    publisher.publish({"text": "x" * 300})
    done = threading.Event()

    def publish():
        publisher.publish({"text": "y"})
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    assert not done.wait(0.05)
    gated.opened()
    assert done.wait(WAIT_S)
    thread.join()
    publisher.close()
    assert len(lines(gated, "a/journal")) == 2


def test_a_coroutine_waits_for_room(gated):
    publisher = Publisher(
        mapping.direct("a/journal"), transport=gated, pending_bytes_max=300, when_full="raise"
    )

    async def publish():
        async with asyncio.timeout(WAIT_S):
            for n in range(10):
                await publisher.room()
                publisher.publish({"n": n, "text": "x" * 300})
                gated.opened()
            await publisher.aclose()

    asyncio.run(publish())
    assert [line["n"] for line in lines(gated, "a/journal")] == list(range(10))


def test_when_full_has_two_values(transport):
    with pytest.raises(ConfigurationError, match="'block' or 'raise'"):
        Publisher(transport=transport, when_full="drop")


def test_on_the_sdks_own_loop_too_much_is_always_an_error(gated, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.publishing.deferred.DEFERRED_MAX", 3)

    async def publish():
        publisher = Publisher(mapping.direct("a/journal"), transport=gated, pending_bytes_max=100)
        receipts = [publisher.publish({"n": n, "text": "x" * 100}) for n in range(3)]
        with pytest.raises(BackPressureError, match="wait for the first listing"):
            publisher.publish({"n": 3})
        gated.append_gate.set()
        for receipt in receipts:  # each waits for room, one after the other
            await receipt
        gated.append_gate.clear()
        last = publisher.publish({"n": 4, "text": "x" * 100})
        with pytest.raises(BackPressureError, match="not acknowledged yet"):
            publisher.publish({"n": 5})
        gated.append_gate.set()
        await last
        await publisher.aclose()
        with pytest.raises(ClosedError):
            publisher.publish({"n": 6})

    run(publish(), WAIT_S)
    assert [line["n"] for line in lines(gated, "a/journal")] == [0, 1, 2, 4]


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


def test_closing_wakes_who_waits_for_room(gated):
    publisher = Publisher(mapping.direct("a/journal"), transport=gated, pending_bytes_max=10)
    publisher.publish({"n": 0})
    outcome = []

    def publish():
        try:
            publisher.publish({"n": 1})
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    with pytest.raises(ReceiptTimeoutError):
        publisher.close(timeout=0.05)
    thread.join(WAIT_S)
    assert len(outcome) == 1


# ----------------------------------------------------------------- life cycle


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


def test_a_deleted_journal_fails_its_messages(transport, on_loop):
    transport.create("a/journal")
    publisher = Publisher(mapping.direct("a/journal"), transport=transport)
    publisher.publish({"a": 1}).result(WAIT_S)
    on_loop(transport.delete, "a/journal")
    with pytest.raises(JournalNotFoundError):
        publisher.publish({"a": 2}).result(WAIT_S)
    with pytest.raises(JournalNotFoundError):
        publisher.close()
