"""Rules of journal specs, and set operations over them (protocol section 6)."""

from __future__ import annotations

import re
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol.durations import HOUR_NS, MINUTE_NS, SECOND_NS, from_ns, to_ns
from gazette_sdk.protocol.fragments import PostfixTemplate, validate_codec
from gazette_sdk.protocol.names import (
    JOURNAL_LENGTH_BYTES,
    at,
    parse_store_url,
    refuse_climbing,
    strip_meta,
    validate_path_component,
    validate_store_url,
)

DEFAULT_MAX_REPLICATION = 9
"""Greatest number of replicas of a journal, unless the process is configured otherwise."""
REPLICATION = (1, 5)
"""Bounds of a spec's replication."""
FRAGMENT_LENGTH_BYTES = (1 << 10, 1 << 34)
"""Bounds of the size at which a fragment is closed: 1 KiB to 16 GiB."""
REFRESH_INTERVAL_NS = (SECOND_NS, 24 * HOUR_NS)
"""Bounds of the period of store listings."""
FLUSH_INTERVAL_LEAST_NS = MINUTE_NS
"""A shorter flush interval would leave many small fragments."""

FLAG_NAMES = {
    number: name
    for name, number in pb.JournalSpec.Flag.items()  # NOT_SPECIFIED, O_RDONLY, O_WRONLY, O_RDWR
}
"""Names of the flags, by number."""

_LEVELS = frozenset(pb.JournalSpec.Suspend.Level.values())
_READABLE = frozenset(
    {pb.JournalSpec.NOT_SPECIFIED, pb.JournalSpec.O_RDONLY, pb.JournalSpec.O_RDWR}
)
_WRITABLE = frozenset(
    {pb.JournalSpec.NOT_SPECIFIED, pb.JournalSpec.O_WRONLY, pb.JournalSpec.O_RDWR}
)

# Printable ASCII but the separators ()<>@,;:\"/[]?= of RFC 1521.
_MEDIA_TOKEN = r"[!#$%&'*+\-.0-9A-Z^_`a-z{|}~]+"  # noqa: S105 - a class of characters
_MEDIA_TYPE = re.compile(f"{_MEDIA_TOKEN}(/{_MEDIA_TOKEN})?")


# ---------------------------------------------------------------- validation


def validate_journal_spec(spec: pb.JournalSpec, path: str = "", *, stored: bool = False) -> None:
    """Check a complete spec, in the order of protocol section 6.1.

    Args:
        spec: the spec.
        path: dotted path of the field, for the error.
        stored: True if the spec is stored already, perhaps by another implementation, and is not
            being applied. Then the rules that only this SDK has are left out: others accept ``..``
            in names, stores and rewritten paths, and postfix templates that are refused here. A
            broker serves such journals; persisting fails where it would leave a store's root, or
            where the template cannot be evaluated.

    Raises:
        ValidationError: of the first rule that is broken.
    """
    _validate_name(spec.name, path, stored=stored)
    least, most = REPLICATION
    if not least <= spec.replication <= most:
        raise ValidationError(
            f"invalid replication ({spec.replication}; expected {least} <= replication <= {most})",
            kind="invalid_replication",
            path=path,
        )
    _validate_labels(spec.labels, path)
    _validate_fragment(spec, at(path, "Fragment"), stored=stored)
    if spec.flags not in FLAG_NAMES:
        raise ValidationError(
            f"invalid flags ({spec.flags}; expected one of {', '.join(FLAG_NAMES.values())})",
            kind="invalid_flags",
            path=at(path, "Flags"),
        )
    if spec.max_append_rate < 0:
        raise ValidationError(
            f"invalid max_append_rate ({spec.max_append_rate}; expected >= 0 bytes per second)",
            kind="invalid_max_append_rate",
            path=path,
        )
    if spec.HasField("suspend"):
        _validate_suspend(spec.suspend, at(path, "Suspend"))


def validate_content_type(value: str, path: str = "") -> None:
    """Check a media type: a token, and optionally ``/`` and another (RFC 1521).

    Raises:
        ValidationError: kind ``invalid_content_type``.
    """
    if not _MEDIA_TYPE.fullmatch(value):
        raise ValidationError(
            f"label {labels.CONTENT_TYPE!r} is not a media type ({value!r})",
            kind="invalid_content_type",
            path=path,
        )


