"""Batching of checkpoints into transactions (allocator section 9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from gazette_sdk.cluster.allocator.converge import Checkpoint
from gazette_sdk.cluster.etcd_messages import Compare, Operation, TxnResult
from gazette_sdk.errors import EtcdError

__all__ = ["TXN_MAX", "BatchedTxn", "Commit"]

TXN_MAX = 128
"""Bound of comparisons, and of operations, of a transaction: Etcd's own default."""

Commit = Callable[[Sequence[Compare], Sequence[Operation]], Awaitable[TxnResult]]


class BatchedTxn:
    """Batch of checkpoints, as many as fit in one transaction.

    Args:
        commit: sends a transaction, as :meth:`Etcd.txn <gazette_sdk.cluster.etcd.Etcd.txn>`.
        fixed: comparisons of every transaction, which count for its bound.
        max_operations: bound of comparisons and of operations.

    Attributes:
        revision: revision of the last transaction that succeeded, 0 before.
    """

    def __init__(
        self, commit: Commit, fixed: Sequence[Compare], *, max_operations: int = TXN_MAX
    ) -> None:
        self.revision = 0
        self._commit = commit
        self._fixed = tuple(fixed)
        self._max_operations = max_operations
        self._compares = list(fixed)
        self._operations: list[Operation] = []

    async def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint. If it does not fit, send the batch first.

        Raises:
            EtcdError: see :meth:`flush`.
        """
        if not checkpoint.operations:
            assert not checkpoint.compares, "a checkpoint without operations compares nothing"
            return
        if (
            len(self._compares) + len(checkpoint.compares) > self._max_operations
            or len(self._operations) + len(checkpoint.operations) > self._max_operations
        ):
            await self.flush()
        self._compares += checkpoint.compares
        self._operations += checkpoint.operations

    async def flush(self) -> None:
        """Send the batch, unless it is empty.

        Raises:
            EtcdError: the comparisons did not hold, or Etcd failed. Earlier transactions stay.
        """
        if not self._operations:
            return
        compares, operations = self._compares, self._operations
        self._compares, self._operations = list(self._fixed), []
        result = await self._commit(compares, operations)
        if not result.succeeded:
            raise EtcdError("transaction checks did not succeed")
        self.revision = result.revision
