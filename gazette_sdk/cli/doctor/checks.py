"""Checks of a cluster, as a table. Pure.

:func:`diagnose` makes all of them over :class:`~gazette_sdk.cli.doctor.facts.Facts`. Each check has
a name, says what it looks at and why that matters, and yields evidence of what is wrong. A check
whose source is missing is unknown. Problems that a broker's report has are taken as they are: the
checks of `gazctl report` are not made again here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from gazette_sdk.cli.doctor.facts import Facts, JournalFacts, Source
from gazette_sdk.cli.formats import iec_bytes
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import PASS_THROUGH_KEY
from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.protocol.journal_spec import desired_replication, is_suspended, may_write
from gazette_sdk.protocol.names import is_local
from gazette_sdk.server.logging import redact

EVIDENCE_MAX = 8
"""Sentences of evidence that a finding has, at most. Further ones are counted."""

LATENCY_S = 0.25
"""Time of a read of Etcd from which changes of routes and leases suffer."""

QUOTA_WARNING, QUOTA_ERROR = 0.8, 0.95
"""Parts of Etcd's quota, at which all writes end."""

DEFRAGMENT_BYTES = 256 << 20
"""Free space in the database of Etcd from which a defragmentation is worth its pause."""

CLOCK_SKEW_S = 5.0
"""Difference of clocks that verifiers of tokens allow."""

DISK_ERROR_BYTES, DISK_WARNING_BYTES = 1 << 30, 8 << 30
DISK_WARNING_PART = 0.1
"""Free space of the disk of spools, or its part, below which appends are about to fail."""

SPOOL_AGE_S = 24 * 3600.0
"""Age of a spool from which its upload seems to fail: flushes take minutes."""

CERTIFICATE_S = 14 * 86400.0
"""Time before the end of a certificate from which it should be renewed."""

OPEN_FILES_PART = 0.8
"""Part of the limit of open files from which new connections and spools are in danger."""

LOG_BYTES, LOG_TIMES = 1 << 30, 4
"""A recovery log is far too long beyond these bytes, and so many times what a recovery reads."""

RECOVERY_BYTES = 10 << 30
"""Bytes of a log whose reading keeps a shard from running for minutes."""

