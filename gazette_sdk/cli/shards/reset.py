"""``gazctl shards reset``, ``skip`` and ``delete``.

A reset has shards read on from another position, with an empty state or their own. An interrupted
command is run again. Its steps, in this order:

1. The shards are disabled, and their processes end them.
2. Shards with an empty state get new recovery logs, and new keys of hints. The old logs stay.
3. The specs of the shards are changed, which enables them.

A new log leads to an empty checkpoint, so that a shard reads from the least offsets of its spec.
One that keeps its state, and is to read again, forgets its positions when it finds a new name in
its label of resets.

Shards that are deleted are disabled first, too. Their logs are deleted before them: a process that
creates the shards again then creates new logs.

A failed shard skips the record at which it stands. Its error has the journal and offset of the
record. A label of the shard says which content it leaves out; the shard is started again with it.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import orjson

from gazette_sdk.cli.client import SHARDS_BROKER_CLIENT, SHARDS_ZONE, open_broker, open_consumer
from gazette_sdk.cli.formats import NONE, write_table
from gazette_sdk.cli.journals.fragments import remove_stored
from gazette_sdk.cli.journals.list import is_fully_suspended, missing_file_root
from gazette_sdk.cli.journals.read import time_of
from gazette_sdk.cli.journals.specs import confirm
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.shards.commands import DELETE, RESET_SHARDS, SKIP_RECORDS, ResetSettings
from gazette_sdk.cli.shards.list import list_some, shard_of
from gazette_sdk.cli.shards.specs import show_changed
from gazette_sdk.errors import (
    ConfigurationError,
    FramingError,
    JournalNotFoundError,
    OffsetNotYetAvailableError,
    StatusError,
    SuspendedError,
)
from gazette_sdk.journals.changes import apply_in_transactions, list_named
from gazette_sdk.message.message_cutter import MessageCutter, records_of
from gazette_sdk.message.uuid import clock_of_time
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import (
    NEEDED_FROM,
    RESET,
    SKIP,
    TABLE,
    add,
    remove,
    set_value,
    values_of,
)
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.shard_spec import recovery_log, source_journals
from gazette_sdk.retries import retrying
from gazette_sdk.server.tls import file_root_of
from gazette_sdk.shard.consumer.client import ShardClient, apply_in_batches
from gazette_sdk.shard.recovery.hints import flatten
from gazette_sdk.shard.transaction.failure import record_of
from gazette_sdk.shard.transaction.transaction import BadRecord
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import (
    OffsetJumpError,
    RetryReader,
    begin_mod_time_of,
    read_metadata,
)
from gazette_sdk.transport.listing import NO_ANSWER
from gazette_sdk.transport.loop import for_each

RELEASE_TIMEOUT_S = 60.0
"""Longest wait for the processes to end disabled shards: a lease may have to end."""

RELEASE_PAUSE_S = 0.1
"""Time between two looks at the assignments."""

READ_PATIENCE_S = 10.0
"""Longest time without an answer of brokers, or without content."""

CHANGES_MAX = 100
"""Shards in one transaction of Etcd, which has 128 operations."""

DELETIONS_MAX = 25
"""Shards that are deleted in one transaction of Etcd, each with its hints."""

_GENERATION = re.compile(r"(.*)/generation-([0-9]+)")


async def run_reset(invocation: Invocation) -> None:
    """Reset shards, or show what would be reset.

    Raises:
        ConfigurationError: the position is malformed, or names other journals.
        CommandFailedError: a journal does not exist, a state cannot be emptied, or a shard was
            not ended in time.
        GazetteError: a broker or a consumer process could not be asked.
    """
    settings = invocation.settings(RESET_SHARDS)
    position = Position(settings.to)
    async with (
        open_consumer(invocation) as client,
        open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport,
    ):
        shards = list((await list_some(client, settings.selector)).shards)
        logs = {} if settings.keep_state else await _logs(transport, shards)
        offsets = await position.offsets(transport, _sources(shards))
        if not settings.dry_run:
            released = await _released(client, settings.selector, shards)
            specs = [_changed(shard.spec, offsets, settings) for shard in released]
            if not settings.keep_state:
                await _create_logs(transport, logs, specs)
            await _apply(client, released, specs)
    _show(shards, offsets, settings)


class Position:
    """Position at which shards begin to read: the value of ``--to``.

    Args:
        text: ``begin``, ``end``, a time, a duration before now, or ``JOURNAL=OFFSET,...``.

    Raises:
        ConfigurationError: it is none of these.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._since: datetime | None = None
        self._given: dict[str, int] = {}
        if not text:
            raise ConfigurationError(
                "the required option --to was not given: begin, end, a time, a duration such as 2h,"
                " or JOURNAL=OFFSET,..."
            )
        if "=" in text:
            self._given = dict(map(_offset_of, text.split(",")))
        elif text not in {"begin", "end"}:
            self._since = time_of(text, "--to")

    async def offsets(self, transport: Transport, journals: Collection[str]) -> Mapping[str, int]:
        """Return the offset in each journal. Names may have metadata.

        Raises:
            ConfigurationError: offsets are given, and not those of these journals.
            CommandFailedError: a journal does not exist, or an offset is after its write head.
            GazetteError: a broker could not be asked.
        """
        if self._given and self._given.keys() != set(journals):
            other = min(self._given.keys() ^ set(journals))
            problem = "is no source of" if other in self._given else "has no offset, and is one of"
            raise ConfigurationError(
                f"--to: {other} {problem} the selected shards; give one offset for each of"
                f" {', '.join(sorted(journals))}"
            )
        names = sorted(set(map(strip_meta, journals)))
        listed = await list_named(transport, names)
        if missing := [name for name in names if name not in listed]:
            raise CommandFailedError(
                f"{missing[0]}, a source of the selected shards, does not exist; create it, or"
                " delete its shard"
            )
        ordered = sorted(journals)

        async def offset(journal: str) -> int:
            return await self._offset(transport, journal, listed[strip_meta(journal)].spec)

        return dict(zip(ordered, await for_each(ordered, offset), strict=True))

    async def _offset(self, transport: Transport, journal: str, spec: pb.JournalSpec) -> int:
        if self._text == "begin":
            return 0
        head = (
            spec.suspend.offset
            if is_fully_suspended(spec)
            else (await _metadata(transport, spec.name, -1)).write_head
        )
        if self._since is not None:
            return head if is_fully_suspended(spec) else await self._first(transport, spec, head)
        offset = self._given.get(journal, head)
        if offset > head:
            raise CommandFailedError(
                f"--to: offset {offset} of {journal} is after its write head, {head}"
            )
        return offset

    async def _first(self, transport: Transport, spec: pb.JournalSpec, head: int) -> int:
        """Return the offset of the first message since a time; the write head if there is none."""
        assert self._since is not None, "a time is given"
        begin_mod_time = begin_mod_time_of(self._since)
        first = await _metadata(transport, spec.name, 0, begin_mod_time)
        cutter = MessageCutter(spec, first.offset, clock_of_time(self._since))
        request = pb.ReadRequest(journal=spec.name, offset=first.offset)
        reader = RetryReader(transport, request, patience_s=READ_PATIENCE_S)
        try:
            while reader.offset < head:
                try:
                    content = await reader.read()
                except OffsetJumpError:
                    cutter.begin(reader.offset)
                    continue
                except OffsetNotYetAvailableError:
                    break
                message, count = cutter.feed(content or b"", 1)
                if count:
                    return cutter.offset - len(message)
        except FramingError as error:
            raise CommandFailedError(
                f"--to: the first message since then is not found in {spec.name}, which has other"
                f" content at offset {error.offset}; give JOURNAL=OFFSET,..."
            ) from error
        finally:
            await reader.aclose()
        return head


