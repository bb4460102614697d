"""The recorder: changes of files become operations."""

from __future__ import annotations

from typing import Any

import pytest

from gazette_sdk.errors import FencedError, GazetteError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.fsm import FSM
from gazette_sdk.shard.recovery.hints import (
    CreateFile,
    FileChange,
    RemoveFile,
    RenameFile,
    SetProperty,
    WriteFile,
)
from gazette_sdk.shard.recovery.recorder import LARGE_FILE_BYTES, Recorder
from support.recovery_logs import content as log_content
from support.recovery_logs import hints, operations, recording
from support.vectors import group

LOG = "examples/integration-tests/recovery-log"
SCENARIOS = {
    scenario["name"]: scenario for scenario in group("message", "recorded_op")["recorder_scenarios"]
}


def new_recorder(log: str = LOG, author: int = 1234, write_head: int = 0) -> Recorder:
    return Recorder(FSM(pb.FSMHints(log=log)), log=log, author=author, write_head=write_head)


class Written:
    """A recorder, and the log that its contents make."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.log = bytearray(b"" if not recorder.opening else recorder.opening)

    def record(self, *changes: FileChange, commit: bool = False) -> list[bytes]:
        contents = self.recorder.record(changes)
        for content in contents:
            self.log += content
        if commit:
            self.recorder.appended(len(self.log))
        return contents


# Changes of files for the calls of a scenario; "commit" where it waits for a barrier. The scenario
# "link-file" makes a second link, which no store does.
CHANGES: dict[str, list[FileChange | str]] = {
    "new-file": [CreateFile("/path/to/file"), "commit", CreateFile("/other/file")],
    "delete-file": [CreateFile("/path/to/file"), RemoveFile("/path/to/file")],
    "rename-target-exists": [
        CreateFile("/target/path"),
        "commit",
        CreateFile("/source/path"),
        RenameFile("//source/path", "/target/path"),
    ],
    "file-appends": [
        CreateFile("/source/path"),
        WriteFile("/source/path", 0, b"first-write"),
        WriteFile("/source/path", 11, b""),
        WriteFile("/source/path", 11, b"second-write"),
    ],
    "property-update": [
        CreateFile("/tmp_file"),
        SetProperty("/IDENTITY", "value"),
        RemoveFile("/tmp_file"),
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_operations_are_those_of_the_vectors(name: str) -> None:
    scenario = SCENARIOS[name]
    written = Written(new_recorder())
    pending = 0
    for change in CHANGES[name]:
        if isinstance(change, str):
            for _ in range(pending):
                written.recorder.appended(len(written.log))
            pending = 0
        else:
            written.record(change)
            pending += 1
    assert_is_recorded(written, scenario)
    for _ in range(pending):
        written.recorder.appended(len(written.log))
    assert written.recorder.hints() == hints(scenario["expect_hints"])


def assert_is_recorded(written: Written, scenario: dict[str, Any]) -> None:
    log = written.recorder.log
    expected = [each for each in scenario["expect_ops"] if each["log"] == log]
    content = b"".join(
        bytes.fromhex(each["frame_hex"]) + each["payload_utf8"].encode() for each in expected
    )
    assert bytes(written.log) == content
    assert written.recorder.fsm.next_seq_no == scenario["expect_next_seq_no"]
    assert written.recorder.fsm.next_checksum == scenario["expect_next_checksum"]


def test_another_log_begins_with_an_operation_that_changes_nothing() -> None:
    scenario = SCENARIOS["updating-recorded-log"]
    first = Written(new_recorder())
    first.record(CreateFile("/file1"), commit=True)
    second = Written(
        Recorder(
            first.recorder.fsm,
            log="examples/integration-tests/other-recovery-log",
            author=5678,
            write_head=0,
        )
    )
    assert second.recorder.opening
    second.record(CreateFile("/file2"))
    assert_is_recorded(second, scenario)
    second.recorder.appended(0)  # the scenario does not wait before its hints
    second.recorder.appended(0)
    assert second.recorder.hints() == hints(scenario["expect_hints"])


def test_a_recorded_log_of_the_json_store_is_recorded_alike() -> None:
    """Its operations, as changes of files, give its bytes again, for each author in turn."""
    name = "json-store"
    log = recording(name)["log"]
    fsm = FSM(pb.FSMHints(log=log))
    written = bytearray()
    found = operations(log_content(name))
    paths: dict[int, str] = {}
    at = 0
    while at < len(found):
        operation = found[at].operation
        if not operation.ListFields()[3:]:  # a hand-off
            fsm.apply(operation, found[at].message, log=log, first_offset=0, last_offset=0)
            written += log_content(name)[found[at].begin : found[at].end]
            recorder = Recorder(fsm, log=log, author=operation.author, write_head=len(written))
            at += 1
            continue
        change: FileChange
        taken = 1
        if operation.HasField("create"):
            change = CreateFile(operation.create.path)
            paths[operation.seq_no] = operation.create.path
        elif operation.HasField("write"):
            write = operation.write
            change = WriteFile(paths[write.fnode], write.offset, found[at].payload)
        else:
            renamed = next(each for each in found[at:] if each.operation.HasField("link"))
            source = paths[renamed.operation.link.fnode]
            change = RenameFile(source, renamed.operation.link.path)
            taken = 2 + operation.HasField("unlink")
        written += b"".join(recorder.record([change]))
        at += taken
    assert bytes(written) == log_content(name)


def test_nothing_is_recorded_of_no_changes() -> None:
    recorder = new_recorder()
    assert recorder.record([]) == []
    assert not recorder.is_committed  # the author was not checked yet
    recorder.appended(7)
    assert recorder.is_committed
    assert recorder.write_head == 7


def test_a_commit_is_one_append() -> None:
    contents = new_recorder().record([CreateFile("/a", b"x" * 100), CreateFile("/b", b"y")])
    assert len(contents) == 1


def test_a_file_created_over_another_replaces_it() -> None:
    written = Written(new_recorder())
    written.record(CreateFile("/a", b"old"))
    written.record(CreateFile("/a", b"new"))
    kinds = [
        [field.name for field, _ in each.operation.ListFields()][-1]
        for each in operations(bytes(written.log))
    ]
    assert kinds == ["create", "write", "unlink", "create", "write"]
    assert written.recorder.bytes_live == 3


def test_a_rename_to_itself_changes_nothing() -> None:
    recorder = new_recorder()
    recorder.record([CreateFile("/a", b"x")])
    assert recorder.record([RenameFile("/a", "//a")]) == []
    assert recorder.fsm.links == {"/a": 1}


def test_large_new_tables_are_appended_before_the_commit_in_pieces() -> None:
    written = Written(new_recorder())
    table = bytes(LARGE_FILE_BYTES) + b"end"
    contents = written.record(
        WriteFile("/MANIFEST", 0, b"m")
        if "/MANIFEST" in written.recorder.fsm.links
        else CreateFile("/MANIFEST", b"m"),
        CreateFile("/000007.sst", table),
        CreateFile("/000008.log", table),
    )
    assert len(contents) == 3
    early = [each.operation for each in operations(b"".join(contents[:2]))]
    assert [each.create.path for each in early if each.HasField("create")] == ["/000007.sst"]
    assert [each.write.length for each in early if each.HasField("write")] == [LARGE_FILE_BYTES, 3]
    last = [each.operation for each in operations(contents[2])]
    assert [each.create.path for each in last if each.HasField("create")] == [
        "/MANIFEST",
        "/000008.log",
    ]


def test_a_large_table_that_another_change_names_is_part_of_the_commit() -> None:
    table = bytes(LARGE_FILE_BYTES + 1)
    for changes in (
        [CreateFile("/1.sst", table), RenameFile("/1.sst", "/2.sst")],
        [CreateFile("/1.sst", table), RemoveFile("/1.sst"), CreateFile("/1.sst", table)],
    ):
        assert len(new_recorder().record(changes)) == 1
    recorder = new_recorder()
    recorder.record([CreateFile("/1.sst", b"small")])
    assert len(recorder.record([CreateFile("//1.sst", table)])) == 1


def test_offsets_of_hints_advance_with_commits_only() -> None:
    written = Written(new_recorder(write_head=1000))
    written.record(CreateFile("/a"))
    written.record(CreateFile("/b"))
    written.recorder.appended(1032)
    written.record(CreateFile("/c"))
    written.recorder.appended(1064)
    written.recorder.appended(1096)
    offsets = [node.segments[0].first_offset for node in written.recorder.hints().live_nodes]
    assert offsets == [1000, 1000, 1032]


def test_hints_wait_for_commits() -> None:
    recorder = new_recorder()
    recorder.record([CreateFile("/a")])
    assert not recorder.is_committed
    with pytest.raises(GazetteError, match="not committed"):
        recorder.hints()
    recorder.appended(40)
    assert recorder.is_committed
    assert recorder.hints().live_nodes


@pytest.mark.parametrize(
    "change",
    [
        WriteFile("/none", 0, b"x"),
        RemoveFile("/none"),
        RenameFile("/none", "/some"),
        CreateFile("/IDENTITY"),
        RenameFile("/a", "/IDENTITY"),
        SetProperty("/a", "x"),
        CreateFile("relative"),
        WriteFile("/a", -1, b"x"),
    ],
)
def test_a_change_that_does_not_fit_ends_the_recorder(change: FileChange) -> None:
    recorder = new_recorder()
    recorder.record([CreateFile("/a"), SetProperty("/IDENTITY", "x")])
    with pytest.raises(GazetteError) as caught:
        recorder.record([change])
    for use in (lambda: recorder.record([]), recorder.hints, lambda: recorder.appended(1)):
        with pytest.raises(GazetteError) as again:
            use()
        assert again.value is caught.value


def test_a_fenced_recorder_records_nothing_any_more() -> None:
    recorder = new_recorder()
    recorder.record([CreateFile("/a")])
    recorder.failed(FencedError("taken over"))
    recorder.failed(GazetteError("later"))
    for use in (lambda: recorder.record([]), recorder.hints, lambda: recorder.appended(1)):
        with pytest.raises(FencedError):
            use()


def test_a_file_is_recorded_anew_when_reading_costs_too_much() -> None:
    recorder = new_recorder()
    end = 0

    def commit(*changes: FileChange) -> None:
        nonlocal end
        end += sum(map(len, recorder.record(changes)))
        recorder.appended(end)

    piece = bytes(1 << 20)
    commit(CreateFile("/MANIFEST", b"m"))
    rounds = 0
    while recorder.rerecord_due() is None:
        commit(CreateFile("/value", piece), WriteFile("/MANIFEST", 1 + rounds, b"m"))
        rounds += 1
        assert rounds < 100
    assert recorder.rerecord_due() == "/MANIFEST"
    assert recorder.bytes_read > 1.5 * recorder.bytes_live + (1 << 20)
    commit(RemoveFile("/MANIFEST"), CreateFile("/MANIFEST", bytes(1 + rounds)))
    assert recorder.rerecord_due() is None
    assert recorder.bytes_read < 1.1 * recorder.bytes_live


def test_write_heads_follow_what_is_recorded() -> None:
    recorder = new_recorder(write_head=100)
    contents = recorder.record([CreateFile("/a", b"x")])
    end = 100 + len(contents[0])
    assert recorder.write_head == end
    recorder.appended(end + 50)  # appended twice, because an answer was lost
    assert recorder.write_head == end + 50
