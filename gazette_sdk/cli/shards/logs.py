"""``gazctl shards prune``, ``recover``, ``state`` and ``unassign``."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import orjson

from gazette_sdk.cli.client import SHARDS_BROKER_CLIENT, SHARDS_ZONE, open_broker, open_consumer
from gazette_sdk.cli.formats import NONE, iec_bytes, open_progress, write_table
from gazette_sdk.cli.journals.fragments import FragmentRemoval, Pruned, stored_of
from gazette_sdk.cli.journals.list import is_fully_suspended
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.shards.commands import PRUNE, RECOVER, STATE, UNASSIGN, UnassignSettings
from gazette_sdk.cli.shards.list import required_selector, shard_of
from gazette_sdk.errors import CallError, ConfigurationError
from gazette_sdk.journals.changes import Existing, list_named
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.labels import TABLE, Matcher, values_of
from gazette_sdk.protocol.shard_spec import matches_shard, recovery_log, validate_shard_id
from gazette_sdk.server.tls import file_root_of
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.state import open_recovered, read_state
from gazette_sdk.shard.recovery import hints as fsm_hints
from gazette_sdk.shard.recovery.log import PrunePlan, ShardHints
from gazette_sdk.shard.recovery.player import Playback, Recovered
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_stores_again, store_health
from gazette_sdk.transport.loop import for_each

_log = logging.getLogger(__name__)


async def run_prune(invocation: Invocation) -> None:
    """Show fragments that no recovery needs, and remove them if asked to.

    Raises:
        ConfigurationError: it is asked both to remove fragments and not to.
        CommandFailedError: a fragment that is needed nowhere is not stored yet, or could not be
            removed.
        GazetteError: a broker or a consumer process could not be asked.
    """
    settings = invocation.settings(PRUNE)
    removal = FragmentRemoval(settings, "Log", goes_on=True)
    selector = required_selector(settings.selector)
    async with (
        open_consumer(invocation) as client,
        open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport,
    ):
        plan = await _plan(client, selector)
        logs = await list_named(transport, sorted(plan.segments.keys() | plan.kept.keys()))
        await _check_logs(transport, plan, logs)
        for log, reason in sorted(plan.kept.items()):
            _log.warning("a log is not pruned", extra={"journal": log, "reason": reason})
        async with removal:
            for log in sorted(plan.segments.keys() - plan.kept.keys()):
                unneeded = await _unneeded(transport, plan, logs[log], removal)
                pruned = await removal.remove(log, unneeded)
                _audit(plan, log, pruned)
                if settings.yes and pruned.pruned_fragments:
                    await list_stores_again(transport, logs[log])
    if failed := removal.total.failed:
        raise CommandFailedError(f"failed to remove {failed} fragments; the log says which and why")


async def _plan(client: ShardClient, selector: pb.LabelSelector) -> PrunePlan:
    """Return the content that the selected shards need, and the logs to leave alone.

    A log of a shard which is not selected is left alone, even if a selected one was made from it.
    """
    listing = await client.list()  # all of them, for their logs
    matcher = Matcher(selector)
    selected = [
        shard
        for shard in listing.shards
        if matches_shard(matcher, shard.spec) and recovery_log(shard.spec)
    ]

    async def hints(shard: cpb.ListResponse.Shard) -> ShardHints:
        response = await client.get_hints(shard.spec.id)
        return ShardHints(
            shard.spec.id,
            recovery_log(shard.spec),
            [
                each.hints if each.HasField("hints") else None
                for each in (response.primary_hints, *response.backup_hints)
            ],
        )

    plan = PrunePlan.of(await for_each(selected, hints))
    for shard in listing.shards:
        log = recovery_log(shard.spec)
        if log in plan.segments and not matches_shard(matcher, shard.spec):
            plan.kept.setdefault(log, f"it is the log of shard {shard.spec.id}, not selected")
    return plan


async def _check_logs(transport: Transport, plan: PrunePlan, logs: Existing) -> None:
    """Keep logs that do not exist, are suspended, or have a store that is not healthy."""
    reasons: dict[str, str] = {}

    async def check(store: str) -> None:
        response = await store_health(transport, store, None)
        if response.status != pb.OK:
            reasons[store] = response.store_health_error or pb.Status.Name(response.status)

    wanted = plan.segments.keys() - plan.kept.keys()
    await for_each(
        sorted({s for log in wanted & logs.keys() for s in logs[log].spec.fragment.stores}), check
    )
    for log in wanted:
        journal = logs.get(log)
        if journal is None:
            plan.kept[log] = "there is no such journal"
        elif is_fully_suspended(journal.spec):
            plan.kept[log] = "it is suspended"
        else:
            for store in journal.spec.fragment.stores:
                if store in reasons:
                    plan.kept[log] = f"store {store} is not healthy: {reasons[store]}"


async def _unneeded(
    transport: Transport,
    plan: PrunePlan,
    journal: pb.ListResponse.Journal,
    removal: FragmentRemoval,
) -> list[pb.Fragment]:
    """Count the fragments of a log, and return those that no recovery reads.

    Raises:
        CommandFailedError: one of them is not stored yet. Recoveries read the end of a log, so
            another shard must have written it.
    """
    log = journal.spec.name
    response = await stored_of(transport, journal)
    fragments = [each.spec for each in response.fragments]
    removal.count(log, fragments)
    unneeded = [each for each in fragments if plan.is_prunable(log, each.begin, each.end)]
    for each in unneeded:
        if not each.backing_store or each.mod_time == 0:
            raise CommandFailedError(
                f"{log}: a fragment that no selected shard needs is not stored yet "
                f"(offsets {each.begin} to {each.end}); select all shards that share this log"
            )
    return unneeded


def _audit(plan: PrunePlan, log: str, pruned: Pruned) -> None:
    """Log what a log was pruned by."""
    if pruned.pruned_fragments:
        segments = [f"{s.first_offset}-{s.last_offset or 'end'}" for s in plan.segments[log]]
        _log.info(
            "pruned a log", extra={"log": log, **asdict(pruned), "needed": ",".join(segments)}
        )


async def run_recover(invocation: Invocation) -> None:
    """Restore the files of a shard's store, and show them.

    Raises:
        ConfigurationError: a required option is missing.
        CommandFailedError: there is no such shard, or it has no recovery log.
        GazetteError: the log cannot be played.
    """
    settings = invocation.settings(RECOVER)
    for name, value in (("id", settings.id), ("dir", settings.directory)):
        if not value:
            raise ConfigurationError(f"the required option --{name} was not given")
    validate_shard_id(settings.id, "--id")
    root = file_root_of(settings.file_root)
    async with open_consumer(invocation) as client:
        hints = await _hints(client, await shard_of(client, settings.id))
    directory = Path(settings.directory)
    await asyncio.to_thread(directory.parent.mkdir, parents=True, exist_ok=True)
    async with open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport:
        playback = Playback(transport, hints, directory, file_root=root)
        recovered = await _play(playback)
    _log.info(
        "completed playback",
        extra={"dir": str(directory), "log": recovered.log, "read": playback.bytes_read},
    )
    rows = await asyncio.to_thread(_files, directory)
    write_table(["File", "Size"], rows)
    sys.stdout.flush()


STATE_TIMEOUT_S = 40.0
"""Longest time of asking a primary, which bounds the call itself."""

PROGRESS_PERIOD_S = 0.2
"""Time between two looks at how far a log is played."""


async def run_state(invocation: Invocation) -> None:
    """Show the state of a shard.

    Raises:
        ConfigurationError: an option or the key is malformed, or the store cannot be shown.
        CommandFailedError: there is no such shard or key, or its processes cannot show it.
        GazetteError: the primary does not answer, or the log cannot be played.
    """
    settings = invocation.settings(STATE)
    shard, *key = invocation.arguments
    validate_shard_id(shard, "ID")
    try:
        request = cpb.StateRequest(shard=shard, what=settings.what, limit=settings.limit)
        if key:
            request.key = key[0]
    except ValueError as error:
        raise ConfigurationError(f"KEY is no text of UTF-8: {error}") from error
    async with open_consumer(invocation) as client:
        if settings.from_log:
            response = await _recovered_state(invocation, client, request)
        else:
            response = await _state_of_primary(client, request)
    if key and not response.entries:
        raise CommandFailedError(f"{shard} has no {key[0]!r} in its {settings.what}")
    if settings.format == "table":
        write_table(
            ["Place", "Key", "Value"],
            ([each.place or NONE, each.key, each.value] for each in response.entries),
        )
    else:
        for each in response.entries:
            place = orjson.dumps(each.place).decode()
            sys.stdout.write(f'{{"place":{place},"key":{each.key},"value":{each.value}}}\n')
    sys.stdout.flush()
    if response.more:
        _log.warning(
            "there are more entries; raise --limit", extra={"shown": len(response.entries)}
        )


async def _state_of_primary(client: ShardClient, request: cpb.StateRequest) -> cpb.StateResponse:
    try:
        async with asyncio.timeout(STATE_TIMEOUT_S):
            return await client.state(request)
    except TimeoutError:
        raise CommandFailedError(
            f"no answer within {STATE_TIMEOUT_S:g} s; --from-log needs no primary"
        ) from None
    except CallError as error:
        if error.code != "UNIMPLEMENTED":
            raise
        raise CommandFailedError(
            f"the processes of {request.shard} have no call that shows its state; use --from-log"
        ) from error


async def _recovered_state(
    invocation: Invocation, client: ShardClient, request: cpb.StateRequest
) -> cpb.StateResponse:
    """Return the state that the recovery log has, by a copy that is removed again."""
    root = file_root_of(invocation.settings(STATE).file_root)
    shard = await shard_of(client, request.shard)
    hints = await _hints(client, shard)
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="gazctl-state-"))
    try:
        async with open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport:
            await _play(Playback(transport, hints, directory / "files", file_root=root))
        return await asyncio.to_thread(_read_recovered, directory / "files", shard.spec, request)
    finally:
        await asyncio.to_thread(shutil.rmtree, directory)


def _read_recovered(
    directory: Path, spec: cpb.ShardSpec, request: cpb.StateRequest
) -> cpb.StateResponse:
    # A topic is a label, or the part of its journals' names before the number, as a rule.
    topics = {f"topic={journal.rpartition('/')[0]}" for journal in values_of(spec.labels, TABLE)}
    store, view = open_recovered(directory)
    try:
        with view as opened:
            return read_state(opened, request, topics)
    finally:
        store.destroy()


async def _hints(client: ShardClient, shard: cpb.ListResponse.Shard) -> rpb.FSMHints:
    """Return the hints to play: the primary ones, else the latest backup, else none.

    Raises:
        CommandFailedError: the shard has no recovery log.
    """
    log = recovery_log(shard.spec)
    if not log:
        raise CommandFailedError(
            f"shard {shard.spec.id} has no recovery log: its store is elsewhere"
        )
    response = await client.get_hints(shard.spec.id)
    primary, *backups = (
        each.hints if each.HasField("hints") else None
        for each in (response.primary_hints, *response.backup_hints)
    )
    return fsm_hints.choose(primary, backups, log)


async def _play(playback: Playback) -> Recovered:
    """Play to the write head, with a bar."""
    playing = asyncio.create_task(playback.run())
    finishing = asyncio.create_task(playback.finish())
    try:
        with open_progress("bytes") as progress:
            progress.begin("recover")
            is_pending = True
            while is_pending:
                done, pending = await asyncio.wait(
                    [playing, finishing],
                    timeout=PROGRESS_PERIOD_S,
                    return_when=asyncio.FIRST_EXCEPTION,
                )
                progress.advance(
                    playback.bytes_read, max(playback.bytes_read, playback.bytes_to_read)
                )
                is_pending = bool(pending) and not any(task.exception() for task in done)
        await playing
        return await finishing
    finally:
        for task in (playing, finishing):
            task.cancel()
        await asyncio.gather(playing, finishing, return_exceptions=True)


def _files(directory: Path) -> list[list[str]]:
    return [
        [str(path.relative_to(directory)), iec_bytes(path.stat().st_size)]
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]


TIMEOUT_S = 10.0
"""Longest time of the command."""

ASSIGNMENTS_MAX = 100
"""Assignments of the shards in one request. It is one transaction of Etcd, with 128 operations."""


async def run_unassign(invocation: Invocation) -> None:
    """Unassign shards, and show them with their former processes.

    Raises:
        CommandFailedError: there was no answer in time.
        ShardStatusError: assignments changed meanwhile, and stayed. Earlier ones are removed.
    """
    settings = invocation.settings(UNASSIGN)
    selector = required_selector(settings.selector)
    try:
        async with asyncio.timeout(TIMEOUT_S), open_consumer(invocation) as client:
            listing = await client.list(selector)
            await _unassign(client, listing, settings)
    except TimeoutError as error:
        raise CommandFailedError(
            f"no answer within {TIMEOUT_S:g} s; some shards may have been unassigned, `gazctl "
            "shards list` shows them"
        ) from error


async def _unassign(
    client: ShardClient, listing: cpb.ListResponse, settings: UnassignSettings
) -> None:
    known = {
        shard.spec.id: shard
        for shard in listing.shards
        if not settings.failed
        or any(status.code == cpb.ReplicaStatus.FAILED for status in shard.status)
    }
    rows: list[list[str]] = []
    try:
        for batch in _batches(known.values()):
            request = cpb.UnassignRequest(
                shards=batch,
                only_failed=settings.failed,
                dry_run=settings.dry_run,
            )
            for shard in (await client.unassign(request)).shards:
                rows.append([shard, "to unassign" if settings.dry_run else "unassigned"])
                rows[-1].append(_former(known[shard]))
    finally:  # also what was unassigned before an error
        if rows:
            write_table(["Shard", "Outcome", "Was At"], rows)
            sys.stdout.flush()
    if not rows:
        _log.warning("no shard is to be unassigned", extra={"selector": settings.selector})


def _batches(shards: Iterable[cpb.ListResponse.Shard]) -> Iterator[list[str]]:
    """Yield the ids of shards that have a bounded number of assignments together."""
    batch: list[str] = []
    count = 0
    for shard in shards:
        held = max(1, len(shard.status))
        if batch and count + held > ASSIGNMENTS_MAX:
            yield batch
            batch, count = [], 0
        batch.append(shard.spec.id)
        count += held
    if batch:
        yield batch


def _former(shard: cpb.ListResponse.Shard) -> str:
    """Return the processes of a shard with their statuses."""
    return ",".join(
        f"{member.suffix}:{cpb.ReplicaStatus.Code.Name(status.code)}"
        for member, status in zip(shard.route.members, shard.status, strict=True)
    )
