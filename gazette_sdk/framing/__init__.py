"""Framings: bytes of a journal to payloads of messages and back, by content type.

A framing defines where one message ends and the next begins, and the form ("json", "protobuf", …)
of payloads. :mod:`gazette_sdk.message` defines the types of messages with that form, and where
their UUID is stored.

Everything here is pure: no I/O, no clock. In reading order:

- ``base``: the :class:`Framing` interface, and :class:`Frames`, the result of a cut
- ``json_lines``: ``application/x-ndjson``
- ``fixed``: ``application/x-protobuf-fixed``, with the rules of a desynchronised stream
- ``csv``: ``text/csv``, whose records have as many fields as the first record of their stream
- ``registry``: framings by content type; :func:`register` adds one
- ``cutter``: cuts a journal's content that is received in chunks of any size
"""

from gazette_sdk.framing.base import Cut, Cutter, FixedProtobuf, Frames, Framing, JsonLines
from gazette_sdk.framing.csv import Csv
from gazette_sdk.framing.registry import framing_for, register

__all__ = [
    "Csv",
    "Cut",
    "Cutter",
    "FixedProtobuf",
    "Frames",
    "Framing",
    "JsonLines",
    "framing_for",
    "register",
]
