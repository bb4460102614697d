"""Stores that cannot be reached, are slow, or come back."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.errors import FragmentNotFoundError, StoreError
from gazette_sdk.fragment import StoreRegistry, open_store
from gazette_sdk.fragment.stores import s3
from support.services import moto_command, running
from support.stores import create_s3_bucket, put_bytes

serial = pytest.mark.serial
"""For tests that measure times."""

KINDS = ("s3", "gs", "azure")


def point_at(monkeypatch, kind, port):
    """A store of a kind whose service is at a port."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    connection = "AccountName=a;AccountKey=a2V5;DefaultEndpointsProtocol=http;"
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"{connection}BlobEndpoint=http://127.0.0.1:{port}/a;",
    )
    query = f"?endpoint=http://127.0.0.1:{port}&region=us-east-1" if kind == "s3" else ""
    return f"{kind}://bucket/prefix/{query}"


@contextmanager
def silent_port():
    """A port that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


@serial
@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_is_not_there_is_a_clear_error_soon(kind, monkeypatch):
    with closing(open_store(point_at(monkeypatch, kind, reserve_port()))) as store:
        began = time.monotonic()
        with pytest.raises(StoreError, match="check the network") as caught:
            store.exists("a/path")
        assert time.monotonic() - began < 5
        for said in ("exists 'a/path'", store.url):
            assert said in str(caught.value)
        assert not store.is_authorization_error(caught.value)


@serial
@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_ends_when_its_time_is_over(kind, monkeypatch):
    with silent_port() as port, closing(open_store(point_at(monkeypatch, kind, port))) as store:
        began = time.monotonic()
        with (
            store.bounded(0.5),
            pytest.raises(StoreError, match=r"no answer within|time.* out"),
        ):
            store.exists("a/path")
        assert time.monotonic() - began < 2


@serial
@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_store_is_known_within_five_seconds_and_its_return_too(
    kind, monkeypatch, tmp_path, request
):
    """The service hangs (its process is stopped), then goes on."""
    service = request.getfixturevalue(
        {"s3": "s3_service", "gs": "gcs_service"}.get(kind, "azure_service")
    )
    make = request.getfixturevalue("make_store")
    url = make(kind).url

    async def scenario():
        registry = StoreRegistry()
        service.process.send_signal(19)  # SIGSTOP
        try:
            health = registry.health(url)
            began = time.monotonic()
            health.request_soon()
            await asyncio.wait_for(health.wait_first(), 5)
            assert time.monotonic() - began < 5
            assert not health.healthy
            assert health.error
            await asyncio.wait_for(health.changed(), 6)
        finally:
            service.process.send_signal(18)  # SIGCONT
        began = time.monotonic()
        while not health.healthy:
            health.request_soon()
            await asyncio.wait_for(health.changed(), 5)
        assert time.monotonic() - began < 5
        await registry.aclose()

    asyncio.run(scenario())


@serial
def test_a_service_that_starts_late_is_found(monkeypatch, tmp_path):
    port = reserve_port()
    url = point_at(monkeypatch, "s3", port)

    async def scenario():
        registry = StoreRegistry()
        health = registry.health(url)
        await asyncio.wait_for(health.wait_first(), 5)
        assert "put failed" in health.error
        with running(moto_command(port), port, tmp_path / "log"):
            await asyncio.to_thread(create_s3_bucket, f"http://127.0.0.1:{port}", "bucket")
            began = time.monotonic()
            while not health.healthy:
                health.request_soon()
                await asyncio.wait_for(health.changed(), 5)
            assert time.monotonic() - began < 5
            await registry.aclose()

    asyncio.run(scenario())


def test_many_threads_share_a_store(make_store):
    store = make_store("s3")
    failures = []

    def use(number):
        try:
            for step in range(5):
                path = f"thread/{number}/{step}"
                put_bytes(store, path, b"%d" % number)
                with store.open(path).raw as raw:
                    assert raw.read() == b"%d" % number
        except (StoreError, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(list(store.list("thread/"))) == 80


def test_large_objects_of_s3_are_uploaded_in_parts(make_store, monkeypatch):
    monkeypatch.setattr(s3, "_PART_BYTES", 5 << 20)
    store = make_store("s3")
    content = bytes(range(256)) * (12 << 12)  # 12 MiB: three parts
    put_bytes(store, "large", content)
    with store.open("large").raw as raw:
        assert raw.read() == content
    put_bytes(store, "large", content[::-1])
    with store.open("large").raw as raw:
        assert raw.read(4) == content[:4]
    with pytest.raises(StoreError, match="too early"):
        store.put("short", Short(content), len(content) + 1)
    assert not store.exists("short")
    assert store._call(lambda: store._request("list_multipart_uploads")).get("Uploads") is None


class Short:
    def __init__(self, content):
        self._left = memoryview(content)

    def read(self, size):
        data, self._left = self._left[:size], self._left[size:]
        return bytes(data)


def test_arguments_of_s3_are_sent_with_what_is_stored(make_store):
    store = make_store(
        "s3", acl="public-read", storageclass="STANDARD_IA", sse="aws:kms", ssekmskeyid="a-key"
    )
    put_bytes(store, "a", b"x", "gzip")
    found = store._call(lambda: store._request("head_object", Key="some/prefix/a"))
    assert found["StorageClass"] == "STANDARD_IA"
    assert found["ServerSideEncryption"] == "aws:kms"
    assert found["SSEKMSKeyId"].endswith("a-key")
    assert found["ContentEncoding"] == "gzip"
    grants = store._call(lambda: store._request("get_object_acl", Key="some/prefix/a"))["Grants"]
    assert any("AllUsers" in str(grant) for grant in grants)


def test_an_object_that_vanishes_while_it_is_read_is_not_found(make_store):
    for kind in KINDS:
        store = make_store(kind)
        put_bytes(store, "gone", b"x" * 100)
        with store.open("gone").raw as raw:
            store.remove("gone")
            with pytest.raises(FragmentNotFoundError, match="gone"):
                raw.read()