async def _metadata(
    transport: Transport, journal: str, offset: int, begin_mod_time: int = 0
) -> pb.ReadResponse:
    """Return the first response of a read; one of a new journal may take some attempts."""
    return await retrying(
        lambda: read_metadata(transport, journal, offset, begin_mod_time=begin_mod_time),
        (StatusError, *NO_ANSWER),
        final=(JournalNotFoundError, SuspendedError),
        patience_s=READ_PATIENCE_S,
    )


def _offset_of(text: str) -> tuple[str, int]:
    journal, _, offset = text.strip().rpartition("=")
    if not journal or not re.fullmatch(r"[0-9]{1,18}", offset):
        raise ConfigurationError(
            f"--to: {text.strip()!r} is no JOURNAL=OFFSET, such as orders/part-000=1024"
        )
    return journal, int(offset)


def _sources(shards: Sequence[cpb.ListResponse.Shard]) -> set[str]:
    """Return the sources of shards but for those of tables, which are always read whole."""
    return {
        journal
        for shard in shards
        for journal in source_journals(shard.spec)
        if journal not in values_of(shard.spec.labels, TABLE)
    }


async def _logs(
    transport: Transport, shards: Sequence[cpb.ListResponse.Shard]
) -> Mapping[str, pb.JournalSpec]:
    """Return the recovery logs of shards, by the ids of the shards.

    Raises:
        CommandFailedError: the state of a shard is in no recovery log, or the log does not exist.
    """
    for shard in shards:
        if not shard.spec.recovery_log_prefix:
            raise CommandFailedError(
                f"the state of {shard.spec.id} is in no recovery log, but in a database of its own:"
                " empty its tables there, and reset it with --keep-state"
            )
    names = {shard.spec.id: recovery_log(shard.spec) for shard in shards}
    found = await list_named(transport, sorted(names.values()))
    for shard_id, name in names.items():
        if name not in found:
            raise CommandFailedError(
                f"{name}, the log of {shard_id}, does not exist: create it first, as the new one"
                " gets its stores and replication"
            )
    return {shard_id: found[name].spec for shard_id, name in names.items()}


