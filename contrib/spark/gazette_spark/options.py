"""Options of a read, parsed and checked."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError

__all__ = ["Bound", "Options"]

DEFAULT_ADDRESS = "http://localhost:8080"

FRAMING_NAMES = MappingProxyType(
    {"json": "application/x-ndjson", "protobuf": "application/x-protobuf-fixed"}
)

KNOWN = frozenset(
    {"address", "store", "journals", "framing", "message", "isolation", "begin", "end", "fileroot"}
)


@dataclass(frozen=True, slots=True)
class Bound:
    """Begin or end of a read: offsets by journal, a time, or neither.

    Attributes:
        offsets: offset by journal; other journals are not limited.
        time: limit of messages' times: included for ``begin``, excluded for ``end``.
    """

    offsets: Mapping[str, int]
    time: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of one read.

    Attributes:
        url: URL of the broker or of the fragment store.
        is_store: read fragments of a store; no broker is involved.
        journals: a label selector; with a store, a journal's name or a prefix ending in ``/``.
        content_type: content type of the framing; empty for that of the journal's label.
        message: ``module:Class`` of a generated protobuf message, or empty.
        begin: begin of the read.
        end: end of the read.
        file_root: local directory of the broker's ``file://`` stores, or empty.
    """

    url: str
    is_store: bool
    journals: str
    content_type: str
    message: str
    begin: Bound
    end: Bound
    file_root: str

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Parse and check options.

        Raises:
            ConfigurationError: an option is unknown, missing, or has a wrong value.
        """
        options = {key.lower(): value for key, value in given.items()}
        unknown = sorted(set(options) - KNOWN - {"path"})
        if unknown:
            raise ConfigurationError(
                f"gazette: unknown option {unknown[0]!r}; known are {', '.join(sorted(KNOWN))}"
            )
        if "address" in options and "store" in options:
            raise ConfigurationError("gazette: give 'address' or 'store', not both")
        is_store = "store" in options
        journals = options.get("journals", "")
        if not journals:
            what = "a journal's name or a prefix ending in '/'" if is_store else "a label selector"
            raise ConfigurationError(f"gazette: the option 'journals' is missing: {what}")
        if options.get("isolation", "uncommitted") != "uncommitted":
            raise ConfigurationError(
                f"gazette: isolation {options['isolation']!r} is not available; use 'uncommitted'"
            )
        message = options.get("message", "")
        framing = options.get("framing", "protobuf" if message else "")
        if message:
            load_message(message)
        default = os.environ.get("GAZETTE_ADDRESS", DEFAULT_ADDRESS)
        return cls(
            url=options["store"] if is_store else options.get("address", default),
            is_store=is_store,
            journals=journals,
            content_type=FRAMING_NAMES.get(framing, framing),
            message=message,
            begin=_bound("begin", options.get("begin", "")),
            end=_bound("end", options.get("end", "")),
            file_root=options.get("fileroot", ""),
        )


def load_message(spec: str) -> type[Message]:
    """Import the generated class ``module:Class``.

    Raises:
        ConfigurationError: there is no such class.
    """
    module, _, name = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"gazette: message {spec!r} cannot be loaded ({error}); "
            "write module:Class of a generated protobuf class that executors can import"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Message)):
        raise ConfigurationError(f"gazette: message {spec!r} is no generated protobuf class")
    return found


def _bound(name: str, text: str) -> Bound:
    if not text:
        return Bound({})
    if text.lstrip().startswith("{"):
        return Bound(_offsets(name, text))
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"gazette: {name} {text!r} is neither a JSON object of offsets by journal nor a time "
            "such as 2026-01-31T00:00:00Z"
        ) from error
    return Bound({}, time if time.tzinfo else time.replace(tzinfo=dt.UTC))


def _offsets(name: str, text: str) -> dict[str, int]:
    try:
        offsets = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"gazette: {name} is no JSON object: {error}") from error
    for journal, offset in offsets.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise ConfigurationError(
                f"gazette: {name} of {journal} must be an offset of at least 0, not {offset!r}"
            )
    return dict(offsets)
