"""Transaction of a shard, as its handler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from gazette_sdk.errors import ClosedError, ConfigurationError

if TYPE_CHECKING:
    from gazette_sdk.message.envelope import Envelope
    from gazette_sdk.message.mapping import Mapping
    from gazette_sdk.shard.application.handles import Shard
    from gazette_sdk.shard.transaction.base import OutputLike

__all__ = ["DeferError", "Transaction"]

S = TypeVar("S")


class DeferError(BaseException):
    """Control flow of :meth:`Transaction.defer`: no failure, and not caught as one."""


class Transaction(Generic[S]):
    """Open transaction of a shard: messages consumed, and what they change, committed together.

    There is one object for all transactions of a shard, used on one thread at a time. What it
    publishes is visible to committed readers once the transaction is committed.

    Args:
        shard: the shard.
        store: its store.
        output: its output.

    Attributes:
        shard: the shard.
        store: its store; what a handler changes is committed with the transaction.
        envelope: envelope of the message that is consumed; None in other hooks.
    """

    __slots__ = ("_output", "_touched", "envelope", "is_open", "shard", "store")

    def __init__(self, shard: Shard, store: S, output: OutputLike) -> None:
        self.shard = shard
        self.store = store
        self.envelope: Envelope[Any] | None = None
        self.is_open = False
        self._output = output
        self._touched: Envelope[Any] | None = None  # the last message that published something

    def publish(self, message: Any, *, mapping: Mapping) -> None:
        """Publish a message: readers see it once the transaction is committed.

        Args:
            message: the message.
            mapping: chooses its journal, see :mod:`gazette_sdk.message.mapping`.

        Raises:
            ClosedError: no transaction is open.
            MappingError: it maps to no journal.
            ValidationError: it cannot be written in the journal's form.
            GazetteError: its journal has failed.
        """
        self._check_open()
        self._touched = self.envelope
        self._output.publish(message, mapping)

    def publish_batch(self, messages: Sequence[Any], *, mapping: Mapping) -> None:
        """Publish messages, encoded in bulk. See :meth:`publish`.

        Args:
            messages: the messages.
            mapping: chooses the journal of each.

        Raises:
            ClosedError: no transaction is open.
            MappingError: one maps to no journal.
            ValidationError: one cannot be written in its journal's form.
            GazetteError: a journal has failed.
        """
        self._check_open()
        self._touched = self.envelope
        self._output.publish_batch(messages, mapping)

    def append(self, journal: str, content: bytes) -> None:
        """Append bytes as they are, at least once, before the transaction commits.

        They are visible at once, and are appended again if the transaction is run again.

        Args:
            journal: name of the journal.
            content: whole frames.

        Raises:
            ClosedError: no transaction is open.
            GazetteError: the journal has failed.
        """
        self._check_open()
        self._touched = self.envelope
        self._output.append(journal, content)

    def defer(self) -> NoReturn:
        """Leave the message to the next transaction, which begins with it.

        Called before the message has changed or published anything.

        Raises:
            ConfigurationError: the message has published something, or there is none.
        """
        if self.envelope is None or self._touched is self.envelope:
            raise ConfigurationError(
                "a message is deferred before it has any effect; call `defer` first, in `consume`"
            )
        raise DeferError

    def _check_open(self) -> None:
        if not self.is_open:
            raise ClosedError(
                "no transaction is open: publish in `begin`, `consume` or `finalize`, before they"
                " return"
            )
