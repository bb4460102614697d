"""Fragments: their names in stores, their sums, their rules (protocol section 7).

Path postfix templates give a fragment extra path components, derived from its content. They are
Go's ``text/template`` (protocol section 6.3). This is the subset that postfixes need; other
templates are refused when a spec is applied:

- literal text;
- ``{{ .Spool.FirstAppendTime.Format "2006-01-02" }}``, and its numbers: ``.Year``, ``.Day``,
  ``.Hour``, ``.Minute``, ``.Second``, ``.YearDay``, ``.Unix``, and ``.Month`` (a name);
- values of the spool: ``Journal``, ``Begin``, ``End``, ``CompressionCodec``, ``BackingStore``,
  ``ModTime``, ``PathPostfix``;
- values of the spec: ``Name``, ``Replication``, ``MaxAppendRate``;
- ``{{ .Spool.Registers.ValueOf "name" }}``, ``{{ .JournalSpec.LabelSet.ValueOf "name" }}``.

All of them also stand at the top level (``{{ .Begin }}``). ``{{-`` and ``-}}`` trim white space,
``{{/* … */}}`` is a comment.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import format_time
from gazette_sdk.protocol.labels import value_of
from gazette_sdk.protocol.names import (
    clean_path,
    refuse_climbing,
    validate_journal,
    validate_path_component,
)

PATH_POSTFIX_LENGTH_BYTES = (0, 512)
"""Bounds of the path between a journal's name and a fragment's content name."""

_EXTENSIONS = {
    pb.CompressionCodec.NONE: ".raw",
    pb.CompressionCodec.GZIP: ".gz",
    pb.CompressionCodec.ZSTANDARD: ".zst",
    pb.CompressionCodec.SNAPPY: ".sz",
    pb.CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION: "",
}
_CODECS_BY_EXTENSION = {
    **{extension: codec for codec, extension in _EXTENSIONS.items()},
    ".gzip": pb.CompressionCodec.GZIP,
    ".zstandard": pb.CompressionCodec.ZSTANDARD,
    ".snappy": pb.CompressionCodec.SNAPPY,
    ".gzod": pb.CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION,
}
_SUM = struct.Struct(">QQI")
_HEX = re.compile(r"\+?[0-9a-fA-F]+")
_GREATEST_OFFSET = (1 << 63) - 1


def content_name(fragment: pb.Fragment) -> str:
    """Return a fragment's content-addressed name: ``BEGIN-END-SUM`` and the codec's extension."""
    return (
        f"{fragment.begin:016x}-{fragment.end:016x}-{digest_of(fragment.sum).hex()}"
        f"{codec_extension(fragment.compression_codec)}"
    )


def content_path(fragment: pb.Fragment) -> str:
    """Return a fragment's path in a store: journal, path postfix and content name, cleaned."""
    return clean_path(f"{fragment.journal}/{fragment.path_postfix}/{content_name(fragment)}")


def parse_content_path(journal: str, relative_path: str) -> pb.Fragment:
    """Return the fragment of a store's object, by its path below the journal's directory.

    Raises:
        ValidationError: the object is no fragment of the journal: kind ``wrong_format``,
            ``invalid_hex``, ``invalid_sum_length``, ``unknown_extension``, or as
            :func:`validate_fragment`. Foreign files below a journal are common.
    """
    postfix, _, final = relative_path.rpartition("/")
    stem, dot, suffix = final.rpartition(".")
    if not dot:
        stem, suffix = final, ""
    parts = stem.split("-")
    if len(parts) != 3:
        raise ValidationError(
            f"wrong format ({final!r}; expected BEGIN-END-SUM)", kind="wrong_format"
        )
    try:
        postfix.encode()
    except UnicodeEncodeError:  # a directory's name is any bytes
        raise ValidationError(
            f"wrong format ({postfix!r} is no text)", kind="wrong_format"
        ) from None
    fragment = pb.Fragment(
        journal=journal,
        begin=_parse_offset(parts[0], "Begin"),
        end=_parse_offset(parts[1], "End"),
        sum=_parse_sum(parts[2]),
        compression_codec=codec_of_extension(dot + suffix),
        path_postfix=postfix,
    )
    validate_fragment(fragment)
    return fragment