BAD_ETCD = frozenset({"3.5.0", "3.5.1", "3.5.2"})
"""Versions of Etcd whose members may differ after a crash, by its own release notes."""


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing, and nothing wrong."""
    UNKNOWN = "unknown"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Found:
    """Evidence of something wrong.

    Attributes:
        text: one sentence.
        status: how grave it is; None for that of its check.
        command: what shows more, or mends it; empty for that of its check.
    """

    text: str
    status: Status | None = None
    command: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Check of facts.

    Attributes:
        name: its name.
        source: where its facts are from.
        status: how grave a finding is.
        what: what it looks at, as a sentence that holds if all is well.
        why: why it matters.
        command: what shows more, or mends it.
        find: yields evidence.
    """

    name: str
    source: Source
    status: Status
    what: str
    why: str
    command: str
    find: Callable[[Facts], Iterable[Found | str]]


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one check.

    Attributes:
        check: its name.
        status: ``ok``, ``note``, ``unknown``, ``warning`` or ``error``.
        what: what holds if all is well.
        evidence: what was found, or why nothing could be.
        why: why it matters.
        command: what shows more, or mends it.
    """

    check: str
    status: Status
    what: str
    evidence: Sequence[str]
    why: str
    command: str


_GRAVITY = [Status.OK, Status.NOTE, Status.UNKNOWN, Status.WARNING, Status.ERROR]


def diagnose(facts: Facts) -> list[Result]:
    """Return the outcome of all checks, the gravest first."""
    results = [_result(check, facts) for check in CHECKS]
    return sorted(results, key=lambda result: -_GRAVITY.index(result.status))


def exit_status(results: Iterable[Result]) -> int:
    """Return 0 if nothing is wrong, 1 for warnings, 2 for errors."""
    found = {result.status for result in results}
    return 2 if Status.ERROR in found else int(Status.WARNING in found)


def _result(check: Check, facts: Facts) -> Result:
    missing = facts.missing.get(check.source)
    if missing is not None:
        return _outcome(check, Status.UNKNOWN, [f"not checked: {missing}"], check.command)
    found = [each if isinstance(each, Found) else Found(each) for each in check.find(facts)]
    if not found:
        return _outcome(check, Status.OK, [], check.command)
    found.sort(key=lambda each: -_GRAVITY.index(each.status or check.status))
    texts = [each.text for each in found[:EVIDENCE_MAX]]
    if more := len(found) - len(texts):
        texts.append(f"and {more} more")
    command = found[0].command or check.command
    return _outcome(check, found[0].status or check.status, texts, command)


def _outcome(check: Check, status: Status, evidence: Iterable[str], command: str) -> Result:
    texts = [redact(text) for text in evidence]
    return Result(check.name, status, check.what, texts, check.why, redact(command))


# ---------------------------------------------------------------- of the report

_STATUSES = {clpb.ERROR: Status.ERROR, clpb.WARNING: Status.WARNING, clpb.INFO: Status.NOTE}


def _of_report(name: str, what: str, why: str, status: Status | None = None) -> Check:
    """Return the check of a kind of problem that a report has.

    Args:
        name: name of the check in the report.
        what: what holds if all is well.
        why: why it matters.
        status: how grave it is, if not as the report says.
    """

    def find(facts: Facts) -> Iterator[Found]:
        for problem in facts.report.problems:
            if problem.check == name:
                others = f" ({problem.others} more)" if problem.others else ""
                grave = status or _STATUSES.get(problem.severity, Status.WARNING)
                yield Found(problem.text + others, grave, problem.command)

    return Check(name, Source.REPORT, Status.WARNING, what, why, "gazctl report", find)


_REPORTED = (
    _of_report(
        "journals-waiting",
        "No journal waits for brokers that have its last bytes",
        "its appends are refused until they are back: content that no other disk has must not be"
        " lost",
    ),
    _of_report(
        "journals-unassigned",
        "Each journal has a broker",
        "it can neither be read nor written",
    ),
    _of_report(
        "journals-no-primary",
        "Each journal has a primary",
        "its appends are refused",
    ),
    _of_report(
        "journals-short",
        "Each journal has as many replicas as its spec asks for",
        "the loss of further brokers loses what is not stored yet",
    ),
    _of_report(
        "journals-single-zone",
        "Each journal is in two zones where there are several",
        "the loss of one zone loses what is not stored yet",
    ),
    _of_report(
        "store-unhealthy",
        "Brokers can list, write and read their fragment stores",
        "appends stop when the spools are full, and content is on disks of brokers alone",
    ),
    _of_report(
        "unstored-old",
        "Content is stored within minutes",
        "only disks of brokers have it, and they fill up",
    ),
    _of_report(
        "member-unreachable",
        "Each member of Etcd answers",
        "its journals or shards do not move before its lease ends",
    ),
    _of_report(
        "token-refused",
        "Each member accepts the token of this call",
        "what it knows is not in this diagnosis, and its keys may not be those of the others",
    ),
    _of_report(
        "lease-short",
        "Leases are renewed in time",
        "a member whose lease ends loses all of its journals or shards at once",
    ),
    _of_report(
        "loop-lag",
        "Members have time for their calls",
        "calls wait, and leases are renewed late",
    ),
    _of_report(
        "clock-skew",
        "The clocks of members agree",
        "tokens are refused, and times of messages are wrong",
    ),
    _of_report(
        "keys-differ",
        "All brokers accept the same keys",
        "calls of clients and of brokers are refused at some of them",
    ),
    _of_report(
        "versions-mixed",
        "All members have the same version",
        "an upgrade that does not go on leaves the cluster between two versions",
        Status.WARNING,
    ),
    _of_report(
        "member-exiting",
        "No member drains",
        "it goes as soon as others have taken its journals or shards; so it should not last",
    ),
    _of_report(
        "shards-failed",
        "No shard has failed",
        "its messages are not processed until it is started again",
    ),
    _of_report(
        "shards-no-primary",
        "Each shard has a primary",
        "its messages are not processed",
    ),
    _of_report(
        "shards-lag",
        "Shards process messages within a minute",
        "results are late, and retention may remove messages before they are read",
    ),
    _of_report(
        "application-silent",
        "Each application answers",
        "the state of its shards is not known",
    ),
)


def _unknown_problems(facts: Facts) -> Iterator[Found]:
    known = {check.name for check in _REPORTED}
    for problem in facts.report.problems:
        if problem.check not in known:
            status = _STATUSES.get(problem.severity, Status.WARNING)
            yield Found(f"{problem.check}: {problem.text}", status, problem.command)


# ---------------------------------------------------------------- Etcd


def _etcd_quorum(facts: Facts) -> Iterator[Found]:
    members = facts.etcd.members
    down = [each for each in members if each.error]
    spare = (len(members) - 1) // 2 - len(down)
    for each in down:
        status = Status.ERROR if spare < 0 else Status.WARNING
        yield Found(f"{each.address} does not answer from here: {each.error}.", status)
    if len(members) == 1:
        yield Found("Etcd has a single member: its loss stops the cluster.", Status.NOTE)
    elif len(members) % 2 == 0:
        yield Found(
            f"Etcd has {len(members)} members: an even number survives no more losses than one"
            " less.",
            Status.NOTE,
        )


def _etcd_leader(facts: Facts) -> Iterator[str]:
    answered = [each for each in facts.etcd.members if not each.error]
    yield from (f"{each.address} knows no leader." for each in answered if not each.leader)
    if len({each.leader for each in answered if each.leader}) > 1:
        yield "Members of Etcd name different leaders."


def _etcd_alarms(facts: Facts) -> Iterator[str]:
    for each in facts.etcd.members:
        yield from (f"{each.address} reports {alarm}." for alarm in each.alarms)


def _etcd_versions(facts: Facts) -> Iterator[Found]:
    versions = {each.version: each.address for each in facts.etcd.members if each.version}
    if len(versions) > 1:
        yield Found(f"Members of Etcd have the versions {', '.join(sorted(versions))}.")
    for version in sorted(versions.keys() & BAD_ETCD):
        yield Found(
            f"Etcd {version} has a fault by which members may differ after a crash; upgrade it to"
            " 3.5.3 or later.",
            Status.NOTE,
        )


def _etcd_latency(facts: Facts) -> Iterator[str]:
    if facts.etcd.latency_s > LATENCY_S:
        yield f"A read of Etcd takes {facts.etcd.latency_s * 1000:.0f} ms, as the median of five."


def _etcd_quota(facts: Facts) -> Iterator[Found]:
    for each in facts.quotas:
        part = each.size_bytes / each.quota_bytes if each.quota_bytes > 0 else 0.0
        if part > QUOTA_WARNING:
            yield Found(
                f"The database of {each.address} has {iec_bytes(round(each.size_bytes))}, which is"
                f" {part:.0%} of its quota.",
                Status.ERROR if part > QUOTA_ERROR else Status.WARNING,
            )


def _etcd_fragmented(facts: Facts) -> Iterator[str]:
    for each in facts.quotas:
        free = each.size_bytes - each.in_use_bytes
        if free > DEFRAGMENT_BYTES and free > each.size_bytes / 2:
            yield (
                f"{iec_bytes(round(free))} of the {iec_bytes(round(each.size_bytes))} in the"
                f" database of {each.address} are free space."
            )


def _shared_stores(facts: Facts) -> Iterator[str]:
    for store, prefix in sorted(facts.etcd.shared_stores.items()):
        yield (
            f"{without_query(store)} has journals of the same names of the cluster {prefix} in this"
            " Etcd, too."
        )


def without_query(url: str) -> str:
    """Return a store's URL without its arguments, which may be secret."""
    return url.partition("?")[0]