async def _released(
    client: ShardClient, selector: str, shards: Sequence[cpb.ListResponse.Shard]
) -> list[cpb.ListResponse.Shard]:
    """Disable shards, and return them once no process holds them.

    Raises:
        CommandFailedError: a process still holds one, or one was deleted.
    """
    enabled = [shard for shard in shards if not shard.spec.disable]
    specs = [_copy(shard.spec) for shard in enabled]
    for spec in specs:
        spec.disable = True
    await _apply(client, enabled, specs)
    wanted = {shard.spec.id for shard in shards}
    ends_at = time.monotonic() + RELEASE_TIMEOUT_S
    while True:
        listing = await list_some(client, selector)
        found = [each for each in listing.shards if each.spec.id in wanted]
        if missing := sorted(wanted - {each.spec.id for each in found}):
            raise CommandFailedError(
                f"{missing[0]} was deleted meanwhile; the others are disabled: run the command"
                " again"
            )
        held = [each for each in found if each.route.members or not each.spec.disable]
        if not held:
            return found
        if time.monotonic() > ends_at:
            members = ", ".join(member.suffix for member in held[0].route.members)
            raise CommandFailedError(
                f"{held[0].spec.id} is still held by {members or 'a process'} after"
                f" {RELEASE_TIMEOUT_S:.0f} s; the shards are disabled, and nothing else is changed:"
                " run the command again"
            )
        await asyncio.sleep(RELEASE_PAUSE_S)


def _copy(spec: cpb.ShardSpec) -> cpb.ShardSpec:
    copied = cpb.ShardSpec()
    copied.CopyFrom(spec)
    return copied


def _changed(
    spec: cpb.ShardSpec, offsets: Mapping[str, int], settings: ResetSettings
) -> cpb.ShardSpec:
    """Return the spec of a shard that begins at offsets, in the next generation of its log."""
    changed = _copy(spec)
    changed.disable = False
    remove(changed.labels, SKIP)
    tables = values_of(spec.labels, TABLE)
    for source in changed.sources:
        if source.journal not in tables:
            source.min_offset = offsets[source.journal]
    if not settings.keep_state:
        _advance(changed)
    elif settings.to != "end":  # after all that is committed the least offsets are enough
        set_value(changed.labels, RESET, secrets.token_hex(8))
    return changed


def _advance(spec: cpb.ShardSpec) -> None:
    """Give a shard the prefixes of the next generation."""
    for name in ("recovery_log_prefix", "hint_prefix"):
        prefix = getattr(spec, name)
        found = _GENERATION.fullmatch(prefix)
        base, number = (found[1], int(found[2])) if found else (prefix, 1)
        setattr(spec, name, f"{base}/generation-{number + 1}")


async def _create_logs(
    transport: Transport, logs: Mapping[str, pb.JournalSpec], specs: Sequence[cpb.ShardSpec]
) -> None:
    """Create the logs of specs like those that shards have, under names that no journal has.

    Raises:
        GazetteError: the logs could not be created.
    """
    pending = list(specs)
    while pending:  # a command that was interrupted has left logs
        taken = await list_named(transport, sorted(map(recovery_log, pending)))
        pending = [spec for spec in pending if recovery_log(spec) in taken]
        for spec in pending:
            _advance(spec)
    changes = []
    for spec in specs:
        change = pb.ApplyRequest.Change(upsert=logs[spec.id], expect_mod_revision=0)
        change.upsert.name = recovery_log(spec)
        change.upsert.ClearField("suspend")
        remove(change.upsert.labels, NEEDED_FROM)
        changes.append(change)
    await apply_in_transactions(transport, changes)


