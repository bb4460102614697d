"""Parts of a local cluster before it is started."""

import pytest

from gazette_sdk.errors import ClosedError, ConfigurationError
from gazette_sdk.local_cluster import BrokerState, LocalCluster
from gazette_sdk.testing import gazette_cluster


@pytest.mark.parametrize(
    ("zones", "wanted"),
    [
        (1, ["local"] * 4),
        (2, ["a", "b", "a", "b"]),
        (["x", "y", "z"], ["x", "y", "z", "x"]),
        (["a", "a", "b", "b"], ["a", "a", "b", "b"]),
    ],
)
def test_zones_are_given_in_turn(zones, wanted, tmp_path):
    cluster = LocalCluster(tmp_path, brokers=4, zones=zones)
    assert [broker.zone for broker in cluster.brokers] == wanted
    assert [broker.name for broker in cluster.brokers] == [f"broker-{n}" for n in range(4)]


@pytest.mark.parametrize(
    "options", [{"brokers": 0}, {"zones": 0}, {"zones": []}, {"zones": "ab"}, {"etcd_members": 0}]
)
def test_wrong_numbers_are_refused(options, tmp_path):
    with pytest.raises(ConfigurationError):
        LocalCluster(tmp_path, **options)


def test_a_cluster_that_does_not_run_says_so(tmp_path):
    cluster = LocalCluster(tmp_path)
    with pytest.raises(ClosedError, match="no broker of the local cluster runs"):
        _ = cluster.address
    broker = cluster.broker("broker-1")
    assert (broker.state, broker.pid, broker.status) == (BrokerState.ENDED, None, None)
    for control in (broker.kill, broker.pause, broker.resume, broker.drain):
        with pytest.raises(ClosedError, match="broker-1 does not run"):
            control()
    with pytest.raises(ConfigurationError, match="has broker-0, broker-1, broker-2"):
        cluster.broker("broker-7")


def test_a_store_fails_and_is_whole_again(tmp_path):
    cluster = gazette_cluster(data=tmp_path)
    store = cluster.fragments / "store"
    store.mkdir(parents=True)
    (store / "fragment").write_bytes(b"content")
    for _ in range(2):
        cluster.fail_store()
        with pytest.raises(OSError, match="Too many levels"):
            list(store.iterdir())
    for _ in range(2):
        cluster.heal_store()
        assert (store / "fragment").read_bytes() == b"content"
