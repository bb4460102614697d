"""Tables of metrics name what a running broker and a running consumer show."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gazette_sdk import Journals, Publisher, connect, mapping, shard
from gazette_sdk.cli.monitoring import written_files
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.transport.listing import list_journals
from gazette_sdk.transport.loop import run
from integration.failures.journals import spec
from support.monitoring import expressions, recorded
from support.pages import ROOT

TIMEOUT_S = 60.0


@shard.handler(message=dict, store=shard.RocksStore, sources="topic=orders", name="metric-tables")
def count(txn: shard.Transaction, order: dict) -> None:
    if order.get("bad"):
        raise ValueError("a bad order")
    txn.store["count"] = int(txn.store.get("count", 0)) + 1


def ready(address: str) -> tuple[int, str]:
    """Status and text of ``/debug/ready``."""
    try:
        with urllib.request.urlopen(f"{address}/debug/ready", timeout=TIMEOUT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(address: str) -> dict[str, list[dict[str, str]]]:
    """By name of a sample, the labels of each series; also by the names of whole metrics."""
    with urllib.request.urlopen(f"{address}/debug/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, [])
        for sample in family.samples:
            for name in {sample.name, family.name}:
                found.setdefault(name, []).append(dict(sample.labels))
    return found


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory):
    """Metrics of a broker and a consumer in which every path of the tables was gone once."""
    directory = tmp_path_factory.mktemp("cluster")
    with EmbeddedCluster(directory, brokers=2, sync_etcd=False) as cluster:
        transport = cluster.transport
        journals = Journals(transport=transport)
        journals.create("orders", partitions=2, replication=2)
        names = sorted(each.name for each in journals.list("topic=orders"))
        for number, name in enumerate(names):
            with Publisher(mapping=mapping.direct(name), transport=transport) as publisher:
                publisher.publish({"bad": number == 1}).result(timeout=TIMEOUT_S)
        over_grpc = connect(cluster.address, wire="grpc")
        assert run(list_journals(over_grpc, "topic=orders")).journals
        run(over_grpc.aclose())
        cluster.apply(spec("a/journal", "s3://a-bucket/?region=local&endpoint=http://127.0.0.1:1/"))
        config = {"transport": transport, "etcd": cluster.etcd_endpoint}
        with shard.EmbeddedConsumer(count, **config, is_ready_with_failed=False) as consumer:
            deadline = time.monotonic() + TIMEOUT_S
            while ready(consumer.address)[0] == HTTPStatus.OK:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            answers = ready(consumer.address), ready(cluster.address)
            while not scraped(consumer.address).get("gazette_shard_transactions_total"):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield (cluster.address, consumer.address), answers


def lacking(cells: list[str], shown: dict[str, list[dict[str, str]]]) -> list[str]:
    """Return the cells of a table of which a scrape does not show a name or a label."""
    return [cell for cell in cells if not is_shown(cell, shown)]


def is_shown(cell: str, shown: dict[str, list[dict[str, str]]]) -> bool:
    for name, value in re.findall(r"`((?:gazette|grpc)_[a-z_]+)([*{][^`]*)?[^`]*`", cell):
        if value == "*":
            if not any(each.startswith(name) for each in shown):
                return False
            continue
        if name not in shown:
            return False
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', value))
        if pairs and not any(pairs.items() <= labels.items() for labels in shown[name]):
            return False
    if by := re.search(r" by `(\w+)`", cell):
        (last,) = re.findall(r"`((?:gazette|grpc)_[a-z_]+)` by", cell)
        return all(by[1] in labels for labels in shown[last])
    return True


@pytest.mark.parametrize("page", ["brokers.md", "consumers.md"])
def test_every_metric_of_the_table_is_shown_with_its_labels(metrics, page: str):
    """Some are shown once a check of a store, or a transaction, has ended: they are waited for."""
    addresses, _ = metrics
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split("## Metrics", 1)[1]
    cells = re.findall(r"^\| (`(?:gazette|grpc)_[^|]*) \|", text.split("\n## ")[0], re.MULTILINE)
    assert len(cells) >= 5
    deadline = time.monotonic() + TIMEOUT_S
    while missing := lacking(cells, {n: s for each in addresses for n, s in scraped(each).items()}):
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics of an expression, each with the names of the labels that it selects by."""
    for name, matchers in re.findall(r"([a-z_][a-z0-9_:]*)(?:\{([^}]*)\})?", expression):
        if re.match(r"(gazette|grpc_server|process)_|up$|\w+:gazette", name):
            yield name, set(re.findall(r"(\w+)(?:=|!=)", re.sub(r'"[^"]*"', "", matchers)))


GIVEN_LABELS = {"cluster", "zone", "instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""


@pytest.mark.parametrize("name", sorted(written_files()))
def test_every_metric_of_rules_and_dashboards_is_shown_with_its_labels(metrics, name: str):
    addresses, _ = metrics
    used = [pair for each in expressions(name) for pair in selectors(each)]
    assert used
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        shown = {"up": [{}], **{rule: [] for rule in recorded()}}
        for address in addresses:
            for metric, series in scraped(address).items():
                shown.setdefault(metric, []).extend(series)
        missing = {metric for metric, _ in used if metric not in shown}
        missing |= {
            f"{metric}{{{label}}}"
            for metric, labels in used
            for label in labels - GIVEN_LABELS
            if shown.get(metric) and not any(label in each for each in shown[metric])
        }
        if not missing:
            return
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


def test_a_consumer_with_failed_shards_is_not_ready_if_they_count(metrics):
    _, ((status, text), (broker, _)) = metrics
    assert status == HTTPStatus.SERVICE_UNAVAILABLE
    assert "have failed: 1" in text
    assert broker == HTTPStatus.OK
