"""Problems of a cluster, as they follow from facts about it. Pure.

:func:`problems` is a table of checks. Each check is a function from :class:`Facts` to the problem
that they show, or none. A problem names one of its subjects, says how many others there are, and
has a command which shows more or mends it.

=========================  =========  =============================================================
check                      severity   found where
=========================  =========  =============================================================
``journals-waiting``       ERROR      journals wait for brokers that have their last bytes
``journals-unassigned``    ERROR      journals have no replica
``journals-no-primary``    ERROR      journals have replicas, and no primary
``journals-short``         WARNING    journals have fewer replicas than their specs ask for
``journals-single-zone``   WARNING    all replicas of journals are in one zone of several
``store-unhealthy``        ERROR      brokers cannot use a fragment store
``unstored-old``           WARNING    the oldest byte in no store is older than 15 minutes
``member-unreachable``     ERROR      a member that Etcd has does not answer
``token-refused``          WARNING    a member does not accept the token of the call
``lease-short``            WARNING    less than a third of a member's lease is left
``loop-lag``               WARNING    the event loop of a member was held for more than 0.5 s
``clock-skew``             WARNING    the clock of a member differs by more than 5 s
``keys-differ``            WARNING    brokers accept different keys
``shards-failed``          ERROR      shards have failed
``shards-no-primary``      WARNING    shards have no primary
``shards-lag``             WARNING    the first unread message of a shard is older than 60 s
``application-silent``     WARNING    an application does not answer, or none of its processes runs
``member-exiting``         INFO       a member drains
``versions-mixed``         INFO       members have different versions
=========================  =========  =============================================================
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.durations import SECOND_NS, format_duration

BROKER = "broker"
"""Component of members that are brokers."""

UNSTORED_AGE_S = 15 * 60.0
"""Age from which bytes that are in no store are a problem: twice that of the usual flush."""

LEASE_SHARE = 1 / 3
"""Part of its lease below which a member is about to lose it. It is renewed at two thirds."""

LOOP_LAG_S = 0.5
"""Lag of an event loop from which its member is too busy to answer others."""

CLOCK_SKEW_S = 5.0
"""Difference of clocks from which tokens are refused: verifiers allow as much."""

SHARD_LAG_S = 60.0
"""Age of an unread message from which its shard lags."""

NAMES_MAX = 8
"""Names that a text lists, at most."""


@dataclass(slots=True)
class JournalsOfState:
    """Journals of one state.

    Attributes:
        count: their number.
        first: name of the first of them.
        detail: what is known of that one, such as ``it has 1 of 3 replicas``.
    """

    count: int = 0
    first: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """Member, as Etcd and its own answer describe it.

    Attributes:
        member: the description.
        clock_ahead_s: seconds by which its clock is ahead of ours; None if it did not answer.
    """

    member: clpb.Member
    clock_ahead_s: float | None = None

    @property
    def name(self) -> str:
        """Zone and id of the member."""
        return f"{self.member.id.zone}/{self.member.id.suffix}"


@dataclass(slots=True)
class ApplicationFacts:
    """Application, as one of its processes shows it.

    Attributes:
        summary: its numbers.
        address: endpoint of the process that was asked; empty if none runs.
        failed: ids of shards that have failed, the first ones, each with its error.
        without_primary: ids of shards without a primary, the first ones.
        lagging: ids of shards that lag, the first ones, each with its lag in seconds.
        lagging_count: number of all of them.
    """

    summary: clpb.ReportResponse.Application
    address: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    without_primary: list[str] = field(default_factory=list)
    lagging: dict[str, float] = field(default_factory=dict)
    lagging_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a cluster, at one moment.

    Attributes:
        now_us: the time, in microseconds since 1970.
        journals: journals by state.
        members: members, brokers and processes of applications.
        stores: fragment stores.
        applications: applications.
    """

    now_us: int = 0
    journals: Mapping[clpb.JournalState, JournalsOfState] = field(default_factory=dict)
    members: Sequence[MemberFacts] = ()
    stores: Sequence[clpb.ReportResponse.Store] = ()
    applications: Sequence[ApplicationFacts] = ()

    @property
    def brokers(self) -> Sequence[MemberFacts]:
        """Members that are brokers."""
        return [each for each in self.members if each.member.component == BROKER]

    @property
    def answered(self) -> Sequence[MemberFacts]:
        """Members of this implementation that answered."""
        return [each for each in self.members if each.member.version]


def problems(facts: Facts) -> list[clpb.Problem]:
    """Return the problems of a cluster, the gravest first."""
    found = [problem for check in _CHECKS for problem in check(facts)]
    return sorted(found, key=lambda problem: -problem.severity)


# ---------------------------------------------------------------- journals

_LIST_REPLICAS = "gazctl journals list --rf --primary --replicas"

