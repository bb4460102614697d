"""Checks of `gazette doctor`: each planted fault is found, and none where all is well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gazette_sdk.cli.doctor.checks import CHECKS, EVIDENCE_MAX, Status, diagnose, exit_status
from gazette_sdk.cli.doctor.facts import (
    CertificateFacts,
    EtcdFacts,
    Facts,
    JournalFacts,
    ProcessFacts,
    QuotaFacts,
    ShardFacts,
    Source,
    SpoolFacts,
)
from gazette_sdk.cluster.etcd import EtcdStatus
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import label_set
from support.pages import ROOT

NOW = 1_800_000_000.0
DAY_S = 86400.0
GIB = 1 << 30


def etcd_member(number, **changes):
    status = EtcdStatus(f"http://etcd-{number}:2379", member_id=number, version="3.5.21", leader=1)
    return replace(status, **changes)


def broker(zone, **changes):
    values = {
        "id": pb.ProcessSpec.ID(zone=zone, suffix="broker"),
        "component": "broker",
        "endpoint": f"https://{zone}:8080",
        "version": "1",
        "limit": 100,
        "replicas": 10,
        "key_ids": ["2026"],
        "disk_free": 100 * GIB,
        **changes,
    }
    return clpb.Member(**values)


def journal(name="a/journal", *, content_type="application/x-ndjson", stores=("s3://b/",), **spec):
    labels = label_set([("content-type", content_type)] if content_type else [])
    message = pb.JournalSpec(name=name, labels=labels, **{"replication": 3, **spec})
    message.fragment.stores.extend(stores)
    return JournalFacts(message, ["a/broker", "b/broker", "c/broker"])


def with_retention(facts):
    facts.spec.fragment.retention.FromSeconds(3600)
    return facts


def recovery_log():
    return journal("logs/shard", content_type="application/x-gazette-recoverylog")


def shard(**changes):
    known = {"has_log": True, "has_hints": True, "log_bytes": GIB, "recovery_bytes": GIB}
    return ShardFacts(spec=cpb.ShardSpec(id="shard-a"), application="app", **{**known, **changes})


def spools(**changes):
    known = {"free_bytes": 500 * GIB, "total_bytes": 1000 * GIB, "filesystem": "ext4"}
    return SpoolFacts(directory="/spools", **{**known, "oldest_s": 60.0, "oldest": "x", **changes})


def quota(**changes):
    known = {"size_bytes": 1e8, "in_use_bytes": 9e7, "quota_bytes": 2e9}
    return QuotaFacts(address="http://etcd-1:2379", **{**known, **changes})


def healthy():
    return Facts(
        now=NOW,
        broker="https://a:8080",
        members=[broker("a"), broker("b"), broker("c")],
        journals=[with_retention(journal()), recovery_log()],
        shards=[shard()],
        etcd=EtcdFacts(members=[etcd_member(n) for n in (1, 2, 3)], latency_s=0.002),
        quotas=[quota()],
        processes=[ProcessFacts(name="a/broker", open_files=100, open_files_max=65536)],
        certificates=[CertificateFacts(place="https://a:8080", ends_at=NOW + 60 * DAY_S)],
        spools=spools(),
    )


def found(facts):
    """Findings by check: those that are not fine, and no unknown ones."""
    outcome = {each.check: each for each in diagnose(facts)}
    return {
        name: each
        for name, each in outcome.items()
        if each.status not in (Status.OK, Status.UNKNOWN)
    }


def etcd(*members, **changes):
    return EtcdFacts(members=members or [etcd_member(n) for n in (1, 2, 3)], **changes)


E, W, N = Status.ERROR, Status.WARNING, Status.NOTE

PLANTED = [
    (
        "etcd-quorum",
        W,
        "etcd-3:2379 does not answer",
        {"etcd": etcd(etcd_member(1), etcd_member(2), etcd_member(3, error="refused"))},
    ),
    (
        "etcd-quorum",
        E,
        "does not answer",
        {"etcd": etcd(etcd_member(1), etcd_member(2, error="x"), etcd_member(3, error="y"))},
    ),
    ("etcd-quorum", N, "a single member", {"etcd": etcd(etcd_member(1))}),
    ("etcd-quorum", N, "an even number", {"etcd": etcd(etcd_member(1), etcd_member(2))}),
    (
        "etcd-leader",
        E,
        "knows no leader",
        {"etcd": etcd(etcd_member(1), etcd_member(2, leader=0), etcd_member(3))},
    ),
    (
        "etcd-leader",
        E,
        "different leaders",
        {"etcd": etcd(etcd_member(1), etcd_member(2, leader=2), etcd_member(3))},
    ),
    (
        "etcd-alarms",
        E,
        "NOSPACE",
        {"etcd": etcd(etcd_member(1, alarms=("alarm:NOSPACE",)), etcd_member(2), etcd_member(3))},
    ),
    (
        "etcd-versions",
        W,
        "3.5.21, 3.6.0",
        {"etcd": etcd(etcd_member(1, version="3.6.0"), etcd_member(2), etcd_member(3))},
    ),
    (
        "etcd-versions",
        N,
        "upgrade it",
        {"etcd": etcd(*(etcd_member(n, version="3.5.1") for n in (1, 2, 3)))},
    ),
    ("etcd-latency", W, "300 ms", {"etcd": etcd(latency_s=0.3)}),
    (
        "etcd-quota",
        W,
        "85% of its quota",
        {"quotas": [quota(size_bytes=1.7e9, in_use_bytes=1.7e9)]},
    ),
    (
        "etcd-quota",
        E,
        "98% of its quota",
        {"quotas": [quota(size_bytes=1.96e9, in_use_bytes=1.9e9)]},
    ),
    ("etcd-defrag", W, "are free space", {"quotas": [quota(size_bytes=1e9, in_use_bytes=1e8)]}),
    (
        "shared-store",
        E,
        "s3://b/ has journals",
        {"etcd": etcd(shared_stores={"s3://b/?secret=x": "/gazette/other"})},
    ),
    ("own-clock", W, "9s ahead of that", {"clock_ahead_s": 9.0}),
    ("own-clock", W, "1m0s late against", {"clock_ahead_s": -60.0}),
    (
        "keys-missing",
        E,
        "has no keys",
        {"members": [broker("a", key_ids=[]), broker("b"), broker("c")]},
    ),
    (
        "keys-missing",
        W,
        "without a token",
        {"members": [broker("a", key_ids=["2026", "AA=="]), broker("b"), broker("c")]},
    ),
    (
        "room",
        W,
        "have room for 20",
        {"members": [broker("a", replicas=90), broker("b", replicas=90), broker("c", replicas=90)]},
    ),
    ("zones", W, "All 2 brokers are in the zone a", {"members": [broker("a"), broker("a")]}),
    (
        "disks",
        E,
        "a/broker has 100 MiB free",
        {"members": [broker("a", disk_free=100 << 20), broker("b"), broker("c")]},
    ),
    (
        "disks",
        W,
        "9.0 GiB not stored",
        {"members": [broker("a", disk_free=10 * GIB, unstored=9 * GIB), broker("b"), broker("c")]},
    ),
    (
        "open-files",
        W,
        "900 of 1024 files",
        {"processes": [ProcessFacts(name="a/broker", open_files=900, open_files_max=1024)]},
    ),
    (
        "audit-journal",
        W,
        "The audit journal of a/broker has taken no records for 5m0s.",
        {
            "processes": [
                ProcessFacts(
                    name="a/broker", open_files=1, open_files_max=1024, audit_failing_s=300.2
                )
            ]
        },
    ),
    (
        "audit-journal",
        W,
        "7 audit records are in the log of a/broker only.",
        {
            "processes": [
                ProcessFacts(name="a/broker", open_files=1, open_files_max=1024, audit_dropped=7)
            ]
        },
    ),
    (
        "content-type",
        W,
        "has no label content-type",
        {"journals": [with_retention(journal(content_type=""))]},
    ),
    ("one-replica", W, "replication of 1", {"journals": [with_retention(journal(replication=1))]}),
    ("no-store", W, "has no store", {"journals": [with_retention(journal(stores=()))]}),
    ("retention", N, "1 of 1 journals keep content for ever", {"journals": [journal()]}),
    (
        "log-retention",
        E,
        "is a recovery log, and has a retention",
        {"journals": [with_retention(recovery_log())]},
    ),
    ("log-lifecycle", E, "recovery log logs/shard", {"expiring": ["logs/shard"]}),
    ("hints", W, "and no hints", {"shards": [shard(has_hints=False)]}),
    ("long-logs", W, "keeps 9.0 GiB", {"shards": [shard(log_bytes=9 * GIB)]}),
    (
        "long-recoveries",
        W,
        "reads 11 GiB",
        {"shards": [shard(recovery_bytes=11 * GIB, log_bytes=12 * GIB)]},
    ),
    (
        "certificates",
        E,
        "has expired at",
        {"certificates": [CertificateFacts(place="https://a:1", ends_at=NOW - 5)]},
    ),
    (
        "certificates",
        W,
        "expires at",
        {"certificates": [CertificateFacts(place="a.pem", ends_at=NOW + DAY_S)]},
    ),
    ("spool-disk", E, "has 10 MiB of", {"spools": spools(free_bytes=10 << 20)}),
    ("spool-disk", W, "has 5.0 GiB of", {"spools": spools(free_bytes=5 * GIB)}),
    ("spool-memory", E, "is on tmpfs", {"spools": spools(filesystem="tmpfs")}),
    ("spool-damaged", W, "x.damaged is damaged", {"spools": spools(damaged=["x.damaged"])}),
    ("spool-superseded", W, "written anew", {"spools": spools(superseded=["x.superseded"])}),
    ("spool-old", W, "is 48h0m0s old", {"spools": spools(oldest_s=2 * DAY_S, oldest="y.content")}),
]


def test_nothing_is_found_where_all_is_well():
    assert found(healthy()) == {}
    assert exit_status(diagnose(healthy())) == 0


@pytest.mark.parametrize(
    ("check", "status", "text", "change"),
    PLANTED,
    ids=[f"{check} {status}: {text}" for check, status, text, _ in PLANTED],
)
def test_a_planted_fault_is_found_alone_with_its_evidence_and_a_command(
    check, status, text, change
):
    facts = healthy()
    for name, value in change.items():
        setattr(facts, name, value)
    findings = found(facts)
    assert set(findings) == {check}
    finding = findings[check]
    assert finding.status is status
    assert text in finding.evidence[0]
    assert finding.command
    assert finding.why
    assert exit_status(diagnose(facts)) == {E: 2, W: 1, N: 0}[status]


def reported(check, severity=clpb.ERROR, **fields):
    problem = clpb.Problem(check=check, severity=severity, text="It is so.", command="do", **fields)
    return clpb.ReportResponse(problems=[problem])


@pytest.mark.parametrize(
    "check",
    [
        "journals-waiting",
        "journals-short",
        "store-unhealthy",
        "member-unreachable",
        "lease-short",
        "clock-skew",
        "keys-differ",
        "shards-failed",
        "shards-lag",
    ],
)
def test_problems_of_the_report_are_taken_as_they_are(check):
    facts = healthy()
    facts.report = reported(check, others=2)
    (finding,) = found(facts).values()
    assert (finding.check, finding.status) == (check, Status.ERROR)
    assert (finding.evidence, finding.command) == (["It is so. (2 more)"], "do")
    assert finding.why


def test_mixed_versions_are_a_warning_and_later_kinds_of_problems_are_shown():
    facts = healthy()
    facts.report = reported("versions-mixed", clpb.INFO)
    assert found(facts)["versions-mixed"].status is Status.WARNING
    facts.report = reported("of-a-later-version", clpb.WARNING)
    assert found(facts)["other-problems"].evidence == ["of-a-later-version: It is so."]


@pytest.mark.parametrize("source", Source)
def test_checks_of_a_missing_source_are_unknown_and_all_others_are_made(source):
    facts = healthy()
    facts.missing[source] = "no one answers"
    outcome = diagnose(facts)
    unknown = {each.check for each in outcome if each.status is Status.UNKNOWN}
    assert unknown == {check.name for check in CHECKS if check.source is source}
    assert all(
        each.evidence == ["not checked: no one answers"]
        for each in outcome
        if each.check in unknown
    )
    assert exit_status(outcome) == 0


def test_replicas_are_counted_in_the_list_where_there_is_no_report():
    facts = healthy()
    facts.journals = [replace(with_retention(journal()), members=["a/broker"])]
    assert found(facts) == {}
    facts.missing[Source.REPORT] = "it is of another implementation"
    assert found(facts)["listed-replicas"].evidence == ["a/journal has 1 of 3 replicas."]


def test_much_evidence_is_counted_and_the_gravest_comes_first():
    facts = healthy()
    facts.journals = [with_retention(journal(f"a/journal-{n}", content_type="")) for n in range(20)]
    assert found(facts)["content-type"].evidence[EVIDENCE_MAX:] == ["and 12 more"]
    facts.members = [broker("a", key_ids=["1", "AA=="]), broker("b", key_ids=[]), broker("c")]
    assert found(facts)["keys-missing"].evidence[0].startswith("b/broker")
    outcome = diagnose(facts)
    assert outcome[0].status is Status.ERROR
    assert outcome[-1].status is Status.OK


def test_members_on_loopback_need_no_keys():
    facts = healthy()
    facts.members = [broker(zone, endpoint="http://127.0.0.1:1", key_ids=[]) for zone in "abc"]
    assert found(facts) == {}


def test_no_secret_of_evidence_is_shown():
    facts = healthy()
    facts.report = reported("store-unhealthy")
    (problem,) = facts.report.problems
    problem.text = (
        "s3://b/?X-Amz-Signature=abcdef does not answer http://u:pass@host with Bearer eyJh.eyJi.x"
    )
    text = " ".join(found(facts)["store-unhealthy"].evidence)
    assert not any(secret in text for secret in ("abcdef", "pass", "eyJh"))


def test_names_are_unique_and_documented():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) >= 40
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in text] == []
