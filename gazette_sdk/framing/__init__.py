"""Framings: bytes of a journal to payloads of messages and back, by content type.

A framing defines where one message ends and the next begins, and the form ("json", "protobuf", …)
of payloads. :mod:`gazette_sdk.message` defines the types of messages with that form, and where
their UUID is stored.

Everything here is pure: no I/O, no clock. In reading order:

- ``base``: Interface of a framing: payloads of messages to frames and back.
- ``csv``: CSV: one record per message, quoted only where needed (message section 8).
"""

from gazette_sdk.framing.base import (
    Cut,
    Cutter,
    FixedProtobuf,
    Frames,
    Framing,
    JsonLines,
    framing_for,
    register,
)
from gazette_sdk.framing.csv import Csv

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
