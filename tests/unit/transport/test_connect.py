from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.router import RoutedTransport
from gazette_sdk.transport.stream.wire import ChosenTransport
from gazette_sdk.transport.wire import Tls


@pytest.fixture(autouse=True)
def _without_address(monkeypatch):
    monkeypatch.delenv("GAZETTE_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost:8080", "http://localhost:8080"),
        ("http://localhost:8080/", "http://localhost:8080"),
        ("https://broker.example", "https://broker.example"),
        ("unix:///run/broker.sock", "unix:///run/broker.sock"),
        ("unix://host/run/broker.sock", "unix://host/run/broker.sock"),
    ],
)
def test_addresses_of_brokers_are_spoken_to_over_the_wire_they_know(url, address):
    transport = connect(url)
    assert isinstance(transport, ChosenTransport)
    assert isinstance(transport, Transport)
    assert transport.address == address
    assert isinstance(connect(f"{url}?wire=grpc"), GrpcTransport)


def test_without_a_url_the_environment_and_then_the_default_count(monkeypatch):
    assert connect().address == "http://localhost:8080"
    monkeypatch.setenv("GAZETTE_ADDRESS", "http://elsewhere:1234")
    assert connect().address == "http://elsewhere:1234"
    monkeypatch.setenv("GAZETTE_ADDRESS", " ")
    assert connect().address == "http://localhost:8080"


def test_stores_are_read_directly(tmp_path):
    assert isinstance(connect(f"file://{tmp_path}"), FragmentStoreTransport)
    assert isinstance(connect("memory://name/", content_type="x"), FragmentStoreTransport)


def test_options_reach_the_transport():
    assert connect("http://localhost:8080", cache_size=0).routes.size == 0


OWN = {"self", "address", "url", "data"}
ONLY_OF_CLUSTERS = {"durability", "sync_etcd", "console", "lease_ttl_s", "config"}


def test_each_option_is_named_documented_and_has_the_default_of_its_transport():
    parameters = dict(inspect.signature(connect).parameters)
    assert parameters.pop("url").default is None
    unknown = parameters.pop("unknown")
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD
    assert unknown.annotation == "Never"  # so that mypy reports it
    assert parameters.pop("wire").default is None
    for parameter in parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert f"\n        {parameter.name}: " in connect.__doc__
    taken = [
        parameter
        for owner in (RoutedTransport, FragmentStoreTransport, EmbeddedCluster)
        for parameter in inspect.signature(owner.__init__).parameters.values()
        if parameter.name not in OWN | ONLY_OF_CLUSTERS
    ]
    assert {each.name: (each.annotation, each.default) for each in taken} == {
        name: (each.annotation, each.default) for name, each in parameters.items()
    }


def test_an_option_of_another_kind_of_url_may_have_its_default(tmp_path):
    assert isinstance(connect(f"file://{tmp_path}", zone="", cache_size=256), Transport)


def test_options_of_an_embedded_cluster_reach_it(tmp_path):
    with pytest.raises(ConfigurationError, match="at least one broker, not 0"):
        connect(f"embedded://{tmp_path}", brokers=0)


@pytest.mark.parametrize("wire", ["grpc", "stream", "auto"])
def test_every_wire_takes_the_same_options(wire):
    options = {
        "zone": "a",
        "cache_size": 1,
        "cache_ttl_s": 2.0,
        "tls": Tls(),
        "auth_keys": "c2VjcmV0",
        "auth_token": "",
        "max_receive_bytes": 1 << 20,
        "reconnect_backoff_max_s": 0.5,
        "connect_timeout_s": 1.0,
        "read_chunk_bytes": 1 << 16,
    }
    transport = connect("http://localhost:8080", wire=wire, **options)
    assert transport.routes.size == 1
    assert transport.address == connect(f"http://localhost:8080?wire={wire}").address
    assert transport.knows_routes


def test_grpc_is_not_imported_where_it_is_not_spoken():
    code = (
        "import sys, gazette_sdk.transport as t; t.connect('http://localhost:8080?wire=stream');"
        "assert 'grpc' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("http://localhost:8080?wire=carrier-pigeon", {}, "wire=carrier-pigeon"),
        ("http://localhost:8080", {"cache": 5}, "no option 'cache'; the nearest is 'cache_size'"),
        ("memory://name/", {"content": "x"}, "no option 'content'; .*'content_type'"),
        ("http://localhost:8080", {"qwerty": 5}, "no option 'qwerty'; use one of wire, zone"),
        ("memory://name/", {"zone": "a"}, "zone='a' is an option of a broker.*takes content_type"),
        ("http://localhost:8080", {"brokers": 3}, "brokers=3 is an option of an embedded cluster"),
        ("http://localhost:8080", {"cache_size": "5"}, "give a whole number, such as 256"),
        ("http://localhost:8080", {"cache_size": True}, "cache_size=True.*another type"),
        ("http://localhost:8080", {"zone": None}, r"connect\(zone=None\).*a text"),
        ("http://localhost:8080", {"cache_ttl_s": "1"}, "cache_ttl_s='1'.*a number"),
        ("memory://name/", {"refresh_interval_s": "1"}, "refresh_interval_s='1'"),
        ("http://?wire=stream", {}, "not the address of a broker"),
        ("http://?wire=auto", {}, "not the address of a broker"),
        ("http://localhost:8080?wires=grpc", {}, "unknown argument 'wires'"),
        ("http://localhost:8080/a/journal", {}, "has no path"),
        ("http://", {}, "not the address of a broker"),
        ("localhost:8080", {}, "must begin with one of http://"),
        ("ftp://host/", {}, "must begin with one of http://"),
        ("http://localhost:8080", {"auth_keys": "%%"}, "authorization key 1"),
    ],
)
def test_what_cannot_be_used_is_named(url, options, text):
    with pytest.raises(ConfigurationError, match=text):
        connect(url, **options)


def test_a_bad_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("GAZETTE_ADDRESS", "localhost")
    with pytest.raises(ConfigurationError, match="GAZETTE_ADDRESS 'localhost'"):
        connect()


def test_stores_are_not_imported_before_they_are_used():
    code = (
        "import sys, gazette_sdk.transport as t; t.connect('http://localhost:8080');"
        "assert 'gazette_sdk.transport.fragment_store' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_transport_that_is_closed_at_once_leaves_no_failed_task(caplog):
    async def fail():
        async with connect("https://localhost:1", tls=Tls(cert_file="/nonexistent")) as transport:
            await read_metadata(transport, "a/journal", 0)

    with pytest.raises(GazetteError):
        asyncio.run(fail())
    gc.collect()
    assert not caplog.records
