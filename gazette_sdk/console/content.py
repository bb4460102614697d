"""Content of journals as the console shows it: fields that are masked, and names of fields.

======================================================  ==========================================
``/console/<sha256>/read?journal=&offset=&block=``      content of a journal, with its masks
``/console/<sha256>/types?journal=``                    names of the fields of its protobuf messages
======================================================  ==========================================

:class:`Masks` replaces fields of JSON messages here, on the server, so that a page never has them.
A journal that no mask selects is answered as its own URL answers. Of one that is selected, each
message is a line ``{"begin", "end", "text"}``, because masked text has another length than the
message has in its journal. The text is absent where nothing of a message may be shown: of anything
but JSON, and of a line that is no JSON. A line ``{"end"}`` ends a complete answer.

:class:`MessageTypes` has the names and types of fields of a protobuf descriptor set. The message
type of a journal is the value of its label ``app.gazette.dev/message-type``.

A page that lacks a right for its journal gets the answer of the journal. Neither call has rights
of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlencode

import orjson
from aiohttp import web
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from gazette_sdk.errors import ConfigurationError, FramingError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import (
    CONTENT_TYPE,
    MESSAGE_TYPE,
    Matcher,
    parse_selector,
    rewrite_prefix,
    value_of,
)
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.server.http import CONTENT_HEADERS, Target, text_error

if TYPE_CHECKING:
    from gazette_sdk.framing.base import Buffer, Cutter

MASKED = "•••"
"""Text in place of a masked value."""

LINE_BYTES_MAX = 1 << 20
"""Greatest length of a message that is shown of a masked journal. Nothing of a longer one is: it
would have to be kept in memory, and to be parsed at once."""

SLICE_BYTES = 32 << 10
"""Content that is masked at once: for two milliseconds, of short messages."""

MASKED_HEADER = "X-Console-Masked"
"""Header of an answer whose body has the form of masked content."""

MASKED_MEDIA_TYPE = "application/json"
"""Media type of masked content."""

TYPES_MAX = 1_000
"""Greatest number of message types in one answer. Fields of others are shown by their numbers."""

_ANY = "*"

# ------------------------------------------------------------------ masks

_KEY = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s".,]+')
_PATH = re.compile(rf"(?:{_KEY.pattern})(?:\.(?:{_KEY.pattern}))*")
_COMMA = re.compile(r"\s*,\s*")
_HOW = (
    "write SELECTOR: FIELD, FIELD, such as 'topic=orders: customer.email, card.*', with a label "
    "selector of journals, which may be empty for all, and paths of JSON fields"
)


@dataclass(frozen=True, slots=True)
class Mask:
    """Fields that are masked in some journals.

    Attributes:
        selector: the journals.
        paths: paths of the fields. A key ``*`` stands for any one.
    """

    selector: pb.LabelSelector
    paths: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Mask:
        """Return the mask of an option.

        Raises:
            ConfigurationError: the text is malformed.
        """
        head, separator, fields = f"{text} ".partition(": ")
        if not separator:
            raise ConfigurationError(f"the mask {text!r} has no ': ' after a selector: {_HOW}")
        try:
            selector = parse_selector(head.strip())
        except ValidationError as error:
            raise ConfigurationError(f"the mask {text!r} has no valid selector: {error}") from error
        return cls(selector, tuple(_parse_paths(text, fields.strip())))


def _parse_paths(text: str, fields: str) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a mask, which are separated by commas, and their keys by dots.

    Raises:
        ConfigurationError: there are none, or one is malformed.
    """
    place = 0
    while path := _PATH.match(fields, place):
        yield tuple(_unquoted(text, key) for key in _KEY.findall(path[0]))
        place = path.end()
        if place == len(fields):
            return
        comma = _COMMA.match(fields, place)
        if comma is None:
            break
        place = comma.end()
    raise ConfigurationError(
        f"the mask {text!r} has no path of a field at {fields[place:] or 'its end'!r}: {_HOW}"
    )


def _unquoted(text: str, key: str) -> str:
    if not key.startswith('"'):
        return key
    try:
        return str(json.loads(key))
    except ValueError as error:
        raise ConfigurationError(f"the mask {text!r} has a malformed key {key}: {_HOW}") from error


class Masks:
    """All masks of a console.

    Args:
        masks: the masks.
    """

    def __init__(self, masks: Iterable[Mask] = ()) -> None:
        self._masks = tuple(masks)
        self._matchers = [Matcher(rewrite_prefix(mask.selector)) for mask in self._masks]

    def __bool__(self) -> bool:
        return bool(self._masks)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Masks:
        """Return the masks of options.

        Raises:
            ConfigurationError: one is malformed.
        """
        return cls(map(Mask.parse, texts))

    def of(self, spec: pb.JournalSpec | None) -> tuple[tuple[str, ...], ...]:
        """Return the paths that are masked in a journal.

        Args:
            spec: its spec. None if it is not known: then all masks apply.
        """
        return tuple(
            path
            for mask, matcher in zip(self._masks, self._matchers, strict=True)
            if spec is None or matcher.journal(spec)
            for path in mask.paths
        )


