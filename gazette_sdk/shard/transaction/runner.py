"""Runner of the transactions of one shard: the shell of the machine.

A shard is one serial program. Everything that computes runs in one call at a time: on a worker
thread, or on the event loop for ``async def`` hooks. The event loop reads, appends and waits. The
next transaction consumes while the last one commits:

1. The worker consumes, finalizes, and commits to the store's local files.
2. The event loop queues the append to the recovery log, fenced, after all outputs, and at once
   every acknowledgement after the commit. So an acknowledgement stands in its journal before the
   messages of the next transaction, whenever the commit ends.
3. When the log's append is acknowledged, the store ends its commit, and the commit's future ends:
   the acknowledgements are sent.
4. When all of them are appended, progress is published, and the next transaction may commit.

A failure fails the commit's future. What waits for it is never sent; a successor reads the same
messages again, or finds the acknowledgements in the checkpoint.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    GazetteError,
    UnreadableStateError,
)
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import TABLE
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.stores.base import ExpiringStore, TimerStore
from gazette_sdk.shard.transaction.async_consume import AsyncConsumer
from gazette_sdk.shard.transaction.consume import Counts, MessageConsumer, OnStep, PreparedCommit
from gazette_sdk.shard.transaction.failure import BadRecords, HandlerFailedError, HookFailedError
from gazette_sdk.shard.transaction.machine import (
    Action,
    CommitStep,
    Current,
    Decision,
    Prior,
    TransactionMachine,
)
from gazette_sdk.shard.transaction.metrics import ShardMetrics
from gazette_sdk.shard.transaction.tables import Tables
from gazette_sdk.shard.transaction.timers import EventTime
from gazette_sdk.shard.transaction.traces import ShardTraces
from gazette_sdk.shard.transaction.transaction import (
    AppendFuture,
    CommitFuture,
    InputLike,
    LogLike,
    NewInput,
    OutputLike,
    RecorderLike,
    Shard,
    Transaction,
    new_commit,
)
from gazette_sdk.shard.transaction.windows import new_windows
from gazette_sdk.tracing import enabled
from gazette_sdk.transport.append.queue import AnyFuture
from gazette_sdk.user_code import acontained, check_done, is_cancellation, on_worker


class Progress:
    """Offsets up to which a shard's transactions are complete, and those who wait for them.

    Belongs to one event loop.

    Attributes:
        read_through: by source journal, the offset up to which messages were consumed by
            transactions that are committed and acknowledged.
        publish_at: by journal, the end of the last acknowledgement of this run.
    """

    def __init__(self) -> None:
        self.read_through: dict[str, int] = {}
        self.publish_at: dict[str, int] = {}
        self._waiters: list[tuple[Mapping[str, int], asyncio.Future[None]]] = []
        self._is_ended = False

    def start(self, sources: Mapping[str, int]) -> None:
        """Begin with the offsets of a checkpoint."""
        self.read_through = dict(sources)
        self._wake()

    def publish(
        self, read_through: Mapping[str, int], publish_at: Mapping[str, int] | None = None
    ) -> None:
        """Publish offsets of completed transactions; none falls after an earlier one."""
        _raise_offsets(self.read_through, read_through)
        _raise_offsets(self.publish_at, publish_at or {})
        self._wake()

    def has_reached(self, offsets: Mapping[str, int]) -> bool:
        """Return True if the offsets of all source journals are reached. Others do not count."""
        known = self.read_through
        return all(known[name] >= offsets[name] for name in known.keys() & offsets.keys())

    async def wait(self, offsets: Mapping[str, int]) -> None:
        """Wait until the offsets of all source journals are reached. The caller bounds the wait.

        Raises:
            ClosedError: the shard has ended before.
        """
        if self.has_reached(offsets):
            return
        if self._is_ended:
            raise _ended()
        waiter = asyncio.get_running_loop().create_future()
        entry = (offsets, waiter)
        self._waiters.append(entry)
        try:
            await waiter
        finally:
            if entry in self._waiters:
                self._waiters.remove(entry)

    def end(self) -> None:
        """Note that the shard has ended: whoever waits gets an error."""
        self._is_ended = True
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(_ended())
        self._waiters.clear()

    def _wake(self) -> None:
        for offsets, waiter in self._waiters:
            if not waiter.done() and self.has_reached(offsets):
                waiter.set_result(None)


def _raise_offsets(known: dict[str, int], offsets: Mapping[str, int]) -> None:
    for journal, offset in offsets.items():
        if offset > known.get(journal, -1):
            known[journal] = offset


def _ended() -> ClosedError:
    return ClosedError("the shard has ended; look at its status with `gazctl shards list`")


_log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_TIMEOUT_S = 1.0
"""Bound of asking for the write heads of a shard's sources."""