# ---------------------------------------------------------------- members


def _own_clock(facts: Facts) -> Iterator[str]:
    if abs(facts.clock_ahead_s) > CLOCK_SKEW_S:
        place = "ahead of" if facts.clock_ahead_s > 0 else "late against"
        yield (
            f"The clock of {facts.broker} is {_span(abs(facts.clock_ahead_s))} {place} that of this"
            " machine."
        )


def _keys(facts: Facts) -> Iterator[Found]:
    for each in facts.members:
        if not each.version or is_local(each.endpoint):
            continue
        keys = set(each.key_ids)
        if not keys:
            yield Found(f"{_name(each)} at {each.endpoint} has no keys.", Status.ERROR)
        elif PASS_THROUGH_KEY in keys:
            yield Found(f"{_name(each)} at {each.endpoint} also serves calls without a token.")


def _room(facts: Facts) -> Iterator[str]:
    brokers = [each for each in facts.brokers if not each.exiting]
    if len(brokers) < 2:
        return
    room = sum(max(each.limit - each.replicas, 0) for each in brokers)
    for each in brokers:
        others = room - max(each.limit - each.replicas, 0)
        if each.replicas > others:
            yield (
                f"{_name(each)} has {each.replicas} replicas, and the other brokers have room for"
                f" {others}."
            )