async def _apply(
    client: ShardClient,
    shards: Sequence[cpb.ListResponse.Shard],
    specs: Sequence[cpb.ShardSpec],
) -> None:
    """Change shards that are still as they were listed.

    Raises:
        ShardStatusError: one was changed meanwhile. Earlier batches are applied.
    """
    changes = [
        cpb.ApplyRequest.Change(upsert=spec, expect_mod_revision=shard.mod_revision)
        for shard, spec in zip(shards, specs, strict=True)
    ]
    async for _ in apply_in_batches(client, cpb.ApplyRequest(changes=changes), CHANGES_MAX):
        pass


def _show(
    shards: Sequence[cpb.ListResponse.Shard], offsets: Mapping[str, int], settings: ResetSettings
) -> None:
    """Write a line for each source, with the log that holds the state of before."""
    rows = [
        {
            "shard": shard.spec.id,
            "outcome": "to reset" if settings.dry_run else "reset",
            "state": "kept" if settings.keep_state else "emptied",
            "source": journal,
            "offset": offsets[journal],
            "former_log": "" if settings.keep_state else recovery_log(shard.spec),
        }
        for shard in shards
        for journal in source_journals(shard.spec)
        if journal in offsets
    ]
    if settings.format == "table":
        write_table(
            ["Shard", "Outcome", "State", "Source", "Offset", "Former Log"],
            ([str(value) or NONE for value in row.values()] for row in rows),
        )
    else:
        for row in rows:
            sys.stdout.write(orjson.dumps(row).decode() + "\n")
    sys.stdout.flush()


_LOGS_STAY = (
    "Their recovery logs stay: shards of the same ids would continue with what these still have."
)
_LOGS_LOST = "Their state is lost: recovery logs are deleted, with their fragments."


async def run_delete(invocation: Invocation) -> None:
    """Delete shards. On a terminal it asks first.

    Raises:
        CommandFailedError: another shard needs a log, a shard was not ended in time, or the answer
            is no.
        GazetteError: a broker or a consumer process could not be asked.
    """
    settings = invocation.settings(DELETE)
    root = file_root_of(settings.file_root)
    async with open_consumer(invocation) as client:
        shards = list((await list_some(client, settings.selector)).shards)
        if settings.with_log:
            await _check_unshared(client, shards)
    if not settings.yes and sys.stdin.isatty():
        lost = _LOGS_LOST if settings.with_log else _LOGS_STAY
        await confirm("shard", [shard.spec.id for shard in shards], lost)
    async with (
        open_consumer(invocation) as client,
        open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport,
    ):
        names = [recovery_log(shard.spec) for shard in shards if settings.with_log]
        logs = await list_named(transport, sorted(filter(None, names)))
        if root is None:
            for log in logs.values():
                if any(url.startswith("file:") for url in log.spec.fragment.stores):
                    raise missing_file_root(log.spec.name)
        released = await _released(client, settings.selector, shards)
        await apply_in_transactions(
            transport,
            [
                pb.ApplyRequest.Change(delete=name, expect_mod_revision=log.mod_revision)
                for name, log in logs.items()
            ],
        )
        await remove_stored([log.spec for log in logs.values()], root)
        changes = [
            cpb.ApplyRequest.Change(
                delete=shard.spec.id, expect_mod_revision=shard.mod_revision, delete_hints=True
            )
            for shard in released
        ]
        async for _ in apply_in_batches(client, cpb.ApplyRequest(changes=changes), DELETIONS_MAX):
            pass
    show_changed({shard.spec.id: "deleted" for shard in shards}, settings.format)


async def _check_unshared(client: ShardClient, shards: Sequence[cpb.ListResponse.Shard]) -> None:
    """Raise a CommandFailedError if a shard that stays needs the log of one that does not."""
    logs = {recovery_log(shard.spec): shard.spec.id for shard in shards}
    ids = {shard.spec.id for shard in shards}
    others = [each for each in (await client.list()).shards if each.spec.id not in ids]

    async def needed(shard: cpb.ListResponse.Shard) -> set[str]:
        response = await client.get_hints(shard.spec.id)
        found = {recovery_log(shard.spec)}
        for stored in (response.primary_hints, *response.backup_hints):
            if stored.HasField("hints"):
                found |= {segment.log for segment in flatten(stored.hints)[1]}
        return found

    for other, needs in zip(others, await for_each(others, needed), strict=True):
        if shared := sorted(needs & logs.keys() - {""}):
            raise CommandFailedError(
                f"{other.spec.id} needs {shared[0]}, the log of {logs[shared[0]]}; delete both, or"
                " leave out --with-log"
            )


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
