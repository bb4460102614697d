"""Fragment stores for tests: each kind over a real service or its emulator.

Load the fixtures in a ``conftest.py`` with ``from support.stores import *``.
:func:`store_url` of :class:`StoreKind` gives a fresh, empty place for each test.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from azure.storage.blob import BlobServiceClient
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.fragment import Store, open_store
from support.services import (
    Service,
    azurite_command,
    gcs_command,
    moto_command,
    running,
)
from support.webhdfs import WebHdfsServer

__all__ = [
    "STORE_KINDS",
    "azure_service",
    "gcs_key_file",
    "gcs_service",
    "make_store",
    "put_bytes",
    "s3_service",
    "store",
    "webhdfs_server",
]

STORE_KINDS = ("file", "memory", "s3", "gs", "azure", "webhdfs", "hdfs")

AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The account that every Azurite has; its key is no secret."""


@pytest.fixture(scope="session")
def s3_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """S3, by moto's server."""
    port = reserve_port()
    with running(moto_command(port), port, tmp_path_factory.mktemp("moto") / "log") as service:
        yield service


@pytest.fixture(scope="session")
def azure_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Azure Blob Storage, by Azurite."""
    port, directory = reserve_port(), tmp_path_factory.mktemp("azurite")
    with running(azurite_command(port, directory), port, directory / "log") as service:
        yield service


@pytest.fixture(scope="session")
def gcs_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Google Cloud Storage, by gcp-storage-emulator."""
    port = reserve_port()
    with running(gcs_command(port), port, tmp_path_factory.mktemp("gcs") / "log") as service:
        yield service


@pytest.fixture(scope="session")
def webhdfs_server() -> Iterator[WebHdfsServer]:
    """WebHDFS, emulated."""
    with WebHdfsServer() as server:
        yield server


@pytest.fixture(scope="session")
def gcs_key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A service account's key file, of a service account that does not exist."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    path = tmp_path_factory.mktemp("keys") / "service-account.json"
    path.write_text(
        json.dumps(
            {
                "type": "service_account",
                "project_id": "test",
                "private_key_id": "1",
                "private_key": key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                ).decode(),
                "client_email": "tester@test.iam.gserviceaccount.com",
                "token_uri": "http://127.0.0.1:1/token",
            }
        )
    )
    return path


@pytest.fixture
def make_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Store]]:
    """Makes a store of a kind in a fresh bucket; ``query`` and ``create=False`` are possible.

    For ``hdfs``, Arrow's own files stand for HDFS.
    """
    with contextlib.ExitStack() as opened:

        def make(kind: str, prefix: str = "some/prefix/", *, create: bool = True, **query: str):
            bucket = f"bucket-{uuid.uuid4().hex[:12]}"
            root = None
            if kind == "file":
                root = tmp_path / bucket
                (root / prefix if create else root).mkdir(parents=True)
            elif kind == "webhdfs":
                server = request.getfixturevalue("webhdfs_server")
                prefix = f"{bucket}/{prefix}"
                if create:
                    server.make_directories(f"/{prefix}")
                bucket = server.address
            elif kind == "hdfs":
                (tmp_path / bucket / prefix if create else tmp_path / bucket).mkdir(parents=True)
                local = SubTreeFileSystem(str(tmp_path / bucket), LocalFileSystem())
                monkeypatch.setattr(
                    "gazette_sdk.fragment.stores.hadoop.HadoopFileSystem",
                    lambda **_: ArrowFSWrapper(local),
                )
            elif kind != "memory":
                query |= _prepare(kind, bucket, request, monkeypatch, create=create)
            host = "" if kind == "file" else bucket
            text = "&".join(f"{name}={value}" for name, value in query.items())
            url = f"{kind}://{host}/{prefix}" + (f"?{text}" if text else "")
            made = open_store(url, file_root=root)
            opened.callback(made.close)
            return made

        yield make


@pytest.fixture(params=STORE_KINDS)
def store(request: pytest.FixtureRequest, make_store: Callable[..., Store]) -> Store:
    """An empty store, of each kind in turn."""
    return make_store(request.param)


def put_bytes(to: Store, path: str, content: bytes, encoding: str = "", **more: Any) -> None:
    """Put some bytes."""
    to.put(path, io.BytesIO(content), len(content), encoding, **more)


# ------------------------------------------------------------------- inside


def _prepare(
    kind: str,
    bucket: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    *,
    create: bool,
) -> dict[str, str]:
    """Point this process at a service, and make a bucket there; gives the URL's query."""
    if kind == "s3":
        endpoint = f"http://{request.getfixturevalue('s3_service').address}"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        if create:
            create_s3_bucket(endpoint, bucket)
        return {"endpoint": endpoint, "region": "us-east-1"}
    if kind == "gs":
        service = request.getfixturevalue("gcs_service")
        key_file = request.getfixturevalue("gcs_key_file")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{service.address}")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
        if create:
            _create_gcs_bucket(service, bucket)
        return {}
    connection = azurite_connection(request.getfixturevalue("azure_service"))
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    if create:
        with BlobServiceClient.from_connection_string(connection) as client:
            client.create_container(bucket).close()
    return {}


def create_s3_bucket(endpoint: str, bucket: str) -> None:
    """Make a bucket; credentials are those of the environment."""
    client = botocore.session.Session().create_client(
        "s3", region_name="us-east-1", endpoint_url=endpoint
    )
    client.create_bucket(Bucket=bucket)
    client.close()


def azurite_connection(service: Service) -> str:
    """Connection string of an Azurite's only account."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};"
        f"BlobEndpoint=http://{service.address}/{AZURITE_ACCOUNT};"
    )


def _create_gcs_bucket(service: Service, bucket: str) -> None:
    create = urllib.request.Request(
        f"http://{service.address}/storage/v1/b?project=test",
        data=json.dumps({"name": bucket}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(create, timeout=10) as answer:
        assert answer.status == 200


def unsigned_token(**claims: Any) -> str:
    """A JSON web token in form; Azurite looks at its claims only."""

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims)}.c2lnbmF0dXJl"
