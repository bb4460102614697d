"""Care of transaction logs, for operators: complete what is decided, and create what is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gazette_sdk.transport import loop as sdk_loop
from gazette_spark.connection import open_transport
from gazette_spark.transaction_log import TransactionLog
from gazette_spark.write_options import TRANSACTION_LOG, log_name

__all__ = ["complete", "create"]

T = TypeVar("T")


def create(
    writer: str,
    journals: str,
    *,
    after: int,
    address: str | None = None,
    transaction_log: str = TRANSACTION_LOG,
) -> None:
    """Create the log of a streaming query that is lost, or which the query never had.

    Args:
        writer: id of the query.
        journals: label selector of the journals that it writes.
        after: number of the last micro-batch whose messages are all written.
        address: URL of a broker; by default that of ``GAZETTE_ADDRESS``.
        transaction_log: the query's option ``transactionLog``.

    Raises:
        ConfigurationError: the log has records.
        GazetteError: a call failed.
    """
    _with_log(writer, journals, address, transaction_log, lambda log: log.create(after))


def complete(
    writer: str, *, address: str | None = None, transaction_log: str = TRANSACTION_LOG
) -> int | None:
    """Complete the last transaction of a writer, if it is decided and not done.

    The next write of the same writer does so, too.

    Args:
        writer: id of the query, ``txnAppId``, or ``batch`` for writes without one.
        address: URL of a broker; by default that of ``GAZETTE_ADDRESS``.
        transaction_log: the writer's option ``transactionLog``.

    Returns:
        The transaction's number; None if there was nothing to complete.

    Raises:
        JournalNotFoundError: the writer has no log.
        GazetteError: a call failed.
    """
    return _with_log(writer, "", address, transaction_log, lambda log: log.complete())


def _with_log(
    writer: str,
    journals: str,
    address: str | None,
    prefix: str,
    use: Callable[[TransactionLog], Awaitable[T]],
) -> T:
    async def work() -> T:
        async with open_transport(address) as transport:
            return await use(TransactionLog(transport, log_name(prefix, writer), journals))

    return sdk_loop.run(work())
