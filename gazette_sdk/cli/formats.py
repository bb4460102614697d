"""Output formats: tables for people, JSON and protobuf text for programs (cli 4.1).

Also the YAML documents that a command line names (a file, or standard input), and progress bars on
a terminal.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

import orjson
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of, is_zero_sum
from gazette_sdk.protocol.rules import complete, json_fields

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


T = TypeVar("T")


def load(path: str, parse: Callable[[bytes], T]) -> T:
    """Return what a document describes.

    Args:
        path: of the file; ``-`` for standard input.
        parse: makes it of the document's text.

    Raises:
        ConfigurationError: the document is malformed. The text begins with the file's name.
        OSError: the file cannot be read.
    """
    text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return parse(text)
    except ValidationError as error:
        name = "standard input" if path == "-" else path
        raise ConfigurationError(f"{name}: {error}") from error


MessageT = TypeVar("MessageT", bound=Message)

NONE = "<none>"
"""Cell of a table without a value."""

TABLE_WIDTH_MAX = 1 << 20
"""Rows are never wrapped or cut to the terminal's width, because scripts read them."""


def write_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], file: TextIO | None = None
) -> None:
    """Write a table, each row on one line: with borders on a terminal, else plain columns.

    Args:
        headers: of the columns; written in upper case.
        rows: cells of each row.
        file: output file; by default standard output.
    """
    file = file or sys.stdout
    headers = [header.upper() for header in headers]
    if file.isatty():
        _write_bordered(headers, rows, file)
    else:
        _write_columns([headers, *rows], file)


def _write_columns(rows: Sequence[Sequence[str]], file: TextIO) -> None:
    """Write cells in columns with two blanks between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(map(str.ljust, row, widths))
        file.write(f"{line.rstrip()}\n")


def _write_bordered(headers: Sequence[str], rows: Iterable[Sequence[str]], file: TextIO) -> None:
    from rich.box import SQUARE  # noqa: PLC0415 - only terminals need rich
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    table = Table(box=SQUARE)
    for header in headers:
        table.add_column(Text(header), no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=file, width=TABLE_WIDTH_MAX).print(table)


def proto_text(message: Message) -> str:
    """Return the protobuf text of a message, one field per line."""
    return str(text_format.MessageToString(message, as_utf8=True))


def listing_text(
    listing: MessageT, form: Literal["yaml", "json", "proto"], to_yaml: Callable[[MessageT], str]
) -> str:
    """Return a listing for programs.

    Args:
        listing: the listing.
        form: the format.
        to_yaml: returns the listing as YAML.
    """
    match form:
        case "yaml":
            return to_yaml(listing)
        case "json":
            return message_json(complete(listing)).decode() + "\n"
        case "proto":
            return proto_text(listing)


def message_json(message: Message) -> bytes:
    """Return a message as one line of JSON, by the proto3 mapping.

    All fields are written, under their original names: 64-bit integers as strings, enums by
    name, absent messages as ``null``.
    """
    return orjson.dumps(_message(message))


def _message(message: Message) -> dict[str, Any]:
    return {field.name: _field(message, field) for field in json_fields(message)}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value(field, item) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _value(field, value)


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Duration):
        return value.ToJsonString()
    if isinstance(value, Message):
        return _message(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode() if value else None
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    if field.cpp_type in {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}:
        return str(value)
    return value


def fragment_json(fragment: pb.FragmentsResponse._Fragment) -> bytes:
    """Return a listed fragment as one line of JSON, with plain numbers and without zero values.

    ``sha1`` is the sum of its content in hexadecimal. The parts of ``spec.sum`` have 64 bits, which
    many readers of JSON round.
    """
    spec = fragment.spec
    found = {
        "journal": spec.journal,
        "begin": spec.begin,
        "end": spec.end,
        "sum": _nonzero(
            {"part1": spec.sum.part1, "part2": spec.sum.part2, "part3": spec.sum.part3}
        ),
        "compression_codec": spec.compression_codec,
        "backing_store": spec.backing_store,
        "mod_time": spec.mod_time,
        "path_postfix": spec.path_postfix,
    }
    found = {name: value for name, value in found.items() if value or name == "sum"}
    sha1 = "" if is_zero_sum(spec.sum) else digest_of(spec.sum).hex()
    return orjson.dumps(_nonzero({"spec": found, "signed_url": fragment.signed_url, "sha1": sha1}))


def _nonzero(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def iec_bytes(count: int) -> str:
    """Return a number of bytes in binary units, such as ``1.1 KiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):  # noqa: B007 - the last one is used
        size /= 1024
        if round(size, 1) < 1024:
            break
    return f"{size:.1f} {unit}" if round(size, 1) < 10 else f"{size:.0f} {unit}"


_SPANS = (
    (1, "second"),
    (60, "minute"),
    (3600, "hour"),
    (86400, "day"),
    (7 * 86400, "week"),
    (30 * 86400, "month"),
    (365 * 86400, "year"),
)


def age(unix_s: int, now_s: float | None = None) -> str:
    """Return the age of a time in words, such as ``3 years ago``."""
    elapsed_s = (time.time() if now_s is None else now_s) - unix_s
    if elapsed_s < 1:
        return "now"
    size_s, name = next(span for span in reversed(_SPANS) if span[0] <= elapsed_s)
    count = int(elapsed_s // size_s)
    return f"{count} {name}{'' if count == 1 else 's'} ago"


class Progress:
    """Steps of a command, each with a bar.

    Args:
        bars: where the bars are drawn; ``None`` shows nothing.
    """

    def __init__(self, bars: Bars | None = None) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._total: int | None = None

    def begin(self, step: str, total: int | None = None) -> None:
        """Show the next step, and the one before as complete.

        Args:
            step: short description.
            total: number of units; ``None`` if it is unknown.
        """
        if self._bars is None:
            return
        if self._task is not None:
            end = self._total or 1
            self._bars.update(self._task, total=end, completed=end)
        self._task, self._total = self._bars.add_task(step, total=total), total

    def advance(self, done: int, total: int | None = None) -> None:
        """Show that ``done`` units of the step are complete; ``total`` replaces its total."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=done, total=total)


@contextmanager
def open_progress(
    unit: Literal["bytes", "messages"], *, is_shown: bool = True
) -> Iterator[Progress]:
    """Draw bars on standard error until the context ends, if that is a terminal.

    Args:
        unit: unit of the bars.
        is_shown: False if the command's own output goes to the same terminal.
    """
    if not is_shown or not sys.stderr.isatty():
        yield Progress()
        return
    from rich import progress as rich  # noqa: PLC0415 - only terminals need it
    from rich.console import Console  # noqa: PLC0415 - as above

    description = rich.TextColumn("{task.description}")
    columns: tuple[rich.ProgressColumn, ...] = (
        *(rich.SpinnerColumn(finished_text="✓"), description, rich.BarColumn()),
        *(rich.MofNCompleteColumn(), rich.TimeElapsedColumn()),
    )
    if unit == "bytes":
        columns = (
            *(description, rich.BarColumn(), rich.DownloadColumn(binary_units=True)),
            *(rich.TransferSpeedColumn(), rich.TimeRemainingColumn()),
        )
    # More than four refreshes per second would disturb what `gazette bench` measures.
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=True, refresh_per_second=4) as bars:
        yield Progress(bars)