def validate_fragment(fragment: pb.Fragment, path: str = "") -> None:
    """Check a fragment: journal, begin <= end, codec, path postfix.

    Raises:
        ValidationError: of the first rule that is broken.
    """
    try:
        _check_fragment(fragment)
    except ValidationError as error:
        raise (error.within(path) if path else error) from None


def _check_fragment(fragment: pb.Fragment) -> None:
    validate_journal(fragment.journal, "Journal")
    if fragment.begin > fragment.end:
        raise ValidationError(
            f"expected begin <= end (have {fragment.begin}, {fragment.end})",
            kind="begin_after_end",
        )
    validate_codec(fragment.compression_codec, "CompressionCodec")
    if fragment.path_postfix:
        validate_path_component(fragment.path_postfix, "PathPostfix", *PATH_POSTFIX_LENGTH_BYTES)


def length_of(fragment: pb.Fragment) -> int:
    """Return the number of bytes of the journal that the fragment holds."""
    return fragment.end - fragment.begin


# ---------------------------------------------------------------- sums


def digest_of(content_sum: pb.SHA1Sum) -> bytes:
    """Return the 20 bytes of a SHA-1 digest."""
    return _SUM.pack(content_sum.part1, content_sum.part2, content_sum.part3)


def sum_of(digest: bytes) -> pb.SHA1Sum:
    """Return the message of a SHA-1 digest of 20 bytes."""
    part1, part2, part3 = _SUM.unpack(digest)
    return pb.SHA1Sum(part1=part1, part2=part2, part3=part3)


def is_zero_sum(content_sum: pb.SHA1Sum) -> bool:
    """Return True if it is the sum of an empty fragment: all zeros, not the digest of no bytes."""
    return not (content_sum.part1 or content_sum.part2 or content_sum.part3)


def set_sum(content_sum: pb.SHA1Sum, digest: bytes) -> None:
    """Set a message's sum to a SHA-1 digest of 20 bytes."""
    content_sum.part1, content_sum.part2, content_sum.part3 = _SUM.unpack(digest)


# ---------------------------------------------------------------- codecs


def codec_extension(codec: pb.CompressionCodec) -> str:
    """Return the extension of a codec's fragments; empty for offloaded gzip.

    Raises:
        ValidationError: the codec is INVALID or unknown.
    """
    validate_codec(codec, "CompressionCodec")
    return _EXTENSIONS[codec]


def codec_of_extension(extension: str) -> pb.CompressionCodec:
    """Return the codec of a name's extension, with its dot and in any case.

    Raises:
        ValidationError: kind ``unknown_extension``.
    """
    codec = _CODECS_BY_EXTENSION.get(extension.lower())
    if codec is None:
        raise ValidationError(
            f"unknown compression extension ({extension!r})", kind="unknown_extension"
        )
    return codec


def validate_codec(codec: int, path: str) -> None:
    """Check that a compression codec is known, and not INVALID.

    Raises:
        ValidationError: kind ``invalid_codec``.
    """
    if codec not in _EXTENSIONS:
        known = ", ".join(pb.CompressionCodec.Name(codec) for codec in _EXTENSIONS)
        raise ValidationError(
            f"invalid compression codec ({codec}; expected one of {known})",
            kind="invalid_codec",
            path=path,
        )


def _parse_offset(text: str, path: str) -> int:
    value = int(text, 16) if _HEX.fullmatch(text) else -1
    if not 0 <= value <= _GREATEST_OFFSET:
        raise ValidationError(f"not a 64-bit hex offset ({text!r})", kind="invalid_hex", path=path)
    return value


def _parse_sum(text: str) -> pb.SHA1Sum:
    if len(text) % 2 or not re.fullmatch("[0-9a-fA-F]*", text):
        raise ValidationError(f"not hex ({text!r})", kind="invalid_hex", path="Sum")
    digest = bytes.fromhex(text)
    if len(digest) != _SUM.size:
        raise ValidationError(
            f"invalid SHA-1 length ({len(digest)} bytes; expected {_SUM.size})",
            kind="invalid_sum_length",
            path="Sum",
        )
    return sum_of(digest)


