"""``gazctl shards list``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from gazette_sdk.cli.client import SHARDS_BROKER_CLIENT, SHARDS_ZONE, open_broker, open_consumer
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.formats import NONE, listing_text, write_table
from gazette_sdk.cli.shards.lag import Lag, lag_of
from gazette_sdk.cli.shards.settings import LIST, ListSettings
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import shardspace
from gazette_sdk.protocol.labels import parse_selector, values_of
from gazette_sdk.protocol.shard_spec import desired_replication, reduce_status

__all__ = ["run", "yaml_of"]


async def run(invocation: Invocation) -> None:
    """List shards."""
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
        + [_lag(lags[shard.spec.id]) if column == "Lag" else _errors(shard) for column in last]
        for shard in listing.shards
    )
    return [*columns, *settings.label_columns, *last], rows


def _cell(shard: cpb.ListResponse.Shard, column: str) -> str:
    route = shard.route
    members = [
        f"{member.suffix}:{_code(status)}"
        for member, status in zip(route.members, shard.status, strict=True)
    ]
    match column:
        case "Status":
            return _code(reduce_status(shard.status))
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


def _code(status: cpb.ReplicaStatus) -> str:
    known = cpb.ReplicaStatus.Code.values()
    return cpb.ReplicaStatus.Code.Name(status.code) if status.code in known else str(status.code)


def _label(spec: cpb.ShardSpec, name: str) -> str:
    values = values_of(spec.labels, name)
    return ",".join(values) if values else NONE


def _lag(lag: Lag | None) -> str:
    if lag is None:
        return NONE
    return ", ".join(
        f"{journal}:{NONE if behind is None else behind}" for journal, behind in sorted(lag.items())
    )


def _errors(shard: cpb.ListResponse.Shard) -> str:
    """Return the errors of a shard's processes in one line."""
    texts = (text for status in shard.status for text in status.errors)
    return " | ".join(" ".join(text.split()) for text in texts)
