"""``gazctl shards generate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from gazette_sdk.cli.application import import_application
from gazette_sdk.cli.client import SHARDS_BROKER_CLIENT, SHARDS_ZONE, open_broker, open_consumer
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.formats import write_table
from gazette_sdk.cli.shards.list import yaml_of
from gazette_sdk.cli.shards.settings import GENERATE
from gazette_sdk.errors import ConfigurationError, EtcdTransactionFailedError, ShardStatusError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.protocol.shard_spec import recovery_log
from gazette_sdk.shard.application.application import (
    Application,
    Existing,
    existing_shards,
    generated,
    source_selector,
)
from gazette_sdk.shard.application.handler import ShardGenerator
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_journals

__all__ = ["run"]

ATTEMPTS_MAX = 10
"""Listings of what exists, while other processes create shards, too."""


async def run(invocation: Invocation) -> None:
    """Create shards and their recovery logs, or show the specs of shards.

    Raises:
        ConfigurationError: the application cannot be imported, or has no known sources.
        CommandFailedError: other processes went on to create shards at the same time.
        GazetteError: a broker or a consumer process could not be asked.
    """
    settings = invocation.settings(GENERATE)
    application = import_application(invocation.arguments[0])
    selector = _selector(application, settings.sources)
    async with (
        open_consumer(invocation) as client,
        open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport,
    ):
        shards = _Shards(client, settings.format)
        if settings.dry_run:
            journals = await _journals(transport, selector)
            wanted = generated(application, journals, await shards.existing())
            listed = [cpb.ListResponse.Shard(spec=spec) for spec in wanted.shards]
            sys.stdout.write(yaml_of(cpb.ListResponse(shards=listed)))
            return
        generator = ShardGenerator(
            application, transport, selector, existing=shards.existing, create=shards.create
        )
        if settings.watch:
            await generator.run()
        else:
            await _generate(generator, transport, selector)


def _selector(application: Application[Any, Any], given: str) -> pb.LabelSelector:
    """Return the selector of source journals.

    Raises:
        ConfigurationError: none is known.
        ValidationError: it is malformed.
    """
    selector = parse_selector(given) if given else source_selector(application)
    if selector is None:
        raise ConfigurationError(
            f"the application {application.full_name} declares no sources: give them with"
            " --sources, as --sources topic=orders"
        )
    return selector


async def _journals(transport: Transport, selector: pb.LabelSelector) -> Sequence[pb.JournalSpec]:
    return [each.spec for each in (await list_journals(transport, selector)).journals]


async def _generate(
    generator: ShardGenerator, transport: Transport, selector: pb.LabelSelector
) -> None:
    """Create what is missing now."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            await generator.generate(await _journals(transport, selector))
        except EtcdTransactionFailedError:
            await pause(attempt)
        else:
            return
    raise CommandFailedError(
        "others create shards or recovery logs at the same time; `gazctl shards list` shows them"
    )


class _Shards:
    """Shards of the consumer processes that a command knows."""

    def __init__(self, client: ShardClient, form: Literal["table", "json"]) -> None:
        self._client = client
        self._form = form

    async def existing(self) -> Existing:
        """Return all shards, with the journals that they read."""
        return existing_shards(shard.spec for shard in (await self._client.list()).shards)

    async def create(self, specs: Sequence[cpb.ShardSpec]) -> None:
        """Create shards, and show them."""
        changes = [cpb.ApplyRequest.Change(upsert=spec) for spec in specs]
        try:
            await self._client.apply(cpb.ApplyRequest(changes=changes))
        except ShardStatusError as error:
            if error.code == cpb.ETCD_TRANSACTION_FAILED:
                raise EtcdTransactionFailedError from error
            raise
        rows = [(spec.id, recovery_log(spec)) for spec in specs]
        if self._form == "table":
            write_table(["Shard", "Recovery Log", "Outcome"], ([*row, "created"] for row in rows))
        else:
            for shard, log in rows:
                line = {"shard": shard, "log": log, "outcome": "created"}
                sys.stdout.write(orjson.dumps(line).decode() + "\n")
        sys.stdout.flush()
