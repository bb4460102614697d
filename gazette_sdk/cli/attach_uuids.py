"""``gazctl attach-uuids`` (cli section 9)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.settings import ATTACH_UUIDS
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.uuid import OUTSIDE_TXN, Stamp, new_producer_id

BLOCK_BYTES = 1 << 20
"""Size of one read of a file."""

_FIELD = re.compile(r"(\{\{.*?(?:\}\}|\Z))", re.DOTALL)


class Template:
    """Text with fields for a UUID and a line.

    Args:
        text: literal text with ``{{.UUID}}`` and ``{{.Line}}``; blanks within braces are fine.

    Raises:
        ConfigurationError: a field has another name, or no end.
    """

    def __init__(self, text: str) -> None:
        # Literal texts and names of fields alternate. The command line need not be UTF-8.
        parts = _FIELD.split(text)
        self._literals = [part.encode(errors="surrogateescape") for part in parts[::2]]
        self._is_uuid = [self._field(part) == ".UUID" for part in parts[1::2]]

    def _field(self, part: str) -> str:
        name = part[2:-2].strip()
        if name not in {".UUID", ".Line"} or not part.endswith("}}"):
            raise ConfigurationError(
                f"--template: {part!r} is neither {{{{.UUID}}}} nor {{{{.Line}}}}"
            )
        return name

    def render(self, uuid: bytes, line: bytes) -> bytes:
        """Return the text of one line."""
        rendered = self._literals[0]
        for is_uuid, literal in zip(self._is_uuid, self._literals[1:], strict=True):
            rendered += (uuid if is_uuid else line) + literal
        return rendered


def run(invocation: Invocation) -> None:
    """Write each line of the files, or of standard input, with a fresh UUID."""
    settings = invocation.settings(ATTACH_UUIDS)
    template = Template(settings.template)
    stamp = Stamp(new_producer_id())
    stamp.flags = OUTSIDE_TXN
    with ExitStack() as opened:
        files: list[tuple[str, BinaryIO]] = [
            (name, opened.enter_context(Path(name).open("rb", buffering=0)))
            for name in invocation.arguments
        ] or [("standard input", opened.enter_context(_standard_input()))]
        for name, file in files:
            is_header = settings.skip_header
            for lines in lines_of(file, name, settings.max_length):
                written = bytearray()
                for line in lines[1:] if is_header else lines:
                    stamp.tick_now()
                    written += template.render(stamp.text(), line)
                is_header = False
                sys.stdout.buffer.write(written)
                sys.stdout.buffer.flush()


def _standard_input() -> BinaryIO:
    return cast("BinaryIO", open(sys.stdin.fileno(), "rb", buffering=0, closefd=False))


def lines_of(file: BinaryIO, name: str, max_length: int) -> Iterator[list[bytes]]:
    """Yield lists of the lines of a file, without their terminators; never an empty list.

    Args:
        file: an unbuffered file.
        name: name of the file in errors.
        max_length: greatest length of a line, without its terminator.

    Raises:
        CommandFailedError: a line is longer. The lines before it were yielded.
    """
    rest, number = b"", 0
    while block := file.read(BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        found = [line.removesuffix(b"\r") for line in lines]
        fitting = _count_fitting(found, max_length)
        if fitting:
            yield found[:fitting]
        number += fitting
        # The rest may end in a carriage return, which does not count.
        if fitting < len(found) or len(rest) > max_length + 1:
            raise _too_long(name, number, max_length)
    if rest:
        last = rest.removesuffix(b"\r")
        if len(last) > max_length:
            raise _too_long(name, number, max_length)
        yield [last]


def _count_fitting(lines: list[bytes], max_length: int) -> int:
    """Return the number of lines before the first one that is too long."""
    if not lines or max(map(len, lines)) <= max_length:
        return len(lines)
    return next(index for index, line in enumerate(lines) if len(line) > max_length)


def _too_long(name: str, before: int, max_length: int) -> CommandFailedError:
    return CommandFailedError(
        f"{name}: line {before + 1} is longer than {max_length} bytes; raise --max-length"
    )
