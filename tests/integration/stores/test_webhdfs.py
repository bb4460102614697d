"""WebHDFS: atomic uploads, errors of both of its servers, and what its URL says."""

from __future__ import annotations

import io
import os
import sys
import traceback

import pytest
import requests

from gazette_sdk import connect
from gazette_sdk.errors import (
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
    ValidationError,
)
from gazette_sdk.fragment import open_store
from gazette_sdk.protocol.names import parse_store_url
from support.stores import put_bytes
from support.webhdfs import DENIED_USER, WebHdfsServer


@pytest.fixture
def server():
    with WebHdfsServer() as server:
        server.make_directories("/base")
        yield server


@pytest.fixture
def opened(server):
    """Opens stores below ``/base``; with a query."""
    stores = []

    def open_with(query="", prefix="base/"):
        stores.append(open_store(f"webhdfs://{server.address}/{prefix}{query}"))
        return stores[-1]

    yield open_with
    for store in stores:
        store.close()


def test_an_upload_is_written_to_a_temporary_name_and_renamed(server, opened):
    put_bytes(opened(), "j/a", b"content")
    assert server.files() == {"/base/j/a": b"content"}
    [created] = [path for operation, path in server.requests if operation == "CREATE"]
    assert created.startswith("/base/j/.partial-a-")
    assert ("RENAME", created) in server.requests
    assert ("MKDIRS", "/base/j") in server.requests


def test_an_upload_that_breaks_off_leaves_no_object_and_its_part_is_never_listed(server, opened):
    store = opened()
    with pytest.raises(StoreError, match="too early"):
        store.put("j/a", io.BytesIO(os.urandom(200_000)), 300_000)
    # The DataNode may create the part behind its removal, when the client has gone already.
    assert all(path.startswith("/base/j/.partial-") for path in server.files())
    put_bytes(store, ".partial-somebody-elses", b"part")
    assert list(store.list("")) == []


@pytest.mark.parametrize("operation", ["DATA CREATE", "RENAME"])
def test_an_upload_that_fails_leaves_nothing(server, opened, operation):
    server.failures[operation] = (500, "IOException")
    with pytest.raises(StoreError, match="HTTP 500: IOException as the test wants it"):
        put_bytes(opened(), "j/a", b"content")
    assert server.files() == {}


def test_a_datanode_that_fails_a_read_is_an_error_and_no_content(server, opened):
    store = opened()
    put_bytes(store, "a", b"content")
    server.failures["DATA OPEN"] = (500, "IOException")
    with store.open("a").raw as raw, pytest.raises(StoreError, match="HTTP 500: IOException"):
        raw.read()


def test_an_object_that_another_writer_renamed_first_is_success(server, opened, monkeypatch):
    store = opened()
    rename = store._rename

    def slower(source, target):
        put_bytes(opened(), "a", b"first")
        return rename(source, target)

    monkeypatch.setattr(store, "_rename", slower)
    put_bytes(store, "a", b"other")
    assert server.files() == {"/base/a": b"first"}


def test_a_gateway_without_options_of_renaming_replaces_objects_too(server, opened):
    server.is_gateway = True
    store = opened()
    put_bytes(store, "a", b"first")
    put_bytes(store, "a", b"second", overwrite=True)
    assert server.files() == {"/base/a": b"second"}


def test_a_refused_user_is_an_authorization_error(server, opened):
    store = opened(f"?user={DENIED_USER}")
    for operate in (
        lambda: put_bytes(store, "a", b"x"),
        lambda: store.exists("a"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreAuthorizationError, match="Permission denied: user=nobody") as got:
            operate()
        assert "HADOOP_USER_NAME" in str(got.value)
        assert store.is_authorization_error(got.value)


def test_an_expired_token_is_no_authorization_error(server, opened):
    server.failures["GETFILESTATUS"] = (403, "InvalidToken")
    with pytest.raises(StoreError, match="InvalidToken") as caught:
        opened().exists("a")
    assert not opened().is_authorization_error(caught.value)


def test_a_missing_directory_says_how_to_create_it(server, opened):
    store = opened(prefix="missing/")
    with pytest.raises(StoreAuthorizationError, match="hdfs dfs -mkdir -p /missing"):
        put_bytes(store, "a", b"x")
    assert server.files() == {}
    assert list(store.list("")) == []
    with pytest.raises(FragmentNotFoundError):
        store.open("a")


def test_removing_what_is_not_there_says_so(opened):
    with pytest.raises(FragmentNotFoundError):
        opened().remove("a")


def test_the_user_comes_from_the_url_or_from_the_environment(server, opened, monkeypatch):
    monkeypatch.setenv("HADOOP_USER_NAME", DENIED_USER)
    put_bytes(opened("?user=ada"), "a", b"x")
    with pytest.raises(StoreAuthorizationError):
        opened().exists("a")


def test_journals_are_read_straight_from_it(server):
    transport = connect(f"webhdfs://{server.address}/base/")
    assert "webhdfs" in repr(transport)


def test_a_namenode_that_cannot_be_reached_is_an_error():
    store = open_store("webhdfs://127.0.0.1:1/base/")
    with pytest.raises(StoreError, match="NameNode"):
        store.exists("a")
    store.close()


def test_a_namenode_that_does_not_answer_costs_the_time_limit(opened, monkeypatch):
    store = opened()

    def slow(self, request, **options):
        assert options["timeout"][1] <= 0.5
        raise requests.exceptions.ReadTimeout("no answer")

    monkeypatch.setattr("requests.adapters.HTTPAdapter.send", slow)
    with store.bounded(0.5), pytest.raises(StoreError, match="no answer"):
        store.exists("a")


@pytest.mark.parametrize(
    ("query", "text"),
    [("?kerberos=true", "requests-kerberos"), ("?tls=no", "must be `true`"), ("?x=y", "'x'")],
)
def test_arguments_that_cannot_be_used_are_refused(opened, monkeypatch, query, text):
    monkeypatch.setitem(sys.modules, "requests_kerberos", None)  # as if it were not installed
    with pytest.raises(StoreError, match=text):
        opened(query)


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs"])
def test_urls_of_hadoop(scheme):
    parsed = parse_store_url(f"{scheme}://name.node:9000/a/b/?user=ada&find=x&replace=y")
    assert (parsed.bucket, parsed.prefix) == ("name.node:9000", "a/b/")
    assert dict(parsed.arguments) == {"user": "ada", "find": "x", "replace": "y"}
    assert parsed.unknown_arguments == ()
    with pytest.raises(ValidationError) as caught:
        parse_store_url(f"{scheme}:///a/")
    assert caught.value.kind == "missing_host"
    with pytest.raises(ValidationError) as caught:
        parse_store_url(f"{scheme}://host/a")
    assert caught.value.kind == "no_trailing_slash"


def test_hdfs_without_its_client_library_says_what_to_install(monkeypatch):
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(StoreError, match="JAVA_HOME, HADOOP_HOME and CLASSPATH"):
        open_store("hdfs://127.0.0.1:1/base/")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "gazette_sdk.fragment.stores.hadoop", None)
    with pytest.raises(StoreError, match=r'pip install "gazette-sdk\[hdfs\]"'):
        open_store("webhdfs://127.0.0.1/base/")


