"""Errors of shards: their recovery logs, stores and processes."""

from __future__ import annotations

from gazette_sdk.errors.base import GazetteError


class RecoveryError(GazetteError):
    """A recovery log cannot be played back, or continued.

    Remedy: if content of the log or hints were deleted, restore them from a backup. Hints are keys
    of Etcd: delete the primary ones to fall back to older ones. If the store reports changes that
    do not fit its files, correct the store. Nothing was appended.
    """


class FencedError(GazetteError):
    """Another process has taken over the shard, and this one cannot commit any more.

    Remedy: none is needed. The shard continues at its new primary, and this process stops its own.
    If no other process should run it, look for one with ``gazctl shards list``.
    """


class ShardStoreError(GazetteError):
    """The state of a shard cannot be read or written.

    Remedy: the text names the cause. The shard fails; ``gazctl shards unassign --failed`` recovers
    it elsewhere.
    """


class UnreadableStateError(ShardStoreError, TypeError):
    """A value of a shard's state would not be read again as it is.

    Remedy: put a value of the type that the store declares, without NaN and infinity where it is
    stored as JSON; or declare the type of the values. Nothing was committed. The record fails, or
    is left out as ``on_error`` says.
    """


_SHARD_STATUSES = (
    ("OK", ""),
    ("SHARD_NOT_FOUND", "check its id with `gazctl shards list`"),
    (
        "NO_SHARD_PRIMARY",
        "the shard is disabled, or too few consumer processes run; else try again",
    ),
    ("NOT_SHARD_PRIMARY", "transient: try again with a fresh route"),
    (
        "ETCD_TRANSACTION_FAILED",
        "the shard was changed meanwhile: list it again, and apply the change to that",
    ),
    ("SHARD_STOPPED", "its primary failed or moved: `gazctl shards list` shows its status"),
)
"""Statuses of the shard service and their remedies, by number."""


class ShardStatusError(GazetteError):
    """A consumer process answered with a status other than OK.

    Remedy: the text names it. A status that this version does not know: use a client as new as the
    process.

    Args:
        status: number of the status in the response.
        shard: id of the shard, if the call was about one.

    Attributes:
        code: the number.
        name: the status by name.
        shard: id of the shard; empty if the call was about several.
    """

    def __init__(self, status: int, *, shard: str = "") -> None:
        known = 0 <= status < len(_SHARD_STATUSES)
        self.name, remedy = _SHARD_STATUSES[status] if known else (f"status {status}", "")
        self.code = status
        self.shard = shard
        text = f"{shard}: {self.name}" if shard else self.name
        super().__init__(f"{text}; {remedy}" if remedy else text)
