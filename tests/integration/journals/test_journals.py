"""Journals from code, against a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gazette_sdk import Journals, Publisher, Reader, connect, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import (
    ConfigurationError,
    DeadlineExceededError,
    JournalExistsError,
    JournalNotFoundError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.journals import changes as creation
from gazette_sdk.transport.base import Transport
from support.brokers import a_broker
from support.etcd import EtcdFixture, run


def test_the_first_message_needs_no_yaml(topic: str):
    names = Journals().create(topic, partitions=3)
    assert names == [f"{topic}/part-00{index}" for index in range(3)]
    with Publisher(mapping=mapping.random(f"topic={topic}")) as publisher:
        publisher.publish({"minutes": 12}).result(timeout=10)
    (envelope,) = Reader(dict, f"topic={topic}", block=False)
    assert envelope.message["minutes"] == 12


def test_defaults_are_shown_by_a_listing(topic: str):
    Journals().create(topic)
    (journal,) = Journals().list(f"topic={topic}")
    assert journal.name == f"{topic}/part-000"
    assert journal.replication == 1  # the cluster has one broker
    assert journal.stores == ("file:///",)
    assert journal.codec == "gzip"
    assert journal.length == 64 << 20
    assert journal.content_type == "application/x-ndjson"
    assert journal.labels == {"content-type": "application/x-ndjson", "topic": topic}
    assert journal.brokers == ("local/broker-0",)
    assert journal.revision >= journal.create_revision > 0


def test_all_values_can_be_given(topic: str):
    Journals().create(
        topic,
        partitions=2,
        replication=1,
        stores="file:///elsewhere/",
        codec="zstd",
        length=1 << 20,
        labels={"region": ["eu", "us"], "topic": "other"},
        content_type="text/csv",
        refresh_interval_s=30,
        flush_interval_s=120,
        retention_s=3600,
        max_append_rate=1 << 20,
    )
    try:
        for journal in Journals().list(f"prefix={topic}/"):
            assert journal.stores == ("file:///elsewhere/",)
            assert journal.codec == "zstandard"
            assert journal.length == journal.max_append_rate == 1 << 20
            assert journal.labels["region"] == ("eu", "us")
            assert journal.labels["topic"] == "other"
            assert journal.content_type == "text/csv"
            assert journal.refresh_interval_s == 30
            assert journal.flush_interval_s == 120
            assert journal.retention_s == 3600
    finally:
        Journals().delete(f"prefix={topic}/")  # or the default store would be ambiguous


def test_a_name_without_partitions_is_one_journal(topic: str):
    assert Journals().create(f"{topic}/log", partitions=0, content_type="") == [f"{topic}/log"]
    (journal,) = Journals().list(f"{topic}/log")
    assert journal.labels == {"topic": f"{topic}/log"}


def test_a_repeated_create_changes_nothing(topic: str):
    names = Journals().create(topic, partitions=3)
    before = Journals().list(f"topic={topic}")
    assert Journals().create(topic, partitions=3) == names
    assert Journals().create(topic, partitions=2) == names[:2]
    assert Journals().list(f"topic={topic}") == before


def test_more_partitions_take_the_values_of_the_first(topic: str):
    Journals().create(topic, partitions=2, codec="snappy", labels={"region": "eu"})
    Journals().create(topic, partitions=4)
    found = Journals().list(f"topic={topic}")
    assert [journal.codec for journal in found] == ["snappy"] * 4
    assert [journal.labels["region"] for journal in found] == ["eu"] * 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codec": "none"}, "codec is gzip, not none"),
        ({"labels": {"region": "eu"}}, "label region is missing, not eu"),
        ({"content_type": ""}, "label content-type is application/x-ndjson, not missing"),
        ({"length": 4096, "replication": 2}, "replication is 1, not 2; its length is 67108864"),
    ],
)
def test_a_create_with_other_values_is_an_error_and_changes_nothing(topic: str, options, text):
    Journals().create(topic, partitions=1)
    before = Journals().list(f"topic={topic}")
    with pytest.raises(JournalExistsError, match=f"{topic}/part-000 exists.*{text}") as caught:
        Journals().create(topic, partitions=3, **options)
    assert caught.value.journal == f"{topic}/part-000"
    assert Journals().list(f"topic={topic}") == before


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"partitions": -1}, ConfigurationError, "use 1 to 1000"),
        ({"partitions": 1001}, ConfigurationError, "use 1 to 1000"),
        ({"codec": "zip"}, ConfigurationError, "'zip' is not one of none, gzip"),
        ({"replication": 6}, ValidationError, "part-000: invalid replication .6; expected"),
        ({"length": "big"}, ValidationError, "length='big' cannot be used"),
        ({"stores": ["ftp://host/"]}, ValidationError, "part-000.Fragment.Stores"),
        ({"kodec": "gzip"}, TypeError, "unknown option 'kodec'"),
    ],
)
def test_values_that_cannot_be_used_create_nothing(topic: str, options, kind, text):
    with pytest.raises(kind, match=text):
        Journals().create(topic, **options)
    assert Journals().list(f"topic={topic}") == []


def test_each_method_has_an_asynchronous_form(cluster: EmbeddedCluster, topic: str):
    async def scenario() -> None:
        for journals in (Journals(), Journals(cluster.transport)):
            names = await journals.acreate(topic, partitions=2)
            assert await journals.acreate(topic, partitions=2) == names
            assert await journals.aupdate(f"topic={topic}", labels={"region": "eu"}) == names
            assert [each.name for each in await journals.alist(f"topic={topic},region=eu")] == names
            assert await journals.adelete(names) == names
            assert await journals.alist(f"topic={topic}") == []

    run(scenario())


def test_an_update_changes_only_what_is_given(topic: str):
    Journals().create(topic, partitions=2, labels={"region": "eu"})
    Journals().update(f"topic={topic}", codec="snappy", labels={"region": [], "tier": "hot"})
    for journal in Journals().list(f"topic={topic}"):
        assert journal.codec == "snappy"
        assert journal.length == 64 << 20
        assert "region" not in journal.labels
        assert journal.labels["tier"] == "hot"
    before = Journals().list(f"topic={topic}")
    Journals().update(f"topic={topic}", codec="snappy")
    assert Journals().list(f"topic={topic}") == before


def test_updates_at_the_same_time_all_take_effect(topic: str):
    async def scenario() -> None:
        journals = Journals()
        await journals.acreate(topic)
        await asyncio.gather(
            *(journals.aupdate(f"topic={topic}", labels={f"label-{n}": "set"}) for n in range(3))
        )
        (journal,) = await journals.alist(f"topic={topic}")
        assert {"label-0", "label-1", "label-2"} <= journal.labels.keys()

    run(scenario())


def test_creates_at_the_same_time_all_succeed(topic: str):
    async def scenario() -> None:
        made = await asyncio.gather(*(Journals().acreate(topic, partitions=3) for _ in range(3)))
        assert made[0] == made[1] == made[2]

    run(scenario())


def test_journals_are_deleted_by_selector_name_and_names(topic: str):
    names = Journals().create(topic, partitions=6)
    assert Journals().delete(names[0]) == names[:1]
    assert Journals().delete(names[1:3]) == names[1:3]
    assert Journals().delete(f"topic={topic}") == names[3:]
    assert Journals().delete(f"topic={topic}") == []


def test_a_name_without_a_slash_selects_its_journal(topic: str):
    journals = Journals()
    assert journals.create(topic, partitions=0) == [topic]
    assert [each.name for each in journals.list(topic)] == [topic]
    assert journals.update(topic, length=4096) == [topic]
    assert journals.delete(topic) == [topic]
    assert journals.list(topic) == []


@pytest.mark.parametrize("missing", ["no/such", ["no/such"]])
def test_a_missing_name_deletes_and_updates_nothing(topic: str, missing):
    names = Journals().create(topic, partitions=2)
    wanted = missing if isinstance(missing, str) else [*names, *missing]
    for change in (Journals().delete, Journals().update):
        with pytest.raises(JournalNotFoundError, match="no/such"):
            change(wanted)
    assert len(Journals().list(f"topic={topic}")) == 2


def test_an_empty_selector_deletes_nothing(topic: str):
    Journals().create(topic)
    with pytest.raises(ConfigurationError, match="matches all journals"):
        Journals().delete("")
    assert Journals().list(f"topic={topic}")


def test_hundreds_of_journals_are_several_transactions(topic: str):
    names = Journals().create(topic, partitions=300, replication=1)
    assert len(names) == 300
    assert Journals().create(topic, partitions=300) == names
    assert Journals().update(f"topic={topic}", codec="none") == names
    assert Journals().delete(names) == names


def test_replication_spares_one_of_two_brokers_or_a_warning_says_that_it_does_not(
    gazette_cluster: Callable[[int], EmbeddedCluster],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    cluster = gazette_cluster(2)
    Journals().create("walks", partitions=2)
    # Other implementations do not say how many brokers there are.
    with monkeypatch.context() as patched:
        patched.setattr(creation, "count_brokers", no_answer)
        Journals().create("trips")
    assert [each.replication for each in Journals().list()] == [1, 1, 1]
    assert "to spare" not in caplog.text
    Journals().create("rides", partitions=3, replication=2)
    assert (
        "replication of rides/part-000 and 2 more leaves no broker to spare: it is 2, and the "
        "cluster has 2 brokers, so that while one of these is away, their appends wait for it; "
    ) in caplog.text
    with Publisher(mapping=mapping.random("topic=rides")) as publisher:
        publisher.publish({"minutes": 12}).result(timeout=10)
    for journal in Journals().list("topic=rides"):
        assert journal.replication == 2
        assert sorted(journal.brokers) == ["local/broker-0", "local/broker-1"]
    transport = connect(cluster.addresses[1])
    assert len(list(Reader(dict, "topic=rides", block=False, transport=transport))) == 1


async def no_answer(_transport: Transport, _name: str) -> int:
    return 0


def test_the_default_store_is_that_of_the_other_journals(gazette: EmbeddedCluster):
    journals = Journals(gazette.transport)
    journals.create("first", stores="file:///shared/")
    journals.create("second")
    assert {each.stores for each in journals.list()} == {("file:///shared/",)}
    journals.create("third", stores="file:///own/")
    with pytest.raises(ConfigurationError, match=r"2 different ones .*own/; file.*stores="):
        journals.create("fourth")
    assert journals.list("topic=fourth") == []


def test_without_any_store_the_error_names_the_remedies(etcd: EtcdFixture, tmp_path: Path):
    async def scenario() -> None:
        async with a_broker(etcd, tmp_path, file_root=None) as (_, client):
            journals = Journals(client.transport)
            with pytest.raises(ConfigurationError, match=r"stores=.*--broker\.file-root"):
                await journals.acreate("rides")
            assert await journals.acreate("rides", stores=[]) == ["rides/part-000"]

    run(scenario())


def test_an_unreachable_broker_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GAZETTE_ADDRESS", "http://127.0.0.1:9")
    with pytest.raises((UnavailableError, DeadlineExceededError), match=r"127\.0\.0\.1:9|1 s"):
        Journals(timeout_s=1).list()
