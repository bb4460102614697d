"""Laws of recorder and player: what is recorded is restored, at every boundary of appends."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.fsm import FSM
from gazette_sdk.shard.recovery.hints import (
    CreateFile,
    FileChange,
    RemoveFile,
    RenameFile,
    SetProperty,
    WriteFile,
    from_bytes,
    to_json,
)
from gazette_sdk.shard.recovery.log import frame_operation
from gazette_sdk.shard.recovery.recorder import Recorder
from support.recovery_logs import files_of, play

LOG = "a/log"
PATHS = ("/a", "/b", "/dir/c", "/dir/deep/d")
PROPERTIES = ("/IDENTITY", "/P")


@dataclass
class Directory:
    """Model of a store's directory."""

    files: dict[str, bytes] = field(default_factory=dict)
    properties: dict[str, bytes] = field(default_factory=dict)

    def perform(self, change: FileChange) -> bool:
        """Perform a change; False if it does not fit."""
        match change:
            case CreateFile(path, content):
                self.files[path] = content
            case WriteFile(path, offset, content):
                if path not in self.files:
                    return False
                if content:
                    held = self.files[path].ljust(offset, b"\0")
                    self.files[path] = held[:offset] + content + held[offset + len(content) :]
            case RenameFile(source, target):
                if source not in self.files:
                    return False
                self.files[target] = self.files.pop(source)
            case RemoveFile(path):
                if self.files.pop(path, None) is None:
                    return False
            case SetProperty(path, text):
                self.properties[path] = text.encode()
        return True

    def all(self) -> dict[str, bytes]:
        return {**self.files, **self.properties}


paths = st.sampled_from(PATHS)
contents = st.binary(max_size=40)
changes = st.one_of(
    st.builds(CreateFile, paths, contents),
    st.builds(WriteFile, paths, st.integers(0, 60), contents),
    st.builds(RenameFile, paths, paths),
    st.builds(RemoveFile, paths),
    st.builds(SetProperty, st.sampled_from(PROPERTIES), st.text(max_size=5)),
)
commits = st.lists(changes, max_size=6)
events = st.lists(
    st.one_of(
        commits,
        st.sampled_from(["junk", "hints", "repeat", "take over", "zombie"]),
    ),
    max_size=14,
)


@dataclass
class Boundary:
    """State of log and directory behind an append."""

    end: int
    files: dict[str, bytes]


class History:
    """A log that a recorder writes, with garbage, repeated appends, and losers of races."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.log = b""
        self.recorder = Recorder(FSM(pb.FSMHints(log=LOG)), log=LOG, author=100, write_head=0)
        self.boundaries = [Boundary(0, {})]
        self.hints: list[tuple[int, pb.FSMHints]] = []
        self.last_append = b""
        self._author = 100

    def commit(self, drawn: list[FileChange]) -> None:
        fitting = [change for change in drawn if self.directory.perform(change)]
        for content in self.recorder.record(fitting):
            self.last_append = content
            self.log += content
        self.recorder.appended(len(self.log))
        self.boundaries.append(Boundary(len(self.log), self.directory.all()))

    def happen(self, event: str) -> None:
        if event == "junk":
            self.log += b"garbage f3\x93"
        elif event == "repeat":
            self.log += self.last_append
        elif event == "hints":
            hints = self.recorder.hints()
            self.hints.append((len(self.log), from_bytes(to_json(hints))))
        elif event == "take over":
            self._take_over()
        else:
            stale = self.recorder.fsm.next_seq_no
            loser = pb.RecordedOp(seq_no=stale, author=666, checksum=0xBAD)
            loser.create.path = "/loser"
            self.log += frame_operation(loser)
        self.boundaries.append(Boundary(len(self.log), self.directory.all()))

    def _take_over(self) -> None:
        """Restore by another process, which goes on in a new directory."""
        self._author += 1
        with tempfile.TemporaryDirectory() as name:
            played = play({LOG: self.log}, pb.FSMHints(log=LOG), Path(name) / "store")
        fsm = played.fsm
        own = pb.RecordedOp(seq_no=fsm.next_seq_no, checksum=fsm.next_checksum, author=self._author)
        frame = frame_operation(own)
        fsm.apply(
            own,
            frame[8:],
            log=LOG,
            first_offset=len(self.log),
            last_offset=len(self.log) + len(frame),
        )
        self.log += frame
        self.recorder = Recorder(fsm, log=LOG, author=self._author, write_head=len(self.log))


@settings(max_examples=100, deadline=None)
@given(events, st.sampled_from([11, 100, 1 << 20]))
def test_every_cut_at_an_append_restores_the_directory(
    drawn: list[list[FileChange] | str], piece_bytes: int
) -> None:
    history = History()
    history.commit([CreateFile("/first", b"begins the history")])
    for event in drawn:
        if isinstance(event, str):
            history.happen(event)
        else:
            history.commit(event)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "store"
        for boundary in history.boundaries:
            log = history.log[: boundary.end]
            if not log:
                continue
            player = play({LOG: log}, pb.FSMHints(log=LOG), directory, piece_bytes=piece_bytes)
            assert files_of(directory) == boundary.files
            exact = from_bytes(to_json(player.fsm.hints(LOG)))
            known = [hints for at, hints in history.hints if at <= boundary.end]
            for hints in (*known[-1:], exact):
                again = play({LOG: log}, hints, directory, piece_bytes=piece_bytes)
                assert files_of(directory) == boundary.files
                assert again.fsm.hints(LOG) == exact
