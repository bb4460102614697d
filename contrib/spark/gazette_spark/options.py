"""Options of a read, parsed and checked; connections by them, and errors as Spark shows them.

Connections of driver and executors have the credentials of their environment
(:func:`open_transport`). Options of a data frame stand in plans and in Spark's web pages, so no
secret is an option.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from pyspark.sql import types as st

from gazette_sdk.errors import (
    ConfigurationError,
    GazetteError,
    UnauthenticatedError,
    ValidationError,
)
from gazette_sdk.framing.base import framing_for

if TYPE_CHECKING:
    from gazette_sdk.transport import Transport

DEFAULT_ADDRESS = "http://localhost:8080"

FRAMING_NAMES = MappingProxyType(
    {"json": "application/x-ndjson", "protobuf": "application/x-protobuf-fixed"}
)

BROKER_SCHEMES = ("http://", "https://", "unix://")

KNOWN = (
    "address",
    "store",
    "journals",
    "framing",
    "message",
    "isolation",
    "begin",
    "end",
    "fileRoot",
    "mode",
    "columnNameOfCorruptRecord",
    "maxBytesPerTrigger",
    "failOnDataLoss",
)

_ISOLATIONS = ("committed", "uncommitted")
_MODES = ("FAILFAST", "PERMISSIVE", "DROPMALFORMED")
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


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
        message: ``module:Class`` of the messages, or empty.
        isolation: ``committed`` or ``uncommitted``.
        begin: begin of the read.
        end: end of the read.
        file_root: local directory of the broker's ``file://`` stores, or empty.
        mode: treatment of content that is no message: ``FAILFAST``, ``PERMISSIVE`` or
            ``DROPMALFORMED``.
        corrupt_column: column of content that is no message, in the mode ``PERMISSIVE``.
        bytes_per_trigger_max: content that a micro-batch reads, in bytes; None for no limit.
        fails_on_data_loss: a stream fails if content is gone that it did not read.
        time_zone: zone of this machine, the driver, which a session has that sets none.
    """

    url: str
    is_store: bool
    journals: str
    content_type: str
    message: str
    isolation: str
    begin: Bound
    end: Bound
    file_root: str
    mode: str
    corrupt_column: str
    bytes_per_trigger_max: int | None
    fails_on_data_loss: bool
    time_zone: str

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Parse and check options.

        Raises:
            ConfigurationError: an option is unknown, missing, or has a wrong value.
        """
        options = {key.lower(): value for key, value in given.items()}
        refuse_path(options)
        unknown = sorted(set(options) - {name.lower() for name in KNOWN} - {"path"})
        if unknown:
            raise ConfigurationError(
                f"gazette: unknown option {unknown[0]!r}; known are {', '.join(KNOWN)}"
            )
        url, is_store = _place(options)
        journals = options.get("journals", "")
        if not journals:
            what = "a journal's name or a prefix ending in '/'" if is_store else "a label selector"
            raise ConfigurationError(f"gazette: the option 'journals' is missing: {what}")
        isolation = _one_of("isolation", options.get("isolation", "committed"), _ISOLATIONS)
        begin, end = (_bound(name, options.get(name, "")) for name in ("begin", "end"))
        _check_order(begin, end)
        needs_uuid = isolation == "committed" or begin.time is not None or end.time is not None
        message = options.get("message", "")
        framing = options.get("framing", "")
        if message and issubclass(load_message(message, needs_uuid=needs_uuid), Message):
            framing = framing or "protobuf"
        return cls(
            url=url,
            is_store=is_store,
            journals=journals,
            content_type=FRAMING_NAMES.get(framing, framing),
            message=message,
            isolation=isolation,
            begin=begin,
            end=end,
            file_root=options.get("fileroot", ""),
            mode=_one_of("mode", options.get("mode", "FAILFAST").upper(), _MODES),
            corrupt_column=options.get("columnnameofcorruptrecord", "_corrupt_record"),
            bytes_per_trigger_max=_size(options.get("maxbytespertrigger", "")),
            fails_on_data_loss=_one_of(
                "failOnDataLoss", options.get("failondataloss", "true").lower(), ("true", "false")
            )
            == "true",
            time_zone=_local_zone(),
        )

    def message_type(self, journal: str, content_type: str) -> type[Any]:
        """Return the class of the messages of a journal.

        Raises:
            ConfigurationError: the class cannot be loaded, or is needed and was not given.
        """
        if self.message:
            try:
                return load_message(self.message, needs_uuid=False)  # parse() has refused it
            except ConfigurationError as error:
                raise ConfigurationError(f"{error}, to read {journal}") from error
        form = framing_for(content_type).form
        if form not in {"json", "csv"}:
            raise ConfigurationError(
                f"gazette: {journal} holds {content_type}; give the option message=module:Class"
            )
        return dict if form == "json" else list


def _local_zone() -> str:
    """Return the name of this machine's time zone, as Java finds it; UTC if it has none."""
    name = os.environ.get("TZ", "").lstrip(":") or os.path.realpath("/etc/localtime")
    return name.rpartition("zoneinfo/")[2] if not name.startswith("/etc/") else "UTC"


def load_message(spec: str, *, needs_uuid: bool = True) -> type[Any]:
    """Import the class ``module:Class`` of messages.

    Raises:
        ConfigurationError: there is no such class, or it holds no UUID and needs one.
    """
    module, _, name = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"gazette: message {spec!r} cannot be loaded ({error}); write module:Class of a class"
            " that the driver and all executors can import, such as by SparkContext.addPyFile"
        ) from error
    from gazette_sdk.message.kinds import known_kind  # noqa: PLC0415 - few need it

    try:
        known_kind(found, needs_uuid=needs_uuid)
    except ValidationError as error:
        raise ConfigurationError(f"gazette: message {spec!r}: {error}") from error
    return found  # type: ignore[no-any-return] # known_kind refuses what is no class


