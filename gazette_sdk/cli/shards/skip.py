"""``gazctl shards skip``: a failed shard passes over the record at which it stands.

The error of a failed shard has the journal and offset of its record. A label of the shard says
which content it leaves out; the shard is started again with it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gazette_sdk.cli.client import SHARDS_BROKER_CLIENT, SHARDS_ZONE, open_broker, open_consumer
from gazette_sdk.cli.formats import write_table
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.shards.commands import SKIP_RECORDS
from gazette_sdk.cli.shards.list import shard_of
from gazette_sdk.journals.changes import list_named
from gazette_sdk.message.message_cutter import records_of
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import SKIP, add, remove, values_of
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.transaction.failure import record_of
from gazette_sdk.shard.transaction.transaction import BadRecord
from gazette_sdk.transport.base import Transport


async def run_skip(invocation: Invocation) -> None:
    """Skip records, or show which ones.

    Raises:
        CommandFailedError: the shard does not exist, or has not failed at a record.
        GazetteError: a broker or a consumer process could not be asked.
        OSError: the file cannot be written.
    """
    settings = invocation.settings(SKIP_RECORDS)
    (shard_id,) = invocation.arguments
    async with (
        open_consumer(invocation) as client,
        open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport,
    ):
        shard, (journal, begin) = await _failed(client, shard_id)
        spec = await _source(transport, journal)
        content, end, found = await records_of(transport, spec, begin, settings.count)
        if found < settings.count:
            raise CommandFailedError(
                f"{journal} has {found} records from offset {begin} on, and {settings.count} are to"
                " be skipped: lower --count"
            )
        if not settings.dry_run:
            if settings.save:
                _append(Path(settings.save), content)
            await _skip(client, shard, journal, f"{journal}={begin}-{end}")
    write_table(
        ["Shard", "Outcome", "Journal", "Begin", "End", "Bytes"],
        [
            [
                shard_id,
                "to skip" if settings.dry_run else "skipped",
                journal,
                *map(str, (begin, end, len(content))),
            ]
        ],
    )
    sys.stdout.flush()


async def _failed(client: ShardClient, shard_id: str) -> tuple[cpb.ListResponse.Shard, BadRecord]:
    """Return a shard, and the journal and offset of the record at which it has failed.

    Raises:
        CommandFailedError: there is none.
    """
    shard = await shard_of(client, shard_id)
    errors = [text for status in shard.status for text in status.errors]
    for text in errors:
        if record := record_of(text):
            return shard, record
    if errors:
        raise CommandFailedError(
            f"{shard_id} has failed, but not at a record: {' | '.join(errors)}; remove"
            " the cause, and start it again by `gazctl shards unassign`"
        )
    raise CommandFailedError(f"{shard_id} has not failed: there is no record to skip")


async def _source(transport: Transport, name: str) -> pb.JournalSpec:
    """Return the spec of the journal that a shard reads under a name.

    Raises:
        CommandFailedError: it does not exist any more.
        GazetteError: the journals cannot be listed.
    """
    journal = strip_meta(name)
    listed = await list_named(transport, [journal])
    if journal not in listed:
        raise CommandFailedError(f"{journal}, the source of the record, does not exist any more")
    return listed[journal].spec


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


async def _skip(
    client: ShardClient, shard: cpb.ListResponse.Shard, journal: str, skipped: str
) -> None:
    """Give a shard the label of what it skips, and start it again.

    Raises:
        ShardStatusError: the shard was changed meanwhile.
    """
    change = cpb.ApplyRequest.Change(upsert=shard.spec, expect_mod_revision=shard.mod_revision)
    labels = change.upsert.labels
    kept = [each for each in values_of(labels, SKIP) if each.rpartition("=")[0] != journal]
    remove(labels, SKIP)
    for value in sorted({*kept, skipped}):
        add(labels, SKIP, value)
    await client.apply(cpb.ApplyRequest(changes=[change]))
    await client.unassign(cpb.UnassignRequest(shards=[shard.spec.id], only_failed=True))
