"""Timers: state of a shard that calls ``on_timer`` once, in each of the stores."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette_sdk import JsonMessage, mapping, shard
from gazette_sdk.errors import ClosedError, ConfigurationError, ValidationError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.stores.codec import any_key
from gazette_sdk.shard.transaction import consume as consume_module
from gazette_sdk.shard.transaction import timers as timers_module
from gazette_sdk.shard.transaction.consume import MessageConsumer
from gazette_sdk.shard.transaction.failure import BadRecords, HandlerFailedError, HookFailedError
from gazette_sdk.shard.transaction.machine import TransactionMachine
from gazette_sdk.shard.transaction.timers import EventTime, Timer, Timers
from gazette_sdk.shard.transaction.transaction import Transaction
from gazette_sdk.testing import Advance
from gazette_sdk.testing.handler_runs import JOURNAL, MemoryInput, MemoryOutput
from support.values import Value, run_values, value_handler

NOW = 1_700_000_000.0

STORES = {
    "RocksStore": shard.RocksStore[str, int],
    "JsonStore": shard.JsonStore,
    "SqliteStore": shard.SqliteStore,
    "SqlStore": lambda directory: shard.SqlStore(
        f"sqlite:///{directory.parent}/remote.sqlite", "a/shard"
    ),
}


@pytest.fixture(params=STORES)
def new_store(request, tmp_path):
    """Yields a function that makes a store over the same files again."""
    directory = tmp_path / "shard"
    directory.mkdir()
    made = []

    def make():
        for store in made:
            store.destroy()
        made.append(STORES[request.param](directory))
        made[-1].restore()
        return made[-1]

    yield make
    made[-1].destroy()


def opened(store) -> Timers:
    timers = Timers(store, lambda: None)
    timers.restore()
    return timers


def commit(store, timers) -> None:
    timers.put()
    store.start_commit(Checkpoint({"a/journal": 1}))
    timers.committed()
    store.finish_commit()


def begin(store, timers, now) -> list[Timer]:
    """Begin a transaction; return what fires."""
    store.begin()
    timers.begin(now)
    return list(iter(timers.next_due, None))


# ------------------------------------------------------------------- the law

KEYS = st.sampled_from(["a", "b", "c", b"a", 1, -1, ("a", 1), ("a",), (), "a\0b"])
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(KEYS, st.none() | st.integers(0, 12)), max_size=8),
        st.integers(0, 4),
        st.sampled_from(["commit", "commit", "commit", "abort", "restart"]),
    ),
    max_size=12,
)


@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(steps=STEPS)
def test_each_timer_fires_once_in_order_whatever_is_aborted(new_store, steps, monkeypatch):
    """Against a dict, with a window of three timers."""
    monkeypatch.setattr(timers_module, "WINDOW_COUNT", 3)
    store = new_store()
    timers = opened(store)
    begin(store, timers, NOW)
    for key in [each.key for each in begin_after(store, timers)]:  # of the example before
        timers.cancel(key)
    commit(store, timers)
    model: dict[object, float] = {}
    now = NOW
    for changes, passed, end in steps:
        now += passed
        fired = begin(store, timers, now)
        due = sorted((at, any_key.encode(key)) for key, at in model.items())
        assert [(timer.at, any_key.encode(timer.key)) for timer in fired] == [
            row for row in due if row[0] <= now
        ]
        changed = {key: at for key, at in model.items() if at > now}
        for key, after_s in changes:
            if after_s is None:
                timers.cancel(key)
                changed.pop(key, None)
            else:
                timers.set(key, after_s=after_s)
                changed[key] = now + after_s
        assert timers.next_due() is None, "what a transaction sets fires in a later one"
        if end == "commit":
            commit(store, timers)
            model = changed
        elif end == "abort":
            store.restore()
            timers.restore()
        else:
            store = new_store()
            timers = opened(store)
        assert timers.next_at == min(model.values(), default=math.inf)


def begin_after(store, timers) -> list[Timer]:
    """All timers of a store, which are fired in a transaction that is aborted."""
    store.restore()
    timers.restore()
    found = begin(store, timers, NOW + 1e6)
    store.restore()
    timers.restore()
    begin(store, timers, NOW)
    return found


def test_many_timers_need_memory_for_the_nearest_only(new_store):
    store = new_store()
    timers = opened(store)
    most = 2 * timers_module.WINDOW_COUNT
    begin(store, timers, NOW)
    for number in range(3 * most):
        timers.set(number, after_s=number % 100 + 1)
    commit(store, timers)
    assert len(timers._processing._rows) <= most
    fired = []
    for second in range(1, 101):
        fired += begin(store, timers, NOW + second)
        commit(store, timers)
        assert len(timers._processing._rows) <= most
        assert len(timers._processing._heap) <= 2 * most
    assert sorted(timer.key for timer in fired) == list(range(3 * most))
    assert [timer.at for timer in fired] == sorted(timer.at for timer in fired)


def test_a_timer_that_is_moved_with_each_message_costs_no_memory(new_store):
    store = new_store()
    timers = opened(store)
    for number in range(200):
        begin(store, timers, NOW)
        for key in range(30):
            timers.set(key, after_s=1 + number)
        commit(store, timers)
    assert len(timers._processing._heap) <= 4 * timers_module.WINDOW_COUNT
    assert timers._former is None
    assert begin(store, timers, NOW + 199) == []
    commit(store, timers)
    assert len(begin(store, timers, NOW + 200)) == 30


# ------------------------------------------------------------------- handlers


def quiet(store=shard.JsonStore):
    """An application that notes who was quiet for 300 s."""

    @value_handler(store=store, name="quiet")
    def rides(txn: shard.Transaction, driver: str) -> None:
        txn.timers.set(driver, after_s=300)

    @rides.timer
    def fired(txn: shard.Transaction, timer: shard.Timer) -> None:
        txn.store[timer.key] = [timer.at - NOW, txn.now - NOW]

    return rides


def test_a_timer_fires_at_its_time_and_is_moved_by_a_second_call():
    run = run_values(
        quiet(), ["ada", "bob", Advance(NOW + 200), "ada", Advance(NOW + 450)], now=NOW
    )
    assert run.state == {"bob": [300, 300]}
    run = run_values(quiet(), ["ada", Advance(NOW + 200), "ada", Advance(NOW + 501)], now=NOW)
    assert run.state == {"ada": [500, 500]}


def test_coroutine_functions_have_timers_too():
    @value_handler(store=shard.JsonStore, name="ticks")
    async def ticks(txn: shard.Transaction, name: str) -> None:
        txn.timers.set(name, after_s=10)

    @ticks.timer
    async def tick(txn: shard.Transaction, timer: shard.Timer) -> None:
        txn.store[timer.key] = txn.store.get(timer.key, 0) + 1
        txn.timers.set(timer.key, after_s=10)

    assert run_values(ticks, ["a", Advance(NOW + 55)], now=NOW).state == {"a": 5}


def test_a_class_has_on_timer():
    class Reminders(shard.Application):
        message, store, name = Value, shard.RocksStore[str, float], "reminders"

        def consume(self, txn, message):
            at = datetime.fromtimestamp(NOW + 60, timezone(timedelta(hours=2)))
            txn.timers.set((message.value, 7), at=at)

        def on_timer(self, txn, timer):
            txn.store[timer.key[0]] = timer.at

    run = run_values(Reminders(), ["tea", Advance(NOW + 3600)], now=NOW)
    assert run.state == {"tea": NOW + 60}


def test_what_is_due_at_once_fires_in_the_next_transaction_in_order():
    @value_handler(store=shard.JsonStore, name="order")
    def order(txn: shard.Transaction, number: int) -> None:
        txn.store.state.setdefault("seen", []).append(number)
        if number == 1:
            txn.timers.set("late", at=NOW - 5)
            txn.timers.set("later", at=NOW - 4)

    @order.timer
    def fired(txn: shard.Transaction, timer: shard.Timer) -> None:
        txn.store.state["seen"].append(timer.key)

    run = run_values(order, [1, Advance(NOW), 2], now=NOW)
    assert run.state == {"seen": [1, "late", "later", 2]}


def test_a_record_that_is_skipped_sets_no_timer_and_what_fired_fires_again():
    calls = []

    @value_handler(store=shard.JsonStore, name="bad", on_error="skip")
    def bad(txn: shard.Transaction, number: int) -> None:
        txn.timers.set(number, after_s=10)
        if number == 2:
            raise ValueError("two")

    @bad.timer
    def fired(txn: shard.Transaction, timer: shard.Timer) -> None:
        calls.append(timer.key)
        txn.store[str(timer.key)] = txn.store.get(str(timer.key), 0) + 1

    run = run_values(bad, [1, 2, 3, Advance(NOW + 10)], now=NOW)
    assert run.state == {"1": 1, "3": 1}
    assert calls == [1, 3]


def test_a_timer_that_raises_fails_the_shard_and_is_named():
    application = quiet(shard.RocksStore[str, int])  # its values are lists
    with pytest.raises(HookFailedError, match=r"on_timer of 'ada': .*int is needed"):
        run_values(application, ["ada", Advance(NOW + 300)], now=NOW)


def test_a_message_may_be_deferred_after_a_timer(tmp_path):
    """Also the first one: its transaction is not empty."""

    @shard.handler(message=list, store=shard.JsonStore, name="defers")
    def defers(txn: shard.Transaction, number: int) -> None:
        if txn.store.get("fired") == number:
            txn.defer()

    @defers.timer
    def fired(txn: shard.Transaction, timer: shard.Timer) -> None:
        txn.store["fired"] = timer.key

    store, output = shard.JsonStore(tmp_path), MemoryOutput()
    store.restore()
    store.put_timers({any_key.encode(7): 1})
    machine = TransactionMachine(min_s=0, max_s=10, waits_for_acks=True, overlaps_commit=True)
    txn = Transaction(shard.Shard("s", cpb.ShardSpec(), None, "s"), store, output)
    txn.times = EventTime([JOURNAL])
    consumer = MessageConsumer(
        defers,
        txn,
        output,
        machine,
        recorder=None,
        bad=BadRecords("fail"),
        on_step=lambda _step: None,
    )
    consumer.restore_timers()
    consumer.read(MemoryInput([7], Checkpoint()))
    machine.available = True
    prepared = consumer.turn()
    assert prepared is not None
    assert prepared.checkpoint.offsets == {JOURNAL: 0}, "the message is left to the next one"
    assert (store.state, consumer.left_count, consumer.fired_count) == ({"fired": 7}, 1, 1)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"after_s": math.nan}, "nan"),
        ({"after_s": -1}, "-1 seconds"),
        ({"after_s": math.inf}, "inf"),
        ({"at": math.nan}, "nan"),
        ({"at": datetime(9999, 12, 31, tzinfo=UTC).timestamp() + 86_400}, "year 10,000"),
        ({"after_s": 253_402_300_799.0}, "year 10,000"),
        ({"at": datetime(2026, 1, 1)}, "time zone"),  # noqa: DTZ001 - the fault
        ({"at": "tomorrow"}, "'tomorrow'"),
        ({"at": True}, "True"),
        ({}, "at="),
        ({"at": 1.0, "after_s": 1.0}, "one time"),
    ],
)
def test_a_time_that_is_none_is_refused(arguments, text):
    timers = opened(shard.JsonStore(Path("/nonexistent")))
    timers.begin(NOW)
    with pytest.raises(ValidationError, match=text):
        timers.set("key", **arguments)
    assert not timers._changes


@pytest.mark.parametrize(
    "key", [None, 1.5, True, ["a"], ("a", 1.5), (("a",),), 1 << 63, "\ud800", "x" * 600]
)
def test_a_key_that_cannot_be_encoded_is_refused(key):
    timers = opened(shard.JsonStore(Path("/nonexistent")))
    for change in (lambda: timers.set(key, after_s=1), lambda: timers.cancel(key)):
        with pytest.raises(ValidationError, match="key of a timer"):
            change()


def test_timers_without_a_function_are_refused_and_named_when_they_were_left(caplog):
    def sets(txn: shard.Transaction, message: str) -> None:
        txn.timers.set(message, after_s=1)

    application = value_handler(store=shard.JsonStore, name="none")(sets)
    with pytest.raises(Exception, match=r"decorate one with `@APPLICATION\.timer`") as caught:
        run_values(application, ["a"])
    assert isinstance(caught.value.__cause__, ConfigurationError)

    class Kept(shard.JsonStore):
        def timers_after(self, row, limit):
            return [(1, b"\1a\0")]

    application = value_handler(store=Kept, name="left")(lambda txn, message: None)
    with caplog.at_level(logging.WARNING):
        run_values(application, ["a"])
    assert "the store of memory has timers or windows which left does not declare" in caplog.text


def test_declarations_are_checked_where_they_stand():
    class NoTimers:
        pass

    with pytest.raises(ConfigurationError, match="NoTimers does not keep"):
        shard.handler(message=list, store=NoTimers, name="a")(lambda txn, message: None).timer(
            lambda txn, timer: None
        )
    with pytest.raises(ConfigurationError, match=r"a timer.*\(txn, timer\)"):
        quiet_of(lambda txn: None)

    async def fired(txn, timer):
        pass

    with pytest.raises(ConfigurationError, match="two kinds"):
        quiet_of(fired)
    with pytest.raises(ConfigurationError, match="is no function"):
        quiet_of(None)
    with pytest.raises(ConfigurationError, match="has a function for `on_timer`"):
        quiet().timer(lambda txn, timer: None)


def quiet_of(function):
    application = shard.handler(message=list, store=shard.JsonStore, name="a")(lambda txn, _: None)
    try:
        return application.timer(function)
    finally:
        assert not application.has_timers or application.on_timer is function


def test_timers_are_set_only_within_a_transaction():
    kept = []

    @value_handler(store=shard.JsonStore, name="outside")
    def outside(txn: shard.Transaction, message: str) -> None:
        kept.append(txn)

    outside.timer(lambda txn, timer: None)
    run_values(outside, ["a"])
    with pytest.raises(ClosedError, match="no transaction is open"):
        kept[0].timers.set("a", after_s=1)


# -------------------------------------------------------------------- layouts


@pytest.mark.parametrize("declares", [False, True])
def test_stores_without_timers_have_the_layout_of_before(new_store, declares):
    store = new_store()
    timers = Timers(store, lambda: None)
    if declares:
        timers.restore()
    store.begin()
    commit(store, timers)
    if isinstance(store, shard.JsonStore):
        assert (store._directory / "state.json").read_bytes().count(b"\n") == 3
    elif isinstance(store, shard.RocksStore):
        keys = [key for key, _ in store._stored(b"", None)]
        assert [key for key in keys if b"timer" in key] == []
    else:
        store.begin()
        found = store.execute("SELECT name FROM sqlite_master").fetchall()
        assert any("timer" in name for (name,) in found) == declares


def test_the_document_of_timers_is_as_the_docs_say(tmp_path):
    store = shard.JsonStore(tmp_path)
    store.restore()
    timers = opened(store)
    begin(store, timers, NOW)
    timers.set("ada", at=1.5)
    commit(store, timers)
    lines = (tmp_path / "state.json").read_text().splitlines()
    assert lines[3] == '{"AmFkYQA=":1500000}'
    begin(store, timers, NOW)
    commit(store, timers)
    assert len((tmp_path / "state.json").read_text().splitlines()) == 3


# ----------------------------------------------------------------- event time


@dataclass
class Ride(JsonMessage):
    zone: str
    at: float | None
    journal: str = ""


def per_minute(store=shard.JsonStore, **options):
    """An application that counts rides by zone and minute, when event time has passed it."""

    @shard.handler(
        message=Ride, store=store, name="minutes", event_time=attrgetter("at"), **options
    )
    def minutes(txn: shard.Transaction, ride: Ride) -> None:
        begin = int(ride.at // 60) * 60
        key = f"{ride.zone}/{begin - int(NOW)}"
        txn.store[key] = txn.store.get(key, 0) + 1
        txn.timers.set((ride.zone, begin), at=begin + 60, clock="event")

    @minutes.timer
    def closed(txn: shard.Transaction, timer: shard.Timer) -> None:
        assert timer.clock == "event"
        assert txn.watermark >= timer.at
        zone, begin = timer.key
        key = f"{zone}/{begin - int(NOW)}"
        txn.publish(Value([key, txn.store[key]]), mapping=mapping.direct("out/part-000"))
        del txn.store[key]

    return minutes


START = NOW - NOW % 60 + 60
"""Begin of a minute."""


def rides(*seconds, zone="a"):
    return [Ride(zone, START + each) for each in seconds]


def test_a_timer_of_event_time_fires_before_the_message_after_its_time():
    messages = rides(0, 59, 30, 60, 61, 130)
    run = run_values(per_minute(idle_s=None), messages, now=START)
    first = int(START - NOW)
    assert run.published == [(f"a/{first}", 3), (f"a/{first + 60}", 2)]
    assert run.state == {f"a/{first + 120}": 1}


@pytest.mark.parametrize("batch_count", [1, 2, 100])
def test_it_fires_at_the_same_place_wherever_batches_end(batch_count):
    messages = rides(*range(0, 600, 7), zone="a") + rides(*range(600, 900, 11), zone="b")
    run = run_values(per_minute(idle_s=None), messages, now=START, batch_count=batch_count)
    assert run.published == run_values(per_minute(idle_s=None), messages, now=START).published
    assert len(run.published) == 14


def test_a_quiet_stream_closes_its_minutes():
    first = int(START - NOW)
    messages = [*rides(5), Advance(START + 69)]
    assert run_values(per_minute(), messages, now=START + 5).published == []
    messages = [*rides(5), Advance(START + 70)]
    assert run_values(per_minute(), messages, now=START + 5).published == [(f"a/{first}", 1)]
    late = [*rides(5), Advance(START + 74)]
    assert run_values(per_minute(lateness_s=5), late, now=START + 5).published == []
    late = [*rides(5), Advance(START + 75)]
    assert len(run_values(per_minute(lateness_s=5), late, now=START + 5).published) == 1
    assert run_values(per_minute(idle_s=None), late, now=START + 5).published == []


def test_coroutine_functions_have_event_time_too():
    @shard.handler(message=Ride, store=shard.JsonStore, name="a", event_time=attrgetter("at"))
    async def later(txn: shard.Transaction, ride: Ride) -> None:
        txn.timers.set(ride.zone, at=ride.at + 10, clock="event")

    @later.timer
    async def fired(txn: shard.Transaction, timer: shard.Timer) -> None:
        txn.store.state.setdefault("fired", []).append([timer.key, txn.watermark - START])

    messages = [*rides(0), *rides(5, zone="b"), *rides(12, zone="c"), Advance(START + 100)]
    run = run_values(later, messages, now=START)
    assert run.state == {"fired": [["a", 12.0], ["b", 15.0], ["c", 22.0]]}


def test_a_message_without_event_time_is_a_bad_record():
    made = per_minute(on_error="skip", idle_s=None)
    run = run_values(made, [*rides(1), Ride("a", None), *rides(61)], now=START)
    assert [count for _, count in run.published] == [1]
    with pytest.raises(HandlerFailedError, match="the event time of a message is None"):
        run_values(per_minute(), [Ride("a", None)], now=START)


@pytest.mark.parametrize("store", [shard.RocksStore[str, int], shard.JsonStore[dict[str, int]]])
def test_many_timers_of_event_time_fire_within_transactions_that_are_not_too_large(
    store, monkeypatch
):
    monkeypatch.setattr(timers_module, "UNCOMMITTED_PUTS_MAX", 300)
    monkeypatch.setattr(consume_module, "FULL_CHECK_COUNT", 10)
    first = int(START - NOW)
    messages = [ride for zone in range(1000) for ride in rides(0, zone=str(zone))]
    run = run_values(per_minute(store, idle_s=None), [*messages, *rides(60)], now=START)
    assert sorted(run.published) == sorted((f"{zone}/{first}", 1) for zone in range(1000))
    assert run.state == {f"a/{first + 60}": 1}


def test_timers_of_event_time_need_a_declaration():
    def sets(txn: shard.Transaction, ride: Ride) -> None:
        txn.timers.set("a", at=ride.at, clock="event")

    application = shard.handler(message=Ride, store=shard.JsonStore, name="rides")(sets)
    application.timer(lambda txn, timer: None)
    with pytest.raises(HandlerFailedError, match=r"has no event time; declare it"):
        run_values(application, rides(1))
    with pytest.raises(ConfigurationError, match="use a function of the message"):
        shard.handler(message=Ride, store=shard.JsonStore, name="rides", event_time="at")(sets)
    published = shard.handler(
        message=Ride, store=shard.JsonStore, name="rides", event_time="published"
    )(sets)
    published.timer(
        lambda txn, timer: txn.publish(Value(timer.at), mapping=mapping.direct("fired/part-000"))
    )
    assert run_values(published, [*rides(1), Advance(NOW + 1e6)], now=NOW).published


def test_a_watermark_needs_no_timers():
    marks = []

    @shard.handler(message=Ride, store=shard.JsonStore, name="rides", event_time=attrgetter("at"))
    def watches(txn: shard.Transaction, ride: Ride) -> None:
        marks.append(txn.watermark)

    run_values(watches, rides(1, 2), now=START)
    assert marks[1] == START + 1


def test_timers_of_both_clocks_with_one_key_are_two():
    @shard.handler(message=Ride, store=shard.JsonStore, name="both", event_time=attrgetter("at"))
    def both(txn: shard.Transaction, ride: Ride) -> None:
        txn.timers.set("key", at=START + 50, clock="event")
        txn.timers.set("key", at=START + 50)
        if ride.zone == "cancel":
            txn.timers.cancel("key", clock="event")

    @both.timer
    def fired(txn: shard.Transaction, timer: shard.Timer) -> None:
        txn.store.state.setdefault(timer.clock, []).append(timer.at - START)

    run = run_values(both, [*rides(0), Advance(START + 1000)], now=START)
    assert run.state == {"processing": [50.0], "event": [50.0]}
    run = run_values(both, [*rides(0, zone="cancel"), Advance(START + 1000)], now=START)
    assert run.state == {"processing": [50.0]}