def masked_text(line: Buffer, paths: Sequence[tuple[str, ...]]) -> str | None:
    """Return the JSON of a message with masked fields; None if nothing of it may be shown.

    The text is made of the parsed value, so that no spelling of a key and no duplicate of it
    brings a value through.

    Args:
        line: the message.
        paths: paths of the masked fields.
    """
    if not line.strip():
        return ""
    try:
        root = [orjson.loads(line)]
        for path in paths:
            _mask(root, path)
        return orjson.dumps(root[0]).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None


def _mask(root: list[Any], path: tuple[str, ...]) -> None:
    """Replace the values at a path. Elements of arrays are at the path of their array.

    A field that has a name on the path and is no object is masked as a whole, unless it is null: it
    may have the masked fields in another form.
    """
    found: list[tuple[Any, Any, str]] = [(root, 0, path[0])]
    for depth, key in enumerate(path):
        following: list[tuple[Any, Any, str]] = []
        while found:
            container, place, above = found.pop()
            value = container[place]
            if isinstance(value, list):
                found.extend((value, index, above) for index in range(len(value)))
            elif isinstance(value, dict):
                keys = list(value) if key == _ANY else [key] if key in value else []
                following.extend((value, one, key) for one in keys)
            elif depth and above != _ANY and value is not None:
                container[place] = MASKED
        found = following
    for container, place, _ in found:
        container[place] = MASKED


class MaskedContent:
    """Masked form of the content of one journal, made as the content comes.

    Args:
        spec: the journal's spec; None if it is not known, and then nothing is shown.
        paths: paths of the masked fields.
        offset: begin of the content.
    """

    def __init__(
        self, spec: pb.JournalSpec | None, paths: Sequence[tuple[str, ...]], offset: int
    ) -> None:
        self._paths = paths
        self._end = self._received = offset
        self._is_json = False
        self._cutter = self._cutter_of(spec, offset)

    def feed(self, content: bytes) -> bytes:
        """Return the lines of the messages that the next content completes."""
        self._received += len(content)
        lines: list[dict[str, Any]] = []
        while self._cutter is not None:
            before = self._cutter.pending_bytes, self._cutter.offset
            cut = self._cutter.feed(content)
            for begin, end in zip(cut.frames.begins, cut.frames.ends, strict=True):
                self._add(lines, cut.offset + begin, cut.offset + end, cut.buffer[begin:end])
            content = b""
            if cut.frames.error is None:
                break
            if before == (self._cutter.pending_bytes, self._cutter.offset):
                self._cutter = None  # no further message can be found
        if self._cutter is None:
            self._skip_to(lines, self._received)
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)

    def _cutter_of(self, spec: pb.JournalSpec | None, offset: int) -> Cutter | None:
        # With numpy, a tenth of the start of a broker, which needs it for masked content alone.
        from gazette_sdk.framing.base import Cutter, framing_for  # noqa: PLC0415

        if spec is None:
            return None
        try:
            framing = framing_for(value_of(spec.labels, CONTENT_TYPE))
        except FramingError:
            return None
        self._is_json = framing.form == "json"
        return Cutter(framing, offset, frame_bytes_max=LINE_BYTES_MAX)

    async def write(self, response: web.StreamResponse, content: bytes) -> None:
        """Write the lines of the next content. Other tasks of the event loop run in between."""
        for begin in range(0, len(content), SLICE_BYTES):
            await response.write(self.feed(content[begin : begin + SLICE_BYTES]))
            await asyncio.sleep(0)

    def finish(self) -> bytes:
        """Return the line that ends a complete answer."""
        return orjson.dumps({"end": self._received}) + b"\n"

    def _add(self, lines: list[dict[str, Any]], begin: int, end: int, frame: Buffer) -> None:
        self._skip_to(lines, begin)
        text = masked_text(frame, self._paths) if self._is_json else None
        line = {"begin": begin, "end": end}
        lines.append(line if text is None else {**line, "text": text})
        self._end = end

    def _skip_to(self, lines: list[dict[str, Any]], offset: int) -> None:
        """Add content that is no message, or too long a one."""
        if offset > self._end:
            lines.append({"begin": self._end, "end": offset})
            self._end = offset


# ------------------------------------------------------------------ types


