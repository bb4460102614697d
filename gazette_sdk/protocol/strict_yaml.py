"""Strict YAML: documents whose every key and type is known.

Unknown and repeated keys and values of the wrong type are errors that name the line and the
key. Durations are Go's (``1h0m0s``), plain integers are nanoseconds. A decoder is a function of a
node of the document and its dotted path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import yaml

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol.durations import format_duration, parse_duration
from gazette_sdk.protocol.names import at

NESTING_MOST = 64
"""Greatest depth of nested directories: a document that contains itself is refused with a clear
error, before the interpreter's stack overflows."""

_ALIASED_MOST = 100_000
"""Greatest number of values that aliases may add to a document: aliases of aliases would multiply a
document of a few lines to any size."""

_SCALAR_CHARACTERS_MOST = 100
"""Longer scalars are text: converting them to numbers takes a time that grows with the square of
their length, and none fits into 64 bits."""

Value = yaml.Node
"""Node of a document."""
Decoder = Callable[[yaml.Node, str], Any]
"""Function of a node and its dotted path; it returns what the node stands for, or raises."""


# ---------------------------------------------------------------- reading


def compose(text: str | bytes) -> Value | None:
    """Return the root of a document; None if it is empty.

    Raises:
        ValidationError: the text is not YAML (kind ``yaml_parse``), or its aliases expand it beyond
            measure (``wrong_type``).
    """
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValidationError(f"not YAML: {problem_of(error)}", kind="yaml_parse") from None
    except RecursionError:
        raise ValidationError("not YAML: nested too deeply", kind="yaml_parse") from None
    if root is not None:
        _check_aliases(root, {})
    return root


def problem_of(error: Exception) -> str:
    """Return the place and the problem of an error of the parser, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"position {error.position}: {error.reason}"
    return str(error)


def _check_aliases(value: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values that aliases add to a node of the document.

    Args:
        value: the node.
        counts: number of values of each node that was visited, by its identity, with aliases
            expanded; zero for nodes that contain this one.

    Raises:
        ValidationError: there are too many, or a node contains itself.
    """
    counts[id(value)] = 0
    added, total = 0, 1
    items = value.value if isinstance(value, yaml.CollectionNode) else ()
    if isinstance(value, yaml.MappingNode):
        items = [node for pair in value.value for node in pair]
    for item in items:
        known = counts.get(id(item))
        if known == 0:
            fail(
                value,
                "",
                f"this contains itself by an alias: nested deeper than {NESTING_MOST} directories",
                "wrong_type",
            )
        if known is None:
            added += _check_aliases(item, counts)
            total += counts[id(item)]
        else:
            added += known
            total += known
        if added > _ALIASED_MOST:
            fail(
                value,
                "",
                f"aliases expand this to more than {_ALIASED_MOST} values: write them out, or "
                "give what they share in common: a directory of journals, or `common` of shards",
                "wrong_type",
            )
    counts[id(value)] = total
    return added


def assign(message: Any, fields: dict[str, Any], value: Value, path: str) -> Any:
    """Set fields of a message; refuse numbers that are out of their ranges.

    Returns:
        The message.
    """
    for name, item in fields.items():
        try:
            setattr(message, name, item)
        except ValueError:
            fail(value, at(path, name), f"out of range ({item})", "wrong_type")
    return message


def mapping(value: Value, path: str, keys: dict[str, Decoder]) -> dict[str, Any]:
    """Decode keys and values: the decoded ones by key, without those that are null.

    Args:
        value: the node.
        path: its path.
        keys: decoders of the values, by key.

    Raises:
        ValidationError: it is no mapping, or a key is unknown or repeated.
    """
    if not isinstance(value, yaml.MappingNode):
        fail(value, path, f"expected keys and values, not {_shown(value)}", "wrong_type")
    found: dict[str, Any] = {}
    for key, item in value.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else _shown(key)
        decoder = keys.get(name)
        if decoder is None:
            fail(
                key,
                path,
                f"unknown key {name!r} (expected one of {', '.join(keys)})",
                "unknown_key",
            )
        if name in found:
            fail(key, at(path, name), f"key {name!r} is given twice", "duplicate_key")
        if _is_null(item):
            continue  # the same as an absent key
        found[name] = decoder(item, at(path, name))
    return found


def list_of(value: Value, path: str, decoder: Decoder) -> list[Any]:
    """Decode a list, each item by ``decoder``."""
    if not isinstance(value, yaml.SequenceNode):
        fail(value, path, f"expected a list, not {_shown(value)}", "wrong_type")
    return [decoder(item, f"{path}[{index}]") for index, item in enumerate(value.value)]


