"""Pytest plugin with fixtures of a real cluster.

Installed with the package (entry point ``pytest11``). Needs the extra ``embedded``.

- ``gazette``: a running embedded cluster of one broker; each test has a new one
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

if TYPE_CHECKING:  # importing the broker is slow, and most test runs do not need it
    from gazette_sdk.embedded import EmbeddedCluster

__all__ = ["gazette", "gazette_cluster"]


@pytest.fixture
def gazette(gazette_cluster: Callable[[int], EmbeddedCluster]) -> EmbeddedCluster:
    """Return a running cluster of one broker, with a temporary directory.

    ``transport`` connects to it without a port, and ``address`` is its URL. ``apply(yaml)`` creates
    journals. ``fragments`` is the directory of ``file:///`` stores.
    """
    return gazette_cluster(1)


@pytest.fixture
def gazette_cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], EmbeddedCluster]]:
    """Yield a function that starts a cluster of ``n`` brokers. The clusters stop after the test.

    ``GAZETTE_ADDRESS`` is the address of the first cluster during the test.
    """
    from gazette_sdk.embedded import EmbeddedCluster  # noqa: PLC0415 - see above

    clusters: list[EmbeddedCluster] = []

    def start(brokers: int) -> EmbeddedCluster:
        data: Path = tmp_path_factory.mktemp("gazette")
        # The directory is deleted after the test, so Etcd need not sync the disk.
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
        except Exception as error:  # noqa: BLE001 - stop the other clusters first
            errors.append(error)
    if errors:
        raise ExceptionGroup("clusters could not be stopped", errors)
