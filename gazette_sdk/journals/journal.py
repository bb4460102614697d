"""A listed journal, as a plain dataclass.

:class:`JournalOptions` are the values that callers give; :func:`default_spec` has the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import from_seconds, to_seconds
from gazette_sdk.protocol.journal_spec import is_suspended
from gazette_sdk.protocol.labels import CONTENT_TYPE, add, pairs_of, remove


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal and its settings, as of one listing.

    Attributes:
        name: its name.
        replication: number of brokers that keep a replica.
        stores: URLs of its fragment stores; new fragments go to the first.
        codec: compression of new fragments, such as ``gzip``.
        length: size in bytes at which a fragment is closed.
        labels: values by label name; a tuple where a label has several.
        refresh_interval_s: seconds between two listings of its stores.
        flush_interval_s: greatest age of a fragment that is not stored, in seconds; 0 for no
            limit.
        retention_s: age at which ``gazctl journals prune`` removes fragments; 0 for never.
        max_append_rate: limit of appends, in bytes per second; 0 for none.
        suspended: True if it has fewer replicas until the next append.
        brokers: brokers that serve it now, as ``zone/id``, the primary first.
        revision: revision of Etcd that changed its settings last.
        create_revision: revision of Etcd that created it. A journal that is deleted and created
            again has another.
    """

    name: str
    replication: int
    stores: tuple[str, ...]
    codec: str
    length: int
    labels: Mapping[str, str | tuple[str, ...]]
    refresh_interval_s: float
    flush_interval_s: float
    retention_s: float
    max_append_rate: int
    suspended: bool = False
    brokers: tuple[str, ...] = ()
    revision: int = 0
    create_revision: int = 0

    @property
    def content_type(self) -> str:
        """Content type of its messages; empty if it has none."""
        value = self.labels.get(CONTENT_TYPE, "")
        return value if isinstance(value, str) else value[0]

    @classmethod
    def of(cls, listed: pb.ListResponse.Journal) -> Journal:
        """Return the journal of an entry of a listing."""
        spec, fragment = listed.spec, listed.spec.fragment
        labels: dict[str, str | tuple[str, ...]] = {}
        for name, value in pairs_of(spec.labels):
            before = labels.get(name, ())
            labels[name] = value
            if before:
                labels[name] = (*((before,) if isinstance(before, str) else before), value)
        primary = listed.route.primary
        members = sorted(enumerate(listed.route.members), key=lambda item: item[0] != primary)
        return cls(
            name=spec.name,
            replication=spec.replication,
            stores=tuple(fragment.stores),
            codec=pb.CompressionCodec.Name(fragment.compression_codec).lower(),
            length=fragment.length,
            labels=labels,
            refresh_interval_s=to_seconds(fragment.refresh_interval),
            flush_interval_s=to_seconds(fragment.flush_interval),
            retention_s=to_seconds(fragment.retention),
            max_append_rate=spec.max_append_rate,
            suspended=is_suspended(spec),
            brokers=tuple(f"{member.zone}/{member.suffix}" for _, member in members),
            revision=listed.mod_revision,
            create_revision=listed.create_revision,
        )


JSON_LINES = "application/x-ndjson"
"""Content type of new journals: messages as lines of JSON."""

DEFAULT_CODEC = "gzip"
"""Every tool reads it."""

DEFAULT_LENGTH = 64 << 20
"""Size in bytes at which fragments are closed: large enough for efficient reads of a store, and
small enough to compress and upload within seconds."""

DEFAULT_FLUSH_INTERVAL_S = 600.0
"""Content of a journal that is rarely written is in its store after this time."""

DEFAULT_REFRESH_INTERVAL_S = 60.0

CODEC_NAMES = tuple(
    name.lower() for name, number in pb.CompressionCodec.items() if number != pb.INVALID
)


class JournalOptions(TypedDict, total=False):
    """Values of a journal. Those that are left out keep their default or their present value.

    Attributes:
        replication: number of brokers that keep a replica: 1 to 5.
        stores: URL of its fragment store, such as ``s3://bucket/prefix/``, or several; new
            fragments go to the first.
        codec: compression of new fragments: ``none``, ``gzip``, ``zstandard``, ``snappy`` or
            ``gzip_offload_decompression``.
        length: size in bytes at which a fragment is closed.
        labels: values by label name: a text, or several. They replace the label's values; an
            empty list removes it.
        content_type: content type of its messages; empty for a journal of plain bytes.
        refresh_interval_s: seconds between two listings of its stores.
        flush_interval_s: greatest age of a fragment that is not stored, in seconds; 0 for no
            limit.
        retention_s: age at which ``gazctl journals prune`` removes fragments; 0 for never.
        max_append_rate: limit of appends, in bytes per second; 0 for none.
    """

    replication: int | None
    stores: str | Sequence[str] | None
    codec: str | None
    length: int | None
    labels: Mapping[str, str | Sequence[str]] | None
    content_type: str | None
    refresh_interval_s: float | None
    flush_interval_s: float | None
    retention_s: float | None
    max_append_rate: int | None


