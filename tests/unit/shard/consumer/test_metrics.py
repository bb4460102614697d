from __future__ import annotations

from prometheus_client import REGISTRY

from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer.shard import ShardUp

STANDBY, PRIMARY = cpb.ReplicaStatus.STANDBY, cpb.ReplicaStatus.PRIMARY


def up(status):
    return REGISTRY.get_sample_value("gazette_shard_up", {"shard": "up/one", "status": status})


def test_a_shard_has_one_status():
    shard = ShardUp("up/one")
    shard.set(STANDBY)
    shard.set(PRIMARY)
    assert (up("STANDBY"), up("PRIMARY")) == (None, 1)
    shard.remove()
    shard.remove()
    assert up("PRIMARY") is None


def test_a_shard_that_ends_late_leaves_the_status_of_its_successor():
    ending, following = ShardUp("up/one"), ShardUp("up/one")
    ending.set(PRIMARY)
    following.set(PRIMARY)
    ending.remove()
    assert up("PRIMARY") == 1
    following.remove()
    assert up("PRIMARY") is None
