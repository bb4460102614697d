from __future__ import annotations

import time

from gazette_sdk import Journals
from gazette_sdk.embedded import RESUME_TIMEOUT_S, EmbeddedCluster


def test_a_restart_with_fewer_brokers_says_how_many_are_wanted(tmp_path, caplog):
    with EmbeddedCluster(tmp_path, brokers=2, sync_etcd=False) as cluster:
        Journals(cluster.transport).create("rides", partitions=2, replication=2)
        Journals(cluster.transport).create("single", partitions=1, replication=1)
    begun = time.monotonic()
    with EmbeddedCluster(tmp_path, sync_etcd=False):
        assert time.monotonic() - begun < RESUME_TIMEOUT_S, "it waited for what cannot be"
    texts = [each.getMessage() for each in caplog.records if each.name == "gazette_sdk.embedded"]
    [text] = texts
    assert text.startswith("2 journals, such as rides/part-000, want more replicas")
    assert "`gazette dev --brokers 2`" in text
