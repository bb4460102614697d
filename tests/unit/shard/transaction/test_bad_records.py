"""Records that are left out: what they changed is undone, at full speed, and they are counted."""

from __future__ import annotations

import itertools
import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk import mapping, shard
from gazette_sdk.shard.transaction.failure import DeadLetter
from gazette_sdk.testing import Advance
from gazette_sdk.testing.handler_runs import JOURNAL
from support.values import Value, run_values, value_handler

NOW = 1_700_000_000.0
REJECTED = shard.dead_letters("orders/rejected")
SCHEMA = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, cents INTEGER)"
PUT = (
    "INSERT INTO totals VALUES (:name, :cents) ON CONFLICT (name) DO UPDATE SET"
    " cents = excluded.cents"
)


class Sql:
    """Keys and values by statements."""

    def __init__(self, store):
        self.execute = store.execute

    def __setitem__(self, name, cents):
        self.execute(PUT, {"name": name, "cents": cents})

    def get(self, name):
        row = self.execute("SELECT cents FROM totals WHERE name = :name", {"name": name}).fetchone()
        return None if row is None else row[0]

    def discard(self, name):
        self.execute("DELETE FROM totals WHERE name = :name", {"name": name})

    def items(self):
        return [tuple(row) for row in self.execute("SELECT name, cents FROM totals").fetchall()]


def sql_store(directory):
    store = shard.SqlStore(f"sqlite:///{directory}/remote.sqlite", "a/shard")
    with store._engine.begin() as connection:
        connection.exec_driver_sql(SCHEMA)
    return store


def entries(store):
    return store if hasattr(store, "discard") else Sql(store)


def read(store):
    if hasattr(store, "begin"):
        store.begin()
    return dict(entries(store).items())


STORES = {
    "RocksStore": shard.RocksStore[str, int],
    "JsonStore": shard.JsonStore,
    "SqliteStore": shard.SqliteStore.of(schema=SCHEMA),
    "SqlStore": sql_store,
}

# A step of a handler: a change of the state, of a timer, an output, or an exception.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "remove", "timer", "cancel", "raise", "raise", "publish"]),
        st.sampled_from("ab"),
        st.integers(0, 9),
    ),
    max_size=4,
)


def is_good(steps):
    return all(step[0] != "raise" for step in steps)


def application(store, *, on_error="fail", begins=None):
    def consume(txn, steps):
        state = entries(txn.store)
        for step, key, number in steps:
            if step == "put":
                state[key] = number
            elif step == "remove":
                state.discard(key)
            elif step == "timer":
                # One that is due at once fires in the next transaction, wherever this one ends.
                txn.timers.set(key, after_s=1 + number)
            elif step == "cancel":
                txn.timers.cancel(key)
            elif step == "publish":
                txn.publish({"number": number}, mapping=mapping.direct("out/part-000"))
            else:
                raise ValueError(f"{key}{number}")

    made = value_handler(store=store, name="bad", on_error=on_error)(consume)

    @made.timer
    def fired(txn, timer):
        entries(txn.store)[f"timer {timer.key}"] = int(timer.at - NOW)

    if begins is not None:
        vars(made)["begin"] = begins.append
    return made


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("on_error", ["skip", REJECTED], ids=["skip", "letters"])
def test_what_is_left_is_what_the_good_records_make(store, on_error):
    @settings(max_examples=25, deadline=None)
    @given(records=st.lists(STEPS, max_size=8), batch_count=st.sampled_from([1, 3, 100]))
    def check(records, batch_count):
        def run(messages, made):
            return run_values(
                made, [*messages, Advance(NOW + 10)], now=NOW, batch_count=batch_count, read=read
            )

        found = run(records, application(STORES[store], on_error=on_error))
        good = run(filter(is_good, records), application(STORES[store]))
        assert found.state == good.state
        letters = [each for each in found.published if isinstance(each, DeadLetter)]
        others = [each for each in found.published if not isinstance(each, DeadLetter)]
        assert others == good.published
        bad = (
            []
            if on_error == "skip"
            else [at for at, each in enumerate(records) if not is_good(each)]
        )
        assert [(each.journal, each.offset) for each in letters] == [(JOURNAL, at) for at in bad]

    check()


