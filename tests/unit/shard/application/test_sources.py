"""Shards and logs of source journals."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import JsonMessage, shard
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdTransactionFailedError,
    EtcdUnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.journal_spec import validate_journal_spec
from gazette_sdk.protocol.labels import label_set, value_of
from gazette_sdk.protocol.shard_spec import validate_shard_id
from gazette_sdk.shard.application import handler as generator
from gazette_sdk.shard.application.application import (
    existing_shards,
    generated,
    shard_id,
    source_selector,
)
from gazette_sdk.shard.application.handler import ShardGenerator
from gazette_sdk.shard.stores.json_store import JsonStore


@dataclass
class Order(JsonMessage):
    customer: str


def declared(**given):
    given = {"name": "totals", "sources": "topic=orders", **given}
    return shard.handler(message=Order, store=JsonStore, **given)(lambda txn, order: None)


def journal(name, **labels):
    spec = pb.JournalSpec(name=name, replication=3, labels=label_set(sorted(labels.items())))
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.stores.append("s3://bucket/")
    spec.fragment.refresh_interval.seconds = 60
    spec.fragment.retention.seconds = 3600
    return spec


NAMES = st.lists(st.sampled_from("ab/+=%235BD"), min_size=4, max_size=12).map("".join)


@given(NAMES, NAMES)
def test_different_journals_have_different_shards(one, other):
    assert (shard_id("app", one) == shard_id("app", other)) == (one == other)


@pytest.mark.parametrize("name", ["orders/part-000", "a+b=c%20/d"])
def test_ids_are_valid(name):
    validate_shard_id(shard_id("totals", name))


def test_each_journal_has_a_shard_and_a_log():
    application = declared(hot_standbys=2, min_txn_s=0.25, max_txn_s=2.5, waits_for_acks=False)
    found = generated(application, [journal("orders/b"), journal("orders/a=1")])
    assert [spec.id for spec in found.shards] == ["totals/orders/a+3D1", "totals/orders/b"]
    spec = found.shards[1]
    assert [source.journal for source in spec.sources] == ["orders/b"]
    assert (spec.hot_standbys, spec.hint_backups, spec.hint_prefix) == (2, 2, "/gazette/hints")
    assert (spec.max_txn_duration.ToMilliseconds(), spec.min_txn_duration.ToMilliseconds()) == (
        2500,
        250,
    )
    assert spec.disable_wait_for_ack
    assert value_of(spec.labels, "app.gazette.dev/managed-by") == "totals"
    log = found.logs[1]
    assert log.name == "recovery/totals/orders/b"
    assert value_of(log.labels, "content-type") == "application/x-gazette-recoverylog"
    assert (log.replication, list(log.fragment.stores)) == (3, ["s3://bucket/"])
    assert not log.fragment.HasField("retention")
    validate_journal_spec(log)


def test_what_exists_is_left_as_it_is():
    found = generated(declared(), [journal("orders/a"), journal("orders/b")], {"totals/orders/a"})
    assert [spec.id for spec in found.shards] == ["totals/orders/b"]
    assert len(found.logs) == 1


def test_recovery_logs_and_unreadable_journals_are_no_sources():
    log = journal("recovery/x", **{"content-type": "application/x-gazette-recoverylog"})
    hidden = journal("orders/hidden")
    hidden.flags = pb.JournalSpec.O_WRONLY
    assert generated(declared(), [log, hidden]) == ([], [])


def test_stores_without_files_have_no_log():
    class Remote(JsonStore):
        is_recorded = False

    application = shard.handler(message=Order, store=Remote, name="t")(lambda txn, order: None)
    found = generated(application, [journal("orders/a")])
    assert found.logs == []
    assert found.shards[0].recovery_log_prefix == ""


def test_a_journal_that_a_shard_of_another_id_reads_gets_no_second_one():
    by_hand = cpb.ShardSpec(
        id="by-hand",
        sources=[cpb.ShardSpec.Source(journal=f"orders/{part}") for part in "ab"],
    )
    other = cpb.ShardSpec(id="totals/orders/c", sources=[cpb.ShardSpec.Source(journal="orders/x")])
    journals = [journal(f"orders/{part}") for part in "abcd"]
    found = generated(declared(), journals, existing_shards([by_hand, other]))
    assert [spec.id for spec in found.shards] == ["totals/orders/d"]
    assert [log.name for log in found.logs] == ["recovery/totals/orders/d"]


def test_names_that_are_too_long_are_refused():
    with pytest.raises(ValidationError):
        generated(declared(), [journal("orders/" + "x" * 500)])


def test_a_name_that_is_too_long_does_not_keep_others_from_their_shards():
    class Remote(JsonStore):
        is_recorded = False

    application = shard.handler(message=Order, store=Remote, name="t")(lambda txn, order: None)
    created = []

    async def existing():
        return ()

    async def create(specs):
        created.extend(spec.id for spec in specs)

    async def scenario():
        made = ShardGenerator(application, None, None, existing=existing, create=create)
        names = ["orders/z", "orders/" + "x" * 510, "orders/a"]
        with pytest.raises(ValidationError, match="invalid length") as caught:
            await made.generate([journal(name) for name in names])
        assert caught.value.journal == names[1]

    asyncio.run(scenario())
    assert created == ["t/orders/a", "t/orders/z"]


def test_selectors_of_sources():
    assert source_selector(declared(sources=None)) is None
    assert source_selector(declared()) == declared().source_selector
    named = source_selector(declared(sources=["b/xyz", "a/xyz"]))
    assert [(label.name, label.value) for label in named.include.labels] == [
        ("name", "a/xyz"),
        ("name", "b/xyz"),
    ]


# ---------------------------------------------------------------- generator


class Listing:
    """Transport that lists and applies journals."""

    def __init__(self, *specs):
        self.specs = {spec.name: spec for spec in specs}

    async def list(self, request):
        response = pb.ListResponse(header=pb.Header(etcd=pb.Header.Etcd(revision=5, cluster_id=1)))
        names = {label.value for label in request.selector.include.labels}
        for spec in self.specs.values():
            if spec.name in names:
                response.journals.add(spec=spec, mod_revision=3)
        yield response

    async def apply(self, request):
        for change in request.changes:
            if change.upsert.name in self.specs:
                raise EtcdTransactionFailedError("exists")
            self.specs[change.upsert.name] = change.upsert
        return pb.ApplyResponse()


@pytest.mark.parametrize("loses", [False, True])
def test_logs_are_created_before_shards(loses):
    transport, shards = Listing(), []

    async def create(specs):
        assert all(f"recovery/{spec.id}" in transport.specs for spec in specs)
        if loses:
            raise EtcdTransactionFailedError("exists")
        shards.extend(spec.id for spec in specs)

    async def existing():
        return shards

    made = ShardGenerator(declared(), transport, None, existing=existing, create=create)
    journals = [journal("orders/a"), journal("orders/b")]
    for _ in range(2):
        with pytest.raises(EtcdTransactionFailedError) if loses else contextlib.nullcontext():
            asyncio.run(made.generate(journals))
    assert shards == ([] if loses else ["totals/orders/a", "totals/orders/b"])


class Ended:
    """Watch that has ended for good: each wait for it fails at once."""

    snapshot = None

    def __init__(self, error):
        self.error = error
        self.waits = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def changed(self):
        self.waits += 1
        assert self.waits < 10, "the event loop stands still"
        raise self.error


@pytest.mark.parametrize(
    "error", [ClosedError("closed"), ConfigurationError("no TLS"), EtcdUnavailableError("ended")]
)
@pytest.mark.parametrize("of_journals", [True, False])
def test_a_watch_that_has_ended_for_good_ends_the_generator(monkeypatch, error, of_journals):
    ended = Ended(error)

    async def existing():
        return ()

    async def never():
        await asyncio.Event().wait()

    async def scenario():
        if of_journals:
            monkeypatch.setattr(generator, "WatchedList", lambda *_: ended)
        made = ShardGenerator(
            declared(),
            Listing(),
            declared().source_selector,
            existing=existing,
            create=None,
            until_changed=never if of_journals else ended.changed,
        )
        async with asyncio.timeout(20):
            with pytest.raises(type(error)) as caught:
                await made.run()
        assert caught.value is error

    asyncio.run(scenario())
