"""Windows: the messages of a key and time, closed once by the watermark, in each of the stores."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette_sdk import JsonMessage, mapping, shard
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    ShardStoreError,
    UnreadableStateError,
    ValidationError,
)
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.application.application import Query
from gazette_sdk.shard.stores.base import TimerRow
from gazette_sdk.shard.transaction import windows as windows_module
from gazette_sdk.shard.transaction.failure import HandlerFailedError, HookFailedError
from gazette_sdk.shard.transaction.timers import EventTime, Timers, WindowTimer
from gazette_sdk.shard.transaction.windows import Hopping, Session, Tumbling, new_windows
from gazette_sdk.testing import Advance
from support.values import Value, run_values
from support.window_model import Event, Model, merged

S = 1_000_000
BEGIN = 1_700_000_000 * S  # a multiple of 5 s

STORES = {
    "RocksStore": shard.RocksStore[str, int],
    "JsonStore": shard.JsonStore,
    "SqliteStore": shard.SqliteStore,
    "SqlStore": lambda directory: shard.SqlStore(
        f"sqlite:///{directory.parent}/remote.sqlite", "a/shard"
    ),
}


# ----------------------------------------------------------------------- the law


class MemoryStore:
    """Store of timers and windows that keeps what is committed in dicts."""

    def __init__(self, _directory=None):
        self.timers, self.rows, self.checkpoint = {}, {}, Checkpoint()

    def restore(self):
        return self.checkpoint

    def begin(self):
        self.changes = {}, {}

    def open_timers(self): ...

    def open_rows(self): ...

    def timers_after(self, row, limit):
        rows = sorted((due, key) for key, due in self.timers.items())
        return [TimerRow(*each) for each in rows if row is None or each > tuple(row)][:limit]

    def put_timers(self, changes):
        self.changes[0].update(changes)

    def row(self, key):
        return self.rows.get(key)

    def rows_of(self, prefix):
        return sorted(row for row in self.rows.items() if row[0].startswith(prefix))

    def put_rows(self, changes):
        self.changes[1].update(changes)

    def start_commit(self, checkpoint):
        self.checkpoint = Checkpoint.from_bytes(checkpoint.to_bytes())
        for rows, changes in zip((self.timers, self.rows), self.changes, strict=True):
            rows.update(changes)
            for key in [key for key, value in changes.items() if value is None]:
                del rows[key]

    def finish_commit(self): ...

    def destroy(self): ...


@dataclass
class Machine:
    """Windows of a shard, over a store that is made again at restarts."""

    make: object
    declared: object
    journals: list
    lateness_s: float = 0
    idle_s: float | None = 10
    output: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.restart()

    def restart(self):
        """Continue as another process, from what is committed."""
        self.store = self.make()
        self.abort()

    def abort(self):
        """Continue from what is committed. Call :meth:`begin` after it."""
        checkpoint = self.store.restore()
        self.times = EventTime(
            self.journals, attrgetter("at"), lateness_s=self.lateness_s, idle_s=self.idle_s
        )
        self.times.restore(self.journals, checkpoint)
        self.timers = Timers(self.store, lambda: None)
        self.timers.restore(is_settable=False, has_windows=True)
        self.windows = new_windows(self.declared, self.store, self.timers, self.times)
        self.windows.restore()
        self.pending = Counter()
        self.begin()

    def begin(self):
        self.store.begin()
        self.timers.begin(1e9)

    def consume(self, journal, event):
        self.times.read(journal, event.published)
        self.close()
        self.windows.begin_message(journal, event.event)
        for window in self.windows.of(event):
            window.state = sorted([*(window.state or []), event.name])
        for window in self.windows.late:
            self.pending["late", window.key, window.begin_us, event.name] += 1
        self.windows.end_message()
        self.times.consumed(journal, event.event)

    def close(self):
        while timer := self.timers.next_of_event_time(self.times.watermark_us):
            assert isinstance(timer, WindowTimer)
            if (window := self.windows.take(timer)) is not None:
                assert window.count == len(window.state)
                span = window.begin_us, window.end_us
                self.pending["closed", window.key, span, tuple(window.state)] += 1

    def commit(self):
        self.windows.encode()
        self.timers.put()
        if self.windows.changes:
            self.store.put_rows(self.windows.changes)
        self.store.start_commit(Checkpoint(dict.fromkeys(self.journals, 1), times=self.times.times))
        self.timers.committed()
        self.windows.committed()
        self.store.finish_commit()
        self.output += self.pending
        self.pending = Counter()
        self.begin()

    def end(self):
        """Close all windows; return the output."""
        for journal in self.journals:
            self.times.present(journal, BEGIN + 100_000 * S)
        self.close()
        self.commit()
        return self.output


DECLARED = st.one_of(
    st.builds(Tumbling, st.sampled_from([1.0, 5.0]), grace_s=st.sampled_from([0, 2])),
    st.builds(
        Hopping, st.sampled_from([5.0, 6.0]), st.sampled_from([2.0, 5.0]), grace_s=st.just(0.0)
    ),
    st.builds(
        Session, st.sampled_from([2.0, 5.0]), grace_s=st.sampled_from([0, 3]), merge=st.just(merged)
    ),
).map(lambda declared: type(declared)(**fields_of(declared)))


def fields_of(declared):
    names = [name for name in declared.__slots__ if not name.startswith("_")]
    values = {name: getattr(declared, name) for name in names}
    return {**values, "by": attrgetter("key"), "state": list[str]}


GAPS = st.sampled_from([0, 1, S // 2, S, 4 * S, 9 * S, 10 * S + 1, 11 * S, 30 * S])
DELAYS = st.sampled_from([0, 0, S, 2 * S, 5 * S, 20 * S])
SOURCE = st.lists(st.tuples(GAPS, DELAYS, st.sampled_from("ab")), max_size=12)


def events_of(source, prefix=""):
    found, published = [], BEGIN
    for number, (gap, delay, key) in enumerate(source):
        published += gap
        found.append(Event(f"{prefix}{number:02}", key, published, published - delay))
    return found


@pytest.fixture(params=STORES)
def new_store(request, tmp_path):
    """Yields a function that makes a store over the same files again, or over new ones."""
    directories = (tmp_path / str(number) / "shard" for number in itertools.count())
    made = []

    def make(*, is_new=False):
        if made:
            made[-1][0].destroy()
        directory = next(directories) if is_new or not made else made[-1][1]
        directory.mkdir(parents=True, exist_ok=True)
        made.append((STORES[request.param](directory), directory))
        made[-1][0].restore()
        return made[-1][0]

    yield make
    made[-1][0].destroy()


@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    source=SOURCE,
    declared=DECLARED,
    lateness_s=st.sampled_from([0, 1, 5]),
    ends=st.lists(st.sampled_from(["", "", "commit", "commit", "abort", "restart"]), max_size=30),
)
def test_each_window_closes_once_with_its_messages_whatever_is_aborted(
    new_store, source, declared, lateness_s, ends
):
    """Against lists in memory, in each store."""
    events = events_of(source)
    model = Model(declared, lateness_s)
    for event in events:
        model.consume(event)
    model.close()
    new_store(is_new=True)
    machine = Machine(new_store, declared, ["a"], lateness_s, None)
    done = at = 0
    for end in [*ends, *[""] * len(events)]:
        if at < len(events):
            machine.consume("a", events[at])
            at += 1
        if end == "commit":
            machine.commit()
            done = at
        elif end:
            getattr(machine, end)()
            at = done
    while at < len(events):
        machine.consume("a", events[at])
        at += 1
    machine.times.watermark_us = 1 << 60
    machine.close()
    machine.commit()
    assert machine.output == model.output
    assert machine.timers.next_event_us is None
    assert not machine.store.rows_of(b"\x02")


@settings(max_examples=300, deadline=None)
@given(
    sources=st.lists(SOURCE, min_size=1, max_size=3),
    declared=DECLARED,
    lateness_s=st.sampled_from([0, 1, 5]),
    data=st.data(),
)
def test_a_replay_gives_what_the_live_run_gave(sources, declared, lateness_s, data):
    """Also interleaved otherwise, and with kills, whatever of the present is seen."""
    journals = [f"journal-{number}" for number in range(len(sources))]
    messages = {
        name: events_of(source, f"{name}/") for name, source in zip(journals, sources, strict=True)
    }
    straight = Machine(MemoryStore, declared, journals, lateness_s)
    for name in journals:
        for event in messages[name]:
            straight.consume(name, event)
    expected = straight.end()
    left = {name: list(events) for name, events in messages.items()}
    store = MemoryStore()
    live = Machine(lambda: store, declared, journals, lateness_s)
    while any(left.values()):
        name = data.draw(st.sampled_from([name for name in journals if left[name]]))
        if data.draw(st.booleans()):  # it is quiet: the present is before the next message
            source = data.draw(st.sampled_from(journals))
            bound = left[source][0].published if left[source] else BEGIN + 1000 * S
            live.times.present(source, bound - data.draw(st.sampled_from([0, 1, S, 20 * S])))
            live.close()
        live.consume(name, left[name].pop(0))
        if data.draw(st.integers(0, 2)) == 0:
            live.commit()
            live.restart()
    assert live.end() == expected
    assert not store.rows
    assert not store.timers


@pytest.mark.parametrize(
    "declared",
    [
        Tumbling(5, by=attrgetter("key"), state=list[str]),
        Session(5, by=attrgetter("key"), state=list[str], merge=merged),
    ],
)
def test_a_window_that_is_shown_after_a_restart_is_the_one_of_later_messages(new_store, declared):
    """In the same transaction, before anything else has read it."""
    machine = Machine(new_store, declared, ["a"])
    machine.consume("a", Event("x", "a", BEGIN, BEGIN))
    (row,) = machine.windows._changes
    machine.commit()
    machine.restart()
    shown = machine.windows.take(WindowTimer(row, closes=False, due_us=0))
    assert shown.state == ["x"]
    machine.consume("a", Event("y", "a", BEGIN, BEGIN))
    assert shown.state == ["x", "y"]
    machine.commit()
    ((_, _, _, names),) = machine.end()
    assert names == ("x", "y")


@pytest.mark.parametrize("step_s", [1, 100])
def test_sessions_that_grew_close_in_the_order_of_their_ends(step_s):
    """However far the watermark moves at once."""
    declared = Session(5, by=attrgetter("key"), state=list[str], merge=merged)
    machine = Machine(MemoryStore, declared, ["a"], 60, None)
    for second, key in [(0, "a"), (2, "b"), (4, "a"), (5, "c")]:
        machine.consume("a", Event(str(second), key, 0, BEGIN + second * S))
    for second in range(0, 101, step_s):
        machine.times.watermark_us = BEGIN + second * S
        machine.close()
    assert [key for _, key, *_ in machine.pending] == ["b", "a", "c"]


def test_windows_are_forgotten_when_they_are_many(new_store, monkeypatch):
    """And read again when they are needed."""
    monkeypatch.setattr(windows_module, "CACHED_BYTES", 3000)
    for declared in (
        Tumbling(60, by=attrgetter("key"), state=list[str]),
        Session(60, by=attrgetter("key"), state=list[str], merge=merged),
    ):
        new_store(is_new=True)
        machine = Machine(new_store, declared, ["a"])
        for number in range(200):
            machine.consume("a", Event(f"{number:03}", f"{number % 50}", BEGIN, BEGIN))
            if number % 7 == 0:
                machine.commit()
                kept = getattr(machine.windows, "_cache", None) or machine.windows._sessions
                assert len(kept) < 25
        output = machine.end()
        assert sum(len(names) for *_, names in output) == 200
        assert len(output) == 50


# ------------------------------------------------------------------- a handler


@dataclass
class Ride(JsonMessage):
    zone: str
    at: float
    cents: int = 1


class Stats(msgspec.Struct):
    rides: int = 0
    cents: int = 0


NOW = BEGIN / S


def counter(windows=None, *, store=shard.JsonStore, **options):
    windows = windows or Tumbling(60, grace_s=30, by=attrgetter("zone"), state=Stats)

    @shard.handler(
        message=Ride,
        store=store,
        sources="topic=rides",
        name="rides",
        event_time=attrgetter("at"),
        windows=windows,
        **options,
    )
    def rides(txn, ride):
        for window in txn.windows(ride):
            window.state = window.state or Stats()
            window.state.rides += 1
            window.state.cents += ride.cents

    return rides


TO_COUNTS = mapping.direct("counts/part-000")


def publishing(application):
    @application.closed
    def closed(txn, window):
        at = window.begin - NOW, window.end - NOW
        txn.publish(Value((window.key, *at, window.state.cents, window.count)), mapping=TO_COUNTS)

    return application


def rides(*seconds, zone="a", cents=1):
    return [Ride(zone, NOW + second, cents) for second in seconds]


MINUTE = -20.0  # begin of the minute, before NOW


@pytest.mark.parametrize("batch_count", [1, 3, 100])
@pytest.mark.parametrize("store", STORES)
def test_a_window_closes_when_the_watermark_has_passed_its_end_and_grace(
    tmp_path, store, batch_count
):
    made = STORES[store]
    if store == "SqlStore":
        made = shard.SqlStore.of(f"sqlite:///{tmp_path}/windows.sqlite")
    application = publishing(counter(store=made))
    given = [*rides(1, 30), *rides(35, zone="b", cents=5), *rides(50, 39, 69.9, 20, 70, 20)]
    _, published = run_values(application, given, batch_count=batch_count, now=NOW)
    assert published == [("a", MINUTE, MINUTE + 60, 4, 4), ("b", MINUTE, MINUTE + 60, 5, 1)]


def test_a_quiet_stream_closes_its_windows():
    application = publishing(counter(lateness_s=5))
    _, published = run_values(application, [*rides(1), Advance(NOW + 84.9)], now=NOW)
    assert published == []
    _, published = run_values(application, [*rides(1), Advance(NOW + 85)], now=NOW)
    assert published == [("a", MINUTE, MINUTE + 60, 1, 1)], "40 + 30 + 5 + 10 s later"


def test_hopping_windows_overlap_and_sessions_merge():
    _, published = run_values(
        publishing(counter(Hopping(60, 30, by=attrgetter("zone"), state=Stats))),
        [*rides(15), Advance(NOW + 500)],
        now=NOW,
    )
    assert published == [("a", -20, 40, 1, 1), ("a", 10, 70, 1, 1)]

    def merge(earlier, later):
        return Stats(earlier.rides + later.rides, earlier.cents + later.cents)

    sessions = Session(10, grace_s=60, by=attrgetter("zone"), state=Stats, merge=merge)
    _, published = run_values(
        publishing(counter(sessions)),
        [*rides(1, 20, 40, 10.5, 25, 0), Advance(NOW + 500)],
        now=NOW,
    )
    assert published == [("a", 0, 10.0 + 25, 5, 5), ("a", 40, 50, 1, 1)]


def test_sessions_whose_states_cannot_be_summed_are_a_failing_record():
    given = rides(0, 15, 8)
    with pytest.raises(HandlerFailedError, match="unsupported operand"):
        run_values(counter(Session(10, grace_s=60, state=Stats)), given, now=NOW)


def test_states_need_no_type_where_they_are_json():
    @shard.handler(
        message=Ride, store=shard.RocksStore, name="rides", windows=shard.windows.Session(10)
    )
    def totals(txn, ride):
        (window,) = txn.windows(ride)
        window.state = (window.state or 0) + ride.cents

    @totals.closed
    def closed(txn, window):
        txn.publish(Value((window.key, window.state)), mapping=TO_COUNTS)

    given = [*rides(0, 5, cents=3), Advance(NOW + 100)]
    assert run_values(totals, given, now=NOW).published == [(None, 6)]


def test_a_late_message_has_a_function():
    application = publishing(counter())

    @application.late
    def late(txn, ride, window):
        txn.publish(
            Value((ride.at - NOW, window.key, window.state, window.count)), mapping=TO_COUNTS
        )

    _, published = run_values(application, rides(1, 100, 2), now=NOW)
    assert published[1:] == [(2.0, "a", None, 0)]


def test_coroutine_functions_have_windows_too():
    @shard.handler(
        message=Ride,
        store=shard.JsonStore,
        name="rides",
        event_time=attrgetter("at"),
        windows=Tumbling(60, state=int),
    )
    async def totals(txn, ride):
        for window in txn.windows(ride):
            window.state = (window.state or 0) + 1

    @totals.closed
    async def closed(txn, window):
        txn.publish(Value(("closed", window.state)), mapping=TO_COUNTS)

    @totals.late
    async def late(txn, ride, window):
        txn.publish(Value(("late", ride.at - NOW, window.key)), mapping=TO_COUNTS)

    @totals.updated(every_s=1)
    async def updated(txn, window):
        txn.publish(Value(("updated", window.state)), mapping=TO_COUNTS)

    given = [*rides(1, 2), Advance(NOW + 2), *rides(100, 3), Advance(NOW + 2.5)]
    _, published = run_values(totals, given, now=NOW)
    assert published == [("updated", 2), ("closed", 2), ("late", 3.0, None)]


def test_open_windows_are_shown_at_most_once_in_a_time_if_they_have_changed():
    application = publishing(counter())

    @application.updated(every_s=5)
    def updated(txn, window):
        txn.publish(Value((window.key, window.count)), mapping=TO_COUNTS)

    given = [
        *rides(1, 2), Advance(NOW + 4), *rides(3), Advance(NOW + 5),
        Advance(NOW + 30), *rides(4), Advance(NOW + 34.9), *rides(5), Advance(NOW + 35),
    ]  # fmt: skip
    _, published = run_values(application, given, now=NOW)
    assert published == [("a", 3), ("a", 5)]


def test_a_window_that_closes_is_not_shown_any_more():
    application = publishing(counter())

    @application.updated(every_s=5)
    def updated(txn, window):
        txn.publish(Value(("updated", window.key)), mapping=TO_COUNTS)

    given = [*rides(1, 100), Advance(NOW + 6)]
    _, published = run_values(application, given, now=NOW)
    assert published == [("a", MINUTE, MINUTE + 60, 1, 1), ("updated", "a")]


def test_a_class_has_windows():
    class Rides(shard.Application):
        message, store, name = Ride, shard.RocksStore, "rides"
        windows = shard.windows.Tumbling(60)

        def consume(self, txn, message):
            for window in txn.windows(message):
                window.state = (window.state or 0) + message.cents

        def on_closed(self, txn, window):
            txn.publish(Value((window.count, window.state)), mapping=TO_COUNTS)

    given = [*rides(1, 2, cents=3), Advance(NOW + 100)]
    assert run_values(Rides(), given, now=NOW).published == [(2, 6)]


# --------------------------------------------------------------------- records


@pytest.mark.parametrize("store", STORES)
def test_a_record_that_is_skipped_changes_no_window(tmp_path, store):
    """Neither one that raised after it had its windows, nor one whose state cannot be read."""
    made = STORES[store]
    if store == "SqlStore":
        made = shard.SqlStore.of(f"sqlite:///{tmp_path}/windows.sqlite")

    @shard.handler(
        message=Ride,
        store=made,
        name="rides",
        event_time=attrgetter("at"),
        windows=Tumbling(60, by=attrgetter("zone"), state=list[float]),
        on_error="skip",
    )
    def bad_rides(txn, ride):
        if ride.cents == 0:
            raise ValueError("it has no windows yet")
        for window in txn.windows(ride):
            window.state = window.state or []
            window.state.append(math.nan if ride.cents == -1 else ride.cents)
        if ride.cents == -2:
            raise ValueError("it has")

    @bad_rides.closed
    def closed(txn, window):
        txn.publish(Value((window.key, window.count, window.state)), mapping=TO_COUNTS)

    given = [
        *rides(1), *rides(2, cents=-1), *rides(3, cents=7), *rides(4, cents=-2),
        *rides(5, cents=0), *rides(6, cents=9), Advance(NOW + 100),
    ]  # fmt: skip
    _, published = run_values(bad_rides, given, now=NOW)
    assert published == [("a", 3, [1, 7, 9])]


def test_a_state_that_would_not_be_read_again_fails_the_shard_before_it_commits():
    @shard.handler(message=Ride, store=shard.RocksStore, name="rides", windows=Tumbling(60))
    def totals(txn, ride):
        (window,) = txn.windows(ride)
        window.state = Stats(1, ride.cents)  # no type is declared: it would be read as a dict

    with pytest.raises(UnreadableStateError, match="declare its type"):
        run_values(totals, rides(1), now=NOW)


def test_a_state_of_another_type_than_was_declared_is_named(tmp_path):
    tmp_path.joinpath("shard").mkdir()
    store = shard.JsonStore(tmp_path / "shard")
    machine = Machine(lambda: store, Tumbling(60, state=list[str]), ["a"])
    machine.consume("a", Event("x", "a", BEGIN, BEGIN))
    machine.commit()
    machine.declared = Tumbling(60, state=int)
    machine.abort()
    with pytest.raises(ShardStoreError, match=r"the state of <window of None .*declare the type"):
        machine.consume("a", Event("y", "a", BEGIN, BEGIN))


def test_windows_of_another_size_that_were_left_close_at_their_ends():
    store = MemoryStore()
    machine = Machine(lambda: store, Tumbling(5, state=list[str]), ["a"], 0, None)
    machine.consume("a", Event("x", "a", BEGIN, BEGIN))
    machine.commit()
    machine.declared = Tumbling(10, state=list[str])
    machine.restart()
    machine.consume("a", Event("y", "a", BEGIN, BEGIN))
    machine.times.watermark_us = BEGIN + 20 * S
    machine.close()
    machine.commit()
    assert machine.output == {
        ("closed", None, (BEGIN, BEGIN + 5 * S), ("x",)): 1,
        ("closed", None, (BEGIN, BEGIN + 10 * S), ("y",)): 1,
    }


@pytest.mark.parametrize("key", [None, 1.5, True, ["a"], {}, ("a", None), "a" * 500, "\ud800"])
def test_a_key_that_cannot_be_encoded_is_refused(key):
    application = counter(Tumbling(60, by=lambda _: key))
    if key is None:
        assert run_values(counter(Tumbling(60, state=Stats)), rides(1), now=NOW)
        return
    with pytest.raises(HandlerFailedError, match="the key of a window") as failed:
        run_values(application, rides(1), now=NOW)
    assert isinstance(failed.value.__cause__, ValidationError)


def test_windows_are_for_the_message_that_is_consumed():
    application = counter()

    @application.closed
    def closed(txn, window):
        txn.windows(Ride("a", NOW))

    with pytest.raises(HookFailedError, match=r"on_closed of <window of 'a'.*is for `consume`"):
        run_values(application, rides(1, 100), now=NOW)

    @shard.handler(message=Ride, store=shard.JsonStore, name="rides")
    def without(txn, ride):
        txn.windows(ride)

    with pytest.raises(HandlerFailedError, match="has no windows; declare them"):
        run_values(without, rides(1), now=NOW)

    transactions = []

    @shard.handler(message=Ride, store=shard.JsonStore, name="rides", windows=Tumbling(60))
    def keeping(txn, ride):
        transactions.append(txn)

    run_values(keeping, rides(1), now=NOW)
    with pytest.raises(ClosedError):
        transactions[0].windows(Ride("a", NOW))


def test_a_message_with_windows_is_not_deferred():
    @shard.handler(message=Ride, store=shard.JsonStore, name="rides", windows=Tumbling(60))
    def deferring(txn, ride):
        txn.windows(ride)
        txn.defer()

    with pytest.raises(HandlerFailedError, match="call `defer` first"):
        run_values(deferring, rides(1), now=NOW)


# ---------------------------------------------------------------- declarations


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: Tumbling(0), r"Tumbling: size_s=0; use a number of seconds, more than 0"),
        (lambda: Tumbling(-1), "size_s=-1"),
        (lambda: Tumbling(math.nan), "size_s=nan"),
        (lambda: Tumbling(1e-9), "size_s=1e-09"),
        (lambda: Tumbling("60"), "size_s='60'"),
        (lambda: Tumbling(True), "size_s=True"),
        (lambda: Tumbling(60, grace_s=-1), "grace_s=-1; use a number of seconds, 0 or more"),
        (lambda: Tumbling(60, by="zone"), r"by='zone' is no function.*attrgetter"),
        (lambda: Hopping(60, 0), "step_s=0"),
        (lambda: Hopping(60, 61), "step_s=61 with size_s=60; use at most the size"),
        (lambda: Hopping(60, 0.01), "at most 1000 windows"),
        (lambda: Session(0), "Session: gap_s=0"),
        (lambda: Session(10, merge=1), "merge=1 is no function"),
        (lambda: counter(60), r"rides: windows=60; use shard.windows.Tumbling"),
        (lambda: counter(Tumbling), "windows=<class"),
    ],
)
def test_declarations_are_checked_where_they_stand(declare, text):
    with pytest.raises(ConfigurationError, match=text):
        declare()


def test_functions_are_checked_where_they_stand():
    application = counter()
    with pytest.raises(ConfigurationError, match=r"with \(txn, window\)"):
        application.closed(lambda _txn: None)
    with pytest.raises(ConfigurationError, match=r"with \(txn, message, window\)"):
        application.late(lambda _txn, _window: None)
    with pytest.raises(ConfigurationError, match="update_every_s=0"):
        application.updated(every_s=0)(lambda _txn, _window: None)
    assert application.update_every_s == 1.0
    publishing(application)
    with pytest.raises(ConfigurationError, match="has a function for `on_closed`"):
        publishing(application)

    @shard.handler(message=Ride, store=shard.JsonStore, name="rides")
    def without(txn, ride): ...

    with pytest.raises(ConfigurationError, match="defines `on_closed` without windows"):
        publishing(without)

    class Keepless:
        """A store that keeps no windows."""

    with pytest.raises(ConfigurationError, match="windows, which Keepless does not keep"):
        counter(store=Keepless)
    with pytest.raises(ConfigurationError, match="Keepless keeps no windows"):
        Machine(KeepsTimers, Tumbling(60), ["a"])


class KeepsTimers(MemoryStore):
    """A store that keeps timers alone."""

    rows_of = None

    def __getattribute__(self, name):
        if name == "open_rows":
            raise AttributeError(name)
        return "Keepless" if name == "__name__" else super().__getattribute__(name)


KeepsTimers.__name__ = "Keepless"


# ---------------------------------------------------------------------- stores


def test_windows_that_are_not_declared_any_more_wait_and_are_named(tmp_path, caplog):
    url = f"sqlite:///{tmp_path}/windows.sqlite"
    store = shard.SqlStore.of(url)
    run_values(counter(store=store), rides(1), now=NOW)

    @shard.handler(message=Ride, store=store, name="rides", event_time=attrgetter("at"))
    def without(txn, ride):
        txn.timers.set("x", after_s=0)

    @without.timer
    def timer(txn, timer):
        txn.publish(Value(timer.key), mapping=TO_COUNTS)

    with caplog.at_level(logging.WARNING):
        given = [*rides(1, 500), Advance(NOW + 1000)]
        assert run_values(without, given, now=NOW).published == ["x"]
    assert "has timers or windows which rides does not declare: they wait" in caplog.text
    caplog.clear()
    _, published = run_values(
        publishing(counter(store=store)), [*rides(1, 500), *rides(1000)], now=NOW
    )
    assert published == [("a", MINUTE, MINUTE + 60, 1, 1)]
    assert not caplog.text


def test_a_query_reads_the_open_windows_of_a_key(new_store):
    machine = Machine(
        new_store, Tumbling(5, by=attrgetter("key"), state=list[str]), ["a"], 60, None
    )
    with pytest.raises(ConfigurationError, match="has no windows"):
        Query(None, None).windows("b")
    for number, key in enumerate("abab"):
        machine.consume("a", Event(str(number), key, BEGIN, BEGIN + (3 - number) * 5 * S))
    machine.times.watermark_us = 0
    machine.commit()
    machine.consume("a", Event("9", "b", BEGIN, BEGIN))  # is not committed
    with machine.store.committed() as view:
        query = Query(view, None, declared=machine.declared)
        found = query.windows("b")
        assert [(window.key, window.begin_us - BEGIN, window.state) for window in found] == [
            ("b", 0, ["3"]), ("b", 10 * S, ["1"]),
        ]  # fmt: skip
        assert query.windows("c") == []
        assert query.windows() == []
        with pytest.raises(ValidationError, match="cannot be the key of a window"):
            query.windows(1.5)


def test_keys_that_begin_with_another_one_are_others(new_store):
    machine = Machine(new_store, Tumbling(5, by=attrgetter("key"), state=list[str]), ["a"])
    keys = [("a",), ("a", "b"), ("a", 1), "a", "a\0", "a\0b", b"a", 1, 0, ()]
    for number, key in enumerate(keys):
        machine.consume("a", Event(str(number), key, BEGIN, BEGIN))
    machine.commit()
    with machine.store.committed() as view:
        query = Query(view, None, declared=machine.declared)
        for number, key in enumerate(keys):
            assert [window.state for window in query.windows(key)] == [[str(number)]]


def test_the_documents_of_windows_are_as_the_docs_say(tmp_path):
    store = shard.JsonStore(tmp_path)
    machine = Machine(lambda: store, Tumbling(5, state=list[str]), ["a"])
    machine.consume("a", Event("x", "a", BEGIN, BEGIN))
    machine.commit()
    assert len((tmp_path / "state.json").read_bytes().splitlines()) == 5
    machine.end()
    assert len((tmp_path / "state.json").read_bytes().splitlines()) == 3


@pytest.mark.parametrize("name", ["SqliteStore", "SqlStore"])
def test_the_table_of_windows_is_made_for_applications_with_windows_alone(tmp_path, name):
    directory = tmp_path / "shard"
    directory.mkdir()
    store = STORES[name](directory)
    store.restore()
    timers = Timers(store, lambda: None)
    timers.restore()
    with pytest.raises(ShardStoreError, match="gazette_"):
        store.rows_of(b"\x00")
    Machine(lambda: store, Tumbling(5), ["a"])
    assert store.rows_of(b"\x00") == []
    store.destroy()
