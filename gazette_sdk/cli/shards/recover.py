"""``gazctl shards recover``."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from gazette_sdk.cli.client import SHARDS_BROKER_CLIENT, SHARDS_ZONE, open_broker, open_consumer
from gazette_sdk.cli.formats import iec_bytes, write_table
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.shards.commands import RECOVER
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.shard_spec import ID, recovery_log, validate_shard_id
from gazette_sdk.server.tls import file_root_of
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.recovery import hints as fsm_hints
from gazette_sdk.shard.recovery.player import Playback, Recovered

_log = logging.getLogger(__name__)


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
        hints = await _hints(client, settings.id)
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


async def _hints(client: ShardClient, shard: str) -> rpb.FSMHints:
    """Return the hints to play: the primary ones, else the latest backup, else none."""
    selector = pb.LabelSelector(include=label_set(((ID, shard),)))
    listing = await client.list(selector)
    if len(listing.shards) != 1:
        raise CommandFailedError(
            f"no shard exists with the given id ({shard}); `gazctl shards list` shows all"
        )
    log = recovery_log(listing.shards[0].spec)
    if not log:
        raise CommandFailedError(f"shard {shard} has no recovery log: its store is elsewhere")
    response = await client.get_hints(shard)
    primary, *backups = (
        each.hints if each.HasField("hints") else None
        for each in (response.primary_hints, *response.backup_hints)
    )
    return fsm_hints.choose(primary, backups, log)


async def _play(playback: Playback) -> Recovered:
    """Play to the write head."""
    playing = asyncio.create_task(playback.run())
    finishing = asyncio.create_task(playback.finish())
    try:
        await asyncio.wait([playing, finishing], return_when=asyncio.FIRST_EXCEPTION)
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
