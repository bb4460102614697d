"""Problems of a cluster: each is found where its facts are, and nowhere else."""

import re
from dataclasses import replace

import pytest

from gazette_sdk.broker.views import problems as module
from gazette_sdk.broker.views.problems import (
    ApplicationFacts,
    Facts,
    JournalsOfState,
    MemberFacts,
    problems,
)
from gazette_sdk.protocol import cluster_pb2 as clpb

NOW_US = 1_700_000_000_000_000
Store = clpb.ReportResponse.Store
Application = clpb.ReportResponse.Application


def member(suffix="broker-1", *, ahead_s=0.0, component="broker", **values):
    described = clpb.Member(
        component=component,
        endpoint=f"http://{suffix}:8080",
        **{
            "version": "1.0",
            "lease_s": 20,
            "lease_left_s": 14,
            "loop_lag_s": 0.01,
            "key_ids": ["a"],
            **values,
        },
    )
    described.id.zone, described.id.suffix = "a", suffix
    return MemberFacts(described, ahead_s)


def silent(suffix="broker-1", **values):
    fields = {"version": "", "key_ids": [], "error": "no answer within 1 s", **values}
    found = member(suffix, **fields)
    for name in ("lease_left_s", "loop_lag_s"):
        found.member.ClearField(name)
    return replace(found, clock_ahead_s=None)


def foreign(suffix="broker-1"):
    return silent(suffix, error="")


def of_state(state, count=3, detail=""):
    return Facts(journals={state: JournalsOfState(count, "orders/part-000", detail)})


def of_members(*members):
    return Facts(now_us=NOW_US, members=members)


def of_application(address="http://totals:80", **values):
    facts = {name: values.pop(name) for name in tuple(values) if not name.startswith("summary_")}
    summary = Application(name="totals", processes=1, shards=4)
    for name, value in values.items():
        setattr(summary, name.removeprefix("summary_"), value)
    return Facts(applications=[ApplicationFacts(summary, address, **facts)])


FINE = Facts(
    now_us=NOW_US,
    journals={
        clpb.JOURNAL_OK: JournalsOfState(10, "orders/part-000"),
        clpb.JOURNAL_SUSPENDED: JournalsOfState(2, "archive/part-000"),
        clpb.JOURNAL_SHORT: JournalsOfState(),
    },
    members=[
        member("broker-1", unstored=10, oldest_unstored_s=900.0, oldest_unstored_journal="a"),
        member("broker-2", ahead_s=5.0, loop_lag_s=0.5, lease_left_s=7.0),
        foreign("go-1"),
        member("totals-1", component="totals", key_ids=["other"]),
    ],
    stores=[Store(url="s3://fine/", healthy=True), Store(url="s3://unused/")],
    applications=[ApplicationFacts(Application(name="totals", shards=4, lag_s=60.0))],
)


def test_nothing_is_found_in_a_cluster_that_is_fine():
    assert problems(FINE) == []
    assert problems(Facts()) == []


