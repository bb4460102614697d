"""Transactions that end well: what is written, in which order, by whom."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import pytest

from gazette_sdk import JsonMessage, Publisher, mapping
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, Clock
from support.published import TO, WAIT_S, begun
from support.transactions import by_to, committed, flags, written
from support.vectors import group


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


def test_an_acknowledgement_of_csv_has_the_columns_of_its_journal(transport):
    transport.create("a/journal", content_type="text/csv")
    with Publisher(TO, transport=transport) as publisher, publisher.transaction() as txn:
        txn.publish(["", "a", "b"])
        txn.publish_batch([["", "c,d", "e"]])
    lines = transport.content_of("a/journal").decode().splitlines()
    assert [line.partition(",")[2] for line in lines] == ["a,b", '"c,d",e', ","]


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