_JOURNAL_CHECKS = (
    (
        clpb.JOURNAL_WAITING,
        "journals-waiting",
        clpb.ERROR,
        "refuses appends until brokers with its last bytes are back",
        _LIST_REPLICAS,
    ),
    (
        clpb.JOURNAL_UNASSIGNED,
        "journals-unassigned",
        clpb.ERROR,
        "has no replica: no broker has room for it",
        "gazctl brokers list",
    ),
    (
        clpb.JOURNAL_NO_PRIMARY,
        "journals-no-primary",
        clpb.ERROR,
        "has replicas, and no primary that takes appends",
        _LIST_REPLICAS,
    ),
    (
        clpb.JOURNAL_SHORT,
        "journals-short",
        clpb.WARNING,
        "has fewer replicas than its spec asks for",
        "gazette allocator simulate",
    ),
    (
        clpb.JOURNAL_SINGLE_ZONE,
        "journals-single-zone",
        clpb.WARNING,
        "has all replicas in one zone, and is lost with it",
        "gazette allocator simulate",
    ),
)


def _journals(facts: Facts) -> Iterable[clpb.Problem]:
    for state, check, severity, text, command in _JOURNAL_CHECKS:
        of_state = facts.journals.get(state)
        if of_state is None or not of_state.count:
            continue
        detail = f" ({of_state.detail})" if of_state.detail else ""
        yield clpb.Problem(
            severity=severity,
            check=check,
            kind="journal",
            subject=of_state.first,
            others=of_state.count - 1,
            text=f"{of_state.first} {text}{detail}.",
            command=command,
        )


# ---------------------------------------------------------------- stores


def _stores(facts: Facts) -> Iterable[clpb.Problem]:
    for store in facts.stores:
        if store.HasField("healthy") and not store.healthy:
            yield clpb.Problem(
                severity=clpb.ERROR,
                check="store-unhealthy",
                kind="store",
                subject=store.url,
                text=f"Brokers cannot use the store {store.url}: {store.error}.",
                command=f"gazctl journals store-health {shlex.quote(store.url)}",
                since_us=store.since_us,
            )


def _unstored(facts: Facts) -> Iterable[clpb.Problem]:
    ages = [
        (each.member.oldest_unstored_s, each.member.oldest_unstored_journal)
        for each in facts.brokers
        if each.member.HasField("oldest_unstored_s")
    ]
    old = sorted((each for each in ages if each[0] > UNSTORED_AGE_S), reverse=True)
    if old:
        age_s, journal = old[0]
        yield clpb.Problem(
            severity=clpb.WARNING,
            check="unstored-old",
            kind="journal",
            subject=journal,
            others=len(old) - 1,
            text=f"{journal} has bytes of {_span(age_s)} ago that are in no store.",
            command=f"gazctl journals list --unstored --name {journal}",
            since_us=facts.now_us - round(age_s * 1e6),
        )


# ---------------------------------------------------------------- members


def _of_members(
    found: Sequence[MemberFacts],
    check: str,
    severity: clpb.Severity,
    text: Callable[[MemberFacts], str],
    command: str = "gazctl brokers list",
) -> Iterable[clpb.Problem]:
    """Yield one problem of members, which names the first of them."""
    if found:
        yield clpb.Problem(
            severity=severity,
            check=check,
            kind="member",
            subject=found[0].name,
            others=len(found) - 1,
            text=f"{found[0].name} {text(found[0])}.",
            command=command,
        )


def _unreachable(facts: Facts) -> Iterable[clpb.Problem]:
    found = [each for each in facts.members if each.member.error and not each.member.refuses_token]
    return _of_members(
        found,
        "member-unreachable",
        clpb.ERROR,
        lambda each: f"at {each.member.endpoint} does not answer: {each.member.error}",
    )


def _refusals(facts: Facts) -> Iterable[clpb.Problem]:
    found = [each for each in facts.members if each.member.refuses_token]
    return _of_members(
        found,
        "token-refused",
        clpb.WARNING,
        lambda _: "does not accept the token of this call, and is not in this report",
    )


def _leases(facts: Facts) -> Iterable[clpb.Problem]:
    found = [
        each
        for each in facts.answered
        if each.member.HasField("lease_left_s")
        and each.member.lease_left_s < LEASE_SHARE * each.member.lease_s
    ]
    return _of_members(
        found,
        "lease-short",
        clpb.WARNING,
        lambda each: (
            f"has {each.member.lease_left_s:.1f} s left of its lease of {each.member.lease_s:g} s:"
            " it does not reach Etcd, and is removed when the lease ends"
        ),
    )


