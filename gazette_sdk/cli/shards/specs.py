"""``gazctl shards apply``, ``edit`` and ``generate``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

import orjson

from gazette_sdk.cli.client import (
    SHARDS_BROKER_CLIENT,
    SHARDS_ZONE,
    open_broker,
    open_consumer,
)
from gazette_sdk.cli.formats import load, proto_text, write_table
from gazette_sdk.cli.journals.specs import edit
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.run_consumer import import_application
from gazette_sdk.cli.shards.commands import APPLY, EDIT, GENERATE
from gazette_sdk.cli.shards.list import list_some, yaml_of
from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    EtcdTransactionFailedError,
    ShardStatusError,
    UnauthenticatedError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import shardspace
from gazette_sdk.protocol.labels import (
    parse_selector,
)
from gazette_sdk.protocol.rules import ANY_REVISION, complete
from gazette_sdk.protocol.shard_spec import recovery_log, validate_shard_rpc
from gazette_sdk.retries import pause
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.generator import (
    Existing,
    KnownShard,
    ShardGenerator,
    generated,
    list_topics,
)
from gazette_sdk.shard.application.sources import JoinedTopics, selectors_of
from gazette_sdk.shard.consumer.client import ShardClient, apply_in_batches, verify_references
from gazette_sdk.transport.base import Transport

_log = logging.getLogger(__name__)

TXN_CHANGES_MAX = 128
"""Changes in one transaction of Etcd, by its default limit of operations."""

ExistingShards = Mapping[str, cpb.ListResponse.Shard]
"""Listed shards by id."""


async def run_apply(invocation: Invocation) -> None:
    """Apply the specs of a file, or print the request."""
    settings = invocation.settings(APPLY)
    request = load(settings.specs, request_of)
    if not request.changes:
        return
    if settings.dry_run:
        await _verify(invocation, request)
        sys.stdout.write(proto_text(request))
        return
    await apply_and_show(invocation, request, settings.max_txn_size, settings.format)


def request_of(text: str | bytes) -> cpb.ApplyRequest:
    """Return the changes that a YAML document describes.

    Raises:
        ValidationError: the document or a change is malformed.
    """
    space = shardspace.parse(text)
    shardspace.push_down(space)
    request = shardspace.to_apply_request(space)
    validate_shard_rpc(request)
    return request


async def _verify(invocation: Invocation, request: cpb.ApplyRequest) -> None:
    """Check that the shards' journals exist and are of the right kinds."""
    async with open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport:
        await verify_references(transport, request)


async def apply_and_show(
    invocation: Invocation,
    request: cpb.ApplyRequest,
    size: int,
    form: Literal["table", "json"],
    file: TextIO | None = None,
) -> None:
    """Check and apply changes, and show their outcomes, also of those before a failed one.

    Args:
        invocation: the call of the command, which knows brokers and consumer processes.
        request: valid changes.
        size: changes in each transaction; 0 means one transaction.
        form: format of the outcomes.
        file: output file; by default standard output.

    Raises:
        CommandFailedError: a transaction failed. It says how many changes were applied before.
        ValidationError: a journal does not exist, or is of another kind.
    """
    await _verify(invocation, request)
    async with open_consumer(invocation) as client:
        existing = await _existing(client)
        outcomes = {_id(change): _outcome(change, existing) for change in request.changes}
        changes = [each for each in request.changes if outcomes[_id(each)] != "unchanged"]
        shown = outcomes.keys() - {_id(change) for change in changes}
        left = len(changes)
        try:
            batches = apply_in_batches(client, cpb.ApplyRequest(changes=changes), size)
            async for batch, response in batches:
                left -= len(batch.changes)
                shown |= {_id(change) for change in batch.changes}
                _log.info("successfully applied", extra={"rev": response.header.etcd.revision})
        except (ShardStatusError, CallError) as error:
            failed = changes[len(changes) - left :][: size or left]
            done = len(request.changes) - left
            raise CommandFailedError(_failure(error, failed, existing, done, left)) from error
        finally:
            if shown:
                show_changed(
                    {shard: outcomes[shard] for shard in outcomes if shard in shown}, form, file
                )


async def _existing(client: ShardClient) -> ExistingShards | None:
    """Return all shards; None if the caller may apply, but not list."""
    try:
        listing = await client.list()
    except UnauthenticatedError:
        return None
    return {shard.spec.id: shard for shard in listing.shards}


def _id(change: cpb.ApplyRequest.Change) -> str:
    return change.delete or change.upsert.id


def _outcome(change: cpb.ApplyRequest.Change, existing: ExistingShards | None) -> str:
    """Return what a change does; ``unchanged`` for one that is in no transaction."""
    if existing is None:
        return "applied"
    known = existing.get(_id(change))
    if change.delete:
        return "unchanged" if known is None else "deleted"
    if known is None:
        return "created"
    return "unchanged" if complete(change.upsert) == complete(known.spec) else "updated"


def _failure(
    error: ShardStatusError | CallError,
    failed: Sequence[cpb.ApplyRequest.Change],
    existing: ExistingShards | None,
    done: int,
    left: int,
) -> str:
    text = f"failed to apply shards: {error}"
    if isinstance(error, ShardStatusError) and existing is not None:
        for change in failed:
            known = existing.get(_id(change))
            revision = 0 if known is None else known.mod_revision
            expected = change.expect_mod_revision
            if expected not in {ANY_REVISION, revision}:
                text += (
                    f"; {_id(change)} has revision {revision}, and the change expects {expected}"
                )
                break
    if len(failed) > TXN_CHANGES_MAX:
        text += f"; {len(failed)} changes are many for one transaction: try --max-txn-size=100"
    if done:
        text += f"; the first {done} of {done + left} changes were applied before"
    return text


