"""Recovery logs for tests: operations built by hand, and recordings of real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict

from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.hints import Segment
from gazette_sdk.shard.recovery.log import HEADER_BYTES, decode_operation
from gazette_sdk.shard.recovery.player import Player, StagedFiles
from support.vectors import GOLDEN

RECORDINGS = GOLDEN / "consumer" / "recoverylog"
NAMES = sorted(path.name.removesuffix(".log.bin") for path in RECORDINGS.glob("*.log.bin"))


@dataclass(frozen=True)
class FoundOperation:
    """An operation of a log's content, with where it stands."""

    operation: pb.RecordedOp
    message: bytes
    begin: int
    end: int
    payload: bytes


@cache
def recording(name: str) -> dict[str, Any]:
    """A recording's description."""
    return dict(json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8")))


def content(name: str) -> bytes:
    """A recording's whole log."""
    return (RECORDINGS / f"{name}.log.bin").read_bytes()


def operations(log: bytes, begin: int = 0) -> list[FoundOperation]:
    """The operations of a log without garbage, found by hand."""
    found = []
    at = 0
    while at < len(log):
        assert log[at : at + 4] == b"\x66\x33\x93\x36", at
        end = at + HEADER_BYTES + int.from_bytes(log[at + 4 : at + 8], "little")
        message = log[at + HEADER_BYTES : end]
        operation = decode_operation(message)
        payload = log[end : end + operation.write.length]
        next_at = end + len(payload)
        found.append(FoundOperation(operation, message, begin + at, begin + next_at, payload))
        at = next_at
    return found


def hints(value: dict[str, Any]) -> pb.FSMHints:
    """Hints of a vector or recording."""
    return ParseDict({k: v for k, v in value.items() if v is not None}, pb.FSMHints())


def segment(value: dict[str, Any]) -> Segment:
    """A segment of a vector; absent fields are zero."""
    return Segment(
        **{name: value.get(name, 0) for name in Segment.__slots__ if name != "log"},
        log=value.get("log", ""),
    )


def play(
    logs: Mapping[str, bytes],
    given: pb.FSMHints,
    directory: Path,
    *,
    piece_bytes: int = 1 << 20,
    begin: int = 0,
) -> Player:
    """Restore a directory from the whole content of logs, as the shell does, without a broker.

    Args:
        logs: content by journal.
        given: hints.
        directory: of the store.
        piece_bytes: content is fed in pieces of this length.
        begin: all content before this offset of the hints' log is gone.
    """
    player = Player(given, {log: len(held) for log, held in logs.items()})
    files = StagedFiles(directory)
    files.begin()
    try:
        while not player.is_done:
            at = player.next_offset
            if player.log == given.log and at < begin:
                player.jumped(begin)
                continue
            piece = logs[player.log][at : at + piece_bytes]
            if piece:
                files.apply(player.feed(piece))
            else:
                player.head()
                player.finish()
        files.make_live(player.fsm)
    finally:
        files.close()
    return player


def files_of(directory: Path) -> dict[str, bytes]:
    """All files below a directory, by their recorded paths."""
    return {
        "/" + str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