def check_options(options: Mapping[str, Any]) -> None:
    """Check the names of options, and those values which the rules of specs do not check.

    Raises:
        TypeError: an option is unknown.
        ConfigurationError: a value cannot be used.
        ValidationError: a value has the wrong type or range.
    """
    unknown = sorted(options.keys() - JournalOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(JournalOptions.__annotations__)
        raise TypeError(f"unknown option {unknown[0]!r}; journals have {known}")
    labels = options.get("labels")
    if labels is not None and not isinstance(labels, Mapping):
        raise ValidationError(
            f"labels={labels!r} cannot be used: give values by label name, such as {{'team': 'a'}}"
        )
    apply_options(pb.JournalSpec(), cast("JournalOptions", options))
    if options.get("content_type") is not None and CONTENT_TYPE in (options.get("labels") or {}):
        raise ConfigurationError(
            f"both content_type= and labels= give the label {CONTENT_TYPE!r}; leave one out"
        )


def apply_options(spec: pb.JournalSpec, options: JournalOptions) -> None:
    """Set the values of a spec that are given.

    Raises:
        ConfigurationError: the codec is unknown.
        ValidationError: a value has the wrong type or range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        try:
            _set_option(spec, name, value)
        except (TypeError, ValueError) as error:
            raise ValidationError(f"{name}={value!r} cannot be used: {error}") from error


def default_spec(stores: Sequence[str], replication: int) -> pb.JournalSpec:
    """Return the spec of a new journal without name and labels."""
    spec = pb.JournalSpec()
    defaults: JournalOptions = {
        "replication": replication,
        "stores": stores,
        "codec": DEFAULT_CODEC,
        "length": DEFAULT_LENGTH,
        "refresh_interval_s": DEFAULT_REFRESH_INTERVAL_S,
        "flush_interval_s": DEFAULT_FLUSH_INTERVAL_S,
    }
    apply_options(spec, defaults)
    return spec


def differences(wanted: pb.JournalSpec, found: pb.JournalSpec) -> list[str]:
    """Return the differences of two specs, as texts such as ``replication is 1, not 3``."""
    new, old = (Journal.of(pb.ListResponse.Journal(spec=spec)) for spec in (wanted, found))
    texts = [
        f"label {name} is {_shown(old.labels.get(name))}, not {_shown(new.labels.get(name))}"
        for name in sorted({*new.labels, *old.labels})
        if new.labels.get(name) != old.labels.get(name)
    ]
    for name in Journal.__dataclass_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if name != "labels" and before != after:
            texts.append(f"{name} is {_shown(before)}, not {_shown(after)}")
    return texts


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "missing"
    return (
        "missing" if value is None else f"{value:.15g}" if isinstance(value, float) else f"{value}"
    )


def _set_option(spec: pb.JournalSpec, name: str, value: Any) -> None:
    fragment = spec.fragment
    match name:
        case "replication" | "max_append_rate":
            setattr(spec, name, value)
        case "length":
            fragment.length = value
        case "codec":
            fragment.compression_codec = _codec(value)
        case "stores":
            fragment.stores[:] = [value] if isinstance(value, str) else value
        case "refresh_interval_s" | "flush_interval_s" | "retention_s":
            getattr(fragment, name.removesuffix("_s")).CopyFrom(from_seconds(value))
        case "labels":
            for label, values in value.items():
                _set_label(spec.labels, label, values)
        case "content_type":
            _set_label(spec.labels, CONTENT_TYPE, value or ())


def _codec(name: str) -> pb.CompressionCodec:
    known = str(name).lower().replace("-", "_")
    known = "zstandard" if known == "zstd" else known
    if known not in CODEC_NAMES:
        raise ConfigurationError(f"codec {name!r} is not one of {', '.join(CODEC_NAMES)}")
    return cast("pb.CompressionCodec", pb.CompressionCodec.Value(known.upper()))


def _set_label(labels: pb.LabelSet, name: str, value: str | Sequence[str]) -> None:
    remove(labels, name)
    for each in [value] if isinstance(value, str) else value:
        add(labels, name, each)
