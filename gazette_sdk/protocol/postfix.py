"""Path postfix templates: extra path components of a fragment, derived from its content.

Templates are Go's ``text/template`` (protocol section 6.3). This is the subset that postfixes
need; other templates are refused when a spec is applied:

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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import PATH_POSTFIX_LENGTH_BYTES
from gazette_sdk.protocol.gotime import format_time
from gazette_sdk.protocol.labels import value_of
from gazette_sdk.protocol.names import clean_path, refuse_climbing, validate_path_component

__all__ = ["ZERO_TIME", "PostfixTemplate"]

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
