"""A cluster, and journals of one topic for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from integration.message.topics import Topic


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A cluster which the tests of a module share; each has journals of its own."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> Topic:
    """Journals that no other test has; ``connect()`` reaches their cluster."""
    monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
    return Topic(cluster, f"exactly-once-{uuid.uuid4().hex[:8]}")
