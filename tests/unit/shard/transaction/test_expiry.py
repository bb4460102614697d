"""Entries of a store with a time to live: timers of the shard, which no handler sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette_sdk import JsonMessage, shard
from gazette_sdk.errors import ClosedError, ConfigurationError, ValidationError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer.state import read_state
from gazette_sdk.shard.transaction import consume as consume_module
from gazette_sdk.shard.transaction import timers as timers_module
from gazette_sdk.shard.transaction.failure import HandlerFailedError
from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.shard.transaction.timers import ExpiryTimer, Timers
from gazette_sdk.testing import Advance, run_handler

NOW = 1_700_000_000.0
STORE = shard.RocksStore.of(key=str, value=int, families={"more": (tuple[str, int], int)})


@dataclass
class Change(JsonMessage):
    """Change of an entry: put it, remove it, or have it expire after so many seconds."""

    key: str
    after_s: float | None = None
    removes: bool = False
    fails: bool = False


def change(store, given):
    if given.removes:
        store.discard(given.key)
    elif given.after_s is not None:
        store.expire(given.key, given.after_s)
    else:
        store[given.key] = store.get(given.key, 0) + 1


def handler_of(store=shard.RocksStore[str, int], **declared):
    @shard.handler(message=Change, store=store, name="changes", **declared)
    def changes(txn, given):
        change(txn.store, given)
        if given.fails:
            raise ValueError("after its change")

    return changes


PUT, LIVES = Change("ada"), Change("ada", 10)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ([PUT, LIVES, Advance(NOW + 9.9)], {"ada": 1}),
        ([PUT, LIVES, Advance(NOW + 10)], {}),
        ([PUT, LIVES, PUT, Advance(NOW + 10)], {}),
        ([PUT, LIVES, Advance(NOW + 5), LIVES, Advance(NOW + 14)], {"ada": 1}),
        ([PUT, LIVES, Advance(NOW + 5), LIVES, Advance(NOW + 15)], {}),
        ([PUT, LIVES, Change("ada", removes=True), PUT, Advance(NOW + 99)], {"ada": 1}),
        ([PUT, LIVES, Advance(NOW + 10), PUT, Advance(NOW + 99)], {"ada": 1}),
        ([PUT, Change("ada", 0)], {}),
        ([PUT, Change("bo"), LIVES, Advance(NOW + 10)], {"bo": 1}),
    ],
)
@pytest.mark.parametrize("batch_count", [1, 100])
def test_an_entry_ends_at_its_time_unless_it_was_removed(given, state, batch_count):
    assert run_handler(handler_of(), given, now=NOW, batch_count=batch_count).state == state


def test_coroutine_functions_have_entries_that_expire():
    @shard.handler(message=Change, store=shard.RocksStore[str, int], name="changes")
    async def changes(txn, given):
        change(txn.store, given)

    assert run_handler(changes, [PUT, LIVES, Advance(NOW + 10)], now=NOW).state == {}


def test_the_function_of_timers_sees_none_of_them():
    application, seen = handler_of(), []

    @application.timer
    def fired(txn, timer):
        seen.append(timer)

    assert run_handler(application, [PUT, LIVES, Advance(NOW + 10)], now=NOW).state == {}
    assert seen == []


def test_a_record_that_is_left_out_changes_no_time_to_live():
    bad = [Change("ada", 1, fails=True), Change("ada", removes=True, fails=True)]
    given = [PUT, LIVES, *bad, Advance(NOW + 9)]
    application = handler_of(on_error="skip")
    assert run_handler(application, given, now=NOW).state == {"ada": 1}
    assert run_handler(application, [*given, Advance(NOW + 10)], now=NOW).state == {}


@pytest.mark.parametrize("batch_count", [1, 100])
def test_the_first_time_to_live_of_a_shard_may_be_of_a_record_that_is_left_out(batch_count):
    given = [PUT, Change("ada", 1, fails=True), Advance(NOW + 5), PUT, LIVES]
    application = handler_of(on_error="skip")
    options = {"now": NOW, "batch_count": batch_count}
    assert run_handler(application, [*given, Advance(NOW + 14)], **options).state == {"ada": 2}
    assert run_handler(application, [*given, Advance(NOW + 15)], **options).state == {}


def test_many_entries_end_within_transactions_that_are_not_too_large(monkeypatch):
    monkeypatch.setattr(timers_module, "UNCOMMITTED_PUTS_MAX", 300)
    monkeypatch.setattr(consume_module, "FULL_CHECK_COUNT", 10)
    given, steps = [], []
    for number in range(1000):
        given += [Change(str(number)), Change(str(number), 10)]
    application = handler_of()
    given = [*given, Advance(NOW + 9), Advance(NOW + 10)]
    assert run_handler(application, given, now=NOW, on_step=steps.append).state == {}
    assert steps.count(CommitStep.COMMITTED) >= 6, "three and more set times, and end them"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (Change("bo", 1), KeyError, "bo"),
        (Change("ada", -1), ValidationError, "a time to live is -1.0 seconds"),
        (Change("ada", 1e12), ValidationError, "a time to live is 1000000000000.0 seconds"),
        (Change("a" * 505, 1), ValidationError, "a key of 513 bytes cannot expire"),
    ],
)
def test_what_cannot_expire_is_refused(given, error, text):
    with pytest.raises(HandlerFailedError, match=text) as caught:
        run_handler(handler_of(), [PUT, Change("a" * 505), given], now=NOW)
    assert isinstance(caught.value.__cause__, error)


def test_a_key_that_is_too_long_to_expire_may_be_removed():
    long = "a" * 1000
    given = [PUT, LIVES, Change(long), Change(long, removes=True)]
    assert run_handler(handler_of(), given, now=NOW).state == {"ada": 1}


def test_entries_of_other_stores_have_no_time_to_live(tmp_path):
    stores = [
        shard.JsonStore(tmp_path),
        shard.SqliteStore(tmp_path),
        shard.SqlStore("sqlite://", "a/shard"),
    ]
    for store in stores:
        with pytest.raises(ConfigurationError, match="have no time to live: use a RocksStore"):
            store.expire("ada", 1)
    rocks = STORE(tmp_path)
    rocks.restore()
    rocks["ada"] = 1
    with pytest.raises(ClosedError, match="keys expire in a shard"):
        rocks.expire("ada", 1)
    rocks.destroy()


# ------------------------------------------------------------------------ the law

KEYS = ["a", "b", ("a", 1), ("a", 2)]
STEPS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(
                st.sampled_from(["put", "put", "remove", "expire", "expire"]),
                st.sampled_from(KEYS),
                st.integers(0, 12),
            ),
            max_size=6,
        ),
        st.integers(0, 6),
        st.sampled_from(["commit", "commit", "commit", "abort", "restart"]),
    ),
    max_size=12,
)


class World:
    """A store and its timers, and a model: the value and the end of each key."""

    def __init__(self, directory):
        self.directory, self.store = directory, None
        self.now, self.model, self.committed = 0, {}, {}
        self.restart()

    def restart(self):
        if self.store is not None:
            self.store.destroy()
        self.store = STORE(self.directory)
        self.timers = Timers(self.store, lambda: None)
        self.abort()

    def abort(self):
        self.store.restore()
        self.timers.restore(is_settable=False)
        has_any = self.store.open_expiry(self.timers.set_expiry)
        assert has_any == any(end < math.inf for _, end in self.committed.values())
        self.model = dict(self.committed)

    def begin(self):
        self.store.begin()
        self.timers.begin(NOW + self.now)
        while (timer := self.timers.next_due()) is not None:
            assert isinstance(timer, ExpiryTimer)
            self.store.end_entry(timer.entry)
        self.model = {key: each for key, each in self.model.items() if each[1] > self.now}

    def change(self, step, key, number):
        family = self.store if isinstance(key, str) else self.store.family("more")
        value, end = self.model.get(key, (None, math.inf))
        if step == "put":
            family[key] = number
            self.model[key] = number, end
        elif step == "remove":
            family.discard(key)
            self.model.pop(key, None)
        elif value is not None:
            family.expire(key, number)
            # What is due at once ends in the next transaction.
            self.model[key] = value, self.now + number
        else:
            with pytest.raises(KeyError):
                family.expire(key, number)

    def commit(self):
        self.timers.put()
        self.store.start_commit(Checkpoint({"a/journal": 1}))
        self.timers.committed()
        self.store.finish_commit()
        self.committed = dict(self.model)

    def check(self):
        found = dict(self.store.items()) | dict(self.store.family("more").items())
        assert found == {key: value for key, (value, _) in self.model.items()}


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(steps=STEPS)
def test_entries_end_at_their_times_whatever_is_aborted(tmp_path_factory, steps):
    world = World(tmp_path_factory.mktemp("store"))
    for changes, wait, end in steps:
        world.now += wait
        world.begin()
        world.check()
        for each in changes:
            world.change(*each)
            world.check()
        getattr(world, end)()
        world.check()
        kept = world.store.timers_after(None, 100)
        assert len(kept) == sum(end < math.inf for _, end in world.committed.values())
    world.store.destroy()


def test_ends_of_entries_are_shown_among_the_timers_of_a_shard(tmp_path):
    world = World(tmp_path)
    world.begin()
    for key in ("ada", ("bo", 1)):
        world.change("put", key, 7)
        world.change("expire", key, 60)
    world.commit()
    with world.store.committed() as view:
        entries = read_state(view, cpb.StateRequest(what="timers")).entries
    assert [(each.place, each.key) for each in entries] == [
        ("end of a key of default", '"ada"'),
        ("end of a key of more", '["bo",1]'),
    ]
    world.store.destroy()
