"""Plans of ``gazctl brokers drain``, and the reasons for which a broker cannot leave."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from gazette_sdk.cli.drain import Look, check, describe, look_at, plan, refusals, room_of
from gazette_sdk.cli.program import CommandFailedError
from gazette_sdk.cli.settings import DrainSettings
from gazette_sdk.cluster.allocator.simulation import (
    ClusterDescription,
    DescribedItem,
    DescribedMember,
    MemberId,
)
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run

STARTED_US = 1_700_000_000_000_000


def name_of(text):
    return MemberId(*text.split("/"))


def member(text, **fields):
    zone, suffix = text.split("/")
    known = {"version": "1.0.0", "started_us": STARTED_US, "limit": 100, "component": "broker"}
    return clpb.Member(id=pb.ProcessSpec.ID(zone=zone, suffix=suffix), **known | fields)


def members(*found):
    return {MemberId(each.id.zone, each.id.suffix): each for each in found}


def planned(found, **options):
    steps = plan(found, DrainSettings(one_by_one=True, wait=True, **options))
    return [(str(step.id), step.passed) for step in steps]


THREE = members(member("b/broker-1"), member("a/broker-2"), member("a/broker-1"))


def test_all_brokers_drain_by_zone_and_id():
    assert [name for name, _ in planned(THREE)] == ["a/broker-1", "a/broker-2", "b/broker-1"]


def test_named_brokers_drain_in_the_order_in_which_they_are_named():
    named = ("b/broker-1", "a/broker-1", "b/broker-1")
    assert [name for name, _ in planned(THREE, broker=named)] == ["b/broker-1", "a/broker-1"]


def test_one_that_drains_already_is_the_first():
    found = members(member("a/broker-1"), member("b/broker-1", exiting=True, version="2.0.0"))
    assert planned(found, to_version="2.0.0") == [("b/broker-1", ""), ("a/broker-1", "")]


def test_brokers_of_the_version_are_passed_over():
    found = members(member("a/broker-1", version="2.0.0"), member("b/broker-1"))
    assert planned(found, to_version="2.0.0") == [
        ("a/broker-1", "it runs 2.0.0"),
        ("b/broker-1", ""),
    ]


def test_brokers_that_have_started_since_a_time_are_passed_over():
    at = datetime.fromtimestamp(STARTED_US / 1e6, UTC)
    found = members(member("a/broker-1"), member("b/broker-1", started_us=STARTED_US - 1))
    assert planned(found, started_before=at.isoformat()) == [
        ("a/broker-1", "it has started at 2023-11-14T22:13:20Z"),
        ("b/broker-1", ""),
    ]
    assert [passed for _, passed in planned(found, started_before="1h")] == ["", ""]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"broker": ("broker-1",)}, "--broker: 'broker-1' names no member: write ZONE/ID"),
        (
            {"broker": ("c/broker-9",)},
            "there is no broker c/broker-9 now; there are a/broker-1, a/broker-2, b/broker-1",
        ),
        ({"started_before": "yesterday"}, "--started-before: 'yesterday' is no time"),
        ({"started_before": "2026-01-31T12:00:00"}, "has no time zone"),
    ],
)
def test_a_plan_refuses_what_names_nothing(options, text):
    with pytest.raises(ConfigurationError) as refused:
        planned(THREE, **options)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"error": "no answer within 1 s"}, "no answer within 1 s"),
        ({"version": ""}, "it is of another implementation; drain it by SIGTERM"),
    ],
)
def test_a_plan_has_only_brokers_that_can_be_asked(fields, text):
    with pytest.raises(CommandFailedError) as refused:
        planned(members(member("a/broker-1", **fields)))
    assert str(refused.value).startswith(f"a/broker-1 cannot be asked to drain: {text}")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give --one-by-one --wait, or name one broker with --broker ZONE/ID"),
        ({"broker": ("a/broker-1", "b/broker-1")}, "brokers drain one after the other"),
        ({"one_by_one": True}, "give --wait, too"),
    ],
)
def test_several_brokers_never_drain_at_the_same_time(options, text):
    with pytest.raises(ConfigurationError) as refused:
        check(DrainSettings(**options))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"broker": ("a/broker-1",)}, {"one_by_one": True, "wait": True}]
)
def test_one_broker_and_one_by_one_are_accepted(options):
    check(DrainSettings(**options))


# ---------------------------------------------------------------- room


def cluster(limits, *journals):
    return ClusterDescription(
        tuple(DescribedMember(name_of(text), limit) for text, limit in limits.items()),
        tuple(
            DescribedItem(f"orders/{number}", len(held), tuple(map(name_of, held)))
            for number, held in enumerate(journals)
        ),
    )


def refused(description, text, **options):
    return list(refusals(description, [name_of(text)], **options))


THREE_ZONES = {"a/one": 100, "b/two": 100, "c/three": 100}
PAIRS = (("a/one", "b/two"), ("b/two", "c/three"), ("c/three", "a/one"))


def test_a_broker_may_leave_where_the_others_have_room():
    description = cluster(THREE_ZONES, *PAIRS)
    assert refusals(description, [each.id for each in description.members]) == []


def test_too_few_brokers_for_the_replicas_are_named():
    [text] = refused(cluster(THREE_ZONES, tuple(THREE_ZONES), tuple(THREE_ZONES)), "a/one")
    assert text == (
        "a/one cannot leave, since R = 3 needs 3 other brokers, and there are 2: start another "
        "one; orders/0, orders/1"
    )


def test_only_journals_with_too_many_replicas_are_named_where_they_are_the_reason():
    [text] = refused(cluster(THREE_ZONES, *PAIRS, tuple(THREE_ZONES)), "a/one")
    assert text.endswith("start another one; orders/3")


def test_full_brokers_are_named_with_their_limits():
    [text] = refused(cluster(THREE_ZONES | {"b/two": 2, "c/three": 3}, *PAIRS), "a/one")
    assert "a/one cannot leave, since 1 replica would have no place on the others" in text
    assert "(b/two has 2 of 2, c/three has 3 of 3: raise --broker.limit there" in text


def test_a_lone_broker_cannot_leave():
    [text] = refused(cluster({"a/one": 9}, ("a/one",)), "a/one")
    assert "R = 1 needs 1 other broker, and there are 0: start another one; orders/0" in text


def test_journals_keep_their_zones_unless_that_is_allowed():
    description = cluster({"a/one": 9, "b/two": 9, "b/three": 9}, ("a/one", "b/two"))
    [text] = refused(description, "a/one")
    assert text.startswith(
        "a/one should not leave, since 1 journal would have all replicas in one zone: orders/0; "
    )
    assert "or give --allow-single-zone" in text
    assert refused(description, "a/one", allow_single_zone=True) == []
    assert refused(description, "b/two") == []


def test_a_cluster_of_one_zone_has_no_zones_to_keep():
    description = cluster({"a/one": 9, "a/two": 9, "a/three": 9}, ("a/one", "a/two"))
    assert refused(description, "a/one") == []


def test_journals_that_lack_replicas_already_are_the_only_reason():
    description = cluster({"a/one": 9, "b/two": 9}, ("a/one", "b/two"))
    [item] = description.items
    lacking = replace(description, items=(replace(item, replication=3),))
    [text] = refusals(lacking, [each.id for each in lacking.members])
    assert text.startswith("1 journal cannot have all replicas as it is (R = 3 needs as many")


def test_a_description_has_primaries_first_and_brokers_that_will_be_back():
    found = members(member("a/broker-1", exiting=True), member("b/broker-1"))
    listing = pb.ListResponse()
    journal = listing.journals.add()
    journal.spec.name, journal.spec.replication = "orders/0", 12
    journal.route.primary = 1
    for text in ("a/broker-1", "b/broker-1", "c/unknown"):
        zone, suffix = text.split("/")
        journal.route.members.add(zone=zone, suffix=suffix)
    listing.journals.add().spec.suspend.level = pb.JournalSpec.Suspend.FULL
    listing.journals[1].route.primary = -1
    described = describe(found, listing, max_replication=3, back=[name_of("a/broker-1")])
    assert [each.exiting for each in described.members] == [False, False]
    assert [each.replication for each in described.items] == [3, 0]
    assert list(map(str, described.items[0].holders)) == ["b/broker-1", "a/broker-1"]
    described = describe(found, listing, max_replication=3, back=[])
    assert [each.exiting for each in described.members] == [True, False]


def test_room_depends_on_limits_and_replicas_and_not_on_where_they_are():
    before = room_of(cluster(THREE_ZONES, *PAIRS))
    assert room_of(cluster(THREE_ZONES, *reversed(PAIRS))) == before
    assert room_of(cluster(THREE_ZONES | {"a/one": 99}, *PAIRS)) != before
    assert room_of(cluster(THREE_ZONES, *PAIRS, ("a/one",))) != before


# ---------------------------------------------------------------- waits

BACK = {"started_us": STARTED_US + 1, "version": "2.0.0"}


@pytest.mark.parametrize(
    ("found", "stage", "left"),
    [
        ({}, "start", 0),
        (members(member("a/broker-1", replicas=7)), "drain", 7),
        (members(member("a/broker-1", exiting=True, replicas=3)), "drain", 3),
        (
            members(member("a/broker-1", exiting=True, version="", started_us=0, error="late")),
            "drain",
            0,
        ),
        (members(member("a/broker-1", version="", started_us=0, error="late")), "start", 0),
        (members(member("a/broker-1", **BACK, exiting=True, replicas=1)), "drain", 1),
        (members(member("a/broker-1", **BACK)), None, 0),
    ],
)
def test_a_broker_is_back_once_another_process_of_it_answers(found, stage, left):
    [step] = plan(members(member("a/broker-1", replicas=9)), DrainSettings())
    look = look_at(step, found)
    assert (look and (look.stage, look.left)) == (stage and (stage, left))
    assert look is None or isinstance(look, Look)


# ---------------------------------------------------------------- errors


def test_a_broker_without_the_call_is_named(gazctl):
    """A broker of another implementation answers no call about the cluster."""
    server = Server(host="127.0.0.1")
    endpoint = run(server.start(), 20)
    try:
        shown = gazctl(
            *("brokers", "drain", "--one-by-one", "--wait", "--broker.address", endpoint)
        )
    finally:
        run(server.stop(0), 20)
    assert shown.status == 1
    assert shown.stderr == (
        f"gazctl: the broker at {endpoint} has no call for this: it is of an older version, or of "
        "another implementation; drain it by SIGTERM\n"
    )


def test_no_broker_at_the_address_is_one_error(gazctl):
    silent = gazctl(
        *("brokers", "drain", "--broker", "a/broker-1", "--broker.address", "http://127.0.0.1:1")
    )
    assert silent.status == 1
    assert "127.0.0.1:1" in silent.stderr
    assert silent.text == ""
