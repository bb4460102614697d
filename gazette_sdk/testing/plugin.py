"""Pytest plugin with fixtures of a real cluster.

Installed with the package (entry point ``pytest11``). Needs the extra ``embedded``.

- ``gazette``: a running embedded cluster of one broker; each test has a new one
- ``gazette_cluster``: starts a cluster of ``n`` brokers; with options, of processes that can be
  killed and paused
- ``run_shards``: runs an application's shards in processes, on the cluster of ``gazette``
- ``etcd``: a real Etcd without keys

::

    def test_orders_are_published(gazette):
        gazette.apply(JOURNALS)
        with Publisher(mapping=by_key, transport=gazette.transport) as publisher:
            publisher.publish(Order("ada", 250)).result(timeout=10)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import pytest

if TYPE_CHECKING:  # importing the broker is slow, and most test runs do not need it
    from gazette_sdk.cluster.etcd_server import EtcdServer
    from gazette_sdk.embedded import EmbeddedCluster
    from gazette_sdk.shard.application.application import Application
    from gazette_sdk.testing.cluster import EtcdFixture, TemporaryCluster
    from gazette_sdk.testing.shards import RunningShards


T = TypeVar("T")

ETCD_TIMEOUT_S = 30.0
"""Limit of looking for keys in Etcd, and of deleting them."""


class ClusterStarter(Protocol):
    """Function that starts a cluster."""

    @overload
    def __call__(self, brokers: int, /) -> EmbeddedCluster: ...

    @overload
    def __call__(self, brokers: int, /, **options: Any) -> TemporaryCluster: ...


class ShardStarter(Protocol):
    """Function that runs an application's shards until the test ends."""

    def __call__(self, application: Application[Any, Any], /, **options: Any) -> RunningShards:
        """Start processes of an application."""


@pytest.fixture
def gazette(gazette_cluster: ClusterStarter) -> EmbeddedCluster:
    """Return a running cluster of one broker, with a temporary directory.

    ``transport`` connects to it without a port, and ``address`` is its URL. ``apply(yaml)`` creates
    journals. ``fragments`` is the directory of ``file:///`` stores.
    """
    return gazette_cluster(1)


@pytest.fixture
def gazette_cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClusterStarter]:
    """Yield a function that starts a cluster of ``n`` brokers. The clusters stop after the test.

    ``gazette_cluster(3)`` has its brokers in the test's process, which is quick. With any option of
    :func:`gazette_sdk.testing.gazette_cluster`, such as ``zones=1``, each broker is a process of
    its own, which can be killed, paused and drained.

    ``GAZETTE_ADDRESS`` is the address of the first cluster during the test.
    """
    from gazette_sdk import embedded, testing  # noqa: PLC0415 - see above

    with ExitStack() as clusters:
        count = 0

        def start(brokers: int, /, **options: Any) -> EmbeddedCluster | TemporaryCluster:
            nonlocal count
            data = tmp_path_factory.mktemp("gazette")
            cluster: EmbeddedCluster | TemporaryCluster
            if options:
                cluster = testing.gazette_cluster(brokers, **{"data": data, **options})
            else:
                # The directory is deleted after the test, so Etcd need not sync the disk.
                cluster = embedded.EmbeddedCluster(data, brokers=brokers, sync_etcd=False)
            clusters.enter_context(cluster)
            count += 1
            if count == 1:
                monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
            return cluster

        yield start  # type: ignore[misc]  # the overloads


@pytest.fixture
def run_shards(gazette: EmbeddedCluster) -> Iterator[ShardStarter]:
    """Yield a function that runs an application's shards, on the cluster of ``gazette``.

    ``run_shards(totals, processes=2)`` takes the options of
    :func:`gazette_sdk.testing.run_shards`. The processes end with the test.
    """
    from gazette_sdk import testing  # noqa: PLC0415 - see above

    with ExitStack() as running:

        def start(application: Application[Any, Any], /, **options: Any) -> RunningShards:
            options.setdefault("cluster", gazette)
            return running.enter_context(testing.run_shards(application, **options))

        yield start


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Yield the Etcd process of all tests of the session."""
    from gazette_sdk.cluster.etcd_server import EtcdServer  # noqa: PLC0415 - see above

    server = EtcdServer(tmp_path_factory.mktemp("etcd"), sync_writes=False)
    server.start_blocking()
    yield server
    server.stop_blocking()


@pytest.fixture
def etcd(etcd_server: EtcdServer) -> Iterator[EtcdFixture]:
    """Yield an Etcd without keys. What the test leaves there is deleted.

    ``address`` is its URL, and ``server`` its process.
    """
    from gazette_sdk.testing.cluster import EtcdFixture  # noqa: PLC0415 - see above

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(asyncio.wait_for(work, ETCD_TIMEOUT_S))

    fixture = EtcdFixture(etcd_server)
    leftovers = run(fixture.keys())
    assert not leftovers, f"an earlier test left keys behind: {leftovers}"
    yield fixture
    run(fixture.clear())
