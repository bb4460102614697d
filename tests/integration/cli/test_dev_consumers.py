"""``gazctl shards`` without the address of a consumer process, beside ``gazette dev``."""

from __future__ import annotations

import asyncio
import json

from gazette_sdk import shard
from gazette_sdk.cli.client import find_consumer
from gazette_sdk.shard import EmbeddedConsumer


class Nothing(shard.Application):
    message, store = dict, shard.JsonStore
    sources = "topic=nothing"

    def __init__(self, name):
        self.name = name
        super().__init__()

    def consume(self, txn, message):
        pass


def test_the_only_application_is_found(gazctl, gazette_cluster):
    dev = gazette_cluster(1)
    gazctl.environ["GAZETTE_ADDRESS"] = dev.address
    options = {"transport": dev.transport, "etcd": dev.etcd_endpoint}

    def listing():
        return gazctl("shards", "list", "-o", "json")

    outcome = listing()
    assert outcome.status == 1
    assert "start one with `gazette run-consumer" in outcome.stderr
    with (
        EmbeddedConsumer(Nothing("one/members"), **options) as one,
        EmbeddedConsumer(Nothing("one/members"), **options),
    ):
        outcome = listing()
        assert outcome.status == 0, outcome.stderr
        assert json.loads(outcome.text)["shards"] == []
        with EmbeddedConsumer(Nothing("two"), **options) as two:
            outcome = listing()
            assert outcome.status == 1
            assert "one/members at http" in outcome.stderr
            assert f"two at {two.address}" in outcome.stderr
            outcome = gazctl("shards", "list", "--consumer.address", one.address)
            assert outcome.status == 0, outcome.stderr
        # What answers, but is no broker of `gazette dev`, and what does not answer.
        assert asyncio.run(find_consumer(one.address)) is None
        assert asyncio.run(find_consumer("http://localhost:1")) is None