def _validate_name(name: str, path: str, *, stored: bool) -> None:
    where = at(path, "Name")
    validate_path_component(strip_meta(name), where, *JOURNAL_LENGTH_BYTES)
    if ";" in name:
        raise ValidationError(
            f"the name of a spec must not carry metadata ({name!r})",
            kind="metadata_not_allowed",
            path=where,
        )
    if not stored:
        refuse_climbing(name, where)


def _validate_labels(given: pb.LabelSet, path: str) -> None:
    where = at(path, "Labels")
    labels.validate_label_set(given, where)
    names = {label.name for label in given.labels}
    for reserved in (labels.NAME, labels.PREFIX):
        if reserved in names:
            raise ValidationError(
                f"label {reserved!r} is reserved: it stands for the journal's name in selectors",
                kind=f"reserved_label_{reserved}",
                path=path,
            )
    labels.validate_single_values(given, where)
    if labels.CONTENT_TYPE in names:
        validate_content_type(labels.value_of(given, labels.CONTENT_TYPE), where)
    if labels.MESSAGE_TYPE in names:
        if labels.CONTENT_TYPE not in names:
            raise ValidationError(
                f"label {labels.MESSAGE_TYPE!r} requires {labels.CONTENT_TYPE!r}",
                kind="content_type_required",
                path=where,
            )
    elif labels.MESSAGE_SUBTYPE in names:
        raise ValidationError(
            f"label {labels.MESSAGE_SUBTYPE!r} requires {labels.MESSAGE_TYPE!r}",
            kind="message_type_required",
            path=where,
        )


def _validate_fragment(spec: pb.JournalSpec, path: str, *, stored: bool) -> None:
    fragment = spec.fragment
    least, most = FRAGMENT_LENGTH_BYTES
    if not least <= fragment.length <= most:
        raise ValidationError(
            f"invalid length ({fragment.length}; expected {least} <= length <= {most} bytes)",
            kind="invalid_length",
            path=path,
        )
    validate_codec(fragment.compression_codec, at(path, "CompressionCodec"))
    _validate_stores(spec, path, stored=stored)
    least, most = REFRESH_INTERVAL_NS
    if not least <= to_ns(fragment.refresh_interval) <= most:
        raise ValidationError(
            "invalid refresh_interval (expected 1s to 24h)",
            kind="invalid_refresh_interval",
            path=path,
        )
    flush_ns = to_ns(fragment.flush_interval)
    if flush_ns != 0 and flush_ns < FLUSH_INTERVAL_LEAST_NS:
        raise ValidationError(
            "invalid flush_interval (expected zero, or 1m or more)",
            kind="invalid_flush_interval",
            path=path,
        )
    if fragment.path_postfix_template and not stored:
        try:
            PostfixTemplate(fragment.path_postfix_template).check()
        except ValidationError as error:
            raise error.within(at(path, "PathPostfixTemplate")) from None


def _validate_stores(spec: pb.JournalSpec, path: str, *, stored: bool) -> None:
    for index, url in enumerate(spec.fragment.stores):
        where = at(path, f"Stores[{index}]")
        validate_store_url(url, where, stored=stored)
        store = parse_store_url(url)
        if (
            index == 0
            and store.scheme == "file"
            and spec.fragment.compression_codec == pb.CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION
        ):
            raise ValidationError(
                "GZIP_OFFLOAD_DECOMPRESSION is not possible with a file store",
                kind="codec_incompatible_with_store",
                path=path,
            )
        if not stored:
            try:
                store.rewrite(spec.name + "/")
            except ValidationError as error:
                raise error.within(where) from None


def _validate_suspend(suspend: pb.JournalSpec.Suspend, path: str) -> None:
    if suspend.level not in _LEVELS:
        raise ValidationError(
            f"invalid level ({suspend.level}; expected NONE, PARTIAL or FULL)",
            kind="invalid_level",
            path=at(path, "Level"),
        )
    if suspend.offset < 0:
        raise ValidationError(
            f"invalid offset ({suspend.offset}; expected >= 0)",
            kind="invalid_offset",
            path=at(path, "Offset"),
        )


# ---------------------------------------------------------------- meaning


def desired_replication(
    spec: pb.JournalSpec, max_replication: int = DEFAULT_MAX_REPLICATION
) -> int:
    """Return the number of brokers a journal should have now: fewer when it is suspended.

    Args:
        spec: the spec.
        max_replication: process-wide cap.
    """
    level = spec.suspend.level
    if level == pb.JournalSpec.Suspend.FULL:
        wanted = 0
    elif level == pb.JournalSpec.Suspend.PARTIAL:
        wanted = 1
    else:
        wanted = spec.replication
    return min(wanted, max_replication)