ZERO_TIME = datetime(1, 1, 1, tzinfo=UTC)
"""Time of the first append of a spool without appends."""


class PostfixTemplate:
    """A parsed template.

    Args:
        text: the template; empty for no postfix.

    Raises:
        ValidationError: kind ``invalid_template``: it is malformed, or outside of the subset.
    """

    __slots__ = ("_parts", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._parts = _parse(text)

    def evaluate(
        self,
        fragment: pb.Fragment,
        spec: pb.JournalSpec,
        first_append_time: datetime,
        registers: pb.LabelSet,
    ) -> str:
        """Return the postfix of a fragment: a clean relative path, perhaps empty.

        Empty and ``.`` components are dropped, as they are from content paths.

        Args:
            fragment: the closed spool.
            spec: the journal's spec.
            first_append_time: time of the commit of its first append; naive times are UTC.
            registers: the journal's registers.

        Raises:
            ValidationError: the result is no path component of at most 512 bytes, or has a
                ``..`` component, so that listings would not find the fragment. Change the
                template or the labels it uses.
        """
        spool = _Spool(fragment, spec, _utc(first_append_time), registers)
        text = "".join(part if isinstance(part, str) else part(spool) for part in self._parts)
        refuse_climbing(text, "PathPostfix")
        postfix = clean_path("/" + text)[1:]
        validate_path_component(postfix, "PathPostfix", *PATH_POSTFIX_LENGTH_BYTES)
        return postfix

    def check(self) -> None:
        """Evaluate the template with zero values, to check it when a spec is applied.

        Raises:
            ValidationError: the result is no valid postfix.
        """
        try:
            self.evaluate(pb.Fragment(), pb.JournalSpec(), ZERO_TIME, pb.LabelSet())
        except ValidationError as error:
            kind = error.kind if error.kind == "traverses_outside" else "invalid_template"
            raise ValidationError(error.reason, kind=kind) from None


@dataclass(frozen=True, slots=True)
class _Spool:
    fragment: pb.Fragment
    spec: pb.JournalSpec
    first_append_time: datetime
    registers: pb.LabelSet


_Evaluated = Callable[[_Spool], str]
_Part = str | _Evaluated


def _utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


# ---------------------------------------------------------------- names in templates

_SPOOL_VALUES: dict[str, _Evaluated] = {
    "Journal": lambda spool: spool.fragment.journal,
    "Begin": lambda spool: str(spool.fragment.begin),
    "End": lambda spool: str(spool.fragment.end),
    "CompressionCodec": lambda spool: pb.CompressionCodec.Name(spool.fragment.compression_codec),
    "BackingStore": lambda spool: spool.fragment.backing_store,
    "ModTime": lambda spool: str(spool.fragment.mod_time),
    "PathPostfix": lambda spool: spool.fragment.path_postfix,
    "FirstAppendTime.Year": lambda spool: str(spool.first_append_time.year),
    "FirstAppendTime.Month": lambda spool: format_time(spool.first_append_time, "January"),
    "FirstAppendTime.Day": lambda spool: str(spool.first_append_time.day),
    "FirstAppendTime.Hour": lambda spool: str(spool.first_append_time.hour),
    "FirstAppendTime.Minute": lambda spool: str(spool.first_append_time.minute),
    "FirstAppendTime.Second": lambda spool: str(spool.first_append_time.second),
    "FirstAppendTime.YearDay": lambda spool: str(spool.first_append_time.timetuple().tm_yday),
    "FirstAppendTime.Unix": lambda spool: str(_unix(spool.first_append_time)),
}
_SPEC_VALUES: dict[str, _Evaluated] = {
    "Name": lambda spool: spool.spec.name,
    "Replication": lambda spool: str(spool.spec.replication),
    "MaxAppendRate": lambda spool: str(spool.spec.max_append_rate),
}
_SPOOL_METHODS: dict[str, Callable[[_Spool, str], str]] = {
    "FirstAppendTime.Format": lambda spool, layout: format_time(spool.first_append_time, layout),
    "Registers.ValueOf": lambda spool, name: value_of(spool.registers, name),
}
_SPEC_METHODS: dict[str, Callable[[_Spool, str], str]] = {
    "LabelSet.ValueOf": lambda spool, name: value_of(spool.spec.labels, name),
    "Labels.ValueOf": lambda spool, name: value_of(spool.spec.labels, name),
}

_VALUES = {
    **_SPOOL_VALUES,
    **_SPEC_VALUES,
    **{f"Spool.{name}": value for name, value in _SPOOL_VALUES.items()},
    **{f"JournalSpec.{name}": value for name, value in _SPEC_VALUES.items()},
}
_METHODS = {
    **_SPOOL_METHODS,
    **_SPEC_METHODS,
    **{f"Spool.{name}": method for name, method in _SPOOL_METHODS.items()},
    **{f"JournalSpec.{name}": method for name, method in _SPEC_METHODS.items()},
}


def _unix(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // (_SECOND)


_SECOND = datetime(1, 1, 1, 0, 0, 1, tzinfo=UTC) - ZERO_TIME

# ---------------------------------------------------------------- parsing

_STRING = r'"(?:[^"\\\n]|\\.)*"|`[^`]*`'
_ACTION = re.compile(
    rf"""\{{\{{(?P<trim_left>-(?=\s))?
        (?: \s*(?P<comment>/\*.*?\*/)\s*
          | \s*\.(?P<chain>[A-Za-z_][\w.]*)(?:\s+(?P<argument>{_STRING}))?\s*
        )
        (?P<trim_right>(?<=\s)-)?\}}\}}""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:([abfnrtv\\\"])|x([0-9a-fA-F]{2})|([0-7]{3})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))"
)
_SIMPLE_ESCAPES = dict(zip('abfnrtv\\"', '\a\b\f\n\r\t\v\\"', strict=True))
_SHOWN_CHARACTERS_MOST = 60


def _parse(text: str) -> tuple[_Part, ...]:
    parts: list[_Part] = []
    place = 0
    trims = False  # True if the action before trims the text that follows it
    while True:
        begin = text.find("{{", place)
        literal = text[place:] if begin < 0 else text[place:begin]
        if trims:
            literal = literal.lstrip()
        if begin < 0:
            parts.append(literal)
            return tuple(part for part in parts if part != "")
        action = _ACTION.match(text, begin)
        if action is None:
            raise _invalid(f"cannot evaluate {text[begin : begin + _SHOWN_CHARACTERS_MOST]!r}")
        parts.append(literal.rstrip() if action["trim_left"] else literal)
        if not action["comment"]:
            parts.append(_expression(action["chain"], action["argument"]))
        trims = bool(action["trim_right"])
        place = action.end()


def _expression(chain: str, argument: str | None) -> _Evaluated:
    if argument is None:
        value = _VALUES.get(chain)
        if value is None:
            raise _invalid(f"cannot evaluate `.{chain}`")
        return value
    method = _METHODS.get(chain)
    if method is None:
        raise _invalid(f"cannot call `.{chain}` with an argument")
    text = _unquote(argument)
    return lambda spool: method(spool, text)


def _unquote(literal: str) -> str:
    if literal.startswith("`"):
        return literal[1:-1].replace("\r", "")

    def unescape(match: re.Match[str]) -> str:
        simple, hex2, octal, hex4, hex8, other = match.groups()
        if other is not None:
            raise _invalid(f"unknown escape \\{other} in a string")
        if simple is not None:
            return _SIMPLE_ESCAPES[simple]
        code = int(octal, 8) if octal is not None else int(hex2 or hex4 or hex8, 16)
        # In Go, such bytes above 0x7f are parts of UTF-8 sequences; no path needs to be written so.
        if code > 0x10FFFF or 0xD800 <= code < 0xE000 or (code > 0x7F and (hex2 or octal)):
            raise _invalid(f"unsupported escape {match[0]} in a string")
        return chr(code)

    return _ESCAPE.sub(unescape, literal[1:-1])


def _invalid(reason: str) -> ValidationError:
    return ValidationError(
        f"{reason}: write literal text, "
        '{{ .Spool.FirstAppendTime.Format "2006-01-02" }}, {{ .Spool.Begin }}, '
        '{{ .JournalSpec.Name }} or {{ .JournalSpec.LabelSet.ValueOf "label" }}',
        kind="invalid_template",
    )
