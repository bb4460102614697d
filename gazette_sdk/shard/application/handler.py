"""Applications of one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.shard.application.application import Application, OnError, Sources

__all__ = ["HandlerApplication", "handler"]

M = TypeVar("M")
S = TypeVar("S")


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
        max_txn_s: duration behind which a transaction consumes nothing more, in seconds.
        on_error: treatment of a record for which the function raises: ``"fail"`` the shard,
            ``"skip"`` the record, or ``shard.dead_letters("JOURNAL")``.
        waits_for_acks: keep a transaction open, up to ``max_txn_s``, while sequences of messages
            that it read are not acknowledged yet.

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
        )

    return decorate
