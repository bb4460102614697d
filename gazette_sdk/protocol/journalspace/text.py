"""Journal-space trees as YAML: strict decoding, and encoding that decodes to the same tree.

Unknown and repeated keys and values of the wrong type are errors that name the line and the
key. Durations are Go's (``1h0m0s``), plain integers are nanoseconds.
"""

from __future__ import annotations

from typing import Any

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import strict_yaml
from gazette_sdk.protocol.durations import from_ns, to_ns
from gazette_sdk.protocol.journalspace.tree import Node
from gazette_sdk.protocol.names import at
from gazette_sdk.protocol.strict_yaml import NESTING_MOST, Decoder, Value

__all__ = ["dump", "flag_text", "parse"]

# ---------------------------------------------------------------- reading


def parse(text: str | bytes) -> Node:
    """Return the tree of a YAML document; an empty document is an empty root.

    The tree's shape is not validated, see :meth:`Node.validate`.

    Raises:
        ValidationError: the text is not YAML (kind ``yaml_parse``), has an unknown or a repeated
            key (``unknown_key``, ``duplicate_key``), a value of the wrong type (``wrong_type``),
            an unknown name (``unknown_enum_name``) or no duration (``invalid_duration``), or its
            aliases expand it beyond measure (``wrong_type``).
    """
    document = strict_yaml.compose(text)
    return Node() if document is None else _node(document, "", 0)


def flag_text(flag: int) -> str | int:
    """Return the name of a journal's flag, or its number if it has none."""
    return strict_yaml.name_of(pb.JournalSpec.Flag, flag)


def _node(value: Value, path: str, depth: int) -> Node:
    if depth > NESTING_MOST:
        strict_yaml.fail(
            value, path, f"nested deeper than {NESTING_MOST} directories", "wrong_type"
        )

    def children(value: Value, path: str) -> list[Node]:
        return strict_yaml.list_of(value, path, lambda item, where: _node(item, where, depth + 1))

    fields = strict_yaml.mapping(value, path, {**_NODE_KEYS, "children": children})
    suspend = fields.pop("suspend", None)
    labels = fields.pop("labels", None) or []
    node = Node(
        comment=fields.pop("comment", ""),
        delete=fields.pop("delete", None),
        revision=fields.pop("revision", 0),
        children=fields.pop("children", []),
        spec=_spec(value, path, fields),
    )
    for name, label in sorted(labels):
        node.spec.labels.labels.add(name=name, value=label)
    if suspend is not None:
        node.spec.suspend.CopyFrom(
            strict_yaml.assign(pb.JournalSpec.Suspend(), suspend, value, path)
        )
    return node


def _spec(value: Value, path: str, fields: dict[str, Any]) -> pb.JournalSpec:
    spec = pb.JournalSpec()
    fragment = fields.pop("fragment", None) or {}
    for name in _DURATIONS & fragment.keys():
        getattr(spec.fragment, name).CopyFrom(from_ns(fragment.pop(name)))
    spec.fragment.stores.extend(fragment.pop("stores", []))
    strict_yaml.assign(spec.fragment, fragment, value, at(path, "fragment"))
    strict_yaml.assign(spec, fields, value, path)
    return spec


def _stores(value: Value, path: str) -> list[str]:
    return strict_yaml.list_of(value, path, strict_yaml.string)


def _fragment(value: Value, path: str) -> dict[str, Any]:
    return strict_yaml.mapping(value, path, _FRAGMENT_KEYS)


def _suspend(value: Value, path: str) -> dict[str, Any]:
    return strict_yaml.mapping(value, path, _SUSPEND_KEYS)


_DURATIONS = frozenset({"refresh_interval", "retention", "flush_interval"})
_FRAGMENT_KEYS: dict[str, Decoder] = {
    "length": strict_yaml.integer,
    "compression_codec": strict_yaml.enum(pb.CompressionCodec, numbers=False),
    "stores": _stores,
    "refresh_interval": strict_yaml.duration,
    "retention": strict_yaml.duration,
    "flush_interval": strict_yaml.duration,
    "path_postfix_template": strict_yaml.string,
}
_SUSPEND_KEYS: dict[str, Decoder] = {
    "level": strict_yaml.enum(pb.JournalSpec.Suspend.Level, numbers=True),
    "offset": strict_yaml.integer,
}
_NODE_KEYS: dict[str, Decoder] = {
    "comment": strict_yaml.string,
    "delete": strict_yaml.boolean,
    "name": strict_yaml.string,
    "replication": strict_yaml.integer,
    "labels": strict_yaml.labels,
    "fragment": _fragment,
    "flags": strict_yaml.enum(pb.JournalSpec.Flag, numbers=True),
    "max_append_rate": strict_yaml.integer,
    "suspend": _suspend,
    "revision": strict_yaml.integer,
}


# ---------------------------------------------------------------- writing


def dump(root: Node) -> str:
    """Return the YAML document of a tree.

    Zero values are left out, but for values of labels, and a present ``suspend``.
    """
    return strict_yaml.document(_node_keys(root))


def _node_keys(node: Node) -> dict[str, Any]:
    spec = node.spec
    return _without_zeros(
        {
            "comment": node.comment,
            "delete": node.delete,
            "name": spec.name,
            "replication": spec.replication,
            "labels": [{"name": label.name, "value": label.value} for label in spec.labels.labels],
            "fragment": _fragment_keys(spec.fragment),
            "flags": spec.flags and flag_text(spec.flags),
            "max_append_rate": spec.max_append_rate,
            "suspend": _suspend_keys(spec.suspend) if spec.HasField("suspend") else None,
            "revision": node.revision,
            "children": [_node_keys(child) for child in node.children],
        }
    )


def _fragment_keys(fragment: pb.JournalSpec.Fragment) -> dict[str, Any]:
    codec = fragment.compression_codec
    return _without_zeros(
        {
            "length": fragment.length,
            "compression_codec": codec and strict_yaml.name_of(pb.CompressionCodec, codec),
            "stores": list(fragment.stores),
            "refresh_interval": strict_yaml.duration_text(to_ns(fragment.refresh_interval)),
            "retention": strict_yaml.duration_text(to_ns(fragment.retention)),
            "flush_interval": strict_yaml.duration_text(to_ns(fragment.flush_interval)),
            "path_postfix_template": fragment.path_postfix_template,
        }
    )


def _suspend_keys(suspend: pb.JournalSpec.Suspend) -> dict[str, Any]:
    return _without_zeros(
        {
            "level": suspend.level
            and strict_yaml.name_of(pb.JournalSpec.Suspend.Level, suspend.level),
            "offset": suspend.offset,
        }
    )


def _without_zeros(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys without zero values; only `suspend` is kept when it is present but empty."""
    return {
        key: value
        for key, value in keys.items()
        if value or value is False or (key == "suspend" and value is not None)
    }