def _zones(facts: Facts) -> Iterator[str]:
    zones = {each.id.zone for each in facts.brokers}
    if len(facts.brokers) > 1 and len(zones) == 1:
        yield f"All {len(facts.brokers)} brokers are in the zone {zones.pop()}."


def _disks(facts: Facts) -> Iterator[Found]:
    for each in facts.brokers:
        if not each.HasField("disk_free"):
            continue
        if each.disk_free < DISK_ERROR_BYTES:
            status = Status.ERROR
        elif each.disk_free < max(DISK_ERROR_BYTES, 2 * each.unstored):
            status = Status.WARNING
        else:
            continue
        unstored = f", and {iec_bytes(each.unstored)} not stored" if each.unstored else ""
        text = f"{_name(each)} has {iec_bytes(each.disk_free)} free for spools{unstored}."
        yield Found(text, status)


def _open_files(facts: Facts) -> Iterator[str]:
    for each in facts.processes:
        if each.open_files > OPEN_FILES_PART * each.open_files_max:
            yield (
                f"{each.name} has {each.open_files:.0f} of {each.open_files_max:.0f} files open."
            )


def _audit_journal(facts: Facts) -> Iterator[str]:
    for each in facts.processes:
        if each.audit_failing_s > 0:
            since = format_duration(round(each.audit_failing_s) * SECOND_NS)
            yield f"The audit journal of {each.name} has taken no records for {since}."
        if each.audit_dropped > 0:
            yield f"{each.audit_dropped:.0f} audit records are in the log of {each.name} only."


def _name(member: clpb.Member) -> str:
    return f"{member.id.zone}/{member.id.suffix}"


# ---------------------------------------------------------------- journals


def _of_journals(
    text: str, is_wrong: Callable[[JournalFacts], bool]
) -> Callable[[Facts], Iterator[str]]:
    """Return a function that yields a sentence for each journal of which something is wrong."""

    def find(facts: Facts) -> Iterator[str]:
        return (f"{each.spec.name} {text}." for each in facts.journals if is_wrong(each))

    return find


def _is_written(journal: JournalFacts) -> bool:
    """Return True unless the journal is read-only."""
    return may_write(journal.spec)


def _listed_replicas(facts: Facts) -> Iterator[str]:
    if Source.REPORT not in facts.missing:
        return  # it knows more
    for each in facts.journals:
        wanted = 0 if is_suspended(each.spec) else desired_replication(each.spec)
        if len(each.members) < wanted:
            yield f"{each.spec.name} has {len(each.members)} of {wanted} replicas."


def _retention_unset(facts: Facts) -> Iterator[Found]:
    kept = [
        each.spec.name
        for each in facts.journals
        if not each.is_recovery_log and not each.spec.fragment.HasField("retention")
    ]
    if kept:
        yield Found(
            f"{len(kept)} of {len(facts.journals)} journals keep content for ever, such as"
            f" {kept[0]}.",
            Status.NOTE,
        )


def _lifecycle(facts: Facts) -> Iterator[str]:
    return (
        f"A lifecycle rule of the bucket removes fragments of the recovery log {log}."
        for log in facts.expiring
    )


# ---------------------------------------------------------------- shards


