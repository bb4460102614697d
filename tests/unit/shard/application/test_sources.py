"""Sources of an application, and which of its journals one shard reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import shard
from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import format_selector, label_set
from gazette_sdk.shard.application.sources import (
    JoinedTopics,
    check_sources,
    group_journals,
    names_of,
    selectors_of,
    source_of,
    topics_of,
)

RIDES, DRIVERS, RATES = "topic=rides", "topic=drivers", "topic=rates"
JOINED = shard.partitions(RIDES, DRIVERS)
WITH_RATES = shard.partitions(shard.broadcast(RATES), RIDES, DRIVERS)


def journal(name, **labels):
    topic = name.partition("/")[0]
    return pb.JournalSpec(name=name, labels=label_set(sorted({"topic": topic, **labels}.items())))


def topic(name, count):
    return [journal(f"{name}/part-{number:03}") for number in range(count)]


def names(groups):
    return [[spec.name for spec in group] for group in groups]


@pytest.mark.parametrize(
    ("sources", "topics", "journals", "selectors"),
    [
        (None, (), (), []),
        (RIDES, (RIDES,), (), [RIDES]),
        ("rides/one", (), ("rides/one",), ["name=rides/one"]),
        (["b/two", "a/one"], (), ("b/two", "a/one"), ["name in (a/one,b/two)"]),
        (JOINED, (RIDES, DRIVERS), (), [RIDES, DRIVERS]),
        (WITH_RATES, (RATES, RIDES, DRIVERS), (), [RATES, RIDES, DRIVERS]),
    ],
)
def test_sources_are_selectors_or_names(sources, topics, journals, selectors):
    check_sources("app", sources)
    assert topics_of(sources) == topics
    assert names_of(sources) == journals
    assert list(map(format_selector, selectors_of(sources))) == selectors


@pytest.mark.parametrize(
    ("topics", "error"),
    [
        ((), "takes several different topics, and not"),
        ((RIDES,), "one selector alone is sources='topic=rides'"),
        ((RIDES, RIDES), "takes several different topics, and not"),
        ((RIDES, "rides/part-000"), "takes label selectors, as 'topic=rides', and not"),
        ((RIDES, [DRIVERS]), "takes label selectors, as 'topic=rides', and not"),
        ((RIDES, "topic in (rides)"), "takes several different topics, and not"),
        ((RIDES, shard.broadcast(RIDES)), "takes several different topics, and not"),
        ((shard.broadcast(RATES),), "is read beside partitions, each of which has a shard"),
        ((shard.broadcast(RATES), shard.broadcast(RIDES)), "is read beside partitions"),
    ],
)
def test_what_is_not_several_topics_is_refused(topics, error):
    with pytest.raises(ConfigurationError, match=error):
        shard.partitions(*topics)


def test_a_malformed_selector_is_refused():
    with pytest.raises(ValidationError):
        shard.partitions(RIDES, "topic in (")


@given(st.integers(1, 20), st.randoms())
def test_partitions_of_one_number_have_one_shard(count, random):
    rides, drivers = topic("rides", count), topic("drivers", count)
    random.shuffle(rides)
    random.shuffle(drivers)
    groups, fault, _ = group_journals(JOINED, [rides, drivers])
    assert fault is None
    assert names(groups) == [
        [f"rides/part-{number:03}", f"drivers/part-{number:03}"] for number in range(count)
    ]


def test_journals_of_a_selector_have_a_shard_each():
    assert names(group_journals(RIDES, [topic("rides", 2)]).groups) == [
        ["rides/part-000"],
        ["rides/part-001"],
    ]


def test_recovery_logs_and_journals_that_cannot_be_read_have_no_number():
    hidden = journal("drivers/hidden")
    hidden.flags = pb.JournalSpec.O_WRONLY
    log = journal("drivers/log", **{"content-type": "application/x-gazette-recoverylog"})
    groups, fault, _ = group_journals(
        JOINED, [topic("rides", 1), [hidden, log, *topic("drivers", 1)]]
    )
    assert (names(groups), fault) == ([["rides/part-000", "drivers/part-000"]], None)


def test_topics_without_journals_are_waited_for():
    assert group_journals(JOINED, [topic("rides", 3), []]) == ([], None, {})


@pytest.mark.parametrize("counts", [(3, 4), (4, 3), (1, 2)])
def test_topics_of_different_numbers_of_partitions_are_refused(counts):
    found = group_journals(JOINED, [topic("rides", counts[0]), topic("drivers", counts[1])])
    assert found.groups == []
    text = str(found.fault)
    least, most = sorted(counts)
    plural = [f"{count} partition{'s' * (count > 1)}" for count in counts]
    assert f"topic=rides has {plural[0]}, topic=drivers has {plural[1]}" in text
    fewer = RIDES if counts[0] == least else DRIVERS
    assert f"until {fewer} has {most}: add them, as with `gazctl journals create NAME" in text
    assert f"--partitions {most}`" in text


def test_topics_with_a_journal_in_common_are_refused():
    both = journal("rides/part-000")
    both.labels.CopyFrom(label_set([("topic", "drivers"), ("topic", "rides")]))
    fault = group_journals(JOINED, [[both], [both]]).fault
    assert "the journal rides/part-000 is of topic=rides and of topic=drivers" in str(fault)


def test_the_source_of_a_journal_is_its_selector():
    assert source_of(JOINED, journal("drivers/part-000")) == DRIVERS
    assert source_of(RIDES, journal("rides/part-000")) == RIDES
    assert source_of(["rides/a"], journal("rides/a;of=shard")) == "rides/a"
    with pytest.raises(ConfigurationError, match="is of none of topic=rides, topic=drivers"):
        source_of(JOINED, journal("others/part-000"))


def test_partitions_are_shown_as_they_are_declared():
    assert repr(JOINED) == "partitions('topic=rides', 'topic=drivers')"
    assert isinstance(JOINED, JoinedTopics)


# ---------------------------------------------------------------- topics that every shard reads


@given(st.integers(1, 5), st.integers(1, 5))
def test_every_shard_reads_all_partitions_of_a_topic_that_is_broadcast(count, rates):
    listings = [topic("rates", rates), topic("rides", count), topic("drivers", count)]
    groups, fault, whole = group_journals(WITH_RATES, listings)
    assert fault is None
    assert [group[0] for group in names(groups)] == [
        f"rides/part-{number:03}" for number in range(count)
    ]
    assert {name: [spec.name for spec in each] for name, each in whole.items()} == {
        RATES: [f"rates/part-{number:03}" for number in range(rates)]
    }


def test_a_topic_that_is_broadcast_and_has_no_partitions_is_an_error():
    found = group_journals(WITH_RATES, [[], topic("rides", 1), topic("drivers", 1)])
    assert found.groups == []
    assert str(found.fault).startswith("topic=rates, which every shard reads, has no partitions")
    assert "gazctl journals create" in str(found.fault)


def test_a_topic_that_is_broadcast_has_no_journal_in_common_with_others():
    both = journal("rides/part-000", rates="yes")
    sources = shard.partitions(RIDES, shard.broadcast("rates=yes"))
    fault = group_journals(sources, [[both], [both]]).fault
    assert "the journal rides/part-000 is of topic=rides and of rates=yes" in str(fault)


@pytest.mark.parametrize("topic", ["rates", 7, ["topic=rates"]])
def test_what_is_no_selector_cannot_be_broadcast(topic):
    with pytest.raises(ConfigurationError, match=r"shard\.broadcast takes a label selector"):
        shard.broadcast(topic)


def test_a_broadcast_without_another_source_is_refused_where_it_is_declared():
    with pytest.raises(
        ConfigurationError, match=r"sources=shard\.partitions\('topic=rides', shard"
    ):
        check_sources("app", shard.broadcast(RATES))
