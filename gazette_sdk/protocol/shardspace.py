"""Shard space: specs of many shards with their common part, and as YAML (shard section 12).

From YAML to consumers::

    space = parse(text)
    push_down(space)
    request = to_apply_request(space)

And back::

    space = from_list_response(response.shards)
    hoist(space)
    text = dump(space)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter
from typing import Any

from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import strict_yaml
from gazette_sdk.protocol.durations import from_ns, to_ns
from gazette_sdk.protocol.shard_spec import intersect_specs, subtract_specs, union_specs
from gazette_sdk.protocol.strict_yaml import Decoder, Value


@dataclass(slots=True)
class ShardNode:
    """A shard.

    Attributes:
        spec: its spec, without what is common.
        comment: free text; it has no effect.
        delete: True to delete it.
        revision: expected modification revision; 0: it must not exist, -1: any.
        patched: True if the shard was inserted or changed by a patch.
    """

    spec: cpb.ShardSpec = field(default_factory=cpb.ShardSpec)
    comment: str = ""
    delete: bool | None = None
    revision: int = 0
    patched: bool = False

    @property
    def id(self) -> str:
        """The shard's id."""
        return self.spec.id


@dataclass(slots=True)
class ShardSpace:
    """Shards, and a partial spec that all of them share.

    Attributes:
        common: the partial spec.
        shards: the shards.
    """

    common: cpb.ShardSpec = field(default_factory=cpb.ShardSpec)
    shards: list[ShardNode] = field(default_factory=list)


# ---------------------------------------------------------------- operations


def push_down(space: ShardSpace) -> None:
    """Complete every shard's spec with the common values, and clear these.

    A shard takes the common value of each field that is zero; a boolean that is true in common
    stays true.
    """
    for shard in space.shards:
        shard.spec = union_specs(shard.spec, space.common)
    space.common = cpb.ShardSpec()


def hoist(space: ShardSpace) -> None:
    """Move the values that all shards share into the common spec; for output.

    The common spec must be empty. :func:`push_down` is the inverse.
    """
    if not space.shards:
        return
    specs = [shard.spec for shard in space.shards]
    common = reduce(intersect_specs, specs)
    common = intersect_specs(common, common)  # a copy, where there is one shard only
    common.id = ""
    space.common = common
    for shard in space.shards:
        shard.spec = subtract_specs(shard.spec, common)


def from_list_response(shards: Iterable[cpb.ListResponse.Shard]) -> ShardSpace:
    """Return listed shards with their modification revisions, before hoisting."""
    space = ShardSpace()
    for shard in sorted(shards, key=lambda shard: shard.spec.id):
        node = ShardNode(revision=shard.mod_revision)
        node.spec.CopyFrom(shard.spec)
        space.shards.append(node)
    return space


def to_apply_request(space: ShardSpace) -> cpb.ApplyRequest:
    """Return a request with one change per shard of a space that was pushed down."""
    request = cpb.ApplyRequest()
    for node in space.shards:
        change = request.changes.add(expect_mod_revision=node.revision)
        if node.delete:
            change.delete = node.id
        else:
            change.upsert.CopyFrom(node.spec)
    return request


def patch(space: ShardSpace, node: ShardNode) -> None:
    """Insert a shard in its order, or merge it into the shard of its id.

    Merging replaces comment, delete and revision by those of ``node`` that are set, and values of
    the spec by those that are not zero.

    Args:
        space: the space, changed in place; its shards are ascending by id.
        node: the shard; marked as patched.
    """
    for known in space.shards:
        if known.id == node.id:
            known.spec = union_specs(node.spec, known.spec)
            known.comment = node.comment or known.comment
            known.delete = known.delete if node.delete is None else node.delete
            known.revision = node.revision or known.revision
            known.patched = True
            return
    node.patched = True
    insort(space.shards, node, key=attrgetter("id"))


def mark_unpatched_for_deletion(space: ShardSpace) -> None:
    """Set ``delete`` of every shard that no patch inserted or changed."""
    for node in space.shards:
        if not node.patched:
            node.delete = True


# ---------------------------------------------------------------- reading


def parse(text: str | bytes) -> ShardSpace:
    """Return the shards of a YAML document; an empty document has none.

    Specs are not validated. Shards may stand in any order.

    Raises:
        ValidationError: the text is not YAML (kind ``yaml_parse``), has an unknown or a repeated
            key (``unknown_key``, ``duplicate_key``), a value of the wrong type (``wrong_type``),
            or no duration (``invalid_duration``).
    """
    document = strict_yaml.compose(text)
    if document is None:
        return ShardSpace()
    fields = strict_yaml.mapping(document, "", {"common": _common, "shards": _shards})
    space = ShardSpace(shards=fields.get("shards", []))
    if "common" in fields:
        space.common = fields["common"]
    return space


