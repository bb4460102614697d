"""``gazctl shards apply``, ``edit`` and ``generate``, and ``gazctl topics grow``."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import orjson

from gazette_sdk.cli.application import import_application
from gazette_sdk.cli.client import (
    SHARDS_BROKER_CLIENT,
    SHARDS_ZONE,
    open_broker,
    open_consumer,
    open_consumers,
)
from gazette_sdk.cli.formats import NONE, load, proto_text, write_table
from gazette_sdk.cli.journals.specs import edit
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.shards.commands import APPLY, EDIT, GENERATE, GROW
from gazette_sdk.cli.shards.consumers import name_of
from gazette_sdk.cli.shards.list import heads_of, list_some, yaml_of
from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    EtcdTransactionFailedError,
    GazetteError,
    ShardStatusError,
    UnauthenticatedError,
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
from gazette_sdk.protocol import shardspace
from gazette_sdk.protocol.labels import (
    CONTENT_TYPE,
    PREFIX,
    label_set,
    matches_journal,
    parse_selector,
    value_of,
)
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.rules import ANY_REVISION, complete
from gazette_sdk.protocol.shard_spec import recovery_log, source_journals, validate_shard_rpc
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
from gazette_sdk.shard.consumer.lag import ANSWER_TIMEOUT_S
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import for_each

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
        rows = [
            (
                change.upsert.id,
                recovery_log(change.upsert),
                "updated" if change.expect_mod_revision else "created",
            )
            for change in changes
        ]
        if self._form == "table":
            write_table(["Shard", "Recovery Log", "Outcome"], map(list, rows))
        else:
            for shard, log, outcome in rows:
                line = {"shard": shard, "log": log, "outcome": outcome}
                sys.stdout.write(orjson.dumps(line).decode() + "\n")
        sys.stdout.flush()


# ---------------------------------------------------------------- topics


PARTITIONS_MAX = 1000
"""Partitions whose names are in the order of their numbers."""

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
        shown = {
            "topic": name,
            "partitions": len(partitions),
            "wanted": len(wanted),
            "created": created,
            "readers": readers,
            "refused": reason if is_refused else "",
        }
        sys.stdout.write(orjson.dumps(shown).decode() + "\n")
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
