"""The pytest plugin: tests against a real cluster, with no set-up of their own.

Installed with the package (entry point ``pytest11``). Needs the extra ``embedded``.

- ``gazette``: a running embedded cluster of one broker, fresh for each test
- ``gazette_cluster``: starts a cluster of ``n`` brokers

::

    def test_orders_are_published(gazette):
        gazette.apply(JOURNALS)
        with Publisher(mapping=by_key, transport=gazette.transport) as publisher:
            publisher.publish(Order("ada", 250)).result(timeout=10)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # importing the broker takes time that no other test run should spend
    from gazette_sdk.embedded import EmbeddedCluster

__all__ = ["gazette", "gazette_cluster"]


@pytest.fixture
def gazette(gazette_cluster: Callable[[int], EmbeddedCluster]) -> EmbeddedCluster:
    """A running cluster of one broker, over a directory of its own.

    Its ``transport`` reaches it without a port, its ``address`` over one; ``apply(yaml)`` creates
    journals; ``fragments`` is where ``file:///`` stores put their files.
    """
    return gazette_cluster(1)


@pytest.fixture
def gazette_cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], EmbeddedCluster]]:
    """Starts a cluster of ``n`` brokers; every cluster is stopped when the test ends.

    The first one is also what ``connect()`` reaches during the test (``GAZETTE_ADDRESS``).
    """
    from gazette_sdk.embedded import EmbeddedCluster  # noqa: PLC0415 - see above

    clusters: list[EmbeddedCluster] = []

    def start(brokers: int) -> EmbeddedCluster:
        data: Path = tmp_path_factory.mktemp("gazette")
        # These directories die with the test, so that nothing need reach the disk.
        cluster = EmbeddedCluster(data, brokers=brokers, sync_etcd=False).start()
        clusters.append(cluster)
        if len(clusters) == 1:
            monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
        return cluster

    yield start
    errors: list[Exception] = []
    for cluster in reversed(clusters):
        try:
            cluster.stop()
        except Exception as error:  # noqa: BLE001 - the others are stopped first
            errors.append(error)
    if errors:
        raise ExceptionGroup("clusters could not be stopped", errors)
