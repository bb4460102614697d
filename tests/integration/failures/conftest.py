import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.testing.tcp_proxy import TcpProxy
from integration.failures.disks import SmallDisk, small_disk
from support.services import Service
from support.stores import *  # noqa: F403
from support.stores import create_s3_bucket


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A cluster which the tests of a module share; each has journals of its own."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as cluster:
        yield cluster


@pytest.fixture
def name() -> str:
    """A name for a journal that no other test has."""
    return f"failures/{uuid.uuid4().hex[:8]}"


@dataclass
class LosableS3:
    """A bucket of S3 behind a port that can be closed, or fall silent."""

    proxy: TcpProxy
    bucket: str

    def url(self, prefix: str = "") -> str:
        endpoint = f"http://127.0.0.1:{self.proxy.port}"
        return f"s3://{self.bucket}/{prefix}?endpoint={endpoint}&region=us-east-1"

    def refuse(self) -> None:
        """Every connection is closed, those of now and new ones."""
        self.proxy.refuse()

    def hang(self) -> None:
        """Connections are taken, and nothing comes back any more."""
        self.proxy.cut()

    def come_back(self) -> None:
        self.proxy.heal()


@pytest.fixture
def losable_s3(s3_service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[LosableS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    create_s3_bucket(f"http://{s3_service.address}", bucket)

    with TcpProxy(s3_service.port) as proxy:
        yield LosableS3(proxy, bucket)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk that can be full."""
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Warnings and errors which the log has by now, of those that hold a text."""
    caplog.set_level(logging.INFO)

    def warnings(text: str) -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelno >= logging.WARNING and text in record.getMessage()
        ]

    return warnings


@pytest.fixture(autouse=True)
def nothing_breaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that no traceback is logged: every failure has a message."""
    yield
    records = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    assert not [r.getMessage() for r in records if r.exc_info and r.name.startswith("gazette")]
