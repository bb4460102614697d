"""Applications of one function, and the generator of an application's shards.

The :class:`ShardGenerator` creates the shards of new source journals. It runs in every process of
the application, and works in the one that leads; and in ``gazctl shards generate``. Two that work
at a time are harmless: shards and logs are created only where there are none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdTransactionFailedError,
    EtcdUnavailableError,
    GazetteError,
    ValidationError,
)
from gazette_sdk.journals.changes import apply_in_transactions, list_named
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import format_selector, topic_hint
from gazette_sdk.retries import Outage, pause
from gazette_sdk.shard.application.application import (
    Application,
    Existing,
    Generated,
    OnError,
    Sources,
    generated,
)
from gazette_sdk.shard.transaction.event_time import IDLE_S, DeclaredTime
from gazette_sdk.shard.transaction.windows import Declared
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import WatchedList

M = TypeVar("M")
S = TypeVar("S")
Function = TypeVar("Function", bound=Callable[..., Any])


class HandlerApplication(Application[Any, Any]):
    """Application whose ``consume`` is a function.

    Args:
        function: function of a transaction and a message.
        declared: declared values, by their names as attributes of an application.

    Raises:
        ConfigurationError: a declared value cannot be used.
        ValidationError: the name, selector or name of a journal is malformed.
    """

    def __init__(self, function: Callable[..., Any], **declared: object) -> None:
        if not callable(function):
            raise ConfigurationError(
                f"{function!r} is no function; decorate a function of a transaction and a message"
            )
        self.function = function
        vars(self).update(declared, consume=function)
        super().__init__()

    def timer(self, function: Function) -> Function:
        """Declare the function that timers call, with the transaction and the timer.

        ::

            @rides.timer
            def quiet(txn: shard.Transaction, timer: shard.Timer) -> None:
                del txn.store[timer.key]

        Returns:
            The function.

        Raises:
            ConfigurationError: it is no such function, or the second one; or the store keeps no
                timers.
        """
        return self._define("on_timer", function, "a timer")

    def closed(self, function: Function) -> Function:
        """Declare the function of windows that the watermark has passed.

        ::

            @rides.closed
            def emit(txn: shard.Transaction, window: shard.Window[int]) -> None:
                txn.publish(Count(window.key, window.begin, window.state), mapping=TO_COUNTS)

        Returns:
            The function.

        Raises:
            ConfigurationError: it is no such function, or the second one; or the application has no
                windows.
        """
        return self._define("on_closed", function, "a window")

    def late(self, function: Function) -> Function:
        """Declare the function of messages that are late: of transaction, message and window.

        Returns:
            The function.

        Raises:
            ConfigurationError: as of :meth:`closed`.
        """
        return self._define("on_late", function, "a message and a window")

    def updated(self, *, every_s: float) -> Callable[[Function], Function]:
        """Declare the function of open windows that have changed.

        Args:
            every_s: time after a change of a window until it is called, in seconds.

        Returns:
            A decorator that returns the function.

        Raises:
            ConfigurationError: as of :meth:`closed`, or the time cannot be used.
        """

        def declare(function: Function) -> Function:
            return self._define("on_updated", function, "a window", update_every_s=every_s)

        return declare

    def _define(self, hook: str, function: Function, argument: str, **declared: object) -> Function:
        """Define a hook by a function, once."""
        if hook in vars(self):
            raise ConfigurationError(f"{self!r} has a function for `{hook}`; declare one")
        if not callable(function):
            raise ConfigurationError(
                f"{function!r} is no function; decorate a function of a transaction and {argument}"
            )
        before = dict(vars(self))
        vars(self).update(declared, **{hook: function})
        try:
            self._validate()
        except ConfigurationError:
            vars(self).clear()
            vars(self).update(before)
            raise
        return function

    def _place(self) -> tuple[str, str]:
        function = self.function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return getattr(function, "__module__", type(function).__module__), name

    def __repr__(self) -> str:
        return f"<application {'.'.join(self._place())}>"


def handler(
    *,
    message: type[Any],
    store: Any,
    sources: Sources | None = None,
    name: str = "",
    hot_standbys: int = 1,
    min_txn_s: float = 0.0,
    max_txn_s: float = 1.0,
    on_error: OnError = "fail",
    waits_for_acks: bool = True,
    event_time: DeclaredTime | None = None,
    lateness_s: float = 0.0,
    idle_s: float | None = IDLE_S,
    windows: Declared | None = None,
) -> Callable[[Callable[..., Any]], HandlerApplication]:
    """Make an application of a function.

    ::

        @shard.handler(message=Order, store=shard.RocksStore[str, int], sources="topic=orders")
        def totals(txn: shard.Transaction, order: Order) -> None:
            txn.store[order.customer] = txn.store.get(order.customer, 0) + order.cents

    Args:
        message: class of the messages.
        store: class of the store, or an object that makes one.
        sources: label selector of the journals that it reads, or their names. Each has a shard,
            now or when it is created. None: shards are created by hand.
        name: name of the application; by default ``module.function``.
        hot_standbys: number of processes that keep a copy of each shard's store up to date,
            besides the primary.
        min_txn_s: least duration of a transaction, in seconds.
        max_txn_s: duration after which a transaction consumes nothing more, in seconds.
        on_error: treatment of a record for which the function raises: ``"fail"`` the shard,
            ``"skip"`` the record, or ``shard.dead_letters("JOURNAL")``.
        waits_for_acks: keep a transaction open, up to ``max_txn_s``, while sequences of messages
            that it read are not acknowledged yet.
        event_time: returns the event time of a message, in Unix seconds or as a datetime with a
            zone; ``"published"`` for that of its publication, which windows have, too, where
            nothing is declared.
        lateness_s: how far out of order event times may be, in seconds.
        idle_s: time without a message after which a source is quiet, in seconds, so that event time
            passes there; None for never.
        windows: windows of event time: a ``shard.windows.Tumbling``, ``Hopping`` or ``Session``.

    Returns:
        A decorator that returns the application.

    Raises:
        ConfigurationError: a declared value cannot be used.
        ValidationError: the name, selector or name of a journal is malformed.
    """

    def decorate(function: Callable[..., Any]) -> HandlerApplication:
        return HandlerApplication(
            function,
            message=message,
            store=store,
            sources=sources,
            name=name,
            hot_standbys=hot_standbys,
            min_txn_s=min_txn_s,
            max_txn_s=max_txn_s,
            on_error=on_error,
            waits_for_acks=waits_for_acks,
            event_time=event_time,
            lateness_s=lateness_s,
            idle_s=idle_s,
            windows=windows,
        )

    return decorate


_log = logging.getLogger(__name__)

CreateShards = Callable[[Sequence[cpb.ShardSpec]], Awaitable[None]]
"""Function that creates shards in one transaction, each only if there is none of its id."""

CREATED_AT_ONCE = 50
"""Shards that are created in one transaction of Etcd."""


class ShardGenerator:
    """Generator of the shards of one application.

    Args:
        application: the application.
        transport: transport to the journals.
        selector: selector of its source journals; None if it has none that are known.
        existing: returns the shards that exist, with the journals that they read.
        create: creates shards. It raises :class:`EtcdTransactionFailedError` if one exists.
        leads: returns True while this process is to create shards; by default always.
        until_changed: waits until `leads` or `existing` may return something else; by default
            that is seldom, and looked at when journals change.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        transport: Transport,
        selector: pb.LabelSelector | None,
        *,
        existing: Callable[[], Awaitable[Existing]],
        create: CreateShards,
        leads: Callable[[], bool] = lambda: True,
        until_changed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._application = application
        self._transport = transport
        self._selector = selector
        self._existing = existing
        self._create = create
        self._leads = leads
        self._until_changed = until_changed
        self._outage = Outage(_log, f"creation of shards of {application.full_name}")

    async def run(self) -> None:
        """Create shards until cancelled; return at once if there is no selector.

        Raises:
            GazetteError: a watch has ended for good.
        """
        if self._selector is None:
            return
        try:
            await self._follow(self._selector)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _follow(self, selector: pb.LabelSelector) -> None:
        """Create shards whenever journals or shards change."""
        wake = asyncio.Event()
        async with (
            WatchedList(self._transport, selector) as watched,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(_repeat(watched.changed, wake))
            if self._until_changed is not None:
                tasks.create_task(_repeat(self._until_changed, wake))
            attempt = 0
            is_noted = False
            while True:
                await wake.wait()
                wake.clear()
                if watched.snapshot is None or not self._leads():
                    continue
                if not watched.snapshot.journals and not is_noted:
                    is_noted = True
                    _log.warning(
                        "no journal matches the sources of %s, %s; it waits for one: create it, or"
                        " check the sources and the address of the broker%s",
                        self._application.full_name,
                        format_selector(selector),
                        "".join(map(topic_hint, self._application.source_names)),
                    )
                try:
                    await self.generate([each.spec for each in watched.snapshot.journals])
                except GazetteError as error:
                    if not isinstance(error, EtcdTransactionFailedError):
                        self._outage.failed(error)
                    await pause(attempt)
                    attempt += 1
                    wake.set()
                else:
                    self._outage.ended()
                    attempt = 0

    async def generate(self, journals: Sequence[pb.JournalSpec]) -> None:
        """Create what journals want and what does not exist: first logs, then shards.

        Args:
            journals: specs of the journals.

        Raises:
            EtcdTransactionFailedError: another process has created some; list what exists again.
            ValidationError: the name of a journal is too long. All others have their shards.
            GazetteError: the creation failed.
        """
        existing = await self._existing()
        wanted, refused = Generated([], []), None
        for journal in sorted(journals, key=lambda spec: spec.name.encode()):
            try:
                found = generated(self._application, [journal], existing)
            except ValidationError as error:
                refused = refused or ValidationError(
                    f"the journal {journal.name} gets no shard, as its name or the application's is"
                    f" too long: {error}",
                    journal=journal.name,
                )
            else:
                wanted.shards.extend(found.shards)
                wanted.logs.extend(found.logs)
        logs = await list_named(self._transport, [log.name for log in wanted.logs])
        changes = [
            pb.ApplyRequest.Change(upsert=log, expect_mod_revision=0)
            for log in wanted.logs
            if log.name not in logs
        ]
        await apply_in_transactions(self._transport, changes)
        for begin in range(0, len(wanted.shards), CREATED_AT_ONCE):
            await self._create(wanted.shards[begin : begin + CREATED_AT_ONCE])
        if refused is not None:
            raise refused


async def _repeat(changed: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
    """Wake the generator after each change, until the watch ends for good."""
    while True:
        try:
            await changed()
        except (ClosedError, ConfigurationError, EtcdUnavailableError):
            raise  # every further call would raise it at once
        except GazetteError as error:
            _log.debug("the watch of journals goes on by itself: %s", error)
        else:
            wake.set()