def refuse_types(schema: st.StructType) -> None:
    """Refuse columns of types that no data source in Python can deliver.

    Raises:
        ConfigurationError: there is one.
    """
    for field in schema.fields:
        found = next(
            (kind for kind in _types_of(field.dataType) if isinstance(kind, _REFUSED)), None
        )
        if found is not None:
            remedy = ", and use parse_json()" if isinstance(found, st.VariantType) else ""
            raise ConfigurationError(
                f"gazette: column {field.name!r} is {found.simpleString()}, which Spark takes from"
                f" no data source in Python; declare it string{remedy}"
            )


_REFUSED = (st.VariantType, st.CalendarIntervalType, st.YearMonthIntervalType)


def _types_of(kind: st.DataType) -> Iterator[st.DataType]:
    """Yield a type, and those within."""
    yield kind
    if isinstance(kind, st.StructType):
        for field in kind.fields:
            yield from _types_of(field.dataType)
    elif isinstance(kind, st.ArrayType):
        yield from _types_of(kind.elementType)
    elif isinstance(kind, st.MapType):
        yield from _types_of(kind.keyType)
        yield from _types_of(kind.valueType)


def refuse_path(options: Mapping[str, str]) -> None:
    """Refuse the path of ``load(path)``, ``save(path)`` or ``start(path)``, which selects nothing.

    Raises:
        ConfigurationError: there is one.
    """
    if path := options.get("path"):
        raise ConfigurationError(
            f"gazette: the path {path!r} selects no journals; leave it out, and give"
            " .option('journals', 'topic=orders')"
        )


def _place(options: Mapping[str, str]) -> tuple[str, bool]:
    """Return the URL of the broker or the fragment store, and True for a store."""
    if "address" in options and "store" in options:
        raise ConfigurationError("gazette: give 'address' or 'store', not both")
    if "store" in options:
        store = options["store"]
        if store.lower().startswith(BROKER_SCHEMES):
            raise ConfigurationError(f"gazette: store {store!r} is a broker; give it as 'address'")
        return store, True
    address = options.get("address") or os.environ.get("GAZETTE_ADDRESS") or DEFAULT_ADDRESS
    if not address.lower().startswith(BROKER_SCHEMES):
        raise ConfigurationError(
            f"gazette: address {address!r} is no broker, whose address begins with"
            f" {', '.join(BROKER_SCHEMES)}; give a fragment store as 'store'"
        )
    return address, False


def _check_order(begin: Bound, end: Bound) -> None:
    """Check that nothing begins after its end."""
    if begin.time is not None and end.time is not None and begin.time > end.time:
        raise ConfigurationError(f"gazette: begin {begin.time} is behind end {end.time}")
    for journal, offset in begin.offsets.items():
        if offset > end.offsets.get(journal, offset):
            raise ConfigurationError(
                f"gazette: begin {offset} of {journal} is behind end {end.offsets[journal]}"
            )


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigurationError(f"gazette: {name} {value!r} is not one of {', '.join(known)}")
    return value


def _size(text: str) -> int | None:
    if not text:
        return None
    found = re.fullmatch(r"(\d+)([kmgt]?)b?", text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise ConfigurationError(
            f"gazette: maxBytesPerTrigger {text!r} is no size such as 268435456, 256m or 1g"
        )
    return int(found[1]) << _UNITS[found[2]]


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


# ------------------------------------------------------------------ connections and errors


def open_transport(url: str | None) -> Transport:
    """Return a transport to brokers or to a fragment store. Opens no connection yet.

    Calls to brokers have the token of ``BROKER_AUTH_TOKEN``, or one signed with the keys of
    ``BROKER_AUTH_KEYS``, and the certificates of ``BROKER_TRUSTED_CA_FILE``, ``BROKER_CERT_FILE``
    and ``BROKER_CERT_KEY_FILE``. Stores have credentials of their own.

    Args:
        url: URL of a broker or of a fragment store; None for that of ``GAZETTE_ADDRESS``.

    Raises:
        ConfigurationError: the URL or a credential is malformed.
    """
    from gazette_sdk.transport import connect  # noqa: PLC0415 - programs may only name options
    from gazette_sdk.transport.wire import Tls  # noqa: PLC0415

    if url is not None and not url.lower().startswith(BROKER_SCHEMES):
        return connect(url)
    given = {
        name: os.environ.get(f"BROKER_{name.upper()}", "")
        for name in ("trusted_ca_file", "cert_file", "cert_key_file")
    }
    return connect(
        url,
        tls=Tls(**given) if any(given.values()) else None,
        auth_keys=os.environ.get("BROKER_AUTH_KEYS", ""),
        auth_token=os.environ.get("BROKER_AUTH_TOKEN", ""),
    )


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Raise errors of the SDK without their causes, and with notes and lines joined to one line.

    Spark appends the traceback to its own message, so the error's text is the last line.
    """
    try:
        yield
    except GazetteError as error:
        if isinstance(error, UnauthenticatedError):
            error.add_note(
                "in Spark set BROKER_AUTH_TOKEN or BROKER_AUTH_KEYS in the environment of driver"
                " and executors"
            )
        notes: list[str] = getattr(error, "__notes__", [])
        lines = [line.strip() for part in (str(error), *notes) for line in part.splitlines()]
        notes.clear()
        error.args = ("; ".join(filter(None, lines)),)
        raise error.with_traceback(None) from None
