"""Shard of this process: playback, store and transactions, as its life's table says (shard 5).

A standby plays the recovery log into a directory of its own, and follows it. The primary hands the
log off to itself, which fences its predecessor, opens the store that was restored so, and runs
transactions. An error of either fails the shard, with its text in Etcd; the store of a failed shard
stays readable until its assignment is removed.

:class:`StatusReports` writes a shard's status as the value of its assignment in Etcd (shard section
5). :class:`HintsWriter` stores the hints of what a primary recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import Counter as CounterMetric
from prometheus_client import Gauge

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace, ShardAssignment, ShardEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Put
from gazette_sdk.contexts import logged_context
from gazette_sdk.errors import (
    CallError,
    EtcdError,
    EtcdUnavailableError,
    FramingError,
    GazetteError,
    UnauthenticatedError,
)
from gazette_sdk.journals.changes import list_named
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.durations import to_seconds
from gazette_sdk.protocol.labels import CONTENT_TYPE, RECOVERY_LOG, value_of
from gazette_sdk.protocol.shard_spec import (
    recovery_log,
    reduce_status,
)
from gazette_sdk.retries import Outage, delay_s, retrying
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.consumer.lifecycle import Effect, Input, Lifecycle, State
from gazette_sdk.shard.recovery import hints as fsm_hints
from gazette_sdk.shard.recovery.hints import load_hints, store_recorded_hints, store_recovered_hints
from gazette_sdk.shard.recovery.log import RecoveryLog
from gazette_sdk.shard.recovery.player import Playback, Recovered
from gazette_sdk.shard.recovery.recorder import HINTS_PAUSE_S, HintsSchedule, Recorder
from gazette_sdk.shard.transaction.consume import OnStep
from gazette_sdk.shard.transaction.failure import at_record, error_of_code
from gazette_sdk.shard.transaction.input import ShardInputs
from gazette_sdk.shard.transaction.runner import Runner
from gazette_sdk.shard.transaction.transaction import Output, Shard
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.base import Transport
from gazette_sdk.user_code import acontained, described, encodable, exit_within, on_worker, text_of

_UP = Gauge(
    "gazette_shard_up", "Shards of this process by status; 1 for each.", ["shard", "status"]
)

_FAILURES = CounterMetric("gazette_shard_failures", "Failures of a shard here.", ["shard"])
_PRIMARY_CHANGES = CounterMetric(
    "gazette_shard_primary_changes", "Times that this process became a shard's primary.", ["shard"]
)

_shown: Counter[tuple[str, str]] = Counter()
"""Shards that show a series: one that ends late may share it with its successor."""


class ShardUp:
    """Status of one shard as a metric: there is one series while the shard is local.

    Args:
        shard: its id.
    """

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._status = ""

    def set(self, code: cpb.ReplicaStatus.Code) -> None:
        """Show a status in place of the one before."""
        self.remove()
        self._status = cpb.ReplicaStatus.Code.Name(code)
        _shown[self._shard, self._status] += 1
        _UP.labels(self._shard, self._status).set(1)

    def remove(self) -> None:
        """Show none any more."""
        if self._status:
            series, self._status = (self._shard, self._status), ""
            _shown[series] -= 1
            if not _shown[series]:
                del _shown[series]
                _UP.remove(*series)


ERROR_CHARACTERS_MAX = 2048
"""Longer texts of errors are cut: the values of all assignments are in every process' memory."""

_CUT = " ...[truncated]"

_log = logging.getLogger(__name__)


def failed_status(errors: Iterable[str]) -> cpb.ReplicaStatus:
    """Return the status of a shard that failed, with texts of bounded length."""
    return cpb.ReplicaStatus(
        code=cpb.ReplicaStatus.FAILED,
        errors=[
            text if len(text) <= ERROR_CHARACTERS_MAX else f"{text[:ERROR_CHARACTERS_MAX]}{_CUT}"
            for text in map(encodable, errors)
        ],
    )