def show_changed(
    outcomes: Mapping[str, str], form: Literal["table", "json"], file: TextIO | None = None
) -> None:
    """Write what came of shards, by their ids."""
    file = file or sys.stdout
    if form == "table":
        write_table(["Shard", "Outcome"], ([*each] for each in outcomes.items()), file)
    else:
        for shard, outcome in outcomes.items():
            file.write(orjson.dumps({"shard": shard, "outcome": outcome}).decode() + "\n")
    file.flush()


async def run_edit(invocation: Invocation) -> None:
    """Edit specs. No connection is open while the editor runs."""
    settings = invocation.settings(EDIT)
    async with open_consumer(invocation) as client:
        text = yaml_of(await list_some(client, settings.selector))

    async def apply(edited: str) -> None:
        request = request_of(edited)
        if request.changes:
            size = settings.max_txn_size
            await apply_and_show(invocation, request, size, "table", sys.stderr)

    await edit(text, prefix="gazctl-shards-edit-", environ=invocation.environ, apply=apply)


ATTEMPTS_MAX = 10
"""Listings of what exists, while other processes create shards, too."""


async def run_generate(invocation: Invocation) -> None:
    """Create shards and their recovery logs, or show the specs of shards.

    Raises:
        ConfigurationError: the application cannot be imported, or has no known sources.
        CommandFailedError: other processes continued to create shards at the same time.
        GazetteError: a broker or a consumer process could not be asked.
    """
    settings = invocation.settings(GENERATE)
    application = import_application(invocation.arguments[0])
    selectors = _selectors(application, settings.sources)
    async with (
        open_consumer(invocation) as client,
        open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport,
    ):
        shards = _Shards(client, settings.format)
        if settings.dry_run:
            listings = await list_topics(transport, selectors)
            wanted = generated(application, listings, await shards.existing())
            listed = [cpb.ListResponse.Shard(spec=spec) for spec in wanted.shards]
            listed += [
                cpb.ListResponse.Shard(spec=each.spec, mod_revision=each.mod_revision)
                for each in wanted.grown
            ]
            sys.stdout.write(yaml_of(cpb.ListResponse(shards=listed)))
            if wanted.faults:
                raise wanted.faults[0]
            return
        generator = ShardGenerator(
            application, transport, selectors, existing=shards.existing, apply=shards.apply
        )
        if settings.watch:
            await generator.run()
        else:
            await _generate(generator, transport, selectors)


def _selectors(application: Application[Any, Any], given: str) -> Sequence[pb.LabelSelector]:
    """Return the selectors of source journals.

    Raises:
        ConfigurationError: none is known.
        ValidationError: it is malformed.
    """
    if given and isinstance(application.all_sources, JoinedTopics):
        raise ConfigurationError(
            f"the application {application.full_name} reads {application.all_sources!r}; leave"
            " --sources out"
        )
    selectors = (parse_selector(given),) if given else selectors_of(application.all_sources)
    if not selectors:
        raise ConfigurationError(
            f"the application {application.full_name} declares no sources: give them with"
            " --sources, as --sources topic=orders"
        )
    return selectors


async def _generate(
    generator: ShardGenerator, transport: Transport, selectors: Sequence[pb.LabelSelector]
) -> None:
    """Create what is missing now."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            await generator.generate(await list_topics(transport, selectors))
        except EtcdTransactionFailedError:
            await pause(attempt)
        else:
            return
    raise CommandFailedError(
        "others create shards or recovery logs at the same time; `gazctl shards list` shows them"
    )


def show_generated(
    changes: Sequence[cpb.ApplyRequest.Change], form: Literal["table", "json"]
) -> None:
    """Write what came of shards that were generated, with their recovery logs."""
    rows = [
        {
            "shard": change.upsert.id,
            "log": recovery_log(change.upsert),
            "outcome": "updated" if change.expect_mod_revision else "created",
        }
        for change in changes
    ]
    if form == "table":
        write_table(["Shard", "Recovery Log", "Outcome"], ([*row.values()] for row in rows))
    else:
        for row in rows:
            sys.stdout.write(orjson.dumps(row).decode() + "\n")
    sys.stdout.flush()


class _Shards:
    """Shards of the consumer processes that a command knows."""

    def __init__(self, client: ShardClient, form: Literal["table", "json"]) -> None:
        self._client = client
        self._form = form

    async def existing(self) -> Existing:
        """Return all shards."""
        listed = (await self._client.list()).shards
        return {each.spec.id: KnownShard(each.spec, each.mod_revision) for each in listed}

    async def apply(self, changes: Sequence[cpb.ApplyRequest.Change]) -> None:
        """Apply changes of shards, and show them."""
        try:
            await self._client.apply(cpb.ApplyRequest(changes=changes))
        except ShardStatusError as error:
            if error.code == cpb.ETCD_TRANSACTION_FAILED:
                raise EtcdTransactionFailedError from error
            raise
        show_generated(changes, self._form)
