"""Clients with several addresses, and with addresses that are wrong."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import aclosing

import pytest

from gazette_sdk import Journals, Publisher, Reader, mapping
from gazette_sdk.errors import ConfigurationError, UnavailableError
from gazette_sdk.testing import gazette_cluster
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.listing import list_journals

REFUSED_S_MAX = 1.0


@pytest.fixture(scope="module")
def cluster():
    with gazette_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def nobody():
    """Address at which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("separator", [",", " , "])
def test_another_address_is_used_where_the_first_is_not_reached(
    cluster, nobody, separator, monkeypatch
):
    addresses = separator.join([nobody, cluster.address.removeprefix("http://")])
    monkeypatch.setenv("GAZETTE_ADDRESS", addresses)
    topic = f"several-{len(separator)}"
    assert Journals().create(topic) == [f"{topic}/part-000"]
    with Publisher(mapping=mapping.random(f"topic={topic}")) as publisher:
        publisher.publish({"n": 1}).result(timeout=10)
    found = [each.message for each in Reader(dict, f"topic={topic}", block=False)]
    assert found == [{"n": 1}]


def test_a_client_goes_on_when_the_broker_of_its_first_address_dies():
    async def calls(cluster):
        addresses = ",".join(broker.address for broker in cluster.brokers)
        async with aclosing(connect(addresses, wire="stream", cache_size=0)) as transport:
            assert (await list_journals(transport)).journals
            await asyncio.to_thread(cluster.brokers[0].kill)
            for _ in range(2):  # a call under way at the death may fail
                try:
                    listed = await list_journals(transport)
                    break
                except UnavailableError:
                    pass
            else:
                pytest.fail("no call reached the second address")
            assert listed.journals

    with gazette_cluster(2, lease_ttl_s=3.0) as cluster:
        Journals(connect(cluster.address)).create("alive", replication=1)
        asyncio.run(asyncio.wait_for(calls(cluster), 30))


def test_all_addresses_are_named_if_none_is_reached(nobody):
    async def call():
        async with aclosing(connect(f"{nobody},{nobody}")) as transport:
            for _ in range(2):
                with pytest.raises(UnavailableError, match=f"{nobody} or {nobody}"):
                    await list_journals(transport)

    asyncio.run(asyncio.wait_for(call(), 5))


def test_no_token_goes_to_a_further_address_without_tls(nobody):
    async def call():
        secure = nobody.replace("http://", "https://")
        addresses = f"{secure},http://192.0.2.1:8080"
        async with aclosing(connect(addresses, auth_token="secret")) as transport:
            with pytest.raises(ConfigurationError, match="has no TLS"):
                await list_journals(transport)

    asyncio.run(asyncio.wait_for(call(), 5))


def fails_at_once(url, text):
    async def call():
        async with aclosing(connect(url)) as transport:
            begin = time.monotonic()
            with pytest.raises(UnavailableError, match=text):
                await list_journals(transport)
            with pytest.raises(UnavailableError, match=text):
                await read_metadata(transport, "a/journal", 0)
            assert time.monotonic() - begin < 2 * REFUSED_S_MAX

    asyncio.run(asyncio.wait_for(call(), 30))


def test_tls_toward_a_broker_without_it_fails_at_once(cluster):
    fails_at_once(cluster.address.replace("http://", "https://"), "does not serve TLS")


def test_an_unknown_host_fails_at_once(monkeypatch):
    def getaddrinfo(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    fails_at_once("http://no-such-host.invalid:8080", "Name or service not known")