def _without_hints(facts: Facts) -> Iterator[str]:
    for each in facts.shards:
        if each.has_log and each.has_hints is False:
            yield f"{each.id} of {each.application} has a recovery log, and no hints."


def _long_logs(facts: Facts) -> Iterator[str]:
    for each in facts.shards:
        kept, needed = each.log_bytes, each.recovery_bytes
        if kept is not None and needed is not None and kept > max(LOG_BYTES, LOG_TIMES * needed):
            yield (
                f"The log of {each.id} keeps {iec_bytes(kept)}, of which a recovery reads"
                f" {iec_bytes(needed)}."
            )


def _long_recoveries(facts: Facts) -> Iterator[str]:
    for each in facts.shards:
        if each.recovery_bytes is not None and each.recovery_bytes > RECOVERY_BYTES:
            yield f"A recovery of {each.id} reads {iec_bytes(each.recovery_bytes)}."


# ---------------------------------------------------------------- certificates


def _certificates(facts: Facts) -> Iterator[Found]:
    for each in facts.certificates:
        left_s = each.ends_at - facts.now
        at = f"{datetime.fromtimestamp(each.ends_at, UTC):%Y-%m-%d %H:%M} UTC"
        if left_s <= 0:
            yield Found(f"The certificate of {each.place} has expired at {at}.", Status.ERROR)
        elif left_s < CERTIFICATE_S:
            yield Found(f"The certificate of {each.place} expires at {at}.")


# ---------------------------------------------------------------- this machine


def _spool_disk(facts: Facts) -> Iterator[Found]:
    if (spools := facts.spools) is None:
        return
    least = min(DISK_WARNING_BYTES, DISK_WARNING_PART * spools.total_bytes)
    if spools.free_bytes < min(DISK_ERROR_BYTES, least):
        status = Status.ERROR
    elif spools.free_bytes < least:
        status = Status.WARNING
    else:
        return
    yield Found(
        f"The disk of {spools.directory} has {iec_bytes(spools.free_bytes)} of"
        f" {iec_bytes(spools.total_bytes)} free.",
        status,
    )


def _spool_memory(facts: Facts) -> Iterator[str]:
    if facts.spools is not None and facts.spools.filesystem in {"tmpfs", "ramfs"}:
        yield f"{facts.spools.directory} is on {facts.spools.filesystem}, which is memory."


def _spool_damaged(facts: Facts) -> Iterator[str]:
    return (f"{path} is damaged." for path in (facts.spools.damaged if facts.spools else ()))


def _spool_superseded(facts: Facts) -> Iterator[str]:
    for path in facts.spools.superseded if facts.spools else ():
        yield f"{path} has bytes that other brokers have written anew."


def _spool_old(facts: Facts) -> Iterator[str]:
    spools = facts.spools
    if spools is not None and spools.oldest_s is not None and spools.oldest_s > SPOOL_AGE_S:
        yield f"{spools.oldest} is {_span(spools.oldest_s)} old."


def _span(seconds: float) -> str:
    return format_duration(round(seconds) * SECOND_NS) if math.isfinite(seconds) else "very long"


