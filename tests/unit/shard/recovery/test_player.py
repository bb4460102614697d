"""The player: content of logs becomes files."""

from __future__ import annotations

import base64
import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from gazette_sdk.errors import DecodeError, GazetteError, RecoveryError, ValidationError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.fsm import FILE_HOLES_BYTES_MAX, FSM
from gazette_sdk.shard.recovery.hints import (
    CreateFile,
    FileChange,
    RemoveFile,
    SetProperty,
    WriteFile,
    from_bytes,
)
from gazette_sdk.shard.recovery.log import HEADER_BYTES, crc32c, frame_operation
from gazette_sdk.shard.recovery.player import (
    CreateNode,
    Player,
    PlayerState,
    RemoveNode,
    WriteNode,
    logs_of,
)
from gazette_sdk.shard.recovery.recorder import Recorder
from support.recovery_logs import NAMES, content, files_of, hints, play, recording

LOG = "a/log"
BRANCHES = recording("branches")
BRANCH_LOGS = {
    name: base64.b64decode(value["bytes_b64"]) for name, value in BRANCHES["logs"].items()
}


def empty() -> pb.FSMHints:
    return pb.FSMHints(log=LOG)


def record(*changes: FileChange, author: int = 7, fsm: FSM | None = None) -> bytes:
    recorder = Recorder(fsm or FSM(empty()), log=LOG, author=author, write_head=0)
    return b"".join(recorder.record(changes))


def tailing(log: bytes = b"", given: pb.FSMHints | None = None) -> Player:
    player = Player(given or empty(), {LOG: len(log)})
    player.feed(log)
    player.head()
    assert player.state is PlayerState.TAIL
    return player


# ------------------------------------------------------------------ recordings


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 1 << 20])
@pytest.mark.parametrize("name", NAMES)
def test_recorded_logs_are_restored(name: str, piece_bytes: int, tmp_path: Path) -> None:
    described = recording(name)
    if piece_bytes == 1 and described["length"] > 10_000:
        piece_bytes = 97  # to the same end
    for case in described["played"].values():
        directory = tmp_path / "store"
        logs = {described["log"]: content(name)}
        given = pb.FSMHints(log=described["log"])
        player = play(logs, given, directory, piece_bytes=piece_bytes)
        restored = files_of(directory)
        assert {path: hashlib.sha256(held).hexdigest() for path, held in restored.items()} == {
            each["path"]: each["sha256"] for each in described["recovered_files"]
        }
        assert player.fsm.hints(described["log"]) == hints(case["hints"])


@pytest.mark.parametrize("name", NAMES)
def test_recorded_logs_are_restored_from_every_recorded_hint(name: str, tmp_path: Path) -> None:
    described = recording(name)
    from_none = pb.FSMHints(log=described["log"])
    play({described["log"]: content(name)}, from_none, tmp_path / "none")
    files = files_of(tmp_path / "none")
    values = {value["value"] for mark in described["marks"] for value in mark["hints"].values()}
    for value in values:
        given = from_bytes(value.encode())
        player = play({described["log"]: content(name)}, given, tmp_path / "hinted")
        assert files_of(tmp_path / "hinted") == files
        assert player.fsm.hints(described["log"]) == hints(described["played"]["none"]["hints"])


@pytest.mark.parametrize("case", BRANCHES["cases"], ids=lambda case: case["name"])
def test_branches_are_played_as_recorded(case: dict[str, Any], tmp_path: Path) -> None:
    given = hints(case["hints"])
    result = case["result"]
    if "error" in result:
        begin = result["error"].split(": ")[-1].split(", vs hinted")[0]
        with pytest.raises((RecoveryError, ValidationError)) as caught:
            play(BRANCH_LOGS, given, tmp_path / "store")
        assert begin in str(caught.value)
        return
    player = play(BRANCH_LOGS, given, tmp_path / "store")
    assert files_of(tmp_path / "store") == {
        path: base64.b64decode(held) for path, held in case["files_b64"].items()
    }
    fsm = player.fsm
    assert fsm.hints(given.log) == hints(result["hints"])
    assert (fsm.next_seq_no, fsm.next_checksum) == (result["next_seq_no"], result["next_checksum"])
    assert (fsm.links, fsm.properties, fsm.last_log) == (
        result["links"],
        result["properties"],
        result["last_log"],
    )


# -------------------------------------------------------------------- vectors