def _loop_lags(facts: Facts) -> Iterable[clpb.Problem]:
    found = [each for each in facts.answered if each.member.loop_lag_s > LOOP_LAG_S]
    return _of_members(
        found,
        "loop-lag",
        clpb.WARNING,
        lambda each: (
            f"held its event loop for {each.member.loop_lag_s:.1f} s: it is too busy, or its"
            " machine is"
        ),
    )


def _clocks(facts: Facts) -> Iterable[clpb.Problem]:
    found = [
        each
        for each in facts.answered
        if each.clock_ahead_s is not None and abs(each.clock_ahead_s) > CLOCK_SKEW_S
    ]

    def text(each: MemberFacts) -> str:
        ahead_s = each.clock_ahead_s or 0.0
        where = "ahead of" if ahead_s > 0 else "late against"
        return (
            f"has a clock that is {_span(abs(ahead_s))} {where} the one that made this report:"
            " synchronize clocks by NTP"
        )

    return _of_members(found, "clock-skew", clpb.WARNING, text, "gazctl brokers list -o json")


def _exiting(facts: Facts) -> Iterable[clpb.Problem]:
    found = [each for each in facts.members if each.member.exiting]
    return _of_members(
        found,
        "member-exiting",
        clpb.INFO,
        lambda each: f"drains: {each.member.replicas} replicas are left to be moved",
    )


def _versions(facts: Facts) -> Iterable[clpb.Problem]:
    by_version: dict[str, MemberFacts] = {}
    for each in facts.answered:
        by_version.setdefault(each.member.version, each)
    if len(by_version) > 1:
        texts = [f"{each.name} has {version}" for version, each in sorted(by_version.items())]
        yield clpb.Problem(
            severity=clpb.INFO,
            check="versions-mixed",
            kind="cluster",
            subject=", ".join(sorted(by_version)),
            text=f"Members have different versions: {', '.join(texts[:NAMES_MAX])}.",
            command="gazctl brokers list",
        )


def _keys(facts: Facts) -> Iterable[clpb.Problem]:
    brokers = [each for each in facts.brokers if each.member.version]
    accepted = [frozenset(each.member.key_ids) for each in brokers]
    for each, its in zip(brokers, accepted, strict=True):
        missing = frozenset().union(*accepted) - its
        if missing:
            lacking = sum(len(other) < len(frozenset().union(*accepted)) for other in accepted)
            yield clpb.Problem(
                severity=clpb.WARNING,
                check="keys-differ",
                kind="member",
                subject=each.name,
                others=lacking - 1,
                text=f"{each.name} does not accept keys that other brokers accept: "
                f"{', '.join(sorted(missing)[:NAMES_MAX])}.",
                command="gazctl brokers list -o json",
            )
            return


# ---------------------------------------------------------------- applications


def _applications(facts: Facts) -> Iterable[clpb.Problem]:
    for application in facts.applications:
        yield from _application(application)


def _application(facts: ApplicationFacts) -> Iterable[clpb.Problem]:
    summary = facts.summary
    at = f" --consumer.address {facts.address}" if facts.address else ""
    list_shards = f"gazctl shards list{at}"
    if summary.error:
        yield clpb.Problem(
            severity=clpb.WARNING,
            check="application-silent",
            kind="application",
            subject=summary.name,
            text=f"The application {summary.name} does not answer: {summary.error}.",
            command=f"gazctl consumers list{at}",
        )
    if facts.failed:
        shard, error = next(iter(facts.failed.items()))
        yield clpb.Problem(
            severity=clpb.ERROR,
            check="shards-failed",
            kind="shard",
            subject=shard,
            others=summary.failed - 1,
            text=f"{shard} of {summary.name} has failed: {error}.",
            command=f"{list_shards} --errors",
        )
    if facts.without_primary:
        shard = facts.without_primary[0]
        yield clpb.Problem(
            severity=clpb.WARNING,
            check="shards-no-primary",
            kind="shard",
            subject=shard,
            others=summary.without_primary - 1,
            text=f"{shard} of {summary.name} has no primary: no process runs it.",
            command=f"{list_shards} --primary",
        )
    if facts.lagging:
        shard, lag_s = next(iter(facts.lagging.items()))
        yield clpb.Problem(
            severity=clpb.WARNING,
            check="shards-lag",
            kind="shard",
            subject=shard,
            others=facts.lagging_count - 1,
            text=f"{shard} of {summary.name} has not read messages of {_span(lag_s)} ago.",
            command=f"{list_shards} --lag",
        )


def _span(seconds: float) -> str:
    return format_duration(round(seconds) * SECOND_NS)


_CHECKS: tuple[Callable[[Facts], Iterable[clpb.Problem]], ...] = (
    _journals,
    _stores,
    _unstored,
    _unreachable,
    _refusals,
    _leases,
    _loop_lags,
    _clocks,
    _keys,
    _applications,
    _exiting,
    _versions,
)