def is_suspended(spec: pb.JournalSpec) -> bool:
    """Return True if the journal is suspended, fully or partially."""
    return spec.suspend.level != pb.JournalSpec.Suspend.NONE


def may_read(spec: pb.JournalSpec) -> bool:
    """Return True if the journal's flags allow reads."""
    return spec.flags in _READABLE


def may_write(spec: pb.JournalSpec) -> bool:
    """Return True if the journal's flags allow appends of content."""
    return spec.flags in _WRITABLE


# ---------------------------------------------------------------- set operations


def union_specs(a: pb.JournalSpec, b: pb.JournalSpec) -> pb.JournalSpec:
    """Return ``a``, with the values of ``b`` where those of ``a`` are zero (protocol section 6.4).

    Name and suspend are those of ``a``.
    """
    made = pb.JournalSpec()
    made.CopyFrom(a)
    made.labels.CopyFrom(labels.union(a.labels, b.labels))
    made.replication = a.replication or b.replication
    made.flags = a.flags or b.flags
    made.max_append_rate = a.max_append_rate or b.max_append_rate
    _set_fragment(
        made.fragment, *(left or right for left, right in _fragment_pairs(a.fragment, b.fragment))
    )
    return made


def intersect_specs(a: pb.JournalSpec, b: pb.JournalSpec) -> pb.JournalSpec:
    """Return the values that are equal in ``a`` and ``b``; zero elsewhere.

    The name is that of ``a``, suspend is dropped.
    """
    made = pb.JournalSpec(
        name=a.name,
        replication=_same(a.replication, b.replication, 0),
        flags=_same(a.flags, b.flags, 0),
        max_append_rate=_same(a.max_append_rate, b.max_append_rate, 0),
    )
    made.labels.CopyFrom(labels.intersect(a.labels, b.labels))
    _set_fragment(
        made.fragment,
        *(_same(left, right, None) for left, right in _fragment_pairs(a.fragment, b.fragment)),
    )
    return made


def subtract_specs(a: pb.JournalSpec, b: pb.JournalSpec) -> pb.JournalSpec:
    """Return ``a``, with zero for values that are equal in ``b``.

    Name and suspend are those of ``a``.
    """
    made = pb.JournalSpec(
        name=a.name,
        replication=_other(a.replication, b.replication, 0),
        flags=_other(a.flags, b.flags, 0),
        max_append_rate=_other(a.max_append_rate, b.max_append_rate, 0),
    )
    if a.HasField("suspend"):
        made.suspend.CopyFrom(a.suspend)
    made.labels.CopyFrom(labels.subtract(a.labels, b.labels))
    _set_fragment(
        made.fragment,
        *(_other(left, right, None) for left, right in _fragment_pairs(a.fragment, b.fragment)),
    )
    return made


_T = TypeVar("_T")
_FragmentValue = int | str | list[str]


def _same(left: _T, right: _T, zero: _T) -> _T:
    return left if left == right else zero


def _other(left: _T, right: _T, zero: _T) -> _T:
    return zero if left == right else left


def _fragment_values(fragment: pb.JournalSpec.Fragment) -> tuple[_FragmentValue, ...]:
    return (
        fragment.length,
        int(fragment.compression_codec),
        list(fragment.stores),
        to_ns(fragment.refresh_interval),
        to_ns(fragment.retention),
        to_ns(fragment.flush_interval),
        fragment.path_postfix_template,
    )


def _fragment_pairs(
    a: pb.JournalSpec.Fragment, b: pb.JournalSpec.Fragment
) -> list[tuple[_FragmentValue | None, _FragmentValue | None]]:
    return list(zip(_fragment_values(a), _fragment_values(b), strict=True))


def _set_fragment(fragment: pb.JournalSpec.Fragment, *values: _FragmentValue | None) -> None:
    """Set all fields of a fragment section, in the order of :func:`_fragment_values`."""
    fragment.Clear()
    fragment.SetInParent()
    fields = (
        "length",
        "compression_codec",
        "stores",
        "refresh_interval",
        "retention",
        "flush_interval",
        "path_postfix_template",
    )
    for field, value in zip(fields, values, strict=True):
        if not value:
            continue
        if isinstance(value, list):
            fragment.stores.extend(value)
        elif field in {"refresh_interval", "retention", "flush_interval"}:
            duration: Duration = getattr(fragment, field)
            duration.CopyFrom(from_ns(int(value)))
        else:
            setattr(fragment, field, value)