def _common(value: Value, path: str) -> cpb.ShardSpec:
    return _spec(value, path, strict_yaml.mapping(value, path, _SPEC_KEYS))


def _shards(value: Value, path: str) -> list[ShardNode]:
    return strict_yaml.list_of(value, path, _shard)


def _shard(value: Value, path: str) -> ShardNode:
    fields = strict_yaml.mapping(value, path, _SHARD_KEYS)
    return ShardNode(
        comment=fields.pop("comment", ""),
        delete=fields.pop("delete", None),
        revision=fields.pop("revision", 0),
        spec=_spec(value, path, fields),
    )


def _spec(value: Value, path: str, fields: dict[str, Any]) -> cpb.ShardSpec:
    spec = cpb.ShardSpec()
    for source in fields.pop("sources", []):
        strict_yaml.assign(spec.sources.add(), source, value, path)
    for name, label in sorted(fields.pop("labels", [])):
        spec.labels.labels.add(name=name, value=label)
    for name in _DURATIONS & fields.keys():
        getattr(spec, name).CopyFrom(from_ns(fields.pop(name)))
    strict_yaml.assign(spec, fields, value, path)
    return spec


def _sources(value: Value, path: str) -> list[dict[str, Any]]:
    return strict_yaml.list_of(value, path, _source)


def _source(value: Value, path: str) -> dict[str, Any]:
    return strict_yaml.mapping(
        value, path, {"journal": strict_yaml.string, "min_offset": strict_yaml.integer}
    )


_DURATIONS = frozenset({"max_txn_duration", "min_txn_duration"})
_SPEC_KEYS: dict[str, Decoder] = {
    "id": strict_yaml.string,
    "sources": _sources,
    "recovery_log_prefix": strict_yaml.string,
    "hint_prefix": strict_yaml.string,
    "hint_backups": strict_yaml.integer,
    "max_txn_duration": strict_yaml.duration,
    "min_txn_duration": strict_yaml.duration,
    "disable": strict_yaml.boolean,
    "hot_standbys": strict_yaml.integer,
    "labels": strict_yaml.labels,
    "disable_wait_for_ack": strict_yaml.boolean,
    "ring_buffer_size": strict_yaml.integer,
    "read_channel_size": strict_yaml.integer,
}
_SHARD_KEYS: dict[str, Decoder] = {
    "comment": strict_yaml.string,
    "delete": strict_yaml.boolean,
    **_SPEC_KEYS,
    "revision": strict_yaml.integer,
}


# ---------------------------------------------------------------- writing


def dump(space: ShardSpace) -> str:
    """Return the YAML document of a space. Zero values are left out, but for values of labels."""
    return strict_yaml.document(
        {
            "common": _spec_keys(space.common),
            "shards": [_shard_keys(shard) for shard in space.shards],
        }
    )


def _shard_keys(node: ShardNode) -> dict[str, Any]:
    return {
        **({"comment": node.comment} if node.comment else {}),
        **({} if node.delete is None else {"delete": node.delete}),
        **_spec_keys(node.spec),
        **({"revision": node.revision} if node.revision else {}),
    }


def _spec_keys(spec: cpb.ShardSpec) -> dict[str, Any]:
    keys = {
        "id": spec.id,
        "sources": [
            {"journal": source.journal}
            | ({"min_offset": source.min_offset} if source.min_offset else {})
            for source in spec.sources
        ],
        "recovery_log_prefix": spec.recovery_log_prefix,
        "hint_prefix": spec.hint_prefix,
        "hint_backups": spec.hint_backups,
        "max_txn_duration": strict_yaml.duration_text(to_ns(spec.max_txn_duration)),
        "min_txn_duration": strict_yaml.duration_text(to_ns(spec.min_txn_duration)),
        "disable": spec.disable,
        "hot_standbys": spec.hot_standbys,
        "labels": [{"name": label.name, "value": label.value} for label in spec.labels.labels],
        "disable_wait_for_ack": spec.disable_wait_for_ack,
        "ring_buffer_size": spec.ring_buffer_size,
        "read_channel_size": spec.read_channel_size,
    }
    return {name: value for name, value in keys.items() if value}