CHECKS: tuple[Check, ...] = (
    *_REPORTED,
    Check(
        "other-problems",
        Source.REPORT,
        Status.WARNING,
        "The report of the broker has no other problem",
        "a broker of a later version knows of it",
        "gazctl report",
        _unknown_problems,
    ),
    Check(
        "etcd-quorum",
        Source.ETCD,
        Status.WARNING,
        "All members of Etcd answer, and one of them may be lost",
        "without a majority no lease is renewed, and the cluster stops",
        "etcdctl endpoint status --cluster -w table",
        _etcd_quorum,
    ),
    Check(
        "etcd-leader",
        Source.ETCD,
        Status.ERROR,
        "The members of Etcd agree on a leader",
        "without a leader nothing can be written",
        "etcdctl endpoint status --cluster -w table",
        _etcd_leader,
    ),
    Check(
        "etcd-alarms",
        Source.ETCD,
        Status.ERROR,
        "Etcd reports no alarm",
        "Etcd refuses writes, such as leases, while it has one",
        "etcdctl alarm list",
        _etcd_alarms,
    ),
    Check(
        "etcd-versions",
        Source.ETCD,
        Status.WARNING,
        "The members of Etcd have one version, without known faults",
        "a mix of versions is for the time of an upgrade alone",
        "etcdctl endpoint status --cluster -w table",
        _etcd_versions,
    ),
    Check(
        "etcd-latency",
        Source.ETCD,
        Status.WARNING,
        "Etcd answers fast",
        "changes of routes are late, and leases may end",
        "etcdctl check perf",
        _etcd_latency,
    ),
    Check(
        "etcd-quota",
        Source.QUOTA,
        Status.WARNING,
        "The database of Etcd is well below its quota",
        "at the quota Etcd refuses all writes, and the cluster stops",
        "etcdctl compact, then etcdctl defrag; or a greater --quota-backend-bytes",
        _etcd_quota,
    ),
    Check(
        "etcd-defrag",
        Source.QUOTA,
        Status.WARNING,
        "Most of the database of Etcd is in use",
        "free space counts for the quota until a defragmentation",
        "etcdctl defrag --endpoints ONE-MEMBER, one after the other",
        _etcd_fragmented,
    ),
    Check(
        "shared-store",
        Source.ETCD,
        Status.ERROR,
        "No other cluster of this Etcd has the same journals in the same store",
        "brokers of both write fragments under the same names, and remove those of the other",
        "gazctl journals list --stores",
        _shared_stores,
    ),
    Check(
        "own-clock",
        Source.MEMBERS,
        Status.WARNING,
        "The clock of this machine agrees with that of the broker",
        "tokens that are made here are refused there, or live too long",
        "timedatectl status",
        _own_clock,
    ),
    Check(
        "keys-missing",
        Source.MEMBERS,
        Status.WARNING,
        "Members that other machines reach demand a token",
        "everybody on the network may read, append and delete",
        "openssl rand -base64 32 > keys; gazette serve --broker.auth-keys-file keys",
        _keys,
    ),
    Check(
        "room",
        Source.MEMBERS,
        Status.WARNING,
        "The brokers have room for the replicas of any one that is lost",
        "its journals stay short of replicas until there is a new broker",
        "gazette allocator simulate --remove ZONE/ID",
        _room,
    ),
    Check(
        "zones",
        Source.MEMBERS,
        Status.WARNING,
        "The brokers are in several zones",
        "what one zone loses, all replicas lose",
        "gazctl brokers list",
        _zones,
    ),
    Check(
        "disks",
        Source.MEMBERS,
        Status.WARNING,
        "Brokers have disk space for spools",
        "appends fail when it is used up",
        "gazctl brokers list -o json",
        _disks,
    ),
    Check(
        "open-files",
        Source.METRICS,
        Status.WARNING,
        "Members are well below their limits of open files",
        "connections and appends fail at the limit",
        "ulimit -n 65536, or LimitNOFILE=65536 of systemd",
        _open_files,
    ),
    Check(
        "audit-journal",
        Source.METRICS,
        Status.WARNING,
        "Audit journals take all records of brokers",
        "they are in logs alone, whose retention may be shorter",
        "curl --silent http://BROKER/debug/health",
        _audit_journal,
    ),
    Check(
        "listed-replicas",
        Source.JOURNALS,
        Status.WARNING,
        "Lists of journals show as many replicas as their specs ask for",
        "the loss of further brokers loses what is not stored yet",
        "gazctl journals list --rf --primary --replicas",
        _listed_replicas,
    ),
    Check(
        "content-type",
        Source.JOURNALS,
        Status.WARNING,
        "Each journal has a label content-type",
        "readers and shards do not know how its messages are framed",
        "gazctl journals edit -l name=NAME",
        _of_journals("has no label content-type", lambda each: not each.content_type),
    ),
    Check(
        "one-replica",
        Source.JOURNALS,
        Status.WARNING,
        "Each journal that is written has two replicas or more",
        "the loss of one broker loses what is not stored yet",
        "gazctl journals edit -l name=NAME",
        _of_journals(
            "has a replication of 1",
            lambda each: each.spec.replication == 1 and _is_written(each),
        ),
    ),
    Check(
        "no-store",
        Source.JOURNALS,
        Status.WARNING,
        "Each journal has a fragment store",
        "its content is on disks of brokers alone, and stays there",
        "gazctl journals edit -l name=NAME",
        _of_journals("has no store", lambda each: not each.spec.fragment.stores),
    ),
    Check(
        "retention",
        Source.JOURNALS,
        Status.WARNING,
        "Journals have a retention",
        "stores grow for ever, and so does their bill",
        "gazctl journals edit -l name=NAME, or gazctl journals prune",
        _retention_unset,
    ),
    Check(
        "log-retention",
        Source.JOURNALS,
        Status.ERROR,
        "Recovery logs have no retention",
        "fragments that a recovery needs are removed: shards lose their state",
        "gazctl journals edit -l name=NAME; gazctl shards prune removes what none needs",
        _of_journals(
            "is a recovery log, and has a retention",
            lambda each: (
                each.is_recovery_log
                and each.spec.fragment.HasField("retention")
                and bool(each.spec.fragment.retention.ToNanoseconds())
            ),
        ),
    ),
    Check(
        "log-lifecycle",
        Source.LIFECYCLE,
        Status.ERROR,
        "No lifecycle rule of a bucket removes fragments of recovery logs",
        "fragments that a recovery needs are removed: shards lose their state",
        "aws s3api get-bucket-lifecycle-configuration --bucket BUCKET",
        _lifecycle,
    ),
    Check(
        "hints",
        Source.SHARDS,
        Status.WARNING,
        "Each shard with a recovery log has hints",
        "its next recovery reads the whole log, and pruning leaves the log alone",
        "gazctl shards list --lag",
        _without_hints,
    ),
    Check(
        "long-logs",
        Source.SHARDS,
        Status.WARNING,
        "Recovery logs are not far longer than what a recovery reads",
        "they cost storage, and nothing needs them",
        "gazctl shards prune -l id",
        _long_logs,
    ),
    Check(
        "long-recoveries",
        Source.SHARDS,
        Status.WARNING,
        "Recoveries read some gigabytes at most",
        "a shard that moves does not run for minutes; hot standbys avoid that",
        "gazctl shards edit -l id=ID, and set hot_standbys: 1",
        _long_recoveries,
    ),
    Check(
        "certificates",
        Source.CERTIFICATES,
        Status.WARNING,
        "Certificates are valid for two weeks or more",
        "no client and no member connects with one that has expired",
        "openssl s_client -connect HOST:PORT < /dev/null | openssl x509 -noout -dates",
        _certificates,
    ),
    Check(
        "spool-disk",
        Source.MACHINE,
        Status.WARNING,
        "The disk of the spools on this machine has free space",
        "appends fail when it is full",
        "df -h DIRECTORY",
        _spool_disk,
    ),
    Check(
        "spool-memory",
        Source.MACHINE,
        Status.ERROR,
        "The spools on this machine are on a disk",
        "a restart of the machine loses all that is not stored, though brokers take it for kept",
        "gazette serve --broker.spool-dir DIRECTORY-ON-A-DISK",
        _spool_memory,
    ),
    Check(
        "spool-damaged",
        Source.MACHINE,
        Status.WARNING,
        "No spool on this machine is damaged",
        "bytes that were acknowledged may be missing, unless another broker or a store has them",
        "gazctl journals fragments -l name=NAME, to see whether a store has its range",
        _spool_damaged,
    ),
    Check(
        "spool-superseded",
        Source.MACHINE,
        Status.WARNING,
        "No spool on this machine was superseded",
        "bytes were appended here that readers of the cluster do not see",
        "gazctl journals fragments -l name=NAME; then move the file away",
        _spool_superseded,
    ),
    Check(
        "spool-old",
        Source.MACHINE,
        Status.WARNING,
        "Spools on this machine are stored within a day",
        "only this disk has their bytes, unless their journal is gone",
        "gazctl journals list --heads --unstored",
        _spool_old,
    ),
)
"""All checks."""

assert max(Counter(check.name for check in CHECKS).values()) == 1, "names are unique"
