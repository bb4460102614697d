"""``gazctl shards apply``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

import orjson

from gazette_sdk.cli.client import SHARDS_BROKER_CLIENT, SHARDS_ZONE, open_broker, open_consumer
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.documents import load
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.formats import proto_text, write_table
from gazette_sdk.cli.shards.settings import APPLY
from gazette_sdk.errors import CallError, ShardStatusError, UnauthenticatedError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import shardspace
from gazette_sdk.protocol.rules import ANY_REVISION, complete
from gazette_sdk.protocol.shard_spec import validate_shard_rpc
from gazette_sdk.shard.consumer.client import ShardClient, apply_in_batches, verify_references

__all__ = ["apply_and_show", "request_of", "run"]

_log = logging.getLogger(__name__)

TXN_CHANGES_MAX = 128
"""Changes in one transaction of Etcd, by its default limit of operations."""

Existing = Mapping[str, cpb.ListResponse.Shard]
"""Listed shards by id."""


async def run(invocation: Invocation) -> None:
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
                _show({shard: outcomes[shard] for shard in outcomes if shard in shown}, form, file)


async def _existing(client: ShardClient) -> Existing | None:
    """Return all shards; None if the caller may apply, but not list."""
    try:
        listing = await client.list()
    except UnauthenticatedError:
        return None
    return {shard.spec.id: shard for shard in listing.shards}


def _id(change: cpb.ApplyRequest.Change) -> str:
    return change.delete or change.upsert.id


def _outcome(change: cpb.ApplyRequest.Change, existing: Existing | None) -> str:
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
    existing: Existing | None,
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


def _show(outcomes: Mapping[str, str], form: Literal["table", "json"], file: TextIO | None) -> None:
    file = file or sys.stdout
    if form == "table":
        write_table(["Shard", "Outcome"], ([*each] for each in outcomes.items()), file)
    else:
        for shard, outcome in outcomes.items():
            file.write(orjson.dumps({"shard": shard, "outcome": outcome}).decode() + "\n")
    file.flush()
