"""``gazctl shards list``, and what the commands of shards share.

That is the selection of the shards that a command works on (:func:`list_some`, :func:`shard_of`),
and their lag: the bytes of their sources that they have not read yet (:func:`lag_of`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

from gazette_sdk.cli.client import SHARDS_BROKER_CLIENT, SHARDS_ZONE, open_broker, open_consumer
from gazette_sdk.cli.formats import NONE, listing_text, write_table
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.shards.commands import LIST, ListSettings
from gazette_sdk.errors import ConfigurationError, GazetteError, ShardStatusError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import shardspace
from gazette_sdk.protocol.labels import label_set, parse_selector, values_of
from gazette_sdk.protocol.shard_spec import (
    ID,
    desired_replication,
    error_text,
    reduce_status,
    status_name,
)
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.lag import ANSWER_TIMEOUT_S, head_of, unread_bytes
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import for_each


def required_selector(text: str) -> pb.LabelSelector:
    """Return the selector of a command that needs one.

    Raises:
        ConfigurationError: it was not given.
        ValidationError: it is malformed.
    """
    if not text:
        raise ConfigurationError(
            "the required option --selector was not given; `-l id` selects all shards"
        )
    return parse_selector(text)


async def list_some(client: ShardClient, text: str) -> cpb.ListResponse:
    """Return the selected shards, at least one.

    Raises:
        CommandFailedError: no shard matches.
        GazetteError: the listing failed.
    """
    listing = await client.list(required_selector(text))
    if not listing.shards:
        raise CommandFailedError(
            f"no shards match the selector {text!r}; `gazctl shards list` shows all"
        )
    return listing


async def shard_of(client: ShardClient, shard: str) -> cpb.ListResponse.Shard:
    """Return the shard of an id.

    Raises:
        CommandFailedError: there is none.
        GazetteError: the listing failed.
    """
    listing = await client.list(pb.LabelSelector(include=label_set(((ID, shard),))))
    if len(listing.shards) != 1:
        raise CommandFailedError(
            f"no shard exists with the given id ({shard}); `gazctl shards list` shows all"
        )
    return listing.shards[0]


_log = logging.getLogger(__name__)

Lag = Mapping[str, int | None]
"""Bytes between what a shard has read and the write head, by source; None where that is unknown."""


async def lag_of(
    client: ShardClient, transport: Transport, shards: Sequence[cpb.ListResponse.Shard]
) -> dict[str, Lag | None]:
    """Return the lag of shards by id; None of one whose primary does not answer.

    Args:
        client: asks the primaries.
        transport: asks the brokers.
        shards: the shards.
    """

    async def read_through(shard: cpb.ListResponse.Shard) -> dict[str, int] | None:
        response = await stat_of(client, shard.spec.id)
        return None if response is None else dict(response.read_through)

    read = dict(
        zip(
            (shard.spec.id for shard in shards),
            await for_each(shards, read_through),
            strict=True,
        )
    )
    heads = await heads_of(transport, {each for offsets in read.values() for each in offsets or ()})
    return {
        shard: None
        if offsets is None
        else {j: unread_bytes(heads[j], o) for j, o in offsets.items()}
        for shard, offsets in read.items()
    }


async def stat_of(
    client: ShardClient, shard: str, *, at_once: bool = False
) -> cpb.StatResponse | None:
    """Return how far a shard is; None, with a warning, if its primary does not answer.

    Args:
        client: asks the primary.
        shard: id of the shard.
        at_once: do not wait for a primary that is still recovering.
    """
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            response = await client.stat(cpb.StatRequest(shard=shard, at_once=at_once))
        if response.status != cpb.OK:
            raise ShardStatusError(response.status, shard=shard)
    except (GazetteError, TimeoutError) as error:
        reason = str(error) or f"no answer within {ANSWER_TIMEOUT_S:g} s"
        _log.warning("lag is unknown", extra={"shard": shard, "err": reason})
        return None
    return response


async def heads_of(transport: Transport, journals: Collection[str]) -> dict[str, int | None]:
    """Return the write heads of journals; None, with a warning, where a broker does not answer."""

    async def head(journal: str) -> int | None:
        return await _head(transport, journal)

    ordered = sorted(journals)
    return dict(zip(ordered, await for_each(ordered, head), strict=True))


async def _head(transport: Transport, journal: str) -> int | None:
    try:
        return await head_of(transport, journal)
    except GazetteError as error:
        _log.warning("write head is unknown", extra={"journal": journal, "err": str(error)})
        return None


async def run(invocation: Invocation) -> None:
    """List shards.

    Raises:
        CommandFailedError: a shard has failed, and that is to end the command with status 1.
    """
    settings = invocation.settings(LIST)
    if settings.lag and settings.format != "table":
        raise ConfigurationError("--lag needs -o table: other formats are of specs alone")
    selector = parse_selector(settings.selector)
    lags: Mapping[str, Lag | None] = {}
    async with open_consumer(invocation) as client:
        listing = await client.list(selector)
        if settings.lag:
            async with open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport:
                lags = await lag_of(client, transport, listing.shards)
    match settings.format:
        case "table":
            write_table(*_table(listing, settings, lags))
        case form:
            sys.stdout.write(listing_text(listing, form, yaml_of))
    sys.stdout.flush()
    for fault in listing.faults:
        _log.warning("%s", fault)
    if settings.fail_on == "failed":
        _check_none_has_failed(listing)


def _check_none_has_failed(listing: cpb.ListResponse) -> None:
    """Raise a CommandFailedError if a listed shard has failed."""
    failed = [
        shard.spec.id
        for shard in listing.shards
        if reduce_status(shard.status).code == cpb.ReplicaStatus.FAILED
    ]
    if failed:
        raise CommandFailedError(
            f"{len(failed)} of {len(listing.shards)} shards have failed, such as {failed[0]}; "
            "`gazctl shards list --errors` shows why"
        )


def yaml_of(listing: cpb.ListResponse) -> str:
    """Return listed shards as YAML for ``apply``."""
    space = shardspace.from_list_response(listing.shards)
    shardspace.hoist(space)
    return shardspace.dump(space)


def _table(
    listing: cpb.ListResponse, settings: ListSettings, lags: Mapping[str, Lag | None]
) -> tuple[list[str], Iterator[list[str]]]:
    wanted = {
        "ID": True,
        "Status": True,
        "RF": settings.rf,
        "Primary": settings.primary,
        "Replicas": settings.replicas,
    }
    columns = [name for name, is_wanted in wanted.items() if is_wanted]
    last = [
        name
        for name, is_wanted in {"Lag": settings.lag, "Errors": settings.errors}.items()
        if is_wanted
    ]
    rows = (
        [_cell(shard, column) for column in columns]
        + [_label(shard.spec, name) for name in settings.label_columns]
        + [
            _lag(lags[shard.spec.id]) if column == "Lag" else error_text(shard.status)
            for column in last
        ]
        for shard in listing.shards
    )
    return [*columns, *settings.label_columns, *last], rows


def _cell(shard: cpb.ListResponse.Shard, column: str) -> str:
    route = shard.route
    members = [
        f"{member.suffix}:{status_name(status)}"
        for member, status in zip(route.members, shard.status, strict=True)
    ]
    match column:
        case "Status":
            return status_name(reduce_status(shard.status))
        case "RF":
            return str(desired_replication(shard.spec, shard.spec.hot_standbys))
        case "Primary":
            return members[route.primary] if 0 <= route.primary < len(members) else NONE
        case "Replicas":
            return ",".join(
                member for index, member in enumerate(members) if index != route.primary
            )
        case _:
            return shard.spec.id


def _label(spec: cpb.ShardSpec, name: str) -> str:
    values = values_of(spec.labels, name)
    return ",".join(values) if values else NONE


def _lag(lag: Lag | None) -> str:
    if lag is None:
        return NONE
    return ", ".join(
        f"{journal}:{NONE if behind is None else behind}" for journal, behind in sorted(lag.items())
    )
