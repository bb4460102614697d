"""Trees of journal specs: inheritance, extraction, patches (protocol section 14)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import attrgetter

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import intersect_specs, subtract_specs, union_specs
from gazette_sdk.protocol.names import at, validate_journal

__all__ = [
    "Node",
    "extract",
    "from_list_response",
    "hoist",
    "mark_unpatched_for_deletion",
    "patch",
    "push_down",
    "shared_prefix",
    "to_apply_request",
]


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
