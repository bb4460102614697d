"""The console over real clusters: brokers, a consumer, a primary that is killed."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import urllib.request
from dataclasses import dataclass

import pytest
from google.protobuf import descriptor_pb2
from playwright.sync_api import expect

from gazette_sdk import JsonMessage, Publisher, connect, mapping, shard
from gazette_sdk.console.content import ConsoleContent, Masks, MessageTypes
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.transport.loop import run
from support.protobuf_messages import Gram

SPECS = """
name: orders/part-000
replication: REPLICATION
labels: [{name: content-type, value: application/x-ndjson}, {name: topic, value: orders}]
fragment: {length: 1048576, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 5s}
"""
BY_NAME = mapping.direct("orders/part-000")


class RolledBackError(Exception):
    """Reason of a transaction to end."""


@dataclass
class Order(JsonMessage):
    customer: str = ""
    cents: int = 0


def add(txn: shard.Transaction, order: Order) -> None:
    if order.customer == "bad":
        raise KeyError("cents")
    txn.store[order.customer] = txn.store.get(order.customer, 0) + order.cents


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("console"), sync_etcd=False) as found:
        found.apply(SPECS.replace("REPLICATION", "1"))
        with Publisher(mapping=BY_NAME, transport=found.transport) as publisher:
            publisher.publish(Order("ada", 250)).result(10)
            with publisher.transaction() as txn:
                txn.publish(Order("bob", 1))
                txn.publish(Order("bob", 2))
            with contextlib.suppress(RolledBackError), publisher.transaction() as txn:
                txn.publish(Order("eve", 666)).result(10)
                raise RolledBackError
        yield found


def test_transactions_of_a_publisher_are_shown(cluster, visit):
    page = visit.open(cluster.address, "/journals")
    expect(page.locator(".rows .row")).to_have_count(1)
    expect(page.locator(".foot")).to_contain_text("1 journal")
    page.get_by_role("link", name="orders/part-000").click()
    rows = page.locator(".rows .row")
    expect(rows.filter(has_text="ada")).to_contain_text("committed")
    expect(rows.filter(has_text="bob").first).to_contain_text("committed")
    expect(rows.filter(has_text="eve")).to_contain_text("rolled back")
    tabs = {
        "Fragments": "on brokers only",
        "Replicas": "in sync",
        "Spec": "GZIP",
        "Readers": "No shard reads",
    }
    for tab, text in tabs.items():
        page.get_by_role("tab", name=tab).click()
        expect(page.get_by_text(text).first).to_be_visible()


def test_the_cluster_is_shown(cluster, visit):
    page = visit.open(cluster.address)
    expect(page.get_by_role("link", name=re.compile("1.*journal"))).to_be_visible()
    expect(page.get_by_role("button", name="Sign in")).to_have_count(0)
    page.get_by_role("link", name="Brokers", exact=True).click()
    # The event loop is late on a busy machine.
    expect(page.get_by_text(re.compile("^serves$|late")).first).to_be_visible()
    page.get_by_role("link", name="Stores", exact=True).click()
    expect(page.get_by_role("heading", name="file:///")).to_be_visible()
    page.get_by_role("link", name="Events", exact=True).click()
    expect(page.locator(".events li").first).to_be_visible()


def test_shards_of_a_consumer_are_shown_by_the_broker(cluster, visit):
    totals = shard.handler(
        message=Order, store=shard.RocksStore[str, int], sources="topic=orders", name="totals"
    )(add)
    with shard.EmbeddedConsumer(totals, transport=cluster.transport, etcd=cluster.etcd_endpoint):
        page = visit.open(cluster.address, "/shards")
        page.get_by_role("link", name="totals/orders/part-000").click(timeout=40_000)
        expect(page.locator("h1")).to_contain_text("totals/orders/part-000")
        page.get_by_role("link", name="orders/part-000", exact=True).first.click()
        page.get_by_role("tab", name="Readers").click()
        reader = page.get_by_role("region", name="Readers").locator("tbody tr")
        expect(reader).to_have_count(1)
        expect(reader.locator("td").nth(6)).to_have_text("0 B")
        reader.get_by_role("link", name="totals/orders/part-000").click()
        page.get_by_role("tab", name="State").click()
        expect(page.get_by_role("cell", name='"ada"')).to_be_visible()
        with Publisher(mapping=BY_NAME, transport=cluster.transport) as publisher:
            publisher.publish(Order("bad", 1)).result(10)
        page.get_by_role("tab", name="Status").click()
        expect(page.locator("pre.problem")).to_contain_text("KeyError")
        page.get_by_role("link", name="Show the record").click()
        expect(page.locator(".rows .row").first).to_contain_text("bad")


def test_a_hidden_tail_loses_and_repeats_nothing_when_the_primary_is_killed(tmp_path, visit):
    visit.page.clock.install()
    visit.expected = ("Failed to load resource", "net::ERR")
    most = 1500
    with LocalCluster(tmp_path, brokers=3, lease_ttl_s=2, sync_etcd=False) as cluster:
        cluster.apply(SPECS.replace("REPLICATION", "2"))
        cluster.wait_until_ready()
        page = visit.open(cluster.address, "/journals/orders/part-000?live=1")
        expect(page.get_by_text("Waiting for messages")).to_be_visible()
        primary = page.locator(".summary dd").nth(2).inner_text().partition("/")[2]
        survivor = next(each for each in cluster.brokers if each.name != primary)
        page = visit.open(survivor.address, "/journals/orders/part-000?live=1")
        expect(page.get_by_text("Waiting for messages")).to_be_visible()
        half = threading.Event()

        def publish():
            transport = connect(survivor.address)
            try:
                with Publisher(mapping=BY_NAME, transport=transport) as publisher:
                    for number in range(most):
                        publisher.publish(Order("ada", number)).result(60)
                        if number == most // 2:
                            half.set()
            finally:
                run(transport.aclose(), 10)

        publishing = threading.Thread(target=publish)
        publishing.start()
        assert half.wait(60)
        visit.be(hidden=True)
        page.clock.fast_forward(31_000)
        cluster.broker(primary).kill()
        visit.be(hidden=False)
        expect(page.locator(".rows .row").last).to_contain_text(
            f'"cents":{most - 1}', timeout=60_000
        )
        publishing.join(60)
        with page.expect_download() as download:
            page.get_by_role("button", name="save as NDJSON").click()
        saved = [json.loads(each) for each in download.value.path().read_text().splitlines()]
        # An append that was tried again may be there twice, and is then marked as a duplicate.
        assert sorted({each["cents"] for each in saved}) == list(range(most))
        assert len({each["UUID"] for each in saved}) == most
        assert int(page.locator(".table").get_attribute("aria-rowcount")) == len(saved) + 1


def test_masked_fields_and_names_of_protobuf_fields_are_shown(tmp_path, visit):
    files = descriptor_pb2.FileDescriptorSet()
    Gram.DESCRIPTOR.file.CopyToProto(files.file.add())
    content = ConsoleContent(Masks.parse(["topic=orders: customer"]), MessageTypes(files))
    grams = SPECS.replace("orders", "grams").replace("x-ndjson", "x-protobuf-fixed")
    grams = grams.replace("}, {", "}, {name: app.gazette.dev/message-type, value: tests.Gram}, {")
    with EmbeddedCluster(tmp_path, sync_etcd=False, console=content) as found:
        for specs in (SPECS, grams):
            found.apply(specs.replace("REPLICATION", "1"))
        with Publisher(mapping=BY_NAME, transport=found.transport) as publisher:
            publisher.publish(Order("s3cret", 250)).result(10)
        by_name = mapping.direct("grams/part-000")
        with Publisher(mapping=by_name, transport=found.transport) as publisher:
            publisher.publish(Gram(text="hello", count=7)).result(10)
        url = f"{found.address}/orders/part-000"
        request = urllib.request.Request(url, data=b"s3cret\n", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        page = visit.open(found.address, "/journals/orders/part-000?live=1")
        rows = page.locator(".rows .row")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text('"customer":"•••","cents":250')
        expect(rows.first).to_contain_text("committed")
        expect(rows.nth(1)).to_contain_text("•••")
        expect(page.get_by_text("A token with READ can read the journal itself")).to_be_visible()
        assert "s3cret" not in page.content()
        visit.open(found.address, "/journals/grams/part-000")
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text('text: "hello" count: 7')
        assert "/orders/part-000" not in visit.paths