TOKEN = "KAAKSm9obkRvZS1zZWNyZXQ"


@pytest.fixture
def token(monkeypatch) -> str:
    monkeypatch.setenv("WEBHDFS_DELEGATION_TOKEN", TOKEN)
    return TOKEN


def test_a_token_is_not_sent_without_tls_but_to_hosts_that_are_named(
    server, opened, token, monkeypatch
):
    with pytest.raises(StoreError, match=r"without TLS; add tls=true .*WEBHDFS_TOKEN_HOSTS"):
        opened()
    monkeypatch.setenv("WEBHDFS_TOKEN_HOSTS", f"namenode:9870, {server.address}")
    put_bytes(opened(), "a", b"content")
    assert {each.get("delegation") for each in server.queries} == {token}
    server.queries.clear()
    monkeypatch.setenv("WEBHDFS_TOKEN_HOSTS", "127.0.0.1")
    assert opened().exists("a")
    assert {each.get("delegation") for each in server.queries} == {token}
    server.queries.clear()
    monkeypatch.setenv("WEBHDFS_TOKEN_HOSTS", "namenode")
    assert opened("?user=ada").exists("a")
    assert {each.get("delegation") for each in server.queries} == {None}
    assert {each.get("user.name") for each in server.queries} == {"ada"}
    open_store("webhdfs://127.0.0.1:9871/base/?tls=true").close()


@pytest.mark.parametrize(
    ("hosts", "location", "is_sent"),
    [
        ("", "https://data-1:9865/webhdfs/v1/a", True),
        ("", "http://data-1:9864/webhdfs/v1/a", False),
        ("namenode,data-1", "http://data-1:9864/webhdfs/v1/a", True),
        ("namenode,data-1:1", "http://data-1:9864/webhdfs/v1/a", False),
    ],
)
def test_no_redirect_takes_a_token_out_of_tls(token, monkeypatch, hosts, location, is_sent):
    monkeypatch.setenv("WEBHDFS_TOKEN_HOSTS", hosts)
    store = open_store("webhdfs://namenode:9871/base/?tls=true")
    try:
        if is_sent:
            store._check_redirect(f"{location}?delegation={token}")
        else:
            with pytest.raises(OSError, match="redirects to http://data-1, where the token") as bad:
                store._check_redirect(f"{location}?delegation={token}")
            assert token not in str(bad.value)
    finally:
        store.close()


def test_no_error_shows_the_token(server, opened, token, monkeypatch):
    monkeypatch.setenv("WEBHDFS_TOKEN_HOSTS", "127.0.0.1, gone.invalid")
    store = opened()
    put_bytes(store, "a", b"content")
    failures = []
    for where, failure in (
        ("LISTSTATUS", (500, "IOException", f"GET /webhdfs/v1/?delegation={token}&op=x failed")),
        ("GETFILESTATUS", (401, "InvalidToken", f"token {token} is not valid")),
        ("OPEN", (307, f"http://127.0.0.1:1/webhdfs/v1/a?delegation={token}&op=OPEN", "")),
    ):
        server.failures[where] = failure
        with pytest.raises(StoreError) as caught:
            list(store.list("")) if where == "LISTSTATUS" else store.open("a").raw.read()
        failures.append(caught.value)
        if where != "LISTSTATUS":
            del server.failures[where]
    gone = open_store("webhdfs://gone.invalid:9870/base/")
    with pytest.raises(StoreError) as caught:
        gone.exists("a")
    gone.close()
    texts = ["".join(traceback.format_exception(each)) for each in [*failures, caught.value]]
    assert all("in store webhdfs://" in text for text in texts)
    assert not any(token in text for text in texts)