def test_writes_of_hinted_files_are_re_enacted_and_others_skipped() -> None:
    segments = [pb.Segment(author=1234, first_seq_no=42, last_seq_no=45)]
    late = [pb.Segment(author=1234, first_seq_no=44, last_seq_no=44)]
    given = pb.FSMHints(
        log=LOG,
        live_nodes=[
            pb.FnodeSegments(fnode=42, segments=segments),
            pb.FnodeSegments(fnode=44, segments=late),
        ],
    )
    fsm = FSM(pb.FSMHints(log=LOG))
    fsm.next_seq_no = 42
    late[0].first_checksum = 0
    recorder = Recorder(fsm, log=LOG, author=1234, write_head=0)
    log = b"".join(
        recorder.record(
            [
                CreateFile("/a/path"),
                CreateFile("/skipped/path"),
            ]
        )
    )
    given.live_nodes[1].segments[0].first_checksum = fsm.next_checksum
    log += b"".join(
        recorder.record(
            [
                CreateFile("/other/path"),
                WriteFile("/a/path", 5, b"over-write"),
                WriteFile("/a/path", 0, b"abcde"),
                WriteFile("/skipped/path", 0, b"skipped"),
                WriteFile("/a/path", 15, b"short"),
                RemoveFile("/skipped/path"),
            ]
        )
    )
    player = Player(given, {LOG: len(log)})
    assert player.feed(log) == [
        CreateNode(42),
        CreateNode(44),
        WriteNode(42, 5, b"over-write"),
        WriteNode(42, 0, b"abcde"),
        WriteNode(42, 15, b"short"),
    ]
    assert player.next_offset == len(log)
    player.head()
    player.finish()
    assert sorted(player.fsm.live_nodes) == [42, 44]


def test_bytes_that_are_no_frame_are_passed_over() -> None:
    log = record(CreateFile("/a/path"))
    junk = b"... invalid data ..."
    player = Player(empty(), {LOG: 1000})
    player.feed(log)
    player.feed(junk)
    fsm = player.fsm
    more = record(WriteFile("/a/path", 0, b"foobar"), fsm=_copy(log))
    assert player.feed(more)[-1] == WriteNode(1, 0, b"foobar")
    assert fsm.live_nodes[1].segments[0].last_offset == len(log) + len(junk) + len(more)


def _copy(log: bytes) -> FSM:
    player = Player(empty(), {LOG: len(log)})
    player.feed(log)
    return player.fsm


def test_hints_behind_the_write_head_are_refused() -> None:
    one = pb.Segment(author=123, first_seq_no=1, last_seq_no=1, first_offset=100)
    given = pb.FSMHints(log=LOG, live_nodes=[pb.FnodeSegments(fnode=1, segments=[one])])
    with pytest.raises(RecoveryError, match=r"max write-head of a/log is 0, vs .*data loss"):
        Player(given, {LOG: 0})
    one.first_offset, one.last_offset = 10, 60
    given = pb.FSMHints(log=LOG, live_nodes=[pb.FnodeSegments(fnode=1, segments=[one])])
    with pytest.raises(RecoveryError, match="max write-head of a/log is 50, vs "):
        Player(given, {LOG: 50})


def test_hints_of_operations_that_were_never_recorded_are_an_error() -> None:
    one = pb.Segment(author=123, first_seq_no=1, last_seq_no=1, first_offset=10)
    given = pb.FSMHints(log=LOG, live_nodes=[pb.FnodeSegments(fnode=1, segments=[one])])
    log = record(CreateFile("/a", b"x" * 100))
    player = Player(given, {LOG: len(log)})
    with pytest.raises(RecoveryError, match=r"offset a/log:\d+ >= readThrough \d+, but FSM has"):
        player.feed(log[10:])
    assert player.state is PlayerState.FAILED


def test_hints_name_all_logs_once() -> None:
    given = hints(next(c for c in BRANCHES["cases"] if "forked" in c["name"])["hints"])
    assert logs_of(given) == ["gold/logs/fork-1", "gold/logs/branches-1"]


# ------------------------------------------------------------- state machine


INPUTS = ("head", "operation", "own applied", "own lost", "finish", "inject", "jump")