CASES = [
    (
        "journals-waiting",
        of_state(clpb.JOURNAL_WAITING, detail="it waits for a/broker-9"),
        (clpb.ERROR, "journal", "orders/part-000", 2),
        (
            "orders/part-000 refuses appends until brokers with its last bytes are back "
            "(it waits for a/broker-9)."
        ),
        "gazctl journals list --rf --primary --replicas",
    ),
    (
        "journals-unassigned",
        of_state(clpb.JOURNAL_UNASSIGNED, 1),
        (clpb.ERROR, "journal", "orders/part-000", 0),
        "orders/part-000 has no replica: no broker has room for it.",
        "gazctl brokers list",
    ),
    (
        "journals-no-primary",
        of_state(clpb.JOURNAL_NO_PRIMARY),
        (clpb.ERROR, "journal", "orders/part-000", 2),
        "orders/part-000 has replicas, and no primary that takes appends.",
        "gazctl journals list --rf --primary --replicas",
    ),
    (
        "journals-short",
        of_state(clpb.JOURNAL_SHORT, detail="it has 1 of 3"),
        (clpb.WARNING, "journal", "orders/part-000", 2),
        "orders/part-000 has fewer replicas than its spec asks for (it has 1 of 3).",
        "gazette allocator simulate",
    ),
    (
        "journals-single-zone",
        of_state(clpb.JOURNAL_SINGLE_ZONE),
        (clpb.WARNING, "journal", "orders/part-000", 2),
        "orders/part-000 has all replicas in one zone, and is lost with it.",
        "gazette allocator simulate",
    ),
    (
        "store-unhealthy",
        Facts(stores=[Store(url="s3://b/?p=1", healthy=False, error="put failed: no", since_us=7)]),
        (clpb.ERROR, "store", "s3://b/?p=1", 0),
        "Brokers cannot use the store s3://b/?p=1: put failed: no.",
        "gazctl journals store-health 's3://b/?p=1'",
    ),
    (
        "unstored-old",
        of_members(
            member("broker-1", oldest_unstored_s=901.0, oldest_unstored_journal="a/1"),
            member("broker-2", oldest_unstored_s=3600.0, oldest_unstored_journal="b/1"),
        ),
        (clpb.WARNING, "journal", "b/1", 1),
        "b/1 has bytes of 1h0m0s ago that are in no store.",
        "gazctl journals list --unstored --name b/1",
    ),
    (
        "member-unreachable",
        of_members(silent("broker-1"), silent("broker-2")),
        (clpb.ERROR, "member", "a/broker-1", 1),
        "a/broker-1 at http://broker-1:8080 does not answer: no answer within 1 s.",
        "gazctl brokers list",
    ),
    (
        "token-refused",
        of_members(silent("totals-1", component="totals", refuses_token=True)),
        (clpb.WARNING, "member", "a/totals-1", 0),
        "a/totals-1 does not accept the token of this call, and is not in this report.",
        "gazctl brokers list",
    ),
    (
        "lease-short",
        of_members(member(lease_left_s=6.6)),
        (clpb.WARNING, "member", "a/broker-1", 0),
        (
            "a/broker-1 has 6.6 s left of its lease of 20 s: it does not reach Etcd, and is "
            "removed when the lease ends."
        ),
        "gazctl brokers list",
    ),
    (
        "loop-lag",
        of_members(member(loop_lag_s=0.75)),
        (clpb.WARNING, "member", "a/broker-1", 0),
        "a/broker-1 held its event loop for 0.8 s: it is too busy, or its machine is.",
        "gazctl brokers list",
    ),
    (
        "clock-skew",
        of_members(member("broker-1", ahead_s=6), member("broker-2", ahead_s=-7)),
        (clpb.WARNING, "member", "a/broker-1", 1),
        (
            "a/broker-1 has a clock that is 6s ahead of the one that made this report: synchronize "
            "clocks by NTP."
        ),
        "gazctl brokers list -o json",
    ),
    (
        "keys-differ",
        of_members(member("broker-1"), member("broker-2", key_ids=["a", "b"]), foreign()),
        (clpb.WARNING, "member", "a/broker-1", 0),
        "a/broker-1 does not accept keys that other brokers accept: b.",
        "gazctl brokers list -o json",
    ),
    (
        "shards-failed",
        of_application(failed={"totals/1": "KeyError: 'cents'"}, summary_failed=3),
        (clpb.ERROR, "shard", "totals/1", 2),
        "totals/1 of totals has failed: KeyError: 'cents'.",
        "gazctl shards list --consumer.address http://totals:80 --errors",
    ),
    (
        "shards-no-primary",
        of_application(without_primary=["totals/2"], summary_without_primary=1),
        (clpb.WARNING, "shard", "totals/2", 0),
        "totals/2 of totals has no primary: no process runs it.",
        "gazctl shards list --consumer.address http://totals:80 --primary",
    ),
    (
        "shards-lag",
        of_application(lagging={"totals/3": 61.0}, lagging_count=2),
        (clpb.WARNING, "shard", "totals/3", 1),
        "totals/3 of totals has not read messages of 1m1s ago.",
        "gazctl shards list --consumer.address http://totals:80 --lag",
    ),
    (
        "application-silent",
        of_application("", summary_error="it has shards, and none of its processes runs"),
        (clpb.WARNING, "application", "totals", 0),
        "The application totals does not answer: it has shards, and none of its processes runs.",
        "gazctl consumers list",
    ),
    (
        "member-exiting",
        of_members(member(exiting=True, replicas=7)),
        (clpb.INFO, "member", "a/broker-1", 0),
        "a/broker-1 drains: 7 replicas are left to be moved.",
        "gazctl brokers list",
    ),
    (
        "versions-mixed",
        of_members(member("broker-1"), member("totals-1", component="totals", version="1.1")),
        (clpb.INFO, "cluster", "1.0, 1.1", 0),
        "Members have different versions: a/broker-1 has 1.0, a/totals-1 has 1.1.",
        "gazctl brokers list",
    ),
]


@pytest.mark.parametrize(
    ("check", "facts", "what", "text", "command"), CASES, ids=[case[0] for case in CASES]
)
def test_a_problem_names_its_subject_and_a_command(check, facts, what, text, command):
    [found] = problems(facts)
    assert found.check == check
    assert (found.severity, found.kind, found.subject, found.others) == what
    assert found.text == text
    assert found.command == command


def test_each_check_of_the_table_is_tested():
    listed = re.findall(r"^``(\S+)``", module.__doc__, re.MULTILINE)
    assert sorted(listed) == sorted(case[0] for case in CASES)
    severities = dict(re.findall(r"^``(\S+)`` +([A-Z]+)", module.__doc__, re.MULTILINE))
    assert severities == {case[0]: clpb.Severity.Name(case[2][0]) for case in CASES}


def test_the_gravest_problems_are_first_and_say_since_when():
    facts = replace(
        of_members(
            member(exiting=True, oldest_unstored_s=1000.0, oldest_unstored_journal="a/1"),
            silent("broker-2"),
        ),
        stores=[Store(url="s3://bad/", healthy=False, since_us=NOW_US - 5)],
    )
    found = problems(facts)
    assert [each.severity for each in found] == [clpb.ERROR, clpb.ERROR, clpb.WARNING, clpb.INFO]
    since = {each.check: each.since_us for each in found}
    assert since["store-unhealthy"] == NOW_US - 5
    assert since["unstored-old"] == NOW_US - 1_000_000_000
