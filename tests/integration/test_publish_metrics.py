"""Metrics of what a program publishes."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from gazette_sdk import Journals, Publisher, mapping
from gazette_sdk.errors import RegisterMismatchError
from gazette_sdk.protocol.labels import label_set, parse_selector
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.append.queue import PublishMetrics
from gazette_sdk.transport.loop import run

TIMEOUT_S = 30.0


def value(name):
    return REGISTRY.get_sample_value(f"gazette_publish_{name}")


def test_appends_are_timed_until_they_are_acknowledged(gazette):
    [journal] = Journals(transport=gazette.transport).create("rides", partitions=1)
    before = value("seconds_count")
    with Publisher(mapping=mapping.direct(journal), transport=gazette.transport) as publisher:
        publisher.publish({"zone": "a"}).result(timeout=TIMEOUT_S)
        assert value("seconds_count") == before + 1
        assert value("pending_bytes") == 0
    assert value("seconds_count") == before + 1


def test_appends_that_have_failed_for_good_are_counted(gazette):
    [journal] = Journals(transport=gazette.transport).create("rides", partitions=1)
    before, timed = value("failures_total"), value("seconds_count")

    async def append():
        service = AppendService(gazette.transport)
        try:
            await service.appender(journal).append(b"{}\n", union=label_set(author="bob"))
            await service.appender(journal).append(b"{}\n", check=parse_selector("author=ada"))
        finally:
            await service.aclose()

    with pytest.raises(RegisterMismatchError):
        run(append(), TIMEOUT_S)
    assert value("failures_total") == before + 1
    assert value("seconds_count") == timed + 1


def test_numbers_of_a_service_that_has_ended_are_kept_once():
    metrics = PublishMetrics()
    meters = metrics.open(lambda: 5)
    meters.seconds.observe(0.2)
    meters.failures = 2
    other = metrics.open(lambda: 7)

    def shown():
        return {
            sample.name: sample.value
            for metric in metrics.collect()
            for sample in metric.samples
            if "bucket" not in sample.name
        }

    assert shown()["gazette_publish_pending_bytes"] == 12
    metrics.end(meters)
    metrics.end(meters)
    metrics.unlock()
    assert shown() == {
        "gazette_publish_pending_bytes": 7,
        "gazette_publish_seconds_count": 1,
        "gazette_publish_seconds_sum": 0.2,
        "gazette_publish_failures_total": 2,
    }
    metrics.end(other)
    assert shown()["gazette_publish_pending_bytes"] == 0
