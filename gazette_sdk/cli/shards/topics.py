"""``gazctl topics grow``: more partitions of a topic, which its readers allow."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from gazette_sdk.cli.client import (
    SHARDS_BROKER_CLIENT,
    SHARDS_ZONE,
    open_broker,
    open_consumers,
)
from gazette_sdk.cli.formats import NONE, write_table
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.shards.commands import GROW
from gazette_sdk.cli.shards.consumers import name_of
from gazette_sdk.cli.shards.list import heads_of
from gazette_sdk.errors import (
    ConfigurationError,
    GazetteError,
)
from gazette_sdk.journals.changes import (
    TOPIC,
    AppliedChange,
    create_journals,
    partition_names,
)
from gazette_sdk.journals.journal import JournalOptions
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import (
    CONTENT_TYPE,
    PREFIX,
    label_set,
    matches_journal,
    value_of,
)
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.shard_spec import source_journals
from gazette_sdk.shard.application.generator import (
    list_topics,
)
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.lag import ANSWER_TIMEOUT_S
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import for_each

PARTITIONS_MAX = 1000
"""Partitions whose names are in the order of their numbers."""

_log = logging.getLogger(__name__)

_PARTS = ("state", "tables", "windows", "timers")


@dataclass(frozen=True, slots=True)
class TopicReader:
    """Application that reads a topic.

    Attributes:
        application: its name; its address if that is not known.
        address: of the process that was asked.
        shards: number of its shards that read the topic.
        with_state: number of these that have state.
        unknown: number of these that cannot be asked for it, or have not begun to read.
        joins: other topics that these read, too.
    """

    application: str
    address: str
    shards: int
    with_state: int
    unknown: int
    joins: list[str]


@dataclass(frozen=True, slots=True)
class Grown:
    """Outcome of a topic, as ``-o json`` shows it.

    Attributes:
        topic: its name.
        partitions: number of its partitions before.
        wanted: number that was asked for.
        created: journals that were created.
        readers: applications that read it.
        refused: why it was left as it is; empty otherwise.
    """

    topic: str
    partitions: int
    wanted: int
    created: list[str]
    readers: list[TopicReader]
    refused: str


async def run_grow(invocation: Invocation) -> None:
    """Add partitions to a topic.

    Raises:
        ConfigurationError: the number of partitions is missing.
        CommandFailedError: there is no such topic, it has as many partitions, or state would be
            split.
        GazetteError: a call failed.
    """
    settings = invocation.settings(GROW)
    (name,) = invocation.arguments
    if not settings.partitions:
        raise ConfigurationError(
            f"--partitions was not given: say how many partitions {name} is to have"
        )
    async with open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport:
        partitions = await _partitions(transport, name)
        wanted = partition_names(name, settings.partitions)
        if len(wanted) <= len(partitions):
            raise CommandFailedError(
                f"{name} has {len(partitions)} partitions, and a topic only grows: give more with"
                " --partitions"
            )
        heads = await heads_of(transport, [each.name for each in partitions])
        readers, errors = await _readers(invocation, heads)
        reason = _refusal(name, readers, errors)
        is_refused = bool(reason) and not settings.force
        made: list[AppliedChange] = []
        if not (settings.dry_run or is_refused):
            options: JournalOptions = {
                "content_type": value_of(partitions[0].labels, CONTENT_TYPE),
                "labels": {TOPIC: value_of(partitions[0].labels, TOPIC)},
            }
            made = await create_journals(transport, name, len(wanted), options)
    created = [each.name for each in made if each.outcome == "created"]
    if settings.format == "json":
        grown = Grown(
            name, len(partitions), len(wanted), created, readers, reason if is_refused else ""
        )
        sys.stdout.write(orjson.dumps(grown).decode() + "\n")
    else:
        _show_grown(readers, made or wanted[len(partitions) :])
    sys.stdout.flush()
    if is_refused and not settings.dry_run:
        raise CommandFailedError(reason)
    if reason:
        _log.warning("%s", reason)


async def _partitions(transport: Transport, name: str) -> list[pb.JournalSpec]:
    """Return the partitions of a topic, in order.

    Raises:
        CommandFailedError: there is none, or they are not those of `gazctl journals create`.
    """
    of_topic = pb.LabelSelector(include=label_set(((TOPIC, name),)))
    of_names = pb.LabelSelector(include=label_set(((PREFIX, f"{name}/"),)))
    topic, named = await list_topics(transport, (of_topic, of_names))
    numbered = re.compile(re.escape(name) + "/part-[0-9]+")
    found = {spec.name: spec for spec in topic}
    found |= {spec.name: spec for spec in named if numbered.fullmatch(spec.name)}
    expected = partition_names(name, len(found)) if found else []
    if not found:
        raise CommandFailedError(
            f"there is no topic {name}; `gazctl journals create {name} --partitions N` creates one"
        )
    others = sorted(found.keys() - set(expected))
    unlabelled = [
        each for each in expected if each in found and not matches_journal(of_topic, found[each])
    ]
    if others or unlabelled or len(found) > PARTITIONS_MAX:
        raise CommandFailedError(
            f"the partitions of {name} are not {name}/part-000, {name}/part-001 and so on, with the"
            f" label topic={name}: {(others or unlabelled or expected)[0]} is another one; add"
            " journals by `gazctl journals apply`"
        )
    return [found[each] for each in expected]


async def _readers(
    invocation: Invocation, heads: Mapping[str, int | None]
) -> tuple[list[TopicReader], list[str]]:
    """Return the applications that read journals, and why others could not be asked.

    Args:
        invocation: the call of the command.
        heads: write heads of the journals; None where they are not known.
    """
    readers: dict[str, TopicReader] = {}
    errors = []
    async with open_consumers(invocation) as clients:
        for address, client in clients.items():
            try:
                found = await _reader(address, client, heads)
            except GazetteError as error:
                errors.append(f"{address} cannot be asked for its shards ({error})")
            else:
                if found.shards:
                    readers[found.application] = found
    return [readers[name] for name in sorted(readers)], errors


async def _reader(
    address: str, client: ShardClient, heads: Mapping[str, int | None]
) -> TopicReader:
    """Return how an application reads journals; also of one that does not."""
    journals = heads.keys()
    listing = await client.list(with_processes=True)
    shards = [each for each in listing.shards if journals & set(source_journals(each.spec))]
    states = await for_each(shards, lambda shard: _has_state(client, shard.spec.id, heads))
    read = {journal for shard in shards for journal in source_journals(shard.spec)}
    return TopicReader(
        name_of(listing) or address,
        address,
        len(shards),
        states.count(True),
        states.count(None),
        sorted({journal.rpartition("/")[0] for journal in read - journals}),
    )


async def _has_state(
    client: ShardClient, shard: str, heads: Mapping[str, int | None]
) -> bool | None:
    """Return True if a shard has any state; None if that cannot be found out.

    A shard that has not begun to read a journal with content may have state later.
    """
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            for part in _PARTS:
                request = cpb.StateRequest(shard=shard, what=part, limit=1)
                if (await client.state(request)).entries:
                    return True
            stat = await client.stat(cpb.StatRequest(shard=shard))
    except (GazetteError, TimeoutError) as error:
        reason = str(error) or f"no answer within {ANSWER_TIMEOUT_S:g} s"
        _log.warning("the state is unknown", extra={"shard": shard, "err": reason})
        return None
    read = {strip_meta(journal): offset for journal, offset in stat.read_through.items()}
    has_begun = all(offset or heads.get(journal, 0) == 0 for journal, offset in read.items())
    return False if read and has_begun else None


def _refusal(name: str, readers: Sequence[TopicReader], errors: Sequence[str]) -> str:
    """Return why a topic should not grow; empty if nothing speaks against it."""
    reasons = list(errors)
    for each in readers:
        if count := each.with_state + each.unknown:
            what = "have state" if not each.unknown else "have state, or may have"
            reasons.append(
                f"{count} of the {each.shards} shards of {each.application} that read {name} {what}"
            )
        if each.joins:
            reasons.append(
                f"{each.application} joins {name} with {', '.join(each.joins)}, and reads no new"
                " partitions until all of them have equally many"
            )
    if not reasons:
        return ""
    return (
        f"{'; '.join(reasons)}. More partitions split the state of keys, where messages are mapped"
        " by the hash of a key; --force adds them all the same, and `gazctl topics grow --help`"
        " says what follows"
    )


def _show_grown(readers: Sequence[TopicReader], made: Sequence[AppliedChange | str]) -> None:
    """Write who reads a topic, and its new partitions."""
    if readers:
        write_table(
            ["Application", "Address", "Shards", "With State", "Unknown", "Joins"],
            (
                [
                    each.application,
                    each.address,
                    str(each.shards),
                    str(each.with_state),
                    str(each.unknown),
                    ",".join(each.joins) or NONE,
                ]
                for each in readers
            ),
        )
        sys.stdout.write("\n")
    write_table(
        ["Journal", "Outcome"],
        (
            [each, "to create"] if isinstance(each, str) else [each.name, each.outcome]
            for each in made
        ),
    )
