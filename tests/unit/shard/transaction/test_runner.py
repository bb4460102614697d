"""The runner over inputs and outputs in memory: order of hooks, overlap, deferral, failures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest

from gazette_sdk import JsonMessage, mapping, shard
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    UnavailableError,
    UnreadableStateError,
    ValidationError,
)
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.uuid import Envelope
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.stores.json_store import JsonStore
from gazette_sdk.shard.transaction.failure import (
    BadRecords,
    DeadLetter,
    HandlerFailedError,
    HookFailedError,
    _as_json,
)
from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.shard.transaction.runner import Runner
from gazette_sdk.testing.handler_runs import JOURNAL, MemoryInput, MemoryOutput, run_handler
from gazette_sdk.testing.store_faults import CrashAt, InjectedCrashError
from gazette_sdk.transport.loop import run

WAIT_S = 20.0
OUT = mapping.direct("out/part-000")


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


@dataclass
class Total(JsonMessage):
    customer: str
    cents: int


def add(txn, order):
    totals = txn.store.state
    totals[order.customer] = totals.get(order.customer, 0) + order.cents
    txn.publish(Total(order.customer, totals[order.customer]), mapping=OUT)


def declared(function=add, **given):
    return shard.handler(message=Order, store=JsonStore, **given)(function)


ORDERS = [Order("ada", 1), Order("bob", 2), Order("ada", 3)]
STATE = {"ada": 4, "bob": 2}
PUBLISHED = [Total("ada", 1), Total("bob", 2), Total("ada", 4)]


# ------------------------------------------------------------------ plain runs


@pytest.mark.parametrize("batch_count", [1, 2, 100])
def test_state_and_messages_of_a_run(batch_count):
    found = run_handler(declared(), ORDERS, batch_count=batch_count)
    assert found.state == STATE
    assert found.published == PUBLISHED


def test_a_run_with_sql_reads_what_it_is_asked_to_read():
    def count(txn, order):
        txn.store.execute("INSERT INTO orders VALUES (?, ?)", (order.customer, order.cents))

    def read(store):
        with store.committed() as view:
            return view.execute("SELECT sum(cents) FROM orders").fetchone()[0]

    schema = "CREATE TABLE IF NOT EXISTS orders (customer TEXT, cents INTEGER) STRICT;"
    application = shard.handler(message=Order, store=shard.SqliteStore.of(schema=schema))(count)
    assert run_handler(application, ORDERS, read=read).state == 6
    assert run_handler(application, ORDERS).state is None


def test_a_run_with_a_database_of_keys():
    def count(txn, order):
        txn.store[order.customer] = txn.store.get(order.customer, 0) + order.cents

    application = shard.handler(message=Order, store=shard.RocksStore[str, int])(count)
    assert run_handler(application, ORDERS).state == STATE


def test_a_run_of_nothing():
    assert run_handler(declared(), []) == ({}, [])


def test_coroutine_functions_do_the_same():
    async def add_later(txn, order):
        await asyncio.sleep(0)
        add(txn, order)

    assert run_handler(declared(add_later), ORDERS) == (STATE, PUBLISHED)


class Traced(shard.Application):
    """Notes every call."""

    message, store = Order, JsonStore

    def __init__(self):
        super().__init__()
        self.calls = []
        self.futures = []

    def begin(self, txn):
        assert txn.envelope is None
        self.calls.append("begin")

    def consume(self, txn, order):
        assert txn.envelope.message is order
        self.calls.append(order.customer)
        add(txn, order)

    def finalize(self, txn):
        txn.publish(Total("all", len(txn.store.state)), mapping=OUT)
        self.calls.append("finalize")

    def finished(self, txn, commit):
        self.calls.append("finished")
        self.futures.append(commit)
        with pytest.raises(ClosedError):
            txn.publish(Total("late", 0), mapping=OUT)


class TracedAsync(shard.Application):
    message, store = Order, JsonStore

    def __init__(self):
        super().__init__()
        self.calls = []
        self.futures = []

    async def begin(self, txn):
        Traced.begin(self, txn)

    async def consume(self, txn, order):
        Traced.consume(self, txn, order)

    async def finalize(self, txn):
        Traced.finalize(self, txn)

    async def finished(self, txn, commit):
        Traced.finished(self, txn, commit)


@pytest.mark.parametrize("kind", [Traced, TracedAsync])
def test_hooks_and_steps_are_in_order(kind):
    application, steps = kind(), []
    found = run_handler(application, ORDERS, on_step=steps.append)
    assert application.calls == ["begin", "ada", "bob", "ada", "finalize", "finished"]
    assert found.published == [*PUBLISHED, Total("all", 2)]
    assert application.futures[0].result(0) is None
    assert steps == list(CommitStep)


async def add_later(txn, order):
    add(txn, order)


def add_as_if_plain(txn, order):
    return add_later(txn, order)


async def add_without_await(txn, order):
    return add_later(txn, order)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize("handler", [add_as_if_plain, add_without_await])
def test_a_handler_of_which_nothing_has_run_fails_its_shard(handler, on_error):
    with pytest.raises(HookFailedError, match="returned a coroutine, of which nothing has run"):
        run_handler(declared(handler, on_error=on_error), ORDERS)


@pytest.mark.parametrize("hook", ["begin", "finalize"])
def test_a_hook_of_which_nothing_has_run_fails_its_shard(hook):
    kind = type("Hooked", (Traced,), {hook: lambda _, txn: add_later(txn, ORDERS[0])})
    with pytest.raises(HookFailedError, match=f"{hook}.*returned a coroutine"):
        run_handler(kind(), ORDERS)


def test_a_deferred_message_opens_the_next_transaction():
    class Deferring(Traced):
        def consume(self, txn, order):
            if order.customer == "bob" and self.calls[-1] != "begin":
                txn.defer()
            super().consume(txn, order)

    application = Deferring()
    found = run_handler(application, ORDERS)
    begun = [name for name in application.calls if name not in {"finalize", "finished"}]
    assert begun == ["begin", "ada", "begin", "bob", "ada"]
    assert found.state == STATE


def test_the_first_message_cannot_be_deferred():
    with pytest.raises(HookFailedError, match="first message was deferred"):
        run_handler(declared(lambda txn, _: txn.defer()), ORDERS)


def test_a_message_that_published_cannot_be_deferred():
    def publish_and_defer(txn, order):
        add(txn, order)
        txn.defer()

    with pytest.raises(HandlerFailedError) as caught:
        run_handler(declared(publish_and_defer), ORDERS)
    assert isinstance(caught.value.error, ConfigurationError)


# -------------------------------------------------------------------- failures


@pytest.mark.parametrize("kind", [Traced, TracedAsync])
@pytest.mark.parametrize(
    ("hook", "text", "is_finished"),
    [
        ("begin", "begin: KeyError: 'bad'", False),
        ("consume", f"consume: KeyError: 'bad'; at the record of {JOURNAL} at offset 0", True),
        ("finalize", "finalize: KeyError: 'bad'", True),
    ],
)
def test_a_hook_that_raises_fails_the_shard(kind, hook, text, is_finished):
    def fail(self, *_):
        raise KeyError("bad")

    async def fail_later(self, *_):
        raise KeyError("bad")

    failing = type("Failing", (kind,), {hook: fail if kind is Traced else fail_later})
    application = failing()
    with pytest.raises((HandlerFailedError, HookFailedError)) as caught:
        run_handler(application, ORDERS)
    assert str(caught.value) == text
    assert isinstance(caught.value.__cause__, KeyError)
    assert ("finished" in application.calls) == is_finished
    if is_finished:
        assert application.futures[0].exception() is caught.value
    if hook == "consume":
        assert (caught.value.journal, caught.value.offset) == (JOURNAL, 0)


@dataclass
class Sum:
    cents: float = 0.0


def poison(txn, order):
    store = txn.store
    txn.publish(order, mapping=OUT)
    cents = float("nan") if order.customer == "x" else float(order.cents)
    if isinstance(store, JsonStore):
        store.state.cents += cents
    else:
        store["cents"] = store.get("cents", 0.0) + cents


async def poison_later(txn, order):
    await asyncio.sleep(0)
    poison(txn, order)


@pytest.mark.parametrize("batch_count", [1, 3, 100])
@pytest.mark.parametrize("handle", [poison, poison_later])
@pytest.mark.parametrize("store", [JsonStore[Sum], shard.RocksStore[str, float]])
def test_a_record_whose_state_could_not_be_read_again_is_skipped(handle, store, batch_count):
    def read(store):
        return store.state.cents if isinstance(store, JsonStore) else store["cents"]

    declare = shard.handler(message=Order, store=store, on_error="skip")
    found = run_handler(declare(handle), MIXED, batch_count=batch_count, read=read)
    good = [order for order in MIXED if order.customer != "x"]
    assert found.state == sum(order.cents for order in good)
    assert found.published == good


@pytest.mark.parametrize("store", [JsonStore[Sum], shard.RocksStore[str, float]])
def test_a_state_that_could_not_be_read_again_fails_the_shard_before_its_commit(store):
    with pytest.raises((UnreadableStateError, HandlerFailedError), match=r"NaN|null"):
        run_handler(shard.handler(message=Order, store=store)(poison), MIXED)


def test_a_state_that_no_record_spoils_fails_the_shard_also_with_skip():
    class Spoiled(shard.Application):
        message, store, on_error = Order, JsonStore[Sum], "skip"

        def consume(self, txn, order):
            txn.store.state.cents = float(order.cents)

        def finalize(self, txn):
            txn.store.state.cents = "n/a"

    with pytest.raises(UnreadableStateError, match="Expected `float`"):
        run_handler(Spoiled(), ORDERS)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_failure_is_not_hidden_by_that_of_the_hook_finished(on_error, caplog):
    class Failing(Traced):
        def consume(self, txn, order):
            raise KeyError("bad")

        def finished(self, txn, commit):
            raise RuntimeError("worse")

    application = Failing()
    application.on_error = on_error
    with pytest.raises((HandlerFailedError, HookFailedError)) as caught:
        run_handler(application, ORDERS)
    if on_error == "fail":
        assert "consume: KeyError: 'bad'" in str(caught.value)
        assert "RuntimeError: worse" in caplog.text
    else:
        assert str(caught.value) == "finished: RuntimeError: worse"


def refuse(*bad):
    def consume(txn, order):
        add(txn, order)  # what a bad record has changed and published is undone
        if order.customer in bad:
            raise ValueError(f"no {order.customer}")

    return consume


MIXED = [Order(name, index) for index, name in enumerate("abxaxbxx")]


@pytest.mark.parametrize("batch_count", [1, 3, 100])
def test_bad_records_are_skipped(batch_count):
    found = run_handler(declared(refuse("x"), on_error="skip"), MIXED, batch_count=batch_count)
    good = [order for order in MIXED if order.customer != "x"]
    assert found == run_handler(declared(), good)


@pytest.mark.parametrize("batch_count", [1, 3, 100])
@pytest.mark.parametrize("is_async", [False, True])
def test_each_bad_record_has_one_dead_letter(batch_count, is_async):
    function = refuse("x")

    async def later(txn, order):
        function(txn, order)

    application = declared(
        later if is_async else function, on_error=shard.dead_letters("orders/rejected")
    )
    found = run_handler(application, MIXED, batch_count=batch_count)
    letters = [message for message in found.published if isinstance(message, DeadLetter)]
    assert letters == [
        DeadLetter(JOURNAL, index, "ValueError: no x", {"customer": "x", "cents": index})
        for index in (2, 4, 6, 7)
    ]
    rest = [message for message in found.published if isinstance(message, Total)]
    assert rest == run_handler(declared(), [m for m in MIXED if m.customer != "x"]).published
    assert found.state == {"a": 3, "b": 6}


def test_the_dead_letter_of_a_record_that_is_too_long_for_one_is_without_it():
    published = []

    class Transaction:
        def publish(self, letter, mapping):
            if letter.record is not None:
                raise ValidationError("too long")
            published.append(letter)

    bad = BadRecords(shard.dead_letters("orders/rejected"))
    envelope = Envelope("orders/part", 7, 9, Order("x", 1), None)
    bad.add(HandlerFailedError(envelope, ValueError("no x")))
    bad.leave_out(Transaction(), envelope)
    text = "ValueError: no x (without the record: too long)"
    assert published == [DeadLetter("orders/part", 7, text, None)]


@pytest.mark.parametrize(
    "error", [UnavailableError("no broker"), OSError(28, "No space left on device"), MemoryError()]
)
def test_failures_that_are_not_the_records_fail_the_shard(error):
    def fail(txn, order):
        raise error

    with pytest.raises(HandlerFailedError) as caught:
        run_handler(declared(fail, on_error="skip"), ORDERS)
    assert caught.value.error is error


class NoTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


ENDING = [asyncio.CancelledError(), StopIteration(), SystemExit(3), KeyboardInterrupt()]


@pytest.mark.parametrize("kind", [Traced, TracedAsync])
@pytest.mark.parametrize("error", ENDING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("hook", ["begin", "consume", "finalize", "finished"])
def test_a_hook_that_raises_what_ends_a_task_fails_the_shard(kind, error, hook):
    def fail(self, *_):
        raise error

    async def fail_later(self, *_):
        fail(self)

    application = type("Failing", (kind,), {hook: fail if kind is Traced else fail_later})()
    with pytest.raises((HandlerFailedError, HookFailedError), match=type(error).__name__):
        run_handler(application, ORDERS)
    assert run_handler(declared(), ORDERS).state == STATE  # the event loop is alive


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("file \udcff not found"), "ValueError: file \\udcff not found"),
        (NoTextError(), "NoTextError: (its __str__ raised RuntimeError)"),
        (asyncio.CancelledError(), "CancelledError"),
        (StopIteration("a"), None),
    ],
)
def test_a_record_is_dead_lettered_whatever_its_handler_raises(is_async, error, text):
    def handle(txn, order):
        if order.customer == "x":
            raise error
        add(txn, order)

    async def later(txn, order):
        if order.customer == "x" and isinstance(error, asyncio.CancelledError):
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            await task
        handle(txn, order)

    function = later if is_async else handle
    application = declared(function, on_error=shard.dead_letters("orders/rejected"))
    found = run_handler(application, MIXED)
    letters = [message for message in found.published if isinstance(message, DeadLetter)]
    assert [letter.offset for letter in letters] == [2, 4, 6, 7]
    assert all(msgspec.json.encode(letter) for letter in letters)
    if text is not None:
        assert {letter.error for letter in letters} == {text}
    assert found.state == run_handler(declared(function, on_error="skip"), MIXED).state


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_ends_the_process_is_no_failure_of_the_record(error):
    def fail(txn, order):
        raise error

    with pytest.raises(HandlerFailedError) as caught:
        run_handler(declared(fail, on_error="skip"), ORDERS)
    assert caught.value.error is error


def test_a_callback_of_a_commit_that_raises_fails_nobody(caplog):
    class Calling(Traced):
        def finished(self, txn, commit):
            commit.add_done_callback(self.called_back)

        def called_back(self, commit):
            raise SystemExit(3)

    assert run_handler(Calling(), ORDERS).state == STATE
    assert "called_back raised SystemExit: 3" in caplog.text


@pytest.mark.parametrize(
    "record", [{"text": "\udcff"}, {"object": object()}, NoTextError(), Order("a", NoTextError())]
)
def test_every_record_has_a_form_in_json(record):
    letter = DeadLetter(JOURNAL, 0, "an error", _as_json(record))
    msgspec.json.encode(letter)


@pytest.mark.parametrize("step", CommitStep)
def test_a_crash_at_a_step_ends_the_run(step):
    crash = CrashAt(step)
    with pytest.raises(InjectedCrashError):
        run_handler(declared(), ORDERS, on_step=crash)
    assert crash.has_crashed
    assert crash.steps[-1] is step


# -------------------------------------------- commits under the test's control


class SlowLog:
    """Recovery log whose appends end when the test says so."""

    def __init__(self):
        self.appends = []

    def append(self, contents, *, after):
        future = asyncio.get_running_loop().create_future()
        self.appends.append(future)
        return future


class Records:
    """Recorder that records nothing but the number of changes."""

    def __init__(self):
        self.ends = []

    def record(self, changes):
        return [bytes(len(changes))]

    def appended(self, end):
        self.ends.append(end)

    def failed(self, error):
        self.failure = error

    def rerecord_due(self):
        return None


class Feed(MemoryInput):
    """Input that a test adds messages to."""

    def __init__(self, messages, checkpoint):
        super().__init__(messages, checkpoint)
        self.added = asyncio.Event()

    async def arrived(self):
        while self._next >= len(self._messages):
            self.added.clear()
            await self.added.wait()


class World:
    """A runner with a feed and a log that the test ends."""

    def __init__(self, directory, application, **given):
        self.application = application
        self.messages, self.log, self.recorder, self.output = (
            [],
            SlowLog(),
            Records(),
            MemoryOutput(),
        )
        self.feed = None
        spec = cpb.ShardSpec(id="s", sources=[cpb.ShardSpec.Source(journal=JOURNAL)])
        handle = self.handle = shard.Shard("s", spec, directory, "test/s")
        self.store = application.new_store(handle)
        self.runner = Runner(
            application,
            handle,
            self.store,
            recorder=self.recorder,
            log=self.log,
            new_input=self.new_input,
            output=self.output,
            **given,
        )

    def new_input(self, checkpoint):
        self.feed = Feed(self.messages, checkpoint)
        return self.feed

    def add(self, *messages):
        self.messages.extend(messages)
        if self.feed is not None:
            self.feed.added.set()


async def until(holds):
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what is waited for is another's state
            await asyncio.sleep(0.001)


async def stopped(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_next_transaction_consumes_while_one_commits_and_commits_behind_it(tmp_path):
    async def scenario():
        application = Traced()
        world = World(tmp_path, application)
        world.add(ORDERS[0])
        task = asyncio.create_task(world.runner.run())
        await until(lambda: len(world.log.appends) == 1)
        world.add(*ORDERS[1:])
        await until(lambda: application.calls[-1] == "ada" and len(application.calls) == 7)
        assert application.calls == ["begin", "ada", "finalize", "finished", "begin", "bob", "ada"]
        assert world.output.published == []
        assert world.runner.progress.read_through == {JOURNAL: 0}
        world.log.appends[0].set_result(11)
        await until(lambda: len(world.log.appends) == 2 and len(application.futures) == 2)
        assert world.recorder.ends == [11]
        assert [m.customer for _, m in world.output.published] == ["ada", "all"]
        assert world.runner.progress.read_through == {JOURNAL: 1}
        assert not application.futures[1].done()
        world.log.appends[1].set_result(22)
        await until(lambda: world.runner.progress.read_through == {JOURNAL: 3})
        assert application.futures[1].result(0) is None
        await stopped(task)

    run(scenario())


@pytest.mark.parametrize("kind", [Traced, TracedAsync])
@pytest.mark.parametrize("when", ["before", "open", "committing", "idle"])
def test_a_further_source_is_read_after_the_current_transaction(kind, when, tmp_path):
    """The input before it ends: what it has read is committed once, and nothing is left out."""
    spec = cpb.ShardSpec(
        id="s", sources=[cpb.ShardSpec.Source(journal=name) for name in ("a/more", JOURNAL)]
    )

    async def scenario():
        application = kind()
        world = World(tmp_path, application, min_txn_s=0.2 if when == "open" else 0.0)
        if when == "before":
            world.runner.change_spec(spec)
        world.add(ORDERS[0])
        task = asyncio.create_task(world.runner.run())
        if when == "open":
            await until(lambda: application.calls == ["begin", "ada"])
            world.runner.change_spec(spec)
            assert world.handle.journals == (JOURNAL,)
        await until(lambda: len(world.log.appends) == 1)
        if when == "committing":
            world.runner.change_spec(spec)
            assert world.handle.journals == (JOURNAL,)
            world.add(ORDERS[1])  # left to the next input
        world.log.appends[0].set_result(11)
        await until(lambda: world.runner.progress.read_through.get(JOURNAL) == 1)
        if when == "idle":
            await until(lambda: world.runner.is_idle)
            world.runner.change_spec(spec)
            world.runner.change_spec(spec)
        assert world.runner.progress.read_through == {JOURNAL: 1, "a/more": 0}
        await until(lambda: world.handle.journals == ("a/more", JOURNAL))
        if when != "committing":
            world.add(ORDERS[1])
        await until(lambda: len(world.log.appends) == 2)
        world.log.appends[1].set_result(22)
        await until(lambda: world.runner.progress.read_through.get(JOURNAL) == 2)
        assert [name for name in application.calls if name in {"ada", "bob"}] == ["ada", "bob"]
        world.runner.change_spec(spec)  # of the same sources
        assert not world.runner._consumer.ends_input
        await stopped(task)

    run(scenario())


def test_a_store_that_does_not_overlap_waits_for_its_commit(tmp_path):
    class Remote(JsonStore):
        overlaps_commit = False
        finished_on = None

        def finish_commit(self):
            self.finished_on = threading.get_ident()

    async def scenario():
        application = Traced()
        application.store = Remote
        world = World(tmp_path, application)
        world.add(ORDERS[0])
        task = asyncio.create_task(world.runner.run())
        await until(lambda: len(world.log.appends) == 1)
        world.add(*ORDERS[1:])
        await asyncio.sleep(0.05)  # would be enough to consume
        assert application.calls == ["begin", "ada", "finalize", "finished"]
        assert world.store.finished_on is None
        world.log.appends[0].set_result(11)
        await until(lambda: len(world.log.appends) == 2)
        assert world.store.finished_on not in {None, threading.get_ident()}
        await stopped(task)

    run(scenario())


def test_a_commit_that_fails_fails_the_shard_and_acknowledges_nothing(tmp_path):
    async def scenario():
        application = Traced()
        world = World(tmp_path, application)
        world.add(*ORDERS)
        task = asyncio.create_task(world.runner.run())
        await until(lambda: len(world.log.appends) == 1)
        world.log.appends[0].set_exception(UnavailableError("fenced"))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(UnavailableError, match="fenced"):
                await task
        assert isinstance(application.futures[0].exception(0), UnavailableError)
        assert world.output.published == []
        with pytest.raises(ClosedError):
            await world.runner.progress.wait({JOURNAL: 3})

    run(scenario())


def test_a_shard_that_is_cancelled_acknowledges_nothing(tmp_path):
    async def scenario():
        application = Traced()
        world = World(tmp_path, application)
        world.add(*ORDERS)
        task = asyncio.create_task(world.runner.run())
        await until(lambda: len(world.log.appends) == 1)
        waiting = asyncio.create_task(world.runner.progress.wait({JOURNAL: 3}))
        await until(lambda: application.futures)
        await stopped(task)
        assert isinstance(application.futures[0].exception(0), ClosedError)
        assert world.output.published == []
        with pytest.raises(ClosedError):
            await waiting

    run(scenario())


@pytest.mark.parametrize("kind", [Traced, TracedAsync])
def test_a_transaction_that_is_cancelled_is_finished_with_a_failure(kind, tmp_path):
    async def scenario():
        application = kind()
        world = World(tmp_path, application, min_txn_s=WAIT_S)
        world.add(ORDERS[0])
        task = asyncio.create_task(world.runner.run())
        await until(lambda: application.calls == ["begin", "ada"])
        await stopped(task)
        assert application.calls == ["begin", "ada", "finished"]
        assert isinstance(application.futures[0].exception(0), ClosedError)
        assert world.log.appends == []

    run(scenario())


def test_a_transaction_whose_commit_cannot_start_is_finished_once(tmp_path):
    async def scenario():
        application = Traced()
        world = World(tmp_path, application)

        def refuse_acknowledgements(intents, after):
            raise UnavailableError("a journal has failed")

        world.output.acknowledge = refuse_acknowledgements
        world.add(*ORDERS)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(UnavailableError, match="a journal has failed"):
                await world.runner.run()
        assert application.calls.count("finished") == 1
        assert isinstance(application.futures[0].exception(0), UnavailableError)

    run(scenario())


def test_others_get_the_event_loop_while_coroutines_consume_a_long_batch(tmp_path):
    turns = []

    async def work(txn, order):
        turns.append(turned)
        time.sleep(0.001)  # noqa: ASYNC251 - computes

    turned = 0

    async def scenario():
        nonlocal turned
        world = World(tmp_path, declared(work))
        world.add(*[Order("ada", index) for index in range(100)])
        task = asyncio.create_task(world.runner.run())
        while not world.log.appends:
            await asyncio.sleep(0)
            turned += 1
        assert max(Counter(turns).values()) < 50
        await stopped(task)

    run(scenario())


def test_a_transaction_runs_for_its_least_time(tmp_path):
    async def scenario():
        world = World(tmp_path, Traced(), min_txn_s=0.2)
        task = asyncio.create_task(world.runner.run())
        await until(lambda: world.feed is not None)
        began = asyncio.get_running_loop().time()
        world.add(ORDERS[0])
        await until(lambda: len(world.log.appends) == 1)
        assert asyncio.get_running_loop().time() - began >= 0.2
        await stopped(task)

    run(scenario())


def test_changed_durations_hold_from_the_next_transaction_on(tmp_path):
    async def scenario():
        application = Traced()
        world = World(tmp_path, application, min_txn_s=WAIT_S)
        world.runner.machine.change_limits(min_s=0.0, max_s=1.0, waits_for_acks=True)
        world.add(ORDERS[0])
        task = asyncio.create_task(world.runner.run())
        await until(lambda: len(world.log.appends) == 1)
        world.add(ORDERS[1])
        await until(lambda: application.calls[-1] == "bob")
        world.runner.machine.change_limits(min_s=WAIT_S, max_s=1.0, waits_for_acks=True)
        world.log.appends[0].set_result(11)
        await until(lambda: len(world.log.appends) == 2)
        world.add(ORDERS[2])
        world.log.appends[1].set_result(22)
        await until(lambda: world.runner.progress.read_through == {JOURNAL: 2})
        assert len(world.log.appends) == 2
        await stopped(task)

    run(scenario())


def test_stored_acknowledgements_are_sent_before_the_first_commit(tmp_path):
    class Owing(JsonStore):
        def restore(self):
            super().restore()
            return Checkpoint({JOURNAL: 0}, ack_intents={"out/part-000": b"ack"})

    async def scenario():
        application = Traced()
        application.store = Owing
        world = World(tmp_path, application)
        stored, sent = concurrent.futures.Future(), []

        def send_stored(intents):
            sent.append(intents)
            return {"out/part-000": stored}

        world.output.send_stored = send_stored
        world.add(*ORDERS)
        task = asyncio.create_task(world.runner.run())
        await until(lambda: application.calls == ["begin", "ada", "bob", "ada"])
        assert sent == [{"out/part-000": b"ack"}]
        assert world.log.appends == []
        stored.set_result(pb.AppendResponse(commit=pb.Fragment(end=7)))
        await until(lambda: len(world.log.appends) == 1)
        await stopped(task)

    run(scenario())


def test_long_runs_of_bad_records_make_progress():
    bad = [Order("x", index) for index in range(40)]
    calls = itertools.count()

    def count(txn, order):
        next(calls)
        refuse("x")(txn, order)

    assert run_handler(declared(count, on_error="skip"), bad).state == {}
    assert next(calls) == len(bad)  # each is consumed once, and left out once


def test_a_commit_without_changes_of_files_is_no_longer_in_flight_when_it_has_ended(tmp_path):
    async def scenario():
        world = World(tmp_path, Traced())
        world.recorder.record = lambda _: []
        world.add(ORDERS[0])
        task = asyncio.create_task(world.runner.run())
        await until(lambda: len(world.log.appends) == 1)
        world.log.appends[0].set_result(11)
        await until(lambda: world.runner.progress.read_through == {JOURNAL: 1})
        assert world.recorder.ends == [11]
        await stopped(task)

    run(scenario())
