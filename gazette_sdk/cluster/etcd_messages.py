"""Requests to Etcd and its responses, as plain dataclasses.

Conversions to and from the messages of ``etcd3`` are at the end. The generated modules of ``etcd3``
0.12 cannot be imported under protobuf 4 or later, but their serialized descriptors are usable. They
are read from the source, which is parsed and not run. They become message classes in a separate
pool, placed in ``sys.modules`` under the names that the rest of ``etcd3`` imports. Only
:mod:`gazette_sdk.cluster.etcd` uses this.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from gazette_sdk.protocol import broker_pb2 as pb

_PACKAGE = "etcd3.etcdrpc"
_FILES = ("kv", "auth", "rpc")
"""Modules in order of their imports."""


_DESCRIPTOR = re.compile(r"serialized_pb=_b\(('(?:[^'\\]|\\.)*')\)")


def _serialized_descriptor(source: str) -> bytes:
    """Return the argument ``serialized_pb`` in the source of a generated module."""
    if (found := _DESCRIPTOR.search(source)) is None:
        raise ImportError("etcd3's generated modules hold no serialized_pb: is it version 0.12?")
    text: str = ast.literal_eval(found[1])
    return text.encode("latin-1")


def _load() -> tuple[Any, Any]:
    """Build and register the modules, and return ``rpc_pb2`` and ``rpc_pb2_grpc``."""
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("etcd3 is not installed; run `pip install etcd3==0.12.0`")
    folder = Path(spec.submodule_search_locations[0], "etcdrpc")
    pool = DescriptorPool()
    for name in _FILES:
        source = folder.joinpath(f"{name}_pb2.py").read_text(encoding="utf-8")
        proto = descriptor_pb2.FileDescriptorProto.FromString(_serialized_descriptor(source))
        pool.Add(proto)
        file = pool.FindFileByName(proto.name)
        module = ModuleType(f"{_PACKAGE}.{name}_pb2")
        for message in file.message_types_by_name.values():
            setattr(module, message.name, message_factory.GetMessageClass(message))
        for enum in file.enum_types_by_name.values():
            setattr(module, enum.name, EnumTypeWrapper(enum))
        sys.modules[module.__name__] = module
    return sys.modules[f"{_PACKAGE}.rpc_pb2"], importlib.import_module(f"{_PACKAGE}.rpc_pb2_grpc")


rpc, stubs = _load()


# ------------------------------------------------------------------ requests


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key of Etcd. ``lease`` is 0 if the key has none."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Condition of a transaction: a property of a key equals a value.

    A missing key has create revision, mod revision, version and lease 0. Each property has a class
    method that constructs its condition.
    """

    key: bytes
    target: str
    value: int

    @classmethod
    def create_revision(cls, key: bytes, revision: int) -> Compare:
        """Require that the key was created at ``revision``; 0: that it does not exist."""
        return cls(key, "create_revision", revision)

    @classmethod
    def mod_revision(cls, key: bytes, revision: int) -> Compare:
        """Require that the key was last changed at ``revision``; 0: that it does not exist."""
        return cls(key, "mod_revision", revision)

    @classmethod
    def version(cls, key: bytes, version: int) -> Compare:
        """Require that the key has been written ``version`` times since its creation."""
        return cls(key, "version", version)

    @classmethod
    def lease(cls, key: bytes, lease: int) -> Compare:
        """Require that the key is attached to ``lease``; 0: to none."""
        return cls(key, "lease", lease)


@dataclass(frozen=True, slots=True)
class Put:
    """Write of a key.

    ``lease``: the lease to attach the key to, 0 for none. ``ignore_lease``: True to keep the
    current lease of an existing key; a plain put would detach it.
    """

    key: bytes
    value: bytes
    lease: int = 0
    ignore_lease: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletion of a key, or with ``range_end`` of all keys in ``[key, range_end)``."""

    key: bytes
    range_end: bytes = b""


@dataclass(frozen=True, slots=True)
class Get:
    """Read of a key, or with ``range_end`` of all keys in ``[key, range_end)``."""

    key: bytes
    range_end: bytes = b""


Operation = Put | Delete | Get


# ------------------------------------------------------------------ responses


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys, in order.

    ``header.revision`` is the revision of the whole store, also for a read at an older one.
    ``has_more``: True if ``limit`` cut the result. ``count``: number of keys in the whole range.
    """

    header: pb.Header.Etcd
    entries: tuple[KeyValue, ...]
    has_more: bool
    count: int


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Outcome of a transaction.

    ``succeeded``: True if the conditions held, and the first branch ran. ``revision``: that of the
    store afterwards; a transaction without writes does not raise it. ``responses``: one for each
    operation of the branch, a :class:`RangeResult` for a :class:`Get`, else ``None``.
    ``deleted``: number of keys that the branch deleted.
    """

    succeeded: bool
    revision: int
    header: pb.Header.Etcd
    responses: tuple[RangeResult | None, ...]
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change of a key.

    For a deletion ``kv`` has only the key, and the revision that deleted it as ``mod_revision``.
    """

    is_delete: bool
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """One message of a watch: changes in order of revision, never a part of a revision.

    Without events it is a progress notification: all changes up to ``header.revision`` were
    delivered.
    """

    header: pb.Header.Etcd
    events: tuple[WatchEvent, ...]


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with ``prefix``."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\x00"


# ------------------------------------------------------------------ conversions


def header_of(header: Any) -> pb.Header.Etcd:
    """Return the header of a response, in the form of the headers of RPCs."""
    return pb.Header.Etcd(
        cluster_id=header.cluster_id,
        member_id=header.member_id,
        revision=header.revision,
        raft_term=header.raft_term,
    )


def key_value_of(kv: Any) -> KeyValue:
    """Return the key and its value in a message of Etcd."""
    return KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def range_result_of(response: Any) -> RangeResult:
    """Return the result in the response to a range."""
    return RangeResult(
        header=header_of(response.header),
        entries=tuple(map(key_value_of, response.kvs)),
        has_more=response.more,
        count=response.count,
    )


def watch_batch_of(response: Any) -> WatchBatch:
    """Return the changes in a response of a watch."""
    # An event's type is PUT (0) or DELETE (1).
    return WatchBatch(
        header=header_of(response.header),
        events=tuple(
            WatchEvent(event.type == 1, key_value_of(event.kv)) for event in response.events
        ),
    )


def compare_message(compare: Compare) -> Any:
    """Return the message of a condition."""
    message = rpc.Compare(
        key=compare.key,
        target=_TARGETS[compare.target],
        result=rpc.Compare.EQUAL,
    )
    setattr(message, compare.target, compare.value)
    return message


_TARGETS = {
    "version": rpc.Compare.VERSION,
    "create_revision": rpc.Compare.CREATE,
    "mod_revision": rpc.Compare.MOD,
    "lease": rpc.Compare.LEASE,
}


def operation_message(operation: Operation) -> Any:
    """Return the message of an operation of a transaction."""
    match operation:
        case Put(key, value, lease, ignore_lease):
            put = rpc.PutRequest(key=key, value=value, lease=lease, ignore_lease=ignore_lease)
            return rpc.RequestOp(request_put=put)
        case Delete(key, range_end):
            delete = rpc.DeleteRangeRequest(key=key, range_end=range_end)
            return rpc.RequestOp(request_delete_range=delete)
        case Get(key, range_end):
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=key, range_end=range_end))