NEXT: dict[tuple[PlayerState, str], PlayerState] = {
    (PlayerState.BACKFILL, "head"): PlayerState.TAIL,
    (PlayerState.BACKFILL, "operation"): PlayerState.BACKFILL,
    (PlayerState.BACKFILL, "jump"): PlayerState.BACKFILL,
    (PlayerState.TAIL, "head"): PlayerState.TAIL,
    (PlayerState.TAIL, "operation"): PlayerState.TAIL,
    (PlayerState.TAIL, "own applied"): PlayerState.LIVE,
    (PlayerState.TAIL, "own lost"): PlayerState.TAIL,
    (PlayerState.TAIL, "finish"): PlayerState.LIVE,
    (PlayerState.TAIL, "inject"): PlayerState.INJECTED,
    (PlayerState.TAIL, "jump"): PlayerState.TAIL,
    (PlayerState.INJECTED, "head"): PlayerState.TAIL,
    (PlayerState.INJECTED, "operation"): PlayerState.INJECTED,
    (PlayerState.INJECTED, "own applied"): PlayerState.LIVE,
    (PlayerState.INJECTED, "own lost"): PlayerState.TAIL,
    (PlayerState.INJECTED, "jump"): PlayerState.INJECTED,
    (PlayerState.LIVE, "operation"): PlayerState.LIVE,
    (PlayerState.LIVE, "own applied"): PlayerState.LIVE,
    (PlayerState.LIVE, "own lost"): PlayerState.LIVE,
}
"""Every other pair is a bug of the caller, except after a failure, which is raised again."""


def in_state(state: PlayerState) -> Player:
    log = record(CreateFile("/a", b"x"))
    player = Player(empty(), {LOG: len(log)})
    player.feed(log)
    if state is PlayerState.BACKFILL:
        return player
    player.head()
    if state is PlayerState.FAILED:
        player.feed(frame_operation(pb.RecordedOp(seq_no=99, author=5))[:12])
        with pytest.raises(RecoveryError):
            player.finish()
        return player
    player.inject(99)
    if state is PlayerState.TAIL:
        player.head()
    elif state is PlayerState.LIVE:
        perform(player, "own applied")
    return player


def perform(player: Player, given: str) -> None:
    operation = pb.RecordedOp(seq_no=player.fsm.next_seq_no, checksum=player.fsm.next_checksum)
    if given == "head":
        player.head()
    elif given == "finish":
        player.finish()
    elif given == "inject":
        player.inject(99)
    elif given == "jump":
        player.jumped(player.next_offset + 10)
    elif given == "operation":
        operation.author = 7
        player.feed(frame_operation(operation))
    else:
        operation.author = 99
        operation.seq_no -= given == "own lost"
        player.feed(frame_operation(operation))


@pytest.mark.parametrize(("state", "given"), list(itertools.product(PlayerState, INPUTS)))
def test_every_state_takes_every_input_as_the_table_says(state: PlayerState, given: str) -> None:
    player = in_state(state)
    assert player.state is state
    if state is PlayerState.FAILED:
        with pytest.raises(RecoveryError):
            perform(player, given)
        assert player.state is PlayerState.FAILED
    elif (state, given) in NEXT:
        perform(player, given)
        assert player.state is NEXT[state, given]
    elif state is PlayerState.BACKFILL and given.startswith("own"):
        perform(player, given)  # nothing was injected: an author like any other
        assert player.state is PlayerState.BACKFILL
    else:
        with pytest.raises(AssertionError):
            perform(player, given)


def test_nothing_behind_the_own_operation_is_played() -> None:
    player = tailing(record(CreateFile("/a", b"x")))
    own = player.inject(99)
    player.injected(1000)
    assert player.read_through[LOG] == 1000
    zombie = frame_operation(pb.RecordedOp(seq_no=3, author=7, checksum=player.fsm.next_checksum))
    offset = player.next_offset
    player.feed(own + zombie)
    assert player.is_done
    assert player.offset == offset + len(own)
    assert player.fsm.next_seq_no == 4


def test_a_lost_race_is_run_again_behind_the_winner() -> None:
    log = record(CreateFile("/a", b"x"))
    player = tailing(log)
    own = player.inject(99)
    winner = frame_operation(
        pb.RecordedOp(seq_no=player.fsm.next_seq_no, checksum=player.fsm.next_checksum, author=55)
    )
    player.feed(winner + own)
    assert player.state is PlayerState.TAIL
    player.head()
    player.feed(player.inject(99))
    assert player.is_done
    assert player.fsm.next_seq_no == 5


