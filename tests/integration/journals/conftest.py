"""A cluster of one broker, and names that no other test uses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from gazette_sdk.embedded import EmbeddedCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A cluster which the tests of a module share."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that no other test has; ``connect()`` reaches the cluster."""
    monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
    return f"topic-{uuid.uuid4().hex[:8]}"
