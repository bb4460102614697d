"""``gazctl backup create``, ``show`` and ``verify``, and ``gazctl restore cluster``."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Final, Literal, cast

import orjson

from gazette_sdk.broker.mirror import incarnation_key
from gazette_sdk.cli.backup.archive import Backup, SavedJournal, read, write
from gazette_sdk.cli.backup.capture import (
    HeadsOf,
    Stored,
    capture,
    hints_problem,
    list_content,
    opened_stores,
)
from gazette_sdk.cli.backup.checks import RestoreChecks
from gazette_sdk.cli.backup.restore import Plan, Restore, State
from gazette_sdk.cli.backup.stores import gather
from gazette_sdk.cli.client import BROKER_CLIENT, call_cluster, open_broker, open_etcd
from gazette_sdk.cli.formats import NONE, Progress, iec_bytes, open_progress, write_table
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.settings import (
    BACKUP,
    BACKUP_ETCD,
    RESTORE,
    SHOW_BACKUP,
    VERIFY_BACKUP,
    RestoreSettings,
)
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.cluster.items import members_prefix
from gazette_sdk.cluster.membership import etcd_of_dev
from gazette_sdk.errors import CallError, ConfigurationError, GazetteError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.rules import HEADS_RPC, MEMBERS_RPC
from gazette_sdk.server.settings import EtcdSettings
from gazette_sdk.server.tls import file_root_of, with_secrets
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.loop import for_each
from gazette_sdk.transport.wire import Tls

CALL_TIMEOUT_S: Final = 30.0
"""Longest time of a call of brokers, which bounds its own calls of others by seconds."""

DIAL_TIMEOUT_S: Final = 8.0
"""Longest time until Etcd answers."""

NAMED_MAX: Final = 5

_log = logging.getLogger(__name__)


async def run_create(invocation: Invocation) -> None:
    """Write a backup of the cluster to a new file.

    Raises:
        GazetteError: it could not be made, or written.
    """
    (url,) = invocation.arguments
    consumers = invocation.settings(BACKUP).consumers_prefix
    etcd_settings = await _etcd_of(invocation)
    with open_progress("messages") as progress:
        async with open_etcd(etcd_settings, DIAL_TIMEOUT_S) as etcd:
            versions = await _versions(invocation)
            backup = await capture(
                etcd,
                etcd_settings.prefix,
                consumers,
                heads_of=_heads(invocation),
                versions=versions,
                progress=progress,
            )
        size = await asyncio.to_thread(write, url, backup)
    unknown = [each.name for each in backup.journals if each.head is None]
    if unknown:
        _log.warning(
            "the heads of %d journals are not known (%s): a restore takes them from the stores",
            len(unknown), ", ".join(unknown[:NAMED_MAX]),
        )  # fmt: skip
    sys.stdout.write(f"{url}: {_counts(backup)}, {iec_bytes(size)}\n")


async def _etcd_of(invocation: Invocation) -> EtcdSettings:
    """Return the options of Etcd; without an address, that of ``gazette dev`` beside the broker."""
    settings = with_secrets(BACKUP_ETCD, invocation.settings(BACKUP_ETCD))
    if settings.address:
        return settings
    address = await asyncio.to_thread(
        etcd_of_dev,
        invocation.settings(BROKER_CLIENT).address,
        remedy="give the address of Etcd with --etcd.address",
        broker_remedy="give the address of Etcd with --etcd.address",
    )
    return settings.model_copy(update={"address": address})


def _heads(invocation: Invocation) -> HeadsOf:
    """Return what asks brokers for heads: those of other implementations by reads."""

    async def ask(names: Sequence[str]) -> Mapping[str, clpb.HeadsResponse.Head]:
        request = clpb.HeadsRequest(journals=names)
        try:
            answer = await call_cluster(invocation, HEADS_RPC, request, CALL_TIMEOUT_S)
            return {each.journal: each for each in answer.heads}
        except CallError as error:
            if error.code != "UNIMPLEMENTED":
                raise
        async with open_broker(invocation) as transport:

            async def look(name: str) -> clpb.HeadsResponse.Head:
                try:
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        response = await read_metadata(transport, name, -1)
                except (GazetteError, TimeoutError) as error:
                    return clpb.HeadsResponse.Head(journal=name, error=str(error))
                return clpb.HeadsResponse.Head(journal=name, head=response.write_head)

            return {each.journal: each for each in await for_each(names, look)}

    return ask


async def _versions(invocation: Invocation) -> Mapping[str, str]:
    """Return the versions of members that say theirs, by endpoint."""
    try:
        answer = await call_cluster(invocation, MEMBERS_RPC, clpb.MembersRequest(), CALL_TIMEOUT_S)
    except CallError as error:
        _log.info("the versions of members are not known: %s", error)
        return {}
    return {each.endpoint: each.version for each in answer.members}


# ---------------------------------------------------------------- show and verify


async def run_show(invocation: Invocation) -> None:
    """Print what a backup has."""
    (url,) = invocation.arguments
    backup = await asyncio.to_thread(read, url)
    if invocation.settings(SHOW_BACKUP).format == "json":
        sys.stdout.write(orjson.dumps(_shown(backup)).decode() + "\n")
        return
    created = datetime.fromtimestamp(backup.created_s, UTC)
    sys.stdout.write(
        f"{backup.prefix} at {created:%Y-%m-%d %H:%M:%S} UTC, revision {backup.revision} of Etcd"
        f" {backup.cluster_id:x}\n{_counts(backup)}\n\n"
    )
    write_table(
        ["Journal", "Head", "Suspended", "Brokers", "Registers"],
        (
            [
                each.name,
                NONE if each.head is None else str(each.head),
                _level(each) or NONE,
                ", ".join(each.brokers) or NONE,
                ", ".join(f"{name}={value}" for name, value in each.registers) or NONE,
            ]
            for each in backup.journals
        ),
    )
    if backup.shards:
        sys.stdout.write("\n")
        write_table(
            ["Shard", "Application", "Recovery Log", "Hints"],
            (
                [each.id, each.application, each.log or NONE, str(len(each.hints))]
                for each in backup.shards
            ),
        )
    sys.stdout.write("\n")
    write_table(
        ["Member", "Of", "Address", "Version"],
        ([each.id, each.prefix, each.endpoint, each.version or NONE] for each in backup.members),
    )


def _level(journal: SavedJournal) -> str:
    suspend = journal.spec.suspend
    name = type(suspend).Level.Name(suspend.level)
    return "" if name == "NONE" else f"{name.lower()} at {suspend.offset}"


def _shown(backup: Backup) -> dict[str, object]:
    return {
        "id": backup.id,
        "created_s": backup.created_s,
        "prefix": backup.prefix,
        "etcd_cluster_id": f"{backup.cluster_id:x}",
        "etcd_revision": backup.revision,
        "journals": [
            {
                "name": each.name,
                "head": each.head,
                "begin": each.begin,
                "suspended": _level(each),
                "registers": dict(each.registers),
                "brokers": each.brokers,
            }
            for each in backup.journals
        ],
        "shards": [
            {
                "id": each.id,
                "application": each.application,
                "recovery_log": each.log,
                "hints": sorted(each.hints),
            }
            for each in backup.shards
        ],
        "members": [
            {"id": each.id, "prefix": each.prefix, "endpoint": each.endpoint,
             "version": each.version}
            for each in backup.members
        ],
    }  # fmt: skip


def _counts(backup: Backup) -> str:
    hints = sum(len(each.hints) for each in backup.shards)
    counted = (
        (len(backup.journals), "journal"),
        (len(backup.shards), "shard"),
        (hints, "hint"),
        (len(backup.brokers), "broker"),
    )
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counted)


async def run_verify(invocation: Invocation) -> None:
    """Compare a backup with the stores.

    Raises:
        CommandFailedError: content up to a saved head is missing, or a store cannot be listed.
    """
    (url,) = invocation.arguments
    settings = invocation.settings(VERIFY_BACKUP)
    backup = await asyncio.to_thread(read, url)
    with open_progress("messages") as progress:
        async with opened_stores(file_root_of(settings.file_root)) as stores:
            stored = await list_content(backup.journals, stores, progress)
    found = [(each, stored[each.name]) for each in backup.journals]
    problems = {
        each.id: problem
        for each in backup.shards
        if (problem := hints_problem(each, stored.get(each.log)))
    }
    wrong = [pair for pair in found if pair[1].error or pair[1].missing(pair[0])]
    if settings.format == "json":
        _write_verified(found, problems)
    else:
        write_table(
            ["Journal", "Head", "Stored To", "Missing"],
            (
                [
                    journal.name,
                    NONE if journal.head is None else str(journal.head),
                    str(content.end),
                    content.error or _ranges(content.missing(journal)) or NONE,
                ]
                for journal, content in (wrong or found)
            ),
        )
        sys.stdout.writelines(f"{shard}: {problem}\n" for shard, problem in problems.items())
    sys.stdout.flush()
    if problems:
        raise CommandFailedError(
            f"{len(problems)} shards cannot be recovered by this backup, since their recovery logs"
            " were pruned after it: make another one"
        )
    if wrong:
        missing = sum(
            end - begin for journal, content in wrong for begin, end in content.missing(journal)
        )
        raise CommandFailedError(
            f"{len(wrong)} of {len(found)} journals: {iec_bytes(missing)} up to the saved heads are"
            " in no store; they are in the spools of brokers, or lost"
        )
    sys.stderr.write(f"{url} is whole, and the stores have all content up to its heads.\n")


def _write_verified(
    found: Iterable[tuple[SavedJournal, Stored]], problems: Mapping[str, str]
) -> None:
    """Write a JSON object for each journal, and for each shard that cannot be recovered."""
    rows: list[dict[str, object]] = [
        {
            "journal": journal.name,
            "head": journal.head,
            "stored_end": content.end,
            "missing": content.missing(journal),
            "error": content.error,
        }
        for journal, content in found
    ]
    rows += [{"shard": shard, "problem": problem} for shard, problem in problems.items()]
    sys.stdout.writelines(orjson.dumps(row).decode() + "\n" for row in rows)


def _ranges(ranges: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{begin} to {end}" for begin, end in ranges)


# ---------------------------------------------------------------- restore


async def run_restore(invocation: Invocation) -> None:
    """Restore a cluster into an empty Etcd.

    Raises:
        RestoreRefusedError: that could do harm.
        CommandFailedError: some journals take no appends yet.
        GazetteError: Etcd or a store failed.
    """
    settings = invocation.settings(RESTORE)
    if bool(settings.backup) == bool(settings.from_stores):
        raise ConfigurationError(
            "a restore needs one source: give --from BACKUP, or --from-stores URL"
        )
    etcd_settings = await _etcd_of(invocation)
    broker = invocation.settings(BROKER_CLIENT)
    with ExitStack() as shown:
        progress = shown.enter_context(open_progress("messages"))
        async with (
            open_etcd(etcd_settings, DIAL_TIMEOUT_S) as etcd,
            opened_stores(file_root_of(settings.file_root)) as stores,
        ):
            if settings.backup:
                backup = await asyncio.to_thread(read, settings.backup)
            else:
                backup = await _gathered(settings, etcd, etcd_settings.prefix, stores, progress)
            checks = RestoreChecks(
                backup=backup,
                prefix=etcd_settings.prefix,
                lost=settings.lost,
                authorizer=broker.authorizer(),
                tls=cast("Tls", broker.connect_options()["tls"]),
                progress=progress,
            )
            restore = Restore(
                etcd=etcd,
                consumers=settings.consumers_prefix,
                checks=checks,
                skip_bytes=settings.skip,
            )
            plan = await restore.plan(stores)
            if settings.dry_run:
                shown.close()
                _show_plan(plan, {}, settings.format)
                sys.stderr.write("Nothing was written (--dry-run).\n")
                return
            outcome = await restore.run(plan)
    _show_plan(plan, outcome.heads, settings.format)
    sys.stdout.flush()
    if outcome.registers_lost:
        _log.warning(
            "%d journals have no registers any more (%s): no broker has them; they are in the"
            " backup (`gazctl backup show`)",
            len(outcome.registers_lost), ", ".join(outcome.registers_lost[:NAMED_MAX]),
        )  # fmt: skip
    if outcome.waiting:
        name, reason = next(iter(outcome.waiting.items()))
        raise CommandFailedError(
            f"{len(outcome.waiting)} journals take no appends yet, such as {name}: {reason}; all is"
            " written: run the command again to look at them again"
        )
    sys.stderr.write("The cluster is restored. Start its consumers.\n")


async def _gathered(
    settings: RestoreSettings, etcd: Etcd, prefix: str, stores: StoreRegistry, progress: Progress
) -> Backup:
    """Return a backup of what stores have."""
    present = (await etcd.range(incarnation_key(prefix))).entries
    members = members_prefix(prefix)
    return await gather(
        settings.from_stores,
        stores,
        prefix=prefix,
        brokers=(await etcd.range(members, prefix_end(members))).count,
        progress=progress,
        incarnation=settings.mirror,
        without=present[0].value.decode() if present else "",
    )


def _show_plan(plan: Plan, heads: Mapping[str, int], form: Literal["table", "json"]) -> None:
    if form == "json":
        for journal in plan.journals:
            row: dict[str, object] = {
                "journal": journal.name,
                "state": journal.state,
                "saved_head": journal.saved_head,
                "stored_end": journal.stored_end,
                "floor": journal.floor,
                "head": heads.get(journal.name),
                "suspended": journal.level,
                "claimed_by": journal.claimed_by,
                "skips": journal.skips,
                "guessed": journal.guessed,
            }
            sys.stdout.write(orjson.dumps(row).decode() + "\n")
        for shard in plan.shards:
            row = {
                "shard": shard.id,
                "application": shard.application,
                "state": shard.state,
                "hints": shard.hints,
                "problem": shard.problem,
            }
            sys.stdout.write(orjson.dumps(row).decode() + "\n")
        return
    write_table(
        ["Journal", "State", "Saved Head", "Stored To", "Begins At", "Claimed By", "Note"],
        (
            [
                each.name,
                each.state,
                NONE if each.saved_head is None else str(each.saved_head),
                str(each.stored_end),
                str(heads.get(each.name, each.floor)),
                ", ".join(each.claimed_by) or NONE,
                each.notes or NONE,
            ]
            for each in plan.journals
        ),
    )
    if plan.shards:
        sys.stdout.write("\n")
        write_table(
            ["Shard", "State", "Application", "Hints", "Note"],
            (
                [each.id, each.state, each.application, str(each.hints), each.problem or NONE]
                for each in plan.shards
            ),
        )
    states = [each.state for each in plan.journals] + [each.state for each in plan.shards]
    sys.stdout.write(f"\n{states.count(State.CREATE)} of {len(states)} were missing\n")