def test_content_without_a_history_is_no_empty_store() -> None:
    log = frame_operation(pb.RecordedOp(seq_no=50, author=7, checksum=3))
    player = Player(empty(), {LOG: len(log)})
    player.feed(log)
    with pytest.raises(RecoveryError, match="restore the hints"):
        player.head()


def test_an_empty_log_is_an_empty_store() -> None:
    player = tailing()
    player.feed(player.inject(1))
    assert player.is_done
    assert player.fsm.next_seq_no == 2


def test_a_log_that_ends_inside_an_operation_is_not_complete() -> None:
    log = record(CreateFile("/a", b"0123456789"))
    for cut in (1, 9, 10, 20):
        player = Player(empty(), {LOG: len(log) - cut})
        player.feed(log[: len(log) - cut])
        player.head()
        with pytest.raises(RecoveryError, match="inside an operation"):
            player.finish()


def test_a_few_bytes_that_begin_no_frame_do_not_matter() -> None:
    log = record(CreateFile("/a"))
    for junk in (b"\n", b"f", b"junk", b"f3\x93"):
        player = tailing(log + junk)
        player.feed(player.inject(99))
        assert player.is_done


def test_a_header_of_an_impossible_length_is_no_frame() -> None:
    log = record(CreateFile("/a"))
    player = tailing(log + b"\x66\x33\x93\x36\xff\xff\xff\xff")
    player.finish()
    assert player.is_done


def test_a_frame_that_is_no_operation_is_an_error() -> None:
    player = Player(empty(), {LOG: 100})
    with pytest.raises(DecodeError):
        player.feed(b"\x66\x33\x93\x36\x03\x00\x00\x00\xff\xff\xff")


@pytest.mark.parametrize(
    "write",
    [
        pb.RecordedOp.Write(fnode=1, offset=0, length=-1),
        pb.RecordedOp.Write(fnode=1, offset=-1, length=1),
    ],
)
def test_a_write_of_negative_numbers_is_an_error(write: pb.RecordedOp.Write) -> None:
    player = tailing(record(CreateFile("/a")))
    with pytest.raises(RecoveryError, match="malformed"):
        player.feed(frame_operation(pb.RecordedOp(seq_no=2, author=7, write=write)))


def test_a_file_without_links_is_removed() -> None:
    log = record(CreateFile("/a", b"x"), RemoveFile("/a"), SetProperty("/P", "p"))
    player = Player(empty(), {LOG: len(log)})
    assert player.feed(log)[-1] == RemoveNode(1)
    assert player.fsm.properties == {"/P": "p"}


# ---------------------------------------------------------------- missing content


def test_missing_content_that_hints_do_not_need_is_passed_over(tmp_path: Path) -> None:
    fsm = FSM(empty())
    recorder = Recorder(fsm, log=LOG, author=7, write_head=0)
    gone = b"".join(recorder.record([CreateFile("/gone", b"x" * 500), RemoveFile("/gone")]))
    recorder.appended(200)  # a lower bound
    kept = b"".join(recorder.record([CreateFile("/kept", b"kept")]))
    recorder.appended(len(gone) + len(kept))
    play({LOG: gone + kept}, recorder.hints(), tmp_path / "store", begin=len(gone))
    assert files_of(tmp_path / "store") == {"/kept": b"kept"}


def test_missing_content_that_hints_name_is_an_error(tmp_path: Path) -> None:
    log = record(CreateFile("/a", b"x" * 500))
    player = Player(empty(), {LOG: len(log)})
    player.feed(log)
    exact = player.fsm.hints(LOG)
    with pytest.raises(RecoveryError, match="over hinted"):
        play({LOG: log + log}, exact, tmp_path / "store", begin=len(log))


def test_missing_content_behind_the_hints_is_an_error_if_operations_are_missing() -> None:
    fsm = FSM(empty())
    recorder = Recorder(fsm, log=LOG, author=7, write_head=0)
    first, lost, last = (
        b"".join(recorder.record([CreateFile(path, b"x")])) for path in ("/1", "/2", "/3")
    )
    player = Player(empty(), {LOG: 1000})
    player.feed(first)
    player.jumped(len(first) + len(lost))
    with pytest.raises(RecoveryError, match="is missing, and with it operation 3"):
        player.feed(last)