@dataclass(slots=True)
class PriorTransaction:
    """Transaction that commits or is acknowledged.

    Attributes:
        commit: future of the commit.
        outputs: appends that must succeed before the store ends its commit.
        logged: append to the recovery log, which waits for them; None without one.
        acknowledgements: appends of the acknowledgements, by journal.
        prepared: its local commit; None for acknowledgements of an earlier run.
        counts: numbers of what it consumed.
        acknowledged_count: acknowledgements that are appended.
    """

    commit: CommitFuture
    outputs: Collection[AnyFuture]
    logged: asyncio.Future[int] | None
    acknowledgements: Mapping[str, AppendFuture]
    prepared: PreparedCommit | None = None
    counts: Counts = Counts()  # noqa: RUF009 - immutable
    acknowledged_count: int = 0

    @property
    def durable(self) -> Collection[AnyFuture]:
        """Appends whose success makes the transaction durable."""
        return self.outputs if self.logged is None else [self.logged]


class Runner:
    """Runner of one shard's transactions, for one primary run.

    Belongs to one event loop. Call :meth:`restore`, then :meth:`run`, and :meth:`aclose` where
    `run` is not called.

    Args:
        application: the application; its hooks are called.
        shard: the shard, as hooks see it.
        store: its store, opened and not restored.
        recorder: recorder of the store's file changes; None without a recovery log.
        log: its recovery log; None without one.
        new_input: opens an input after a checkpoint.
        output: producer of this primary run. The runner closes it.
        workers: pool of threads; None for the event loop's own.
        min_txn_s: least duration of a transaction, in seconds; None for the application's.
        max_txn_s: greatest duration, in seconds; None for the application's.
        waits_for_acks: as of an application; None for the application's.
        on_step: called at each step of a commit, on the thread that does the step.
        on_completed: called on the event loop between two transactions.
        wall_clock: returns Unix seconds.

    Attributes:
        progress: what completed transactions have read and acknowledged.
        machine: the machine.
        store: the store.
        is_idle: True while it waits for input, and no transaction is open or under way.

    Raises:
        ConfigurationError: the store has coroutine functions, and the application has none.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        shard: Shard,
        store: Any,
        *,
        recorder: RecorderLike | None,
        log: LogLike | None,
        new_input: NewInput,
        output: OutputLike,
        workers: concurrent.futures.Executor | None = None,
        min_txn_s: float | None = None,
        max_txn_s: float | None = None,
        waits_for_acks: bool | None = None,
        on_step: OnStep | None = None,
        on_completed: Callable[[], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if not application.is_async and inspect.iscoroutinefunction(store.start_commit):
            raise ConfigurationError(
                f"the store {type(store).__name__} works with `async def` hooks only; define them"
                " so, or use another store"
            )
        self.progress = Progress()
        self.store = store
        self.is_idle = False
        self.machine = TransactionMachine(
            min_s=application.min_txn_s if min_txn_s is None else min_txn_s,
            max_s=application.max_txn_s if max_txn_s is None else max_txn_s,
            waits_for_acks=(
                application.waits_for_acks if waits_for_acks is None else waits_for_acks
            ),
            overlaps_commit=store.overlaps_commit,
        )
        self._application = application
        self._shard = shard
        self._output = output
        self._recorder = recorder
        self._log = log
        self._new_input = new_input
        self._workers = workers
        self._on_step: OnStep = on_step or _ignore_step
        self._traces: ShardTraces | None = None
        handler = None
        if (tracing := enabled()) is not None:
            self._traces = ShardTraces(tracing, application.full_name, shard.id, self._on_step)
            self._on_step = self._traces.on_step
            traced = self._traces.async_handler if application.is_async else self._traces.handler
            handler = traced(application.consume)
        self._on_completed = on_completed
        self._wall_clock = wall_clock
        self._metrics = ShardMetrics(shard.full_name, self._lag_bytes)
        self._bad = BadRecords(application.on_error, shard.id)
        self._txn: Transaction[Any] = Transaction(shard, store, output)
        if application.tables:
            self._txn.all_tables = Tables(application.tables, store, shard.topics)
        if application.has_event_time:
            self._txn.times = EventTime(
                self._consumed_journals(),
                application.event_time,
                lateness_s=application.lateness_s,
                idle_s=application.idle_s,
            )
        if application.windows is not None:
            assert self._txn.times is not None, "an application with windows has event time"
            self._txn.all_windows = new_windows(
                application.windows,
                store,
                self._txn.timers,
                self._txn.times,
                updates_s=application.update_every_s if application.has_on_updated else None,
            )
        self._consumer = MessageConsumer(
            application,
            self._txn,
            output,
            self.machine,
            recorder=recorder,
            bad=self._bad,
            on_step=self._on_step,
            handler=handler,
            wall_clock=wall_clock,
        )
        self._turn: Callable[[], Awaitable[PreparedCommit | None]] = self._turn_on_worker
        if application.is_async:
            self._turn = AsyncConsumer(self._consumer, self._on_worker, self._call_store).turn
        self._input: InputLike | None = None
        self._prior: PriorTransaction | None = None
        self._arrival: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._restored: Checkpoint | None = None
        self._next_spec: cpb.ShardSpec | None = None
        self._counted = Counts()

    # -------------------------------------------------------------------- life

    async def restore(self) -> Checkpoint:
        """Restore the store, and return its checkpoint.

        Raises:
            GazetteError: the store cannot be restored.
        """
        if self._next_spec is not None:
            self._shard.spec, self._next_spec = self._next_spec, None
            self._consumer.ends_input = False
        checkpoint: Checkpoint = await self._call_store("restore")
        if self._shard.reset not in {"", checkpoint.reset}:
            checkpoint = checkpoint.without(self._consumed_journals())
        if self._txn.times is not None:
            self._txn.times.restore(self._consumed_journals(), checkpoint)
        if self._txn.all_tables is not None:
            await self._on_worker(self._txn.all_tables.restore)
        if isinstance(self.store, ExpiringStore):
            await self._on_worker(self._consumer.open_expiry, self.store)
        if self._consumer.has_timers:
            await self._on_worker(self._consumer.restore_timers)
            waits = self._txn.timers.has_left_out
        else:
            waits = self._restored is None and await self._on_worker(_has_timers, self.store)
        if waits and self._restored is None:
            _log.warning(
                "the store of %s has timers or windows which %s does not declare: they wait until"
                " it does",
                self._shard.id,
                self._application.full_name,
            )
        self._restored = checkpoint
        offsets = checkpoint.offsets | self._shard.begin_offsets(checkpoint)
        self.progress.start(offsets)
        self._metrics.start(offsets)
        return checkpoint

    async def run(self) -> None:
        """Run transactions until cancelled.

        Raises:
            HandlerFailedError: the handler raised for a message, and the shard is to fail then.
            HookFailedError: another hook raised.
            GazetteError: an append failed for good, or the input, store or log failed.
        """
        try:
            checkpoint = self._restored or await self.restore()
            if self._traces is not None:
                self._traces.begun(checkpoint, self._wall_clock())
            await self._read_on(checkpoint)
            self._send_stored(checkpoint)
            while True:
                await self._step()
        except BaseException as error:
            try:
                await self._end_failed(error if isinstance(error, Exception) else self._ended())
            except HookFailedError:  # what failed first is raised
                _log.exception("a hook of shard %s failed after its failure", self._shard.id)
            raise
        finally:
            await self.aclose()

    def change_spec(self, spec: cpb.ShardSpec) -> None:
        """Read the sources of another spec after the current transaction, if they are others.

        On the event loop.
        """
        sources = {source.journal: source.min_offset for source in spec.sources}
        if self._next_spec is None and sources.keys() == set(self._shard.journals):
            return
        self._next_spec = spec
        self.progress.publish(
            {name: sources[name] for name in sources.keys() - set(self._shard.journals)}
        )
        self._consumer.ends_input = True
        self.machine.available = True  # so that the end of the input is noticed
        self._wake.set()

    def interrupt(self) -> None:
        """End the waits of a worker, before :meth:`run` is cancelled, which waits for its call."""
        self._output.interrupt()

    @property
    def next_timer_at(self) -> float:
        """Time at which the next timer may be due, in Unix seconds; infinity for none.

        While :attr:`is_idle`.
        """
        return self._consumer.next_timer_at

    @property
    def watermark_us(self) -> int:
        """Watermark of event time, in microseconds since 1970; 0 if there is none."""
        return 0 if self._txn.times is None else self._txn.times.watermark_us

    def look_at_clock(self) -> None:
        """Look for timers that are due, as the wall clock was set, while :attr:`is_idle`."""
        self._consumer.clock_was_set()
        self._wake.set()

    def running_call(self) -> str:
        """Return what the worker does, in words: which hooks, and for which record."""
        handler = self._application.full_name
        envelope = self._txn.envelope if self._txn.is_open else None
        if envelope is None:
            return f"a hook of {handler}, or its store, has not returned"
        return (
            f"the handler {handler} has not returned for the record of {envelope.journal} at offset"
            f" {envelope.begin}"
        )

    def _consumed_journals(self) -> list[str]:
        """Return the sources that are of no table."""
        of_tables = self._shard.labels(TABLE)
        return [journal for journal in self._shard.journals if journal not in of_tables]

    @property
    def write_heads(self) -> Mapping[str, int] | None:
        """By source, the last write head that a broker reported; None while none is read."""
        return None if self._input is None else self._input.write_heads

    def _lag_bytes(self, journal: str) -> int:
        """Return the bytes of a source that are not read through, as far as is known."""
        head = (self.write_heads or {}).get(journal, 0)
        return max(0, head - self.progress.read_through.get(journal, 0))

    async def _step(self) -> None:
        """Take in what has happened, and do what the machine decides."""
        await self._take_prior()
        self._take_arrival()
        await self._look_at_heads()
        decision = self.machine.decide(time.monotonic())
        if decision.action in {Action.CONSUME, Action.START_COMMIT}:
            await self._consume()
        elif decision.action is Action.WAIT:
            await self._wait(decision)
        elif decision.action is Action.ABORT:
            await self._abort()
        elif decision.action is Action.END:
            self.machine.restarted()
            await self._read_on(await self.restore())
        else:
            assert self.machine.failure is not None, "a failure was reported"
            raise self.machine.failure

    async def _look_at_heads(self) -> None:
        """Ask for the write heads of quiet sources, where a timer of event time waits for them."""
        quiet = self._consumer.quiet_sources()
        if not quiet:
            return
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await self._consumer.look_at_heads(quiet)
        except (GazetteError, TimeoutError) as error:
            _log.debug("the write heads of shard %s are not known: %s", self._shard.id, error)

    # ---------------------------------------------------------- consume, commit

    async def _consume(self) -> None:
        """Consume, and start the commit if one was prepared."""
        began = time.monotonic()
        self._consumer.preparing_s = 0.0
        try:
            prepared = await acontained(self._turn)
        except Exception as error:  # noqa: BLE001 - the machine decides what follows
            self.machine.failed(error, aborts=self._bad.may_leave_out(error))
            return
        self._metrics.turned(time.monotonic() - began, self._consumer.preparing_s)
        if prepared is not None:
            self._start_commit(prepared)
            assert self._prior is not None, "a commit has started"
            try:
                await self._call_finished(self._prior.commit)
            except HookFailedError as error:
                self.machine.failed(error)

    async def _turn_on_worker(self) -> PreparedCommit | None:
        return await self._on_worker(self._consumer.turn)

    def _start_commit(self, prepared: PreparedCommit) -> None:
        """Queue the commit and its acknowledgements. There is no ``await`` in between."""
        outputs = self._output.pending()
        logged = None
        if self._log is not None:
            logged = self._log.append(prepared.contents, after=outputs)
            self._metrics.recorded(sum(map(len, prepared.contents)))
        commit = new_commit()
        prior = PriorTransaction(commit, outputs, logged, {}, prepared)
        self._prior = prior
        intents = prepared.checkpoint.ack_intents
        prior.acknowledgements = self._output.acknowledge(intents, after=commit)
        counted, self._counted = self._counted, self._consumer.counts
        prior.counts = self._counted.since(counted)
        self.machine.commit_started()
        self._metrics.prior_changed(Prior.NONE, time.monotonic())
        self._on_step(CommitStep.LOG_SENT)
        self._wake_by([*prior.durable, *prior.acknowledgements.values()])

    async def _call_finished(self, commit: CommitFuture) -> None:
        """Call the hook ``finished``, with the future of the commit.

        Raises:
            HookFailedError: it raised.
        """
        try:
            await self._call_hook("finished", commit)
        except BaseException as error:
            if is_cancellation(error):
                raise
            raise HookFailedError("finished", error) from error

    async def _take_prior(self) -> None:
        """Tell the machine how far the prior transaction has come."""
        prior = self._prior
        if prior is None:
            return
        try:
            if self.machine.prior is Prior.COMMITTING and _have_succeeded(prior.durable):
                await self._finish_commit(prior)
            if self.machine.prior is Prior.ACKNOWLEDGING:
                self._take_acknowledgements(prior)
        except Exception as error:  # noqa: BLE001 - the shard ends with it
            self._fail_commit(error)
            self.machine.failed(error)

    async def _finish_commit(self, prior: PriorTransaction) -> None:
        """End a commit whose outputs and file changes are durable."""
        if self._recorder is not None and prior.logged is not None:
            self._recorder.appended(prior.logged.result())
        await self._call_store("finish_commit")
        self._on_step(CommitStep.COMMITTED)
        self.machine.committed()
        self._metrics.prior_changed(Prior.COMMITTING, time.monotonic())
        prior.commit.set_result(None)

    def _take_acknowledgements(self, prior: PriorTransaction) -> None:
        """Tell the machine once all acknowledgements are appended."""
        appends = prior.acknowledgements
        ended = [append for append in appends.values() if append.done()]
        if len(ended) > prior.acknowledged_count == 0 and _have_succeeded(ended):
            self._on_step(CommitStep.FIRST_ACK)
        prior.acknowledged_count = len(ended)
        if not _have_succeeded(appends.values()):
            return
        self._on_step(CommitStep.ACKNOWLEDGED)
        self.machine.acknowledged()
        self._prior = None
        if prior.prepared is not None:
            offsets = prior.prepared.checkpoint.offsets
            self.progress.publish(offsets, _ends_of(appends))
            self._metrics.prior_changed(Prior.ACKNOWLEDGING, time.monotonic())
            self._metrics.completed(offsets, prior.counts)
        if self._on_completed is not None:
            self._on_completed()

    def _send_stored(self, checkpoint: Checkpoint) -> None:
        """Append the acknowledgements of the restored checkpoint, before the first commit."""
        if not checkpoint.ack_intents:
            return
        commit = new_commit()
        commit.set_result(None)
        appends = self._output.send_stored(checkpoint.ack_intents)
        self._prior = PriorTransaction(commit, (), None, appends)
        self.machine.recovered()
        self._wake_by(list(appends.values()))

    # -------------------------------------------------------- failure and abort

    async def _abort(self) -> None:
        """Undo the current transaction, and read on after the last one."""
        failure = self.machine.failure
        assert isinstance(failure, HandlerFailedError | UnreadableStateError), "a bad record aborts"
        await self._end_failed(failure)
        self._bad.transaction_aborted()
        self._bad.add(failure)
        await self._output.roll_back()
        self.machine.restarted()
        await self._read_on(await self.restore())

    async def _end_failed(self, failure: BaseException) -> None:
        """Close the current transaction, and call the hook ``finished`` if it had begun.

        Raises:
            HookFailedError: the hook raised.
        """
        self._txn.is_open = False
        if self._traces is not None:
            self._traces.abandoned(failure)
        if self.machine.current is Current.EMPTY:
            return
        self.machine.abandoned()  # so that the hook is called once
        commit = new_commit()
        commit.set_exception(failure)
        await self._call_finished(commit)

    def _fail_commit(self, error: Exception) -> None:
        """Fail the future of an unfinished commit: nothing that waits for it is sent."""
        if self._traces is not None:
            self._traces.commit_failed(error)
        if self._prior is not None and not self._prior.commit.done():
            self._prior.commit.set_exception(error)
            if self._recorder is not None:
                self._recorder.failed(error)

    # ------------------------------------------------------------ input, waiting

    async def _read_on(self, checkpoint: Checkpoint) -> None:
        """Open the input after a checkpoint, in place of another one."""
        await self._close_input()
        self._input = self._new_input(checkpoint)
        self._bad.skipped = self._shard.skipped(checkpoint)
        if self._bad.passes_over or self._bad.skipped:
            self._input.on_undecodable = self._bad.pass_over
        self._consumer.read(self._input)
        self.machine.available = True  # so that the input is polled first
        self._counted = self._consumer.counts

    def _take_arrival(self) -> None:
        """Tell the machine that input has arrived, if it has."""
        arrival = self._arrival
        if arrival is not None and arrival.done():
            self._arrival = None
            arrival.result()
            self.machine.available = True

    async def _wait(self, decision: Decision) -> None:
        """Wait for what the decision names."""
        assert self._input is not None, "an input is opened first"
        if decision.is_idle:
            self.progress.publish(self._input.passed())
        if decision.waits_for_input and self._arrival is None:
            self._arrival = asyncio.create_task(self._input.arrived())
            self._arrival.add_done_callback(lambda _: self._wake.set())
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            timeout_s = None if decision.until is None else decision.until - began
            async with asyncio.timeout(timeout_s):
                self.is_idle = decision.is_idle
                await self._wake.wait()
        self.is_idle = False
        self._wake.clear()
        self._metrics.waited(self.machine.current, time.monotonic() - began)

    def _wake_by(self, futures: Collection[AnyFuture]) -> None:
        """Wake the runner when each of these has ended, from whichever thread."""
        wake = partial(_call_on, asyncio.get_running_loop(), self._wake.set)
        for future in futures:
            future.add_done_callback(wake)

    # -------------------------------------------------------------------- calls

    async def _call_hook(self, name: str, *arguments: object) -> None:
        """Call a hook of the transaction, where the application defines it."""
        hook = getattr(self._application, name)
        if getattr(hook, "__func__", None) is vars(Application)[name]:
            return
        if self._application.is_async:
            returned = await acontained(hook, self._txn, *arguments)
        else:
            returned = await self._on_worker(hook, self._txn, *arguments)
        check_done(returned, hook)

    async def _call_store(self, name: str, *arguments: object) -> Any:
        """Call the store: on the loop where it is a coroutine function, else on a worker."""
        function = getattr(self.store, name)
        if inspect.iscoroutinefunction(function):
            return await acontained(function, *arguments)
        return await self._on_worker(function, *arguments)

    async def _on_worker(self, function: Callable[..., T], *arguments: object) -> T:
        return await on_worker(self._workers, function, *arguments)

    async def _close_input(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.cancel()
            await asyncio.wait([arrival])
        source, self._input = self._input, None
        if source is not None:
            await source.aclose()

    async def aclose(self) -> None:
        """Fail what is not committed, and close input and output. :meth:`run` ends with it."""
        self._fail_commit(self._ended())
        self.progress.end()
        self._metrics.end()
        try:
            await self._close_input()
        finally:
            await self._output.aclose()

    def _ended(self) -> ClosedError:
        return ClosedError(f"{self._shard.id} has ended before this commit")


def _has_timers(store: object) -> bool:
    return isinstance(store, TimerStore) and bool(store.timers_after(None, 1))


def _have_succeeded(futures: Collection[AnyFuture]) -> bool:
    """Return True if all have ended well.

    Raises:
        Exception: that of one that has failed.
    """
    all_ended = True
    for future in futures:
        if not future.done():
            all_ended = False
        elif future.cancelled():
            raise ClosedError(f"an append was cancelled: {future!r}")
        elif (error := future.exception()) is not None:
            raise error
    return all_ended


def _ends_of(appends: Mapping[str, AppendFuture]) -> dict[str, int]:
    """Return the end offsets of acknowledgements, by journal."""
    responses = {journal: append.result() for journal, append in appends.items()}
    return {name: response.commit.end for name, response in responses.items() if response}


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None], _: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the runner
        loop.call_soon_threadsafe(call)


def _ignore_step(_: CommitStep) -> None:
    """Do nothing."""
