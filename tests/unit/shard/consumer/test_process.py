from __future__ import annotations

import pytest

from gazette_sdk.cluster.etcd_messages import KeyValue, WatchBatch, WatchEvent
from gazette_sdk.cluster.items import assignment_key, item_key, member_key
from gazette_sdk.errors import ConfigurationError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer.process import Consumer, ConsumerConfig
from gazette_sdk.shard.consumer.service import admit_upsert
from gazette_sdk.shard.consumer.shard import LocalShard
from support.etcd import run
from support.order_totals import totals

PRIMARY, STANDBY = cpb.ReplicaStatus.PRIMARY, cpb.ReplicaStatus.STANDBY
BACKFILL, FAILED = cpb.ReplicaStatus.BACKFILL, cpb.ReplicaStatus.FAILED


def consumer_of(shards, members=("local", "other"), exiting=(), hot_standbys=1):
    """A process that has seen an Etcd with shards: by member, their codes in order of slots."""
    consumer = Consumer(ConsumerConfig(suffix="local", endpoint="http://here:1"), totals, None)
    root = consumer.keyspace.root
    entries = []
    for name in members:
        spec = cpb.ConsumerSpec(
            process_spec={"id": {"zone": "local", "suffix": name}, "endpoint": "http://here:1"},
            shard_limit=10,
            exiting=name in exiting,
        )
        entries.append((member_key(root, "local", name), spec))
    for shard, held in shards.items():
        spec = cpb.ShardSpec(id=shard, hot_standbys=hot_standbys, max_txn_duration={"seconds": 1})
        entries.append((item_key(root, shard), spec))
        for slot, (name, code) in enumerate(held.items()):
            errors = ["why"] if code == FAILED else []
            status = cpb.ReplicaStatus(code=code, errors=errors)
            entries.append((assignment_key(root, shard, "local", name, slot), status))
    for revision, (key, value) in enumerate(entries, 1):
        kv = KeyValue(key, value.SerializeToString(), revision, revision, 1, 0)
        header = pb.Header.Etcd(revision=revision)
        consumer.keyspace.apply([WatchBatch(header, (WatchEvent(is_delete=False, kv=kv),))])
    return consumer


@pytest.mark.parametrize(
    ("shards", "options", "may_leave"),
    [
        pytest.param({}, {}, True, id="without shards"),
        pytest.param(
            {"shard-1": {"local": PRIMARY}}, {"members": ("local",)}, True, id="as the last one"
        ),
        pytest.param(
            {"shard-1": {"local": PRIMARY, "other": STANDBY}},
            {"exiting": ("local", "other")},
            True,
            id="as all leave",
        ),
        pytest.param(
            {"shard-1": {"local": PRIMARY, "other": STANDBY}}, {}, True, id="others have each shard"
        ),
        pytest.param(
            {"shard-1": {"local": PRIMARY, "other": BACKFILL}}, {}, False, id="another is behind"
        ),
        pytest.param(
            {"shard-1": {"local": PRIMARY, "other": FAILED}}, {}, False, id="another has failed"
        ),
        pytest.param(
            {"shard-1": {"local": FAILED, "other": FAILED}}, {}, True, id="the primary has, too"
        ),
        pytest.param(
            {"shard-1": {"other": PRIMARY, "local": STANDBY}, "shard-2": {"local": PRIMARY}},
            {},
            False,
            id="one shard is here alone",
        ),
        pytest.param(
            {"shard-1": {"local": PRIMARY, "other": STANDBY}},
            {"members": ("local", "other", "third")},
            False,
            id="the allocator can move them all",
        ),
    ],
)
def test_a_process_leaves_when_it_is_not_needed(shards, options, may_leave):
    async def scenario():
        assert consumer_of(shards, **options)._may_leave() is may_leave

    run(scenario())


def test_the_process_announced_first_leads():
    async def scenario():
        assert consumer_of({}, members=("local", "other"))._leads()
        assert not consumer_of({}, members=("other", "local"))._leads()
        assert not consumer_of({}, members=())._leads()

    run(scenario())


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    async def scenario():
        config = ConsumerConfig(
            suffix="local", endpoint="http://here:1", directory=tmp_path / "file" / "below"
        )
        with pytest.raises(ConfigurationError, match="no directory for shards"):
            await Consumer(config, totals, None).start()

    run(scenario())


def test_a_shard_goes_on_under_its_assignment_and_when_it_is_promoted():
    async def scenario():
        consumer = consumer_of({"shard-1": {"other": PRIMARY, "local": STANDBY}})
        keyspace = consumer.keyspace
        item = keyspace.item("shard-1")
        primary, standby = sorted(keyspace.assignments("shard-1"), key=lambda each: each.slot)
        shard = object.__new__(LocalShard)
        shard.create_revision, shard._assignment = item.create_revision, standby
        assert shard.continues(item, standby, is_primary=False)
        assert primary.create_revision != standby.create_revision
        assert shard.continues(item, primary, is_primary=True)  # a lesser slot
        shard._assignment = primary
        assert not shard.continues(item, standby, is_primary=False)  # made anew
        shard.create_revision += 1
        assert not shard.continues(item, primary, is_primary=True)  # the shard was made anew

    run(scenario())


def reading(shard, *journals):
    sources = [cpb.ShardSpec.Source(journal=each) for each in journals]
    return cpb.ShardSpec(id=shard, sources=sources, recovery_log_prefix="logs", hint_prefix="/h")


def test_a_caller_with_a_selector_may_share_sources_that_the_application_gives_to_several_shards():
    one, two = (reading(f"app/a/{part}", f"a/{part}", "rates/0") for part in "01")
    admit_upsert(two, None, [one, two], [one])
    with pytest.raises(UnauthenticatedError, match="the source of app/a/0"):
        admit_upsert(two, None, [two], [one])
    with pytest.raises(UnauthenticatedError, match="the source"):
        admit_upsert(reading("app/a/1", "a/0", "a/1"), None, [one, two], [one])
