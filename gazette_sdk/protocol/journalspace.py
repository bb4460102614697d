"""Journal space: specs of many journals as a tree, and as YAML (protocol section 14).

A node whose name is empty or ends in ``/`` is a directory: all journals below it inherit its
partial spec. Any other node is a journal.

From YAML to brokers::

    root = parse(text)
    root.validate()
    push_down(root)
    request = to_apply_request(root)

And back::

    root = from_list_response(response.journals)
    hoist(root)
    text = dump(root)

Decoding is strict, and what is encoded decodes to the same tree. Unknown and repeated keys and
values of the wrong type are errors that name the line and the key. Durations are Go's (``1h0m0s``),
plain integers are nanoseconds.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import attrgetter
from typing import Any

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import strict_yaml
from gazette_sdk.protocol.durations import from_ns, to_ns
from gazette_sdk.protocol.journal_spec import intersect_specs, subtract_specs, union_specs
from gazette_sdk.protocol.names import at, validate_journal
from gazette_sdk.protocol.strict_yaml import NESTING_MOST, Decoder, Value


@dataclass(slots=True)
class Node:
    """A directory or a journal.

    Attributes:
        spec: partial spec; its ``name`` is the node's.
        comment: free text; it has no effect.
        delete: True to delete it and all below it; ``None`` inherits.
        revision: expected modification revision of a journal; 0: it must not exist, -1: any.
        children: nodes of a directory, ascending by name.
        patched: True if the node was inserted or changed by a patch.
    """

    spec: pb.JournalSpec = field(default_factory=pb.JournalSpec)
    comment: str = ""
    delete: bool | None = None
    revision: int = 0
    children: list[Node] = field(default_factory=list)
    patched: bool = False

    @property
    def name(self) -> str:
        """The node's name; empty for a root that covers everything."""
        return self.spec.name

    @property
    def is_directory(self) -> bool:
        """Return True if it is a directory, and not a journal."""
        return not self.name or self.name.endswith("/")

    def journals(self) -> Iterator[Node]:
        """Yield the journals among the node and all nodes below it, ascending by name."""
        if not self.is_directory:
            yield self
        for child in self.children:
            yield from child.journals()

    def validate(self, path: str = "") -> None:
        """Check names and the tree's shape, but not the partial specs.

        Raises:
            ValidationError: kind ``unexpected_revision``, ``expected_children``,
                ``child_outside_parent``, ``children_not_ordered``, ``unexpected_children``, or
                of a journal's name.
        """
        if not self.is_directory:
            validate_journal(self.name, at(path, "Name"))
            if self.children:
                raise _broken(
                    "unexpected_children", f"a journal has no children ({self.name!r})", path
                )
            return
        if self.revision:
            raise _broken(
                "unexpected_revision", f"a directory has no revision ({self.revision})", path
            )
        if not self.children:
            raise _broken(
                "expected_children", f"a directory has at least one child ({self.name!r})", path
            )
        for index, child in enumerate(self.children):
            if not child.name.startswith(self.name):
                raise _broken(
                    "child_outside_parent",
                    f"names of children begin with their directory's ({self.name!r}, "
                    f"{child.name!r})",
                    path,
                )
            if index and self.children[index - 1].name >= child.name:
                raise _broken(
                    "children_not_ordered",
                    f"children are ascending by name ({self.children[index - 1].name!r}, then "
                    f"{child.name!r})",
                    path,
                )
        for index, child in enumerate(self.children):
            child.validate(at(path, f"Children[{index}]"))


# ---------------------------------------------------------------- inheritance


def push_down(root: Node) -> None:
    """Complete every journal's spec with the values of its directories, and clear the directories.

    ``suspend``, ``revision`` and ``comment`` are not inherited. An explicit ``delete: false``
    overrides a directory's ``true``.
    """
    for child in root.children:
        suspend = child.spec.suspend if child.spec.HasField("suspend") else None
        child.spec = union_specs(child.spec, root.spec)
        if suspend is None:
            child.spec.ClearField("suspend")
        if child.delete is None:
            child.delete = root.delete
        push_down(child)
    if root.is_directory:
        root.spec = pb.JournalSpec(name=root.name)
        root.delete = None