def test_missing_content_between_operations_does_not_matter() -> None:
    fsm = FSM(empty())
    recorder = Recorder(fsm, log=LOG, author=7, write_head=0)
    first, last = (b"".join(recorder.record([CreateFile(path)])) for path in ("/1", "/2"))
    player = Player(empty(), {LOG: 1000})
    player.feed(first)
    player.jumped(500)
    player.feed(last)
    assert player.fsm.links == {"/1": 1, "/2": 2}
    player.jumped(900)
    player.feed(first)  # a copy, of old operations


def test_missing_content_inside_an_operation_is_an_error() -> None:
    log = record(CreateFile("/a", b"x" * 500))
    player = Player(empty(), {LOG: 1000})
    player.feed(log[:-10])
    with pytest.raises(RecoveryError, match="within the content"):
        player.jumped(700)


def test_missing_content_up_to_the_head_is_an_error_until_somebody_appends() -> None:
    log = record(CreateFile("/a"))
    lost = Player(empty(), {LOG: 1000})
    lost.feed(log)
    with pytest.raises(RecoveryError, match="append a line"):
        lost.missing(1000)
    assert lost.state is PlayerState.FAILED
    accepted = Player(empty(), {LOG: 1000})
    accepted.feed(log)
    accepted.jumped(999)
    accepted.feed(b"\n")
    accepted.head()
    accepted.finish()
    assert accepted.fsm.links == {"/a": 1}


# ------------------------------------------------------------------ sparse files

TIB = 1 << 40


def written_at(*offsets: int, files: int = 1) -> bytes:
    """A log of files, in each of which a byte is written at each offset."""
    operations: list[tuple[pb.RecordedOp, bytes]] = []
    checksum = 0
    sequence = itertools.count(1)
    out = bytearray()
    for number in range(files):
        fnode = next(sequence)
        create = pb.RecordedOp.Create(path=f"/file-{number}")
        operations.append((pb.RecordedOp(seq_no=fnode, create=create), b""))
        for offset in offsets:
            write = pb.RecordedOp.Write(fnode=fnode, offset=offset, length=1)
            operations.append((pb.RecordedOp(seq_no=next(sequence), write=write), b"x"))
    for operation, payload in operations:
        operation.author, operation.checksum = 7, checksum
        frame = frame_operation(operation)
        checksum = crc32c(frame[HEADER_BYTES:], checksum)
        out += frame + payload
    return bytes(out)


@pytest.mark.parametrize(
    "log",
    [
        written_at(8 * TIB),
        written_at(2**63 - 2),
        written_at(0, FILE_HOLES_BYTES_MAX + 2),
        # By many small steps, and over many files.
        written_at(*range(0, 8 * TIB, TIB // 4096)),
        written_at(FILE_HOLES_BYTES_MAX, files=17),
    ],
)
def test_a_log_that_makes_huge_sparse_files_is_refused(log: bytes, tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="a write far after the end of its file"):
        play({LOG: log}, empty(), tmp_path / "store")
    for path in (tmp_path / "store").rglob("*"):
        status = path.stat()
        assert status.st_size <= FILE_HOLES_BYTES_MAX + 3
        assert status.st_blocks * 512 <= 1 << 20


def test_the_holes_of_a_database_are_played(tmp_path: Path) -> None:
    log = written_at(4 << 20, 12 << 20, 1 << 20, files=3)
    play({LOG: log}, empty(), tmp_path / "store")
    assert {len(held) for held in files_of(tmp_path / "store").values()} == {(12 << 20) + 1}


def test_holes_of_files_that_are_gone_do_not_count(tmp_path: Path) -> None:
    fsm = FSM(empty())
    recorder = Recorder(fsm, log=LOG, author=7, write_head=0)
    for _ in range(40):
        recorder.record(
            [CreateFile("/a"), WriteFile("/a", FILE_HOLES_BYTES_MAX, b"x"), RemoveFile("/a")]
        )


@pytest.mark.parametrize("offset", [8 * TIB, 2**63 - 2, FILE_HOLES_BYTES_MAX + 2])
def test_a_huge_sparse_file_is_not_recorded(offset: int) -> None:
    recorder = Recorder(FSM(empty()), log=LOG, author=7, write_head=0)
    recorder.record([CreateFile("/a", b"a")])
    with pytest.raises(GazetteError, match="far after the end of its file"):
        recorder.record([WriteFile("/a", offset, b"x")])
