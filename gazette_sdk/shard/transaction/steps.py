"""Steps of a transaction's commit, in their order. Tests stop a process at each of them."""

from __future__ import annotations

import enum

__all__ = ["CommitStep"]


class CommitStep(enum.Enum):
    """Step of a commit that has just been done."""

    CONSUMED = "its messages were consumed; `finalize` was not called"
    FINALIZED = "`finalize` has returned"
    CHECKPOINTED = "checkpoint and acknowledgements are built"
    LOCALLY_COMMITTED = "the store's files hold state and checkpoint"
    LOG_SENT = "the append to the recovery log, and the acknowledgements behind it, are queued"
    COMMITTED = "state and checkpoint are durable"
    FIRST_ACK = "the first acknowledgement is appended"
    ACKNOWLEDGED = "all acknowledgements are appended"
