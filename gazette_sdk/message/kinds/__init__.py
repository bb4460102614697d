"""Kinds of messages: conversion of objects of a class to payloads, and the place of their UUID.

======================== ============== =======================================================
class                    form           place of its UUID
======================== ============== =======================================================
``dict``                 ``"json"``     first key of the written object, ``UUID``; removed from
                                        the dict when it is read
dataclass on JsonMessage ``"json"``     the same, beside its fields; or its own field ``UUID``
msgspec Struct           ``"json"``     the same; also of a union of Structs with tags
pydantic model           ``"json"``     the same
generated protobuf class ``"protobuf"`` its field ``bytes uuid``
``list``, CsvRecord      ``"csv"``      its first item, as text
======================== ============== =======================================================

An adapter (:class:`Kind`) is found by class and form, see :func:`kind_of`. In reading order:

- ``base``: Interface of the kinds of messages: between objects of one class and payloads.
- ``json``: Kinds of JSON messages: dicts, typed classes and pydantic models; single ones, and
  chunks.
- ``others``: Kinds of messages as CSV records and in protobuf.
"""

from gazette_sdk.message.kinds.base import (
    FINDERS,
    Decoded,
    JsonMessage,
    Kind,
    Spliced,
    kind_of,
    known_kind,
    name_of,
    union_classes,
)
from gazette_sdk.message.kinds.json import find_json
from gazette_sdk.message.kinds.others import CsvRecord, find_csv, find_protobuf

FINDERS[:] = find_json, find_protobuf, find_csv

__all__ = [
    "CsvRecord",
    "Decoded",
    "JsonMessage",
    "Kind",
    "Spliced",
    "kind_of",
    "known_kind",
    "name_of",
    "union_classes",
]
