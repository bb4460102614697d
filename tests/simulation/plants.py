"""Bugs to plant into the product: each has to be found by the checker within a thousand seeds."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

from gazette_sdk.broker.append import append, common_case
from gazette_sdk.broker.append.machine import Checked, judge_preconditions
from gazette_sdk.broker.failover import decision as replacement
from gazette_sdk.broker.failover import failover as rebuilder
from gazette_sdk.broker.failover import pause_guard
from gazette_sdk.broker.fragments import persister
from gazette_sdk.broker.fragments.index import Summary
from gazette_sdk.broker.fragments.persister import Persister
from gazette_sdk.broker.recovery import etcd_history
from gazette_sdk.broker.recovery.custody import Custody
from gazette_sdk.broker.recovery.etcd_history import WithheldSpools
from gazette_sdk.broker.recovery.routes import LastRoutes
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.pipeline import Pipeline
from gazette_sdk.broker.spool.directory import JournalSpools
from gazette_sdk.broker.spool.files import CompletedSpool
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.cluster import verification as decision
from gazette_sdk.cluster import verification as verifier
from gazette_sdk.cluster.keyspace import Continuity
from gazette_sdk.cluster.verification import Input, State

__all__ = ["PLANTS"]

OLD_S = 300.0
"""Age of a spool that no run reaches with right clocks."""


def _acknowledge_early() -> None:
    """Acknowledge an append before its peers did."""

    async def acknowledged(*_: object) -> None:
        pass

    Pipeline.acknowledged = acknowledged  # type: ignore[method-assign]


def _reuse_offsets() -> None:
    """Begin a journal at offset 0 where its head is not known, whatever the stores have."""

    def judge(
        request: Any, terms: Any, registers: Any, spool: Any, index: Summary, **others: Any
    ) -> Checked:
        index = Summary(min(index.begin, spool.end), spool.end, index.mod_time)
        return judge_preconditions(request, terms, registers, spool, index, **others)

    append.judge_preconditions = judge
    common_case.judge_preconditions = judge
    JournalSpools.head = property(lambda _: None)  # type: ignore[method-assign, assignment]


def _forget_syncs() -> None:
    """Acknowledge an append with durability ``persisted`` before it is on disk."""

    async def sync(_: Spool) -> None:
        pass

    Spool._sync = sync  # type: ignore[method-assign]


def _read_early() -> None:
    """Show an append to readers before all replicas have it."""
    new_spool = Replica._new_spool

    def make(replica: Replica) -> Spool:
        spool = new_spool(replica)
        on_commit = spool._on_commit
        # An index that shows all that is committed is early by itself.
        acknowledge = getattr(replica.index, "acknowledge", None)

        def committed(fragment: Any, file: Any) -> None:
            on_commit(fragment, file)
            if acknowledge is not None:
                acknowledge(fragment.end)

        spool._on_commit = committed
        return spool

    Replica._new_spool = make  # type: ignore[method-assign]


def _believe_names() -> None:
    """Take an object of a fragment's name for the fragment."""
    persister._is_whole = lambda *_: True  # type: ignore[assignment]


def _believe_listings() -> None:
    """Continue behind what the stores list, whatever the last broker had stored."""
    LastRoutes.stored_end = lambda *_: 0  # type: ignore[method-assign, assignment]


def _believe_etcd() -> None:
    """Take any Etcd for the one that was seen: missing journals were deleted."""

    async def compare(*_: object) -> Continuity:
        return Continuity.SAME

    etcd_history.compare_history = compare


def _believe_older_routes() -> None:
    """Take the routes of an Etcd that went back for the last ones, where it has the journal."""

    async def claim(_: Custody) -> None:
        pass

    Custody._claim_older = claim  # type: ignore[method-assign]
    WithheldSpools._may_lack_route = lambda *_: False  # type: ignore[method-assign, assignment]


def _wait_for_leases() -> None:
    """Take an endpoint that accepts and closes for one that answers."""
    for state in decision.DIALS:
        decision.VERIFICATION[state, Input.CLOSED] = State.UNDECIDED  # type: ignore[index]


def _keep_places() -> None:
    """Let a primary that reaches no broker wait for them."""

    def decide(*given: Any, **others: Any) -> replacement.Decision:
        found = replacement.decide(*given, **others)
        is_kept = found.action is replacement.Action.HAND_OVER
        return replacement.Decision(replacement.Action.NOTHING) if is_kept else found

    rebuilder.decide = decide


def _depose_unasked() -> None:
    """Depose a broker whose endpoint closes connections, whatever it answers in Etcd."""

    async def unanswered(_: object) -> Input:
        return Input.UNANSWERED

    async def confirmed(_: object) -> Input:
        return Input.CONFIRMED

    actions = verifier._Verification._ACTIONS
    actions[State.AWAIT_ANSWER] = unanswered  # type: ignore[index]
    actions[State.CONDEMN] = confirmed  # type: ignore[index]


def _trust_clocks() -> None:
    """Take a spool that seems to be old, or of the future, for one that was stored long ago."""
    complete = Persister.complete

    def completed(persister: Persister, spool: CompletedSpool) -> None:
        if abs(time.time() - spool.first_append_time.timestamp()) < OLD_S:
            complete(persister, spool)

    Persister.complete = completed  # type: ignore[method-assign]


def _miss_suspensions() -> None:
    """Look for pauses by a clock that stands still while a machine is suspended."""
    time.clock_gettime = lambda _: time.monotonic()  # as boot_s() of the lease and its guard
    clocks = types.SimpleNamespace(time=time.monotonic, clock_gettime=time.clock_gettime)
    pause_guard.time = common_case.time = clocks  # type: ignore[assignment, attr-defined]


PLANTS: dict[str, Callable[[], None]] = {
    "early-acknowledgements": _acknowledge_early,
    "offsets-again": _reuse_offsets,
    "no-sync": _forget_syncs,
    "early-reads": _read_early,
    "names-of-objects": _believe_names,
    "late-listings": _believe_listings,
    "any-etcd": _believe_etcd,
    "older-routes": _believe_older_routes,
    "leases-behind-proxies": _wait_for_leases,
    "kept-places": _keep_places,
    "unasked-deposals": _depose_unasked,
    "trusted-clocks": _trust_clocks,
    "suspensions-unnoticed": _miss_suspensions,
}
"""All planted bugs, by name."""