def string(value: Value, path: str) -> str:
    """Decode a text: any scalar, as it is written."""
    if not isinstance(value, yaml.ScalarNode):
        fail(value, path, f"expected a text, not {_shown(value)}", "wrong_type")
    text = str(value.value)
    try:
        text.encode()
    except UnicodeEncodeError:
        fail(value, path, f"not valid Unicode ({text!r})", "wrong_type")
    return text


def integer(value: Value, path: str) -> int:
    """Decode an integer of 64 bits."""
    found = _scalar(value)
    if not isinstance(found, int) or isinstance(found, bool):
        fail(value, path, f"expected an integer, not {_shown(value)}", "wrong_type")
    return _bounded(found, value, path)


def _bounded(number: int, value: Value, path: str) -> int:
    if not -(1 << 63) <= number < 1 << 63:
        fail(value, path, f"out of range ({number})", "wrong_type")
    return number


def boolean(value: Value, path: str) -> bool:
    """Decode true or false."""
    found = _scalar(value)
    if not isinstance(found, bool):
        fail(value, path, f"expected true or false, not {_shown(value)}", "wrong_type")
    return found


def duration(value: Value, path: str) -> int:
    """Decode a duration, into nanoseconds."""
    found = _scalar(value)
    if isinstance(found, int) and not isinstance(found, bool):
        return _bounded(found, value, path)
    try:
        return parse_duration(string(value, path))
    except ValidationError as error:
        fail(value, path, error.reason, error.kind)


def enum(kind: Any, *, numbers: bool) -> Decoder:
    """Return the decoder of an enum's names.

    Args:
        kind: the generated enum.
        numbers: True if numbers are accepted too.
    """

    def decode(value: Value, path: str) -> int:
        found = _scalar(value)
        if numbers and isinstance(found, int) and not isinstance(found, bool):
            return found
        text = string(value, path)
        try:
            number: int = kind.Value(text)
        except ValueError:
            fail(
                value,
                path,
                f"unknown name {text!r} (expected one of {', '.join(kind.keys())})",
                "unknown_enum_name",
            )
        return number

    return decode


def _label(value: Value, path: str) -> tuple[str, str]:
    fields = mapping(value, path, {"name": string, "value": string})
    return fields.get("name", ""), fields.get("value", "")


def labels(value: Value, path: str) -> list[tuple[str, str]]:
    """Decode a list of labels, into pairs of name and value."""
    return list_of(value, path, _label)


def _scalar(value: Value) -> object:
    """Return the value of a scalar; its text if it has none of the types that keys hold."""
    if not isinstance(value, yaml.ScalarNode):
        return None
    if len(value.value) > _SCALAR_CHARACTERS_MOST:
        return value.value
    try:
        found: object = yaml.constructor.SafeConstructor().construct_object(value)
    except (yaml.YAMLError, ValueError):
        return value.value
    return found


def _is_null(value: Value) -> bool:
    return isinstance(value, yaml.ScalarNode) and value.tag == "tag:yaml.org,2002:null"


def _shown(value: Value) -> str:
    if isinstance(value, yaml.ScalarNode):
        return repr(value.value)
    return "a list" if isinstance(value, yaml.SequenceNode) else "keys and values"


def fail(value: Value, path: str, reason: str, kind: str) -> NoReturn:
    """Raise a ValidationError that names the line of a node."""
    line = value.start_mark.line + 1
    raise ValidationError(f"line {line}: {reason}", kind=kind, path=path)


# ---------------------------------------------------------------- writing


def document(keys: Mapping[str, Any]) -> str:
    """Return the YAML document of nested keys and values, in their order."""
    text: str = yaml.dump(
        dict(keys),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=sys.maxsize,
    )
    return text


def duration_text(ns: int) -> str:
    """Return the text of a duration of nanoseconds; empty for zero, which is left out."""
    return format_duration(ns) if ns else ""


def name_of(kind: Any, number: int) -> str | int:
    """Return the name of an enum's number, or the number if it has none."""
    return next((name for name, known in kind.items() if known == number), number)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes like other implementations: documents are the same across tools."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - nothing is shared by reference
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None
        plain_tag = self.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        if plain_tag != "tag:yaml.org,2002:str" or text in {"y", "Y", "n", "N"}:
            style = '"'
        elif "\n" in text:
            style = "|"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
