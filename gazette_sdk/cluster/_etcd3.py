"""Messages and stubs of ``etcd3``, adapted to current releases of protobuf.

The generated modules of ``etcd3`` 0.12 cannot be imported under protobuf 4 or later, but their
serialized descriptors are usable. They are read from the source, which is parsed and not run. They
become message classes in a separate pool, placed in ``sys.modules`` under the names that the rest
of ``etcd3`` imports. Only :mod:`gazette_sdk.cluster.etcd` uses this.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

__all__ = ["rpc", "stubs"]

_PACKAGE = "etcd3.etcdrpc"
_FILES = ("kv", "auth", "rpc")
"""Modules in order of their imports."""


def _serialized_descriptor(source: str) -> bytes:
    """Return the argument ``serialized_pb`` in the source of a generated module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            literal = next(n for n in ast.walk(node.value) if isinstance(n, ast.Constant))
            assert isinstance(literal.value, str)
            return literal.value.encode("latin-1")
    raise ImportError("etcd3's generated modules hold no serialized_pb: is it version 0.12?")


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
