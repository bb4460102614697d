"""Applications of one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.shard.application.application import Application, OnError
from gazette_sdk.shard.application.sources import Sources
from gazette_sdk.shard.transaction.tables import Table
from gazette_sdk.shard.transaction.timers import IDLE_S, DeclaredTime
from gazette_sdk.shard.transaction.windows import Declared

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from gazette_sdk.shard.transaction.transaction import Shard, Transaction

Function = TypeVar("Function", bound=Callable[..., Any])
M = TypeVar("M")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class StoreMaker(Protocol[S_co]):
    """Object that makes the stores of an application."""

    def for_shard(self, shard: Shard) -> S_co:
        """Return the store of a shard."""


StoreOf: TypeAlias = Callable[[Path], S] | StoreMaker[S]
"""Declaration of a store: its class, a function of the shard's directory, or a maker."""


class HandlerOptions(TypedDict, total=False):
    """Options of :func:`handler`, as type checkers know them."""

    sources: Sources | None
    tables: Sequence[Table[Any]]
    name: str
    hot_standbys: int
    min_txn_s: float
    max_txn_s: float
    on_error: OnError
    waits_for_acks: bool
    event_time: DeclaredTime | None
    lateness_s: float
    idle_s: float | None
    windows: Declared | None


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


@overload
def handler(
    *,
    message: type[M],
    store: StoreOf[S],
    **options: Unpack[HandlerOptions],
) -> Callable[[Callable[[Transaction[S], M], Any]], HandlerApplication]: ...
@overload
def handler(
    *,
    message: TypeForm[M],
    store: StoreOf[S],
    **options: Unpack[HandlerOptions],
) -> Callable[[Callable[[Transaction[S], M], Any]], HandlerApplication]: ...
@overload
def handler(
    *,
    message: Mapping[str, object],
    store: StoreOf[S],
    **options: Unpack[HandlerOptions],
) -> Callable[[Callable[[Transaction[S], Any], Any]], HandlerApplication]: ...
def handler(
    *,
    message: Any,
    store: Any,
    sources: Sources | None = None,
    tables: Sequence[Table[Any]] = (),
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
        message: class of the messages, or a union of msgspec Structs with tags; of several topics,
            by their selectors.
        store: class of the store, or an object that makes one.
        sources: label selector of the journals that it reads, or their names. Each has a shard,
            now or when it is created. Of ``shard.partitions`` of several topics, the journals of
            one number have. None: shards are created by hand.
        tables: tables of further topics, which are joined with the sources; see ``shard.table``.
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
            tables=tables,
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
