"""Journal-space trees as YAML: strict decoding, and encoding that decodes to the same tree.

Unknown and repeated keys and values of the wrong type are errors that name the line and the
key. Durations are Go's (``1h0m0s``), plain integers are nanoseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import yaml

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import format_duration, from_ns, parse_duration, to_ns
from gazette_sdk.protocol.journalspace.tree import Node
from gazette_sdk.protocol.names import at

__all__ = ["dump", "flag_text", "parse"]

_DEPTH_MOST = 64
"""Greatest depth of nested directories: a document that contains itself is refused with a clear
error, before the interpreter's stack overflows."""

_ALIASED_MOST = 100_000
"""Greatest number of values that aliases may add to a document: aliases of aliases would multiply a
document of a few lines to any size."""

_SCALAR_CHARACTERS_MOST = 100
"""Longer scalars are text: converting them to numbers takes a time that grows with the square of
their length, and none fits into 64 bits."""

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
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValidationError(f"not YAML: {error}", kind="yaml_parse") from None
    except RecursionError:
        raise ValidationError("not YAML: nested too deeply", kind="yaml_parse") from None
    if document is None:
        return Node()
    _check_aliases(document, {})
    return _node(document, "", 0)


def _check_aliases(value: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values that aliases add to a node of the document.

    Args:
        value: the node.
        counts: number of values of each node that was visited, by its identity, with aliases
            expanded; zero for nodes that contain this one.

    Raises:
        ValidationError: there are too many, or a node contains itself.
    """
    counts[id(value)] = 0
    added, total = 0, 1
    items = value.value if isinstance(value, yaml.CollectionNode) else ()
    if isinstance(value, yaml.MappingNode):
        items = [node for pair in value.value for node in pair]
    for item in items:
        known = counts.get(id(item))
        if known == 0:
            _fail(
                value,
                "",
                f"this contains itself by an alias: nested deeper than {_DEPTH_MOST} directories",
                "wrong_type",
            )
        if known is None:
            added += _check_aliases(item, counts)
            total += counts[id(item)]
        else:
            added += known
            total += known
        if added > _ALIASED_MOST:
            _fail(
                value,
                "",
                f"aliases expand this to more than {_ALIASED_MOST} values: write them out, or "
                "give journals of one directory their values in common",
                "wrong_type",
            )
    counts[id(value)] = total
    return added


def flag_text(flag: int) -> str | int:
    """Return the name of a journal's flag, or its number if it has none."""
    return _name_of(pb.JournalSpec.Flag, flag)


_Value = yaml.Node
_Decoder = Callable[[yaml.Node, str], Any]


def _node(value: _Value, path: str, depth: int) -> Node:
    if depth > _DEPTH_MOST:
        _fail(value, path, f"nested deeper than {_DEPTH_MOST} directories", "wrong_type")

    def children(value: _Value, path: str) -> list[Node]:
        return _list(value, path, lambda item, where: _node(item, where, depth + 1))

    fields = _mapping(value, path, {**_NODE_KEYS, "children": children})
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
        node.spec.suspend.CopyFrom(_assign(pb.JournalSpec.Suspend(), suspend, value, path))
    return node


def _spec(value: _Value, path: str, fields: dict[str, Any]) -> pb.JournalSpec:
    spec = pb.JournalSpec()
    fragment = fields.pop("fragment", None) or {}
    for name in _DURATIONS & fragment.keys():
        getattr(spec.fragment, name).CopyFrom(from_ns(fragment.pop(name)))
    spec.fragment.stores.extend(fragment.pop("stores", []))
    _assign(spec.fragment, fragment, value, at(path, "fragment"))
    _assign(spec, fields, value, path)
    return spec


def _assign(message: Any, fields: dict[str, Any], value: _Value, path: str) -> Any:
    for name, item in fields.items():
        try:
            setattr(message, name, item)
        except ValueError:
            _fail(value, at(path, name), f"out of range ({item})", "wrong_type")
    return message


def _mapping(value: _Value, path: str, keys: dict[str, _Decoder]) -> dict[str, Any]:
    if not isinstance(value, yaml.MappingNode):
        _fail(value, path, f"expected keys and values, not {_shown(value)}", "wrong_type")
    found: dict[str, Any] = {}
    for key, item in value.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else _shown(key)
        decoder = keys.get(name)
        if decoder is None:
            _fail(
                key,
                path,
                f"unknown key {name!r} (expected one of {', '.join(keys)})",
                "unknown_key",
            )
        if name in found:
            _fail(key, at(path, name), f"key {name!r} is given twice", "duplicate_key")
        if _is_null(item):
            continue  # the same as an absent key
        found[name] = decoder(item, at(path, name))
    return found


def _list(value: _Value, path: str, decoder: _Decoder) -> list[Any]:
    if not isinstance(value, yaml.SequenceNode):
        _fail(value, path, f"expected a list, not {_shown(value)}", "wrong_type")
    return [decoder(item, f"{path}[{index}]") for index, item in enumerate(value.value)]


def _string(value: _Value, path: str) -> str:
    if not isinstance(value, yaml.ScalarNode):
        _fail(value, path, f"expected a text, not {_shown(value)}", "wrong_type")
    text = str(value.value)
    try:
        text.encode()
    except UnicodeEncodeError:
        _fail(value, path, f"not valid Unicode ({text!r})", "wrong_type")
    return text


def _integer(value: _Value, path: str) -> int:
    found = _scalar(value)
    if not isinstance(found, int) or isinstance(found, bool):
        _fail(value, path, f"expected an integer, not {_shown(value)}", "wrong_type")
    return _bounded(found, value, path)


def _bounded(number: int, value: _Value, path: str) -> int:
    if not -(1 << 63) <= number < 1 << 63:
        _fail(value, path, f"out of range ({number})", "wrong_type")
    return number


def _boolean(value: _Value, path: str) -> bool:
    found = _scalar(value)
    if not isinstance(found, bool):
        _fail(value, path, f"expected true or false, not {_shown(value)}", "wrong_type")
    return found


def _duration(value: _Value, path: str) -> int:
    found = _scalar(value)
    if isinstance(found, int) and not isinstance(found, bool):
        return _bounded(found, value, path)
    try:
        return parse_duration(_string(value, path))
    except ValidationError as error:
        _fail(value, path, error.reason, error.kind)


def _enum(enum: Any, *, numbers: bool) -> _Decoder:
    def decode(value: _Value, path: str) -> int:
        found = _scalar(value)
        if numbers and isinstance(found, int) and not isinstance(found, bool):
            return found
        text = _string(value, path)
        try:
            number: int = enum.Value(text)
        except ValueError:
            _fail(
                value,
                path,
                f"unknown name {text!r} (expected one of {', '.join(enum.keys())})",
                "unknown_enum_name",
            )
        return number

    return decode


def _label(value: _Value, path: str) -> tuple[str, str]:
    fields = _mapping(value, path, {"name": _string, "value": _string})
    return fields.get("name", ""), fields.get("value", "")


def _labels(value: _Value, path: str) -> list[tuple[str, str]]:
    return _list(value, path, _label)


def _stores(value: _Value, path: str) -> list[str]:
    return _list(value, path, _string)


def _fragment(value: _Value, path: str) -> dict[str, Any]:
    return _mapping(value, path, _FRAGMENT_KEYS)


def _suspend(value: _Value, path: str) -> dict[str, Any]:
    return _mapping(value, path, _SUSPEND_KEYS)


_DURATIONS = frozenset({"refresh_interval", "retention", "flush_interval"})
_FRAGMENT_KEYS: dict[str, _Decoder] = {
    "length": _integer,
    "compression_codec": _enum(pb.CompressionCodec, numbers=False),
    "stores": _stores,
    "refresh_interval": _duration,
    "retention": _duration,
    "flush_interval": _duration,
    "path_postfix_template": _string,
}
_SUSPEND_KEYS: dict[str, _Decoder] = {
    "level": _enum(pb.JournalSpec.Suspend.Level, numbers=True),
    "offset": _integer,
}
_NODE_KEYS: dict[str, _Decoder] = {
    "comment": _string,
    "delete": _boolean,
    "name": _string,
    "replication": _integer,
    "labels": _labels,
    "fragment": _fragment,
    "flags": _enum(pb.JournalSpec.Flag, numbers=True),
    "max_append_rate": _integer,
    "suspend": _suspend,
    "revision": _integer,
}


def _scalar(value: _Value) -> object:
    """Return the value of a scalar; its text if it has none of the types that keys hold."""
    if not isinstance(value, yaml.ScalarNode):
        return None
    if len(value.value) > _SCALAR_CHARACTERS_MOST:
        return value.value
    try:
        found: object = yaml.constructor.SafeConstructor().construct_object(value)
    except (yaml.YAMLError, ValueError):
        return value.value
    return found


def _is_null(value: _Value) -> bool:
    return isinstance(value, yaml.ScalarNode) and value.tag == "tag:yaml.org,2002:null"


def _shown(value: _Value) -> str:
    if isinstance(value, yaml.ScalarNode):
        return repr(value.value)
    return "a list" if isinstance(value, yaml.SequenceNode) else "keys and values"


def _fail(value: _Value, path: str, reason: str, kind: str) -> NoReturn:
    line = value.start_mark.line + 1
    raise ValidationError(f"line {line}: {reason}", kind=kind, path=path)


# ---------------------------------------------------------------- writing


def dump(root: Node) -> str:
    """Return the YAML document of a tree.

    Zero values are left out, but for values of labels, and a present ``suspend``.
    """
    text: str = yaml.dump(
        _node_keys(root),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=sys.maxsize,
    )
    return text


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
            "compression_codec": codec and _name_of(pb.CompressionCodec, codec),
            "stores": list(fragment.stores),
            "refresh_interval": _duration_text(to_ns(fragment.refresh_interval)),
            "retention": _duration_text(to_ns(fragment.retention)),
            "flush_interval": _duration_text(to_ns(fragment.flush_interval)),
            "path_postfix_template": fragment.path_postfix_template,
        }
    )


def _suspend_keys(suspend: pb.JournalSpec.Suspend) -> dict[str, Any]:
    return _without_zeros(
        {
            "level": suspend.level and _name_of(pb.JournalSpec.Suspend.Level, suspend.level),
            "offset": suspend.offset,
        }
    )


def _duration_text(ns: int) -> str:
    return format_duration(ns) if ns else ""


def _name_of(enum: Any, number: int) -> str | int:
    return next((name for name, known in enum.items() if known == number), number)


def _without_zeros(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys without zero values; only `suspend` is kept when it is present but empty."""
    return {
        key: value
        for key, value in keys.items()
        if value or value is False or (key == "suspend" and value is not None)
    }


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes like other implementations: documents are the same across tools."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - nothing is shared by reference
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None
        plain_tag = self.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        if plain_tag != "tag:yaml.org,2002:str" or text in {"y", "Y", "n", "N"}:
            style = '"'
        elif "\n" in text:
            style = "|"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