@pytest.mark.parametrize(
    ("store", "steps", "is_at_once"),
    [
        ("RocksStore", [("put", "a", 1), ("remove", "b", 0)], True),
        ("SqliteStore", [("put", "a", 1), ("remove", "b", 0)], True),
        ("RocksStore", [("timer", "a", 1)], True),
        ("JsonStore", [("put", "a", 1)], False),
        ("SqlStore", [("put", "a", 1)], False),
        ("RocksStore", [("publish", "a", 1)], False),
    ],
)
def test_a_transaction_is_run_again_only_where_its_store_cannot_undo(store, steps, is_at_once):
    """Each run again has a further begin."""
    begins = []
    bad = [*steps, ("raise", "a", 1)]
    made = application(STORES[store], on_error="skip", begins=begins)
    run_values(made, [bad] * 5, now=NOW)
    assert (len(begins) == 1) == is_at_once


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("on_error", ["skip", REJECTED], ids=["skip", "letters"])
def test_five_thousand_bad_records_a_second(on_error, is_async, caplog):
    """Also such that change the state first; and one line of the log says how many there are."""
    count = 20_000

    def refuse(txn, number):
        txn.store[str(number)] = number
        if number % 10:
            raise ValueError("no number of ten")

    async def refuse_later(txn, number):
        refuse(txn, number)

    made = value_handler(store=shard.RocksStore[str, int], name="fast", on_error=on_error)(
        refuse_later if is_async else refuse
    )
    began = time.process_time()
    with caplog.at_level(logging.WARNING):
        found = run_values(made, range(count), timeout_s=120)
    took_s = time.process_time() - began
    assert len(found.state) == count // 10
    assert len(found.published) == (0 if on_error == "skip" else count * 9 // 10)
    assert took_s < count / 5_000, f"{count / took_s:,.0f} records a second"
    (line,) = [text for each in caplog.records if "left out" in (text := each.getMessage())]
    assert "ValueError: no number of ten; at the record of memory/part-000 at offset" in line


@pytest.mark.parametrize("store", ["JsonStore", "SqliteStore", "SqlStore"])
def test_what_a_handler_holds_from_before_is_undone_too(store):
    """The value of the state, a cursor, or the connection, of which the store sees no use."""

    class Holds(shard.Application):
        message, name, on_error = Value, "holds", "skip"

        def new_store(self, shard):
            return STORES[store](shard.directory)

        def begin(self, txn):
            if store == "JsonStore":
                self.put = txn.store.state.__setitem__
                return
            insert = "INSERT INTO totals VALUES ('{}', {})"
            if store == "SqliteStore":
                execute = txn.store.execute("SELECT 1").execute
            else:
                execute = txn.store.connection.exec_driver_sql
            self.put = lambda key, value: execute(insert.format(key, value))

        def consume(self, txn, message):
            number = message.value
            self.put(str(number), number)
            if number % 2:
                raise ValueError("odd")

    assert run_values(Holds(), range(6), read=read).state == {"0": 0, "2": 2, "4": 4}


def test_a_deferred_record_keeps_what_others_did():
    @value_handler(store=shard.RocksStore[str, int], name="d", on_error="skip")
    def defers(txn, number):
        if number == 2 and "1" in txn.store and "again" not in txn.store:
            txn.store["again"] = 1
            raise ValueError("left out")
        if number == 3 and not deferred:
            deferred.append(number)
            txn.defer()
        txn.store[str(number)] = number

    deferred = []
    assert run_values(defers, [1, 2, 3]).state == {"1": 1, "3": 3}


def test_the_store_is_not_asked_to_undo_where_the_shard_fails_on_errors():
    class Counting(shard.RocksStore):
        begun = itertools.count()

        def begin_record(self):
            next(self.begun)
            super().begin_record()

    made = value_handler(store=Counting, name="plain")(lambda txn, number: None)
    run_values(made, range(10))
    assert next(Counting.begun) == 0