def hoist(root: Node) -> None:
    """Move the values that all children of a directory share into the directory; for output.

    Directories must be empty, as after :func:`push_down` or :func:`from_list_response`.
    :func:`push_down` is the inverse.
    """
    if not root.children:
        return
    for child in root.children:
        hoist(child)
    specs = [child.spec for child in root.children]
    shared = reduce(intersect_specs, specs, intersect_specs(specs[0], specs[0]))
    shared.name = root.name
    root.spec = shared
    root.delete = root.children[0].delete
    if any(child.delete != root.delete for child in root.children):
        root.delete = None
    for child in root.children:
        child.spec = subtract_specs(child.spec, shared)
        if root.delete is not None:
            child.delete = None


# ---------------------------------------------------------------- extraction


def from_list_response(journals: Iterable[pb.ListResponse.Journal]) -> Node:
    """Return the tree of listed journals, with their modification revisions, before hoisting."""
    nodes = [
        Node(spec=_copy(journal.spec), revision=journal.mod_revision)
        for journal in sorted(journals, key=lambda journal: journal.spec.name)
    ]
    return extract(nodes)


def extract(nodes: Sequence[Node]) -> Node:
    """Return the tree of journals: those that share a path are in a directory.

    A chain of directories with a single child each is one node. One journal is its own tree;
    no journal is an empty root.

    Args:
        nodes: journals, ascending by name.
    """
    if not nodes:
        return Node()
    shared = [shared_prefix(a.name, b.name) for a, b in pairwise(nodes)]
    return _extract(nodes, shared, 0, len(nodes))


def _extract(nodes: Sequence[Node], shared: Sequence[int], begin: int, end: int) -> Node:
    if end - begin == 1:
        return nodes[begin]
    length = min(shared[begin : end - 1])
    directory = Node(spec=pb.JournalSpec(name=nodes[begin].name[:length]))
    for index in range(begin, end):
        if index == end - 1 or shared[index] == length:
            directory.children.append(_extract(nodes, shared, begin, index + 1))
            begin = index + 1
    return directory


def shared_prefix(a: str, b: str) -> int:
    """Return the length of the directory that two names share, with its ``/``."""
    if a == b:
        return a.rfind("/") + 1
    differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a.rfind("/", 0, min(len(a), len(b)) if differs is None else differs) + 1


# ---------------------------------------------------------------- changes


def to_apply_request(root: Node) -> pb.ApplyRequest:
    """Return a request with one change per journal of a tree that was pushed down."""
    request = pb.ApplyRequest()
    for node in root.journals():
        change = request.changes.add(expect_mod_revision=node.revision)
        if node.delete:
            change.delete = node.name
        else:
            change.upsert.CopyFrom(node.spec)
    return request


def patch(root: Node, node: Node) -> Node:
    """Insert a journal in a tree, or merge it into the node of its name.

    Merging replaces comment, delete and revision by those of ``node`` that are set, and values of
    the spec by those that are not zero.

    Args:
        root: the tree, changed in place.
        node: the journal; marked as patched.

    Returns:
        The tree's root: a new one, named "", if the journal's name is not under ``root``'s.
    """
    is_root = root.name == node.name
    if not is_root and not (root.is_directory and node.name.startswith(root.name)):
        root = Node(children=[root])
    _patch(root, node)
    return root


def mark_unpatched_for_deletion(root: Node) -> None:
    """Set ``delete`` of every journal that no patch inserted or changed."""
    for node in root.journals():
        if not node.patched:
            node.delete = True


def _patch(into: Node, node: Node) -> None:
    if into.name == node.name:
        into.comment = node.comment or into.comment
        into.delete = into.delete if node.delete is None else node.delete
        into.revision = node.revision or into.revision
        suspend = node.spec if node.spec.HasField("suspend") else into.spec
        merged = union_specs(node.spec, into.spec)
        merged.ClearField("suspend")
        if suspend.HasField("suspend"):
            merged.suspend.CopyFrom(suspend.suspend)
        into.spec = merged
        into.patched = True
        return
    for child in into.children:
        if child.name == node.name or (child.is_directory and node.name.startswith(child.name)):
            _patch(child, node)
            return
    node.patched = True
    insort(into.children, node, key=attrgetter("name"))


def _copy(spec: pb.JournalSpec) -> pb.JournalSpec:
    copy = pb.JournalSpec()
    copy.CopyFrom(spec)
    return copy


def _broken(kind: str, reason: str, path: str) -> ValidationError:
    return ValidationError(reason, kind=kind, path=path)


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
