"""A cluster that the tests of shards share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from support.tools import gazctl

__all__ = ["gazctl"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A cluster which the tests of a module share; each has journals of its own."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as cluster:
        yield cluster
