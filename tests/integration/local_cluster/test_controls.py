"""Controls of a cluster of real processes."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
import urllib.error
import urllib.request

import pytest

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.local_cluster import BrokerState
from gazette_sdk.testing import gazette_cluster as cluster_of
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.listing import get_journal

JOURNAL = """
name: notes
replication: {replication}
fragment: {{length: 1048576, compression_codec: NONE, stores: ["{store}"], refresh_interval: 10s}}
"""


def append(address, content, limit_s=5):
    """Append. A primary may pause between dials of a replica that has just come back."""
    request = urllib.request.Request(f"{address}/notes", data=content, method="PUT")
    ends_at = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.headers["X-Commit-Begin"])
        except urllib.error.HTTPError as error:
            text = error.read()
            if b"Connection refused" not in text or time.monotonic() > ends_at:
                raise AssertionError(text) from error


def appends_soon(address):
    """Return True if a broker answers an append within two seconds."""
    request = urllib.request.Request(f"{address}/notes", data=b"x", method="PUT")
    try:
        urllib.request.urlopen(request, timeout=2).close()
    except OSError:
        return False
    return True


def wait_for_append(address, limit_s=60):
    """Append, once a broker takes it."""
    ends_at = time.monotonic() + limit_s
    while not appends_soon(address):
        assert time.monotonic() < ends_at, f"{address} takes no append"


def read(address):
    with urllib.request.urlopen(f"{address}/notes?offset=0", timeout=30) as answer:
        return answer.read()


def members(cluster):
    async def route():
        transport = cluster.connect()
        try:
            return (await get_journal(transport, "notes")).route.members
        finally:
            await transport.aclose()

    return {member.suffix for member in sdk_loop.run(route(), 30)}


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_brokers_are_killed_paused_drained_and_started_again(gazette_cluster):
    cluster = gazette_cluster(3, zones=2, lease_ttl_s=3)
    assert os.environ["GAZETTE_ADDRESS"] == cluster.address
    cluster.apply(JOURNAL.format(replication=2, store=cluster.store))
    append(cluster.address, b"one ")
    [first, second, third] = cluster.brokers
    assert [each.zone for each in cluster.brokers] == ["a", "b", "a"]

    second.kill()
    assert (second.state, second.status) == (BrokerState.ENDED, -signal.SIGKILL)
    assert cluster.addresses == [first.address, third.address]
    cluster.wait_until_ready()
    second.start()
    with pytest.raises(ConfigurationError, match="broker-1 runs already"):
        second.start()
    cluster.wait_until_ready()
    append(second.address, b"two ")

    third.pause()
    assert third.state is BrokerState.PAUSED
    third.resume()
    assert third.state is BrokerState.RUNNING
    third.drain()
    assert (third.state, third.status) == (BrokerState.ENDED, 0)
    cluster.wait_until_ready()
    assert members(cluster) == {"broker-0", "broker-1"}

    third.start(name="newcomer", empty_disk=True)
    cluster.wait_until_ready()
    assert cluster.broker("newcomer") is third
    append(third.address, b"three")
    deadline = time.monotonic() + 60
    # A broker with an empty disk sees what others stored by its next listing of the store.
    while [read(each.address) for each in cluster.brokers] != [b"one two three"] * 3:
        assert time.monotonic() < deadline, "a broker does not have everything"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_broker_that_was_paused_for_longer_than_its_lease_ends(gazette_cluster):
    cluster = gazette_cluster(2, lease_ttl_s=1)
    first, second = cluster.brokers
    second.pause()
    # Its key is deleted when Etcd ends its lease.
    cluster.wait_until_ready()
    second.resume()
    assert second.wait_until_ended(30) == 1
    second.start()
    cluster.wait_until_ready()
    assert first.state is BrokerState.RUNNING


@pytest.mark.slow
def test_a_member_of_etcd_is_killed_and_started_again(gazette_cluster):
    cluster = gazette_cluster(1, etcd_members=3)
    assert len(cluster.etcd.endpoints) == 3
    cluster.kill_etcd(2)
    assert len(cluster.etcd.endpoints) == 2
    with contextlib.suppress(GazetteError):  # a transaction under way may have an unknown outcome
        cluster.apply(JOURNAL.format(replication=1, store=cluster.store))
    cluster.apply(JOURNAL.format(replication=1, store=cluster.store))
    cluster.start_etcd(2)
    assert len(cluster.etcd.endpoints) == 3
    assert append(cluster.address, b"one") == 0


@pytest.mark.slow
def test_a_broker_that_is_cut_from_etcd_loses_its_lease(gazette_cluster):
    cluster = gazette_cluster(3, lease_ttl_s=1, cuts=True)
    first, second, _ = cluster.brokers
    cluster.apply(JOURNAL.format(replication=2, store=cluster.store))
    cluster.cut_from_etcd(second)
    assert second.wait_until_ended(60) == 1
    cluster.wait_until_ready()
    assert append(first.address, b"one") == 0
    second.start()  # the cut was of the earlier process
    cluster.wait_until_ready()


@pytest.mark.slow
def test_brokers_that_are_cut_from_each_other_do_not_serve_for_each_other(gazette_cluster):
    cluster = gazette_cluster(2, cuts=True)
    cluster.apply(JOURNAL.format(replication=1, store=cluster.store))
    for broker in cluster.brokers:
        wait_for_append(broker.address)  # its mirror of Etcd may be some ms late
    cluster.cut(cluster.brokers[0], [cluster.brokers[1]])
    outcomes = [appends_soon(broker.address) for broker in cluster.brokers]
    assert sorted(outcomes) == [False, True]  # the journal's broker does not need the other
    cluster.heal_links()
    for broker in cluster.brokers:
        wait_for_append(broker.address)  # connections that broke are dialled again


def test_cuts_need_proxies(tmp_path):
    cluster = cluster_of(2, data=tmp_path)
    with pytest.raises(ConfigurationError, match="cuts=True"):
        cluster.cut_from_etcd(cluster.brokers[0])


@pytest.mark.slow
def test_a_failed_run_leaves_no_process_and_keeps_its_logs():
    failure = ValueError("a failed test")
    with contextlib.suppress(ValueError), cluster_of(1) as cluster:
        pids = [cluster.brokers[0].pid, cluster.etcd.servers[0].pid]
        assert all(is_alive(pid) for pid in pids)
        raise failure
    try:
        assert not any(is_alive(pid) for pid in pids)
        assert str(cluster.data / "logs") in failure.__notes__[0]
        assert "serving" in (cluster.data / "logs" / "broker-0.log").read_text()
    finally:
        shutil.rmtree(cluster.data)


@pytest.mark.slow
def test_asynchronous_code_uses_a_cluster_and_leaves_nothing():
    async def scenario():
        async with cluster_of(1) as cluster:
            await asyncio.to_thread(cluster.wait_until_ready)
            return cluster.data, cluster.brokers[0].pid

    data, pid = asyncio.run(scenario())
    assert not data.exists()
    assert not is_alive(pid)


def test_a_broker_that_cannot_start_says_why():
    with (
        pytest.raises(GazetteError, match=r"broker-0 ended with status 1; the end of its log:"),
        cluster_of(1, arguments=["--broker.unknown=1"]),
    ):
        pass


@pytest.mark.slow
def test_a_cluster_that_is_stopped_stores_its_spools(tmp_path):
    begun = time.monotonic()
    with cluster_of(3, data=tmp_path) as cluster:
        cluster.apply(JOURNAL.format(replication=3, store=cluster.store))
        append(cluster.address, b"kept")
        cluster.stop()
        print(f"stopped after {time.monotonic() - begun:.1f} s")
        assert [broker.status for broker in cluster.brokers] == [0, 0, 0]
        assert len(list((cluster.fragments / "store" / "notes").iterdir())) == 1
        cluster.start()
        cluster.wait_until_ready()
        assert read(cluster.address) == b"kept"