def local_assignment(
    keyspace: ConsumerKeySpace, shard: str, local_id: pb.ProcessSpec.ID
) -> ShardAssignment | None:
    """Return the first assignment of a shard to a process; None if there is none."""
    for entry in keyspace.assignments(shard):
        if (entry.zone, entry.suffix) == (local_id.zone, local_id.suffix):
            return entry
    return None


class StatusReports:
    """Reports of one shard of this process.

    Args:
        etcd: takes them.
        keyspace: the mirror.
        shard: the shard's id.
        local_id: this process.
    """

    def __init__(
        self, etcd: Etcd, keyspace: ConsumerKeySpace, shard: str, local_id: pb.ProcessSpec.ID
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._shard = shard
        self._local_id = local_id

    async def report(self, status: cpb.ReplicaStatus) -> None:
        """Report a status, and wait until the mirror shows it.

        The new value is the old one reduced with ``status``: the code of an assignment never goes
        down. It tries again until it is cancelled, or the shard is not assigned to us any more;
        then its owner cancels the shard.
        """
        attempt = 0
        while (entry := local_assignment(self._keyspace, self._shard, self._local_id)) is not None:
            value = _reduced(entry.value, status)
            if value == entry.value:
                return
            try:
                if await self._write(entry, value):
                    return
            except EtcdError as error:
                _log.warning(
                    "status of a shard is not reported yet",
                    extra={"shard": self._shard, "err": str(error), "attempt": attempt},
                )
            await asyncio.sleep(delay_s(attempt))
            attempt += 1

    async def _write(self, entry: ShardAssignment, value: cpb.ReplicaStatus) -> bool:
        """Write a value; return False if the assignment was changed meanwhile."""
        result = await self._etcd.txn(
            (Compare.mod_revision(entry.key, entry.mod_revision),),
            (Put(entry.key, value.SerializeToString(), ignore_lease=True),),
        )
        if result.succeeded:
            await self._keyspace.wait_for_revision(result.revision)
        return result.succeeded


def _reduced(known: cpb.ReplicaStatus, status: cpb.ReplicaStatus) -> cpb.ReplicaStatus:
    """Return the reduction, in which an error that was reported already is not repeated."""
    fresh = [text for text in status.errors if text not in known.errors]
    return reduce_status([known, cpb.ReplicaStatus(code=status.code, errors=fresh)])


T = TypeVar("T")

AUTHOR_MAX = (1 << 32) - 1
"""Greatest number of a recorder."""

NAME_CHARACTERS_MAX = 48
"""Characters of a shard's id in the name of its directory, which has 255 bytes at most."""

USE_TIMEOUT_S = 10.0
"""Bound of the wait for calls that use the store, when a shard ends."""

END_NOTICE_S = 5.0
"""A longer wait for the running call of a handler, when a shard ends, is logged."""


@dataclass(frozen=True, slots=True)
class ShardParts:
    """Dependencies of a process' shards.

    Attributes:
        application: the application.
        transport: to the journals.
        etcd: takes statuses and hints.
        keyspace: mirror of Etcd.
        local_id: this process.
        workers: threads for hooks, stores and files.
        directory: directory below which each shard makes its own.
        lookups: bound of concurrent look-ups of hints and logs.
        openings: bound of stores that are opened at once.
        new_on_step: returns, for a shard's id, what its runner calls at each step of a commit.
        exits: ends the process in order, because user code raised KeyboardInterrupt or SystemExit.
    """

    application: Application[Any, Any]
    transport: Transport
    etcd: Etcd
    keyspace: ConsumerKeySpace
    local_id: pb.ProcessSpec.ID
    workers: Executor
    directory: Path
    lookups: asyncio.Semaphore
    openings: asyncio.Semaphore
    new_on_step: Callable[[str], OnStep] | None = None
    exits: Callable[[BaseException], None] = lambda _: None


class ShardStepError(GazetteError):
    """Error of a step of a shard's life. Its text begins with the step, and its cause says more."""


class LocalShard:
    """Shard that is assigned to this process, from its assignment to its end. On one event loop.

    Args:
        entry: its key.
        parts: what the process gives.

    Attributes:
        id: its id.
        create_revision: revision of Etcd at which the shard was created.
        spec: its current spec.
        is_primary: True if this process is the shard's primary.
        store: the open store of a primary; None before.
        handle: the shard as its application sees it; None before it is opened.
        status: what it reported last.
    """

    def __init__(self, entry: ShardEntry, parts: ShardParts) -> None:
        self.id = entry.id
        self.create_revision = entry.create_revision
        self.spec = entry.value
        self._item = entry
        self.is_primary = False
        self.store: Any = None
        self.handle: Shard | None = None
        self.status = cpb.ReplicaStatus(code=cpb.ReplicaStatus.IDLE)
        self._parts = parts
        self._log = recovery_log(entry.value)
        self._full_name = parts.keyspace.item_key(entry.id).decode()
        self._assignment: ShardAssignment | None = None
        self._lifecycle = Lifecycle()
        # It is made on a worker, so that a full disk fails this shard, and not the mirror of Etcd.
        tail = entry.id.rpartition("/")[2][:NAME_CHARACTERS_MAX]
        self._directory = parts.directory / f"{tail}-{secrets.token_hex(8)}"
        self._reports = StatusReports(parts.etcd, parts.keyspace, self.id, parts.local_id)
        self._to_report = asyncio.Event()
        self._up = ShardUp(self.id)
        self._failures = _FAILURES.labels(self._full_name)
        self._primary_changes = _PRIMARY_CHANGES.labels(self._full_name)
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self._playback: asyncio.Future[Playback] = loop.create_future()
        self._ready: asyncio.Future[bool] = loop.create_future()
        self._runner: Runner | None = None
        self._hints_writer: HintsWriter | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._use_count = 0
        self._unused = asyncio.Event()
        self._unused.set()

    # ---------------------------------------------------------- assignments

    def continues(self, item: ShardEntry, assignment: ShardAssignment, *, is_primary: bool) -> bool:
        """Return True if it continues under an assignment: the same one, or one of a lesser slot.

        An assignment of another create revision is a new one, unless it is a promotion.
        """
        del is_primary
        known = self._assignment
        assert known is not None, "it is updated when it is made"
        return self.create_revision == item.create_revision and (
            assignment.create_revision == known.create_revision or assignment.slot < known.slot
        )

    def update(
        self, item: ShardEntry, assignments: Sequence[ShardAssignment], *, is_primary: bool
    ) -> None:
        """Note the shard's keys. A promoted standby becomes the primary."""
        del assignments  # the mirror has ours
        self.spec, self._item = item.value, item
        if self._runner is not None:
            self._runner.machine.change_limits(
                min_s=to_seconds(item.value.min_txn_duration),
                max_s=to_seconds(item.value.max_txn_duration),
                waits_for_acks=not item.value.disable_wait_for_ack,
            )
            self._runner.change_spec(item.value)
        self._assignment = self._local_assignment() or self._assignment
        is_promoted = is_primary and not self.is_primary
        self.is_primary = is_primary
        if is_promoted and self._lifecycle.state in {State.BACKFILL, State.STANDBY}:
            _log.info("promoted", extra={"shard": self.id})
            self._run(self._lead(), "primary")

    def start(self) -> None:
        """Begin to play the log, and to lead if we are the primary."""
        _log.info("assigned", extra={"shard": self.id, "primary": self.is_primary})
        self._reporting = self._run(self._report(), "status")
        if self._log:
            self._advance(Input.STARTED)
            self._run(self._play(), "playback")
        else:
            self._advance(Input.STARTED_WITHOUT_LOG)
        if self.is_primary:
            self._run(self._lead(), "primary")

    # ---------------------------------------------------------- what calls see

    @property
    def read_through(self) -> Mapping[str, int]:
        """By source journal, the offset through which committed transactions have read."""
        return {} if self._runner is None else self._runner.progress.read_through

    @property
    def write_heads(self) -> Mapping[str, int] | None:
        """By source, the last write head that a broker reported; None while none is read."""
        if self._runner is None or self._lifecycle.state is not State.PRIMARY:
            return None
        return self._runner.write_heads

    @property
    def publish_at(self) -> Mapping[str, int]:
        """By journal, the end of the last acknowledgement of this run."""
        return {} if self._runner is None else self._runner.progress.publish_at

    @property
    def watermark_us(self) -> int:
        """Watermark of event time, in microseconds since 1970; 0 if there is none."""
        return 0 if self._runner is None else self._runner.watermark_us

    @property
    def recovery(self) -> tuple[int, int]:
        """Bytes of the log that are read, and an estimate of all; zeros unless it recovers."""
        if self._ready.done() or not self._playback.done() or self._playback.cancelled():
            return 0, 0
        playback = self._playback.result()
        return playback.bytes_read, max(playback.bytes_read, playback.bytes_to_read)

    async def wait_for_store(self) -> bool:
        """Wait until the primary's store is ready; return False if its run ended before that."""
        return await asyncio.shield(self._ready)

    async def wait_for_offsets(self, read_through: Mapping[str, int]) -> bool:
        """Wait until the shard has read through offsets of its sources; others do not count.

        Returns:
            False if the primary's run ended before that.
        """
        assert self._runner is not None, "the store is ready"
        progress = self._runner.progress
        try:
            await progress.wait(read_through)
        except GazetteError:
            return False
        return True

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Delay the destruction of the store while the context is open."""
        self._use_count += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._use_count -= 1
            if not self._use_count:
                self._unused.set()

    # ------------------------------------------------------------------- life

    def _advance(self, event: Input) -> None:
        """Take an input of the table, and report the status that it leads to."""
        effect = self._lifecycle.advance(event)
        if effect is Effect.PLAY:
            self._show(cpb.ReplicaStatus(code=cpb.ReplicaStatus.BACKFILL))
        elif effect is Effect.REPORT_STANDBY:
            self._show(cpb.ReplicaStatus(code=cpb.ReplicaStatus.STANDBY))
        elif effect is Effect.SERVE:
            self._show(cpb.ReplicaStatus(code=cpb.ReplicaStatus.PRIMARY))

    def _show(self, status: cpb.ReplicaStatus) -> None:
        if status.code >= self.status.code:
            self.status = status
            self._up.set(status.code)
            self._to_report.set()

    async def _report(self) -> None:
        """Write each status to Etcd. Later ones replace those that wait."""
        while True:
            await self._to_report.wait()
            self._to_report.clear()
            await self._reports.report(self.status)

    async def _play(self) -> None:
        """Play the log, until the primary has it handed off."""
        hints = await self._step("beginRecovery", self._load_hints())
        await self._step("beginRecovery", self._on_worker(self._make_directory))
        playback = Playback(
            self._parts.transport, hints, self._directory, workers=self._parts.workers
        )
        self._run(self._await_tailing(playback), "tailing")
        self._playback.set_result(playback)
        await self._step("playLog", playback.run())

    async def _load_hints(self) -> rpb.FSMHints:
        """Return the hints to play. Check that the log is one."""
        parts = self._parts
        stored = await self._step(
            "GetHints", self._retried("hints", lambda: load_hints(parts.etcd, self.spec))
        )
        found = await self._step(
            "fetching log spec",
            self._retried("log", lambda: list_named(parts.transport, [self._log])),
        )
        if self._log not in found:
            raise ShardStepError(
                f"fetching log spec: named journal does not exist ({self._log}); without it the "
                "shard's state is lost: create it anew to begin with an empty one, and `gazctl "
                "shards unassign` the shard",
                journal=self._log,
            )
        content_type = value_of(found[self._log].spec.labels, CONTENT_TYPE)
        if content_type != RECOVERY_LOG:
            raise GazetteError(
                f"the journal {self._log} has the content type {content_type!r}, and a recovery "
                f"log has {RECOVERY_LOG!r}: change its label, or the shard's log prefix",
                journal=self._log,
            )
        return fsm_hints.choose(stored.primary, stored.backups, self._log)

    async def _await_tailing(self, playback: Playback) -> None:
        """Note when the log is played, and log how far it is until then."""
        await RecoveryProgress(self.id, playback).run()
        self._advance(Input.TAILING)

    async def _lead(self) -> None:
        """Take over, open the store, and run transactions."""
        self._primary_changes.inc()
        self._advance(Input.PROMOTED)
        async with contextlib.AsyncExitStack() as closing:
            recovered: Recovered | None = None
            recorder: Recorder | None = None
            log: RecoveryLog | None = None
            if self._log:
                author = 1 + secrets.randbelow(AUTHOR_MAX)
                playback = await asyncio.shield(self._playback)
                recovered = await self._step("completeRecovery", playback.hand_off(author))
                hints = recovered.fsm.hints(recovered.log)
                recorder = Recorder(
                    recovered.fsm, log=self._log, author=author, write_head=recovered.write_head
                )
                appends = AppendService(self._parts.transport)
                closing.push_async_callback(appends.aclose)
                log = RecoveryLog(appends.appender(self._log), self._log, author)
                if recorder.opening:
                    recorder.appended(await log.take_over(recorder.opening))
            self._advance(Input.RECOVERED)
            async with self._parts.openings:
                runner = await self._open(recorder, log, closing)
                restoring = runner.restore()
                await self._step("completeRecovery: store.RestoreCheckpoint", restoring)
            if recovered is not None and self._has_own_log(recovered.log):
                await store_recovered_hints(
                    self._parts.etcd, self._item, hints, self._local_assignment
                )
            self._advance(Input.RESTORED)
            if not self._ready.done():
                self._ready.set_result(True)
            await self._step("runTransactions", runner.run())

    async def _open(
        self,
        recorder: Recorder | None,
        log: RecoveryLog | None,
        closing: contextlib.AsyncExitStack,
    ) -> Runner:
        """Open the store, and make the runner of its transactions."""
        parts = self._parts
        application = parts.application
        handle = self.handle = Shard(
            id=self.id,
            spec=self.spec,
            directory=self._directory,
            full_name=self._full_name,
            transport=parts.transport,
        )
        await self._step("newStore", self._on_worker(self._new_store, handle))
        if recorder is not None:
            self._hints_writer = HintsWriter(recorder, self._store_hints)
            closing.push_async_callback(self._hints_writer.aclose)
        spec = self.spec  # of now: `update` does not change a runner that is not made yet
        inputs = ShardInputs(application, parts.transport, handle.topics)
        runner = self._runner = Runner(
            application,
            handle,
            self.store,
            recorder=recorder,
            log=log,
            new_input=lambda checkpoint: inputs.open(handle.spec, checkpoint),
            output=Output(parts.transport),
            workers=parts.workers,
            min_txn_s=to_seconds(spec.min_txn_duration),
            max_txn_s=to_seconds(spec.max_txn_duration),
            waits_for_acks=not spec.disable_wait_for_ack,
            on_step=None if parts.new_on_step is None else parts.new_on_step(self.id),
            on_completed=self._completed,
        )
        runner.change_spec(spec)  # it may have changed since the shard was opened
        closing.push_async_callback(runner.aclose)
        return runner

    def _new_store(self, handle: Shard) -> None:
        """Make the store. On a worker: it is kept, to be destroyed, also if no one waits for it."""
        self._make_directory()
        self.store = self._parts.application.new_store(handle)

    def _make_directory(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _completed(self) -> None:
        """Store hints if they are due, between two transactions."""
        if self._hints_writer is not None:
            self._hints_writer.consider(
                is_idle=lambda: self._runner is not None and self._runner.is_idle
            )

    async def _store_hints(self, hints: rpb.FSMHints) -> None:
        assignment = self._local_assignment()
        if assignment is not None and self._has_own_log(hints.log):
            await store_recorded_hints(self._parts.etcd, self._item, hints, assignment)

    def _has_own_log(self, log: str) -> bool:
        """Return True if a log is still the shard's own: a changed spec may name another, or none.

        Hints of another log under the shard's keys would fail its next recovery.
        """
        return log == recovery_log(self.spec)

    # -------------------------------------------------------------- end, failure

    def stopping(self) -> None:
        """End the waits of calls: they resolve the shard again."""
        if not self._ready.done():
            self._ready.set_result(False)
        if self._runner is not None:
            self._runner.progress.end()

    async def shut_down(self) -> None:
        """Cancel everything, wait for running calls, and remove the store. May be called twice."""
        self._lifecycle.advance(Input.CANCELLED)
        self.stopping()
        tasks = list(self._tasks)
        self._cancel(tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=END_NOTICE_S)
            if not all(task.done() for task in tasks):
                _log.warning(
                    "a shard cannot end yet: %s", self.running_call(), extra={"shard": self.id}
                )
            await asyncio.wait(tasks)
        try:
            async with asyncio.timeout(USE_TIMEOUT_S):
                await self._unused.wait()
        except TimeoutError:
            _log.warning(
                "the store of %s is closed under %d calls, which have used it for %.0f s more",
                self.id,
                self._use_count,
                USE_TIMEOUT_S,
                extra={"shard": self.id},
            )
        self._playback.cancel()
        self._up.remove()
        store, self.store = self.store, None
        try:
            if store is not None:
                destroy = store.destroy
                if inspect.iscoroutinefunction(destroy):
                    await acontained(destroy)
                else:
                    await self._on_worker(destroy)
        finally:
            await self._on_worker(partial(shutil.rmtree, self._directory, ignore_errors=True))

    def _failed(self, error: BaseException) -> None:
        """Fail the shard, unless it has failed or is being stopped."""
        if self._lifecycle.is_ended:
            return
        self._lifecycle.advance(Input.ERROR)
        self._failures.inc()
        cause = error.__cause__ if isinstance(error, ShardStepError) else error
        _log.error(
            "shard %s failed: %s",
            self.id,
            error,
            extra={"shard": self.id},
            exc_info=error_of_code(cause),
        )
        text = text_of(error) or type(error).__name__
        if isinstance(cause, FramingError) and cause.journal is not None:
            text = at_record(text, cause.journal, cause.offset or 0)
        self._show(failed_status([text]))
        if exit_within(error) is not None:
            self._parts.exits(error)
        self.stopping()
        self._cancel(task for task in self._tasks if task is not self._reporting)

    def _cancel(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Cancel tasks, once the life has ended: what they raise does not count any more."""
        if self._runner is not None:
            self._runner.interrupt()
        for task in tasks:
            task.cancel()

    def running_call(self) -> str:
        """Return what the end of the shard waits for, in words."""
        if self._runner is None:
            return f"{self.id}: its store is being restored or opened"
        return f"{self.id}: {self._runner.running_call()}"

    # ------------------------------------------------------------------ parts

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(
            acontained(_awaited, work),
            name=f"{name} of {self.id}",
            context=logged_context(shard=self.id),
        )
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._failed(GazetteError(f"{task.get_name()} was cancelled, by code that runs in it"))
        elif (error := task.exception()) is not None:
            self._failed(error)

    def _local_assignment(self) -> ShardAssignment | None:
        return local_assignment(self._parts.keyspace, self.id, self._parts.local_id)

    async def _on_worker(self, function: Callable[..., T], *arguments: object) -> T:
        return await on_worker(self._parts.workers, function, *arguments)

    async def _retried(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Call until Etcd or the brokers answer; a few shards at a time."""

        async def limited() -> T:
            async with self._parts.lookups:
                return await call()

        outage = Outage(_log, f"look-up of the {what} of shard {self.id}")
        return await retrying(
            limited,
            (CallError, EtcdUnavailableError),
            final=(UnauthenticatedError,),
            outage=outage,
        )

    @staticmethod
    async def _step(name: str, work: Awaitable[T]) -> T:
        """Await a step of the shard's life, whose error then begins with its name."""
        try:
            return await work
        except Exception as error:
            text = text_of(error) if isinstance(error, GazetteError) else described(error)
            raise ShardStepError(f"{name}: {text}") from error


async def _awaited(work: Coroutine[Any, Any, None]) -> None:
    await work


class HintsWriter:
    """Writer of the primary hints of one run. On the event loop.

    Args:
        recorder: of the run.
        store: stores hints in Etcd.
    """

    def __init__(
        self, recorder: Recorder, store: Callable[[rpb.FSMHints], Awaitable[None]]
    ) -> None:
        self._recorder = recorder
        self._store = store
        self._schedule = HintsSchedule(time.monotonic(), recorder.write_head)
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def consider(self, *, is_idle: Callable[[], bool]) -> None:
        """Store hints if they are due, between two transactions; and once the shard is idle.

        Args:
            is_idle: returns True if no transaction is open or under way, and no worker runs.
        """
        self._write_if_due(is_idle=False)
        if self._timer is None:
            self._set_timer(is_idle)

    def _set_timer(self, is_idle: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HINTS_PAUSE_S, self._timer_fired, is_idle)

    def _timer_fired(self, is_idle: Callable[[], bool]) -> None:
        self._timer = None
        if is_idle():
            self._write_if_due(is_idle=True)
        if self._schedule.is_due(time.monotonic() + HINTS_PAUSE_S, self._head, 0, is_idle=True):
            # Not written, as the shard is busy, or the last ones were too recent: later then.
            self._set_timer(is_idle)

    @property
    def _head(self) -> int:
        return self._recorder.write_head

    def _write_if_due(self, *, is_idle: bool) -> None:
        recorder = self._recorder
        if self._writing is not None or not recorder.is_committed:
            return
        if self._schedule.is_due(
            time.monotonic(), self._head, recorder.bytes_live, is_idle=is_idle
        ):
            work = self._write(recorder.hints(), self._head)
            self._writing = asyncio.get_running_loop().create_task(work, name="hints")

    async def _write(self, hints: rpb.FSMHints, head: int) -> None:
        try:
            await self._store(hints)
        except EtcdError as error:
            # They are advice: without them recovery reads more. The next ones are soon due.
            self._schedule.failed(time.monotonic())
            _log.warning("hints of %s are not stored: %s", hints.log, error)
        else:
            self._schedule.stored(time.monotonic(), head)
        finally:
            self._writing = None

    async def aclose(self) -> None:
        """Store nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            writing = self._writing
            writing.cancel()
            await asyncio.wait([writing])


PERIOD_S = 5.0
"""Time between two lines. A recovery that takes less has one line, at its end."""


class RecoveryProgress:
    """Progress of one shard's recovery.

    Args:
        shard: its id.
        playback: of its log.
    """

    def __init__(self, shard: str, playback: Playback) -> None:
        self._shard = shard
        self._playback = playback
        self._began = time.monotonic()

    async def run(self) -> None:
        """Log progress until the log is played to its write head."""
        waiting = asyncio.ensure_future(self._playback.tailing.wait())
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=PERIOD_S)
                if not waiting.done():
                    _log.info("recovering", extra=self._figures())
        finally:
            waiting.cancel()
        _log.info("recovered", extra=self._figures())

    def _figures(self) -> dict[str, object]:
        """Return what was read and what is left."""
        playback = self._playback
        taken_s = time.monotonic() - self._began
        left_bytes = max(0, playback.bytes_to_read - playback.bytes_read)
        rate = playback.bytes_read / taken_s if taken_s else 0.0
        figures: dict[str, object] = {
            "shard": self._shard,
            "bytes_to_read": playback.bytes_to_read,
            "bytes_read": playback.bytes_read,
            "bytes_live": playback.bytes_live,
            "seconds": round(taken_s, 1),
        }
        if left_bytes and rate:
            figures["seconds_left"] = round(left_bytes / rate, 1)
        return figures