class MessageTypes:
    """Names and types of the fields of protobuf messages.

    Args:
        files: a descriptor set.
    """

    def __init__(self, files: descriptor_pb2.FileDescriptorSet | None = None) -> None:
        self._types: dict[str, Mapping[str, Any]] = {}
        for file in files.file if files is not None else ():
            package = f"{file.package}." if file.package else ""
            self._add(package, file.message_type, file.enum_type)

    def __bool__(self) -> bool:
        return bool(self._types)

    @classmethod
    def load(cls, path: str) -> MessageTypes:
        """Read a descriptor set.

        Raises:
            ConfigurationError: the file cannot be read, or has no message types.
        """
        how = "make it by `protoc --descriptor_set_out=FILE.binpb --include_imports …`"
        try:
            types = cls(descriptor_pb2.FileDescriptorSet.FromString(Path(path).read_bytes()))
        except (OSError, DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no descriptor set"
            raise ConfigurationError(
                f"the descriptor set {path} cannot be read: {reason}; {how}"
            ) from error
        if not types:
            raise ConfigurationError(f"the descriptor set {path} has no message types: {how}")
        return types

    def _add(
        self,
        scope: str,
        messages: Iterable[descriptor_pb2.DescriptorProto],
        enums: Iterable[descriptor_pb2.EnumDescriptorProto],
    ) -> None:
        for enum in enums:
            values = {str(value.number): value.name for value in reversed(enum.value)}
            self._types[scope + enum.name] = values
        for message in messages:
            name = scope + message.name
            self._types[name] = {str(field.number): _field_row(field) for field in message.field}
            self._add(f"{name}.", message.nested_type, message.enum_type)

    def table(self, name: str) -> dict[str, Any]:
        """Return the fields of a message type and of those within it.

        Returns:
            ``root`` is the name of the type. ``types`` has, by the name of a message type, its
            fields by number: name, number of their protobuf type, and name of the message type or
            enum; and by that of an enum its names by number. Empty for a type that is not known.
        """
        found: dict[str, Any] = {}
        left = [name]
        while left and len(found) < TYPES_MAX:
            one = left.pop()
            if one in found or one not in self._types:
                continue
            found[one] = rows = self._types[one]
            left.extend(row[2] for row in rows.values() if not isinstance(row, str) and row[2:])
        return {"root": name, "types": found} if found else {}


def _field_row(field: descriptor_pb2.FieldDescriptorProto) -> list[Any]:
    of = field.type_name.removeprefix(".")
    return [field.name, field.type, *([of] if of else [])]


# ------------------------------------------------------------------ calls


class Refusal(NamedTuple):
    """Answer of another server in place of a journal's spec."""

    status: int
    text: str


Masking = Callable[[int], MaskedContent]
"""Makes the masked form of the content that begins at an offset."""


class JournalSource(Protocol):
    """Journals that a console reads, with the rights of its callers."""

    async def find(self, journal: str, request: web.BaseRequest) -> pb.JournalSpec | Refusal | None:
        """Return the spec of a journal; None if there is none that the caller may read.

        Args:
            journal: the name, without metadata.
            request: has the caller's token.

        Raises:
            UnauthenticatedError: the token does not allow it.
        """

    async def read(
        self, request: web.BaseRequest, target: Target, masking: Masking | None
    ) -> web.StreamResponse:
        """Answer a read of a journal.

        Args:
            request: the request.
            target: the URL of the journal.
            masking: makes the body of the content; None for the content itself.
        """


class ConsoleContent:
    """Masks and message types of a console, and the calls that use them.

    Args:
        masks: the masks.
        types: message types.
    """

    def __init__(self, masks: Masks | None = None, types: MessageTypes | None = None) -> None:
        self.masks = masks or Masks()
        self.types = types or MessageTypes()

    @classmethod
    def of(cls, masks: Iterable[str], descriptors: str) -> ConsoleContent:
        """Return the content of options.

        Args:
            masks: the masks as they were given.
            descriptors: path of a descriptor set; empty for none.

        Raises:
            ConfigurationError: one of them cannot be used.
        """
        types = MessageTypes.load(descriptors) if descriptors else None
        return cls(Masks.parse(masks), types)

    @property
    def features(self) -> str:
        """Calls that the page should make, as words."""
        words = (("masks", self.masks), ("types", self.types))
        return " ".join(word for word, has_it in words if has_it)

    async def answer(
        self, request: web.BaseRequest, call: str, query: str, source: JournalSource
    ) -> web.StreamResponse:
        """Answer a call.

        Args:
            request: the request.
            call: ``read`` or ``types``.
            query: its query.
            source: the journals.

        Raises:
            GazetteError: the caller may not read the journal, or the call failed.
        """
        values = dict(parse_qsl(query, keep_blank_values=True))
        journal = values.pop("journal", "")
        if not journal:
            return text_error(400, "the query has no journal: add journal=NAME")
        found = await source.find(strip_meta(journal), request)
        if isinstance(found, Refusal):
            return text_error(found.status, found.text)
        if call == "types":
            name = "" if found is None else value_of(found.labels, MESSAGE_TYPE)
            body = orjson.dumps(self.types.table(name))
            headers = {"Content-Type": "application/json", **CONTENT_HEADERS}
            return web.Response(body=body, headers=headers)
        target = Target(f"/{journal}", urlencode(values))
        paths = self.masks.of(found)
        masking = partial(MaskedContent, found, paths) if paths else None
        return await source.read(request, target, masking)
