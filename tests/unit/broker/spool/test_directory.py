from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette_sdk.broker.spool.directory import Durability, SpoolDirectory
from gazette_sdk.broker.spool.files import (
    Commit,
    CommitLog,
    Head,
    Origin,
    decode_head,
    encode_head,
    parse_log,
)
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from support.spools import (
    CLUSTER,
    REVISION,
    SpoolUser,
    content_of,
    files_below,
    sum_of_content,
    until,
)

JOURNAL = "a/journal"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "spools"


def as_after_a_crash(root: Path, target: Path) -> Path:
    """A copy of the directory as it stands: what a process that is killed now leaves."""
    while True:
        try:
            shutil.copytree(root, target)
        except shutil.Error:  # a file was removed meanwhile, and this is no moment's state
            shutil.rmtree(target)
        else:
            return target


def recover(root: Path, *, cluster: int = CLUSTER):
    """Return what a new process finds: {(journal, begin): content}, and its head of the journal."""
    with SpoolDirectory(root) as directory:
        spools = directory.recover(cluster)
        found = {}
        for spool in spools:
            content = content_of(spool)
            assert spool.fragment.sum == sum_of_content(content), "every byte is verified"
            found[spool.fragment.journal, spool.fragment.begin] = content
        head = directory.head(JOURNAL, create_revision=REVISION, cluster_id=cluster)
        return found, head


def test_committed_content_is_found_again_and_uncommitted_content_is_cut_off(root, tmp_path):
    async def scenario():
        with SpoolDirectory(root) as directory:
            user = SpoolUser(directory)
            await user.roll(codec=pb.GZIP)
            await user.append(b"first ", label_set(owner="me"))
            await user.append(b"second ")
            await user.roll(codec=pb.SNAPPY)
            await user.append(b"third ")
            written = user.spool.first_append_s
            await user.spool.write(b"never acknowledged", 0)
            crashed = as_after_a_crash(root, tmp_path / "crashed")

        with SpoolDirectory(crashed) as directory:
            one, two = directory.recover(CLUSTER)
            assert (content_of(one), content_of(two)) == (b"first second ", b"third ")
            assert two.file.path.stat().st_size == 6
            assert (one.fragment.compression_codec, two.fragment.compression_codec) == (
                pb.GZIP,
                pb.SNAPPY,
            )
            assert two.fragment.begin == one.fragment.end == 13
            assert one.registers == two.registers == label_set(owner="me")
            assert two.first_append_time.timestamp() == written
            assert (one.create_revision, one.primary) == (REVISION, False)

            # The journal goes on where it was, and what was recovered is still there then.
            user = SpoolUser(directory)
            assert user.spool.fragment.end == 19
            assert user.spool.registers == label_set(owner="me")
            await user.append(b"fourth")
        assert sorted(recover(crashed)[0].values()) == sorted(
            [b"first second ", b"third ", b"fourth"]
        )

    asyncio.run(scenario())


def test_a_head_outlives_the_files_it_came_from(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            user = SpoolUser(directory)
            await user.append(b"content", label_set(owner="me"))
            await user.roll()
            user.completed[0].file.discard()
        assert not [name for name in files_below(root) if "content" in name.split("/")[-1]]
        found, head = recover(root)
        assert found == {}
        assert (head.end, pb.LabelSet.FromString(head.registers)) == (7, label_set(owner="me"))

    asyncio.run(scenario())


def test_a_recovered_spool_that_is_released_leaves_its_head(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            await SpoolUser(directory).append(b"content")
        with SpoolDirectory(root) as directory:
            for spool in directory.recover(CLUSTER):
                spool.file.discard()
        found, head = recover(root)
        assert found == {}
        assert head.end == 7

    asyncio.run(scenario())


def test_a_head_is_only_that_of_the_very_journal_and_cluster(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            await SpoolUser(directory).append(b"content")
        with SpoolDirectory(root) as directory:
            directory.recover(CLUSTER)
            assert SpoolUser(directory).spool.fragment.end == 7
            again = SpoolUser(directory, revision=REVISION + 1)
            assert again.spool.fragment.end == 0, "deleted and created again"
            await again.append(b"new")
            await again.roll()
            old = SpoolUser(directory)
            await old.roll(100)  # a replica of the old journal, which still shuts down
            head = directory.head(JOURNAL, create_revision=REVISION + 1, cluster_id=CLUSTER)
            assert head.end == 3
        found, head = recover(root, cluster=CLUSTER + 1)
        assert (found, head) == ({}, None)
        with SpoolDirectory(root) as directory:
            left = [content_of(spool) for spool in directory.recover(CLUSTER)]
        assert left == [b"content", b"new"], "another cluster's spools are left where they are"

    asyncio.run(scenario())


def test_a_forgotten_head_stays_forgotten_while_spools_are_still_there(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            user = SpoolUser(directory)
            await user.append(b"content")
            await user.roll()
            directory.journal(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER).forget_head()
        found, head = recover(root)
        assert list(found.values()) == [b"content"], "the content is not forgotten"
        assert head is None
        with SpoolDirectory(root) as directory:
            directory.recover(CLUSTER)
            user = SpoolUser(directory)
            await user.roll(20)
            await user.append(b"later")
        assert recover(root)[1].end == 25

    asyncio.run(scenario())


def test_spools_without_a_head_are_contested_when_others_continue_their_journal(root):
    """As content that a primary kept, of which not all replicas had anything."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            directory.forget_head("never/here")
            user = SpoolUser(directory)
            await user.append(b"kept")
            kept = await asyncio.to_thread(user.spool.content_after, 0)
            assert not directory.is_contested(kept)
            assert directory.head(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER) is None
            directory.forget_head(JOURNAL)
            assert directory.is_contested(kept)
            (written,) = root.rglob("forgotten")
            before = written.stat().st_ino
            directory.forget_head(JOURNAL)
            assert written.stat().st_ino == before, "nothing is new"
            later = SpoolUser(directory)
            await later.append(b"later")
            assert not directory.is_contested(await asyncio.to_thread(later.spool.content_after, 0))
        with SpoolDirectory(root) as directory:
            contested = [directory.is_contested(spool) for spool in directory.recover(CLUSTER)]
            assert sorted(contested) == [False, False, True, True], "each, and its copy"

    asyncio.run(scenario())


def test_deleted_journals_are_swept(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            for name in ("a/kept", "a/gone"):
                user = SpoolUser(directory, name)
                await user.append(b"x")
                await user.roll()
            directory.sweep(lambda name, revision: (name, revision) == ("a/kept", REVISION))
            known = {"create_revision": REVISION, "cluster_id": CLUSTER}
            assert directory.head("a/kept", **known) is not None
            assert directory.head("a/gone", **known) is None

    asyncio.run(scenario())


def test_one_process_uses_a_directory_at_a_time(root):
    with SpoolDirectory(root), pytest.raises(ConfigurationError, match="in use by another"):
        SpoolDirectory(root)
    with SpoolDirectory(root):
        pass


def test_a_directory_that_cannot_be_used_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="choose a writable directory"):
        SpoolDirectory(tmp_path / "file")


def test_names_of_journals_become_safe_file_names(root):
    names = [
        "../../escape", "a" * 512, "a" * 511 + "b", "A/journal", "a/journal", "ünïcode/…"[:9],
        "with=and%2F",
    ]  # fmt: skip

    async def scenario():
        with SpoolDirectory(root) as directory:
            for number, name in enumerate(names):
                await SpoolUser(directory, name).append(b"%d" % number)
        found, _ = recover(root)
        assert found == {(name, 0): b"%d" % number for number, name in enumerate(names)}
        directories = [path.name for path in (root / "journals").iterdir()]
        assert len({name.lower() for name in directories}) == len(names)
        assert max(len(name.encode()) for name in directories) < 200

    asyncio.run(scenario())


def test_a_content_file_that_vanished_is_an_error_and_no_end_of_the_start(root, caplog):
    async def scenario():
        with SpoolDirectory(root) as directory:
            await SpoolUser(directory).append(b"content")
            await SpoolUser(directory, "b/journal").append(b"other")
        [content] = (root / "journals").glob("a*/*.content")
        content.unlink()
        found, head = recover(root)
        assert found == {("b/journal", 0): b"other"}
        assert head.end == 7, "those offsets are not used again"
        assert "not what was committed" in caplog.text

    asyncio.run(scenario())


def test_a_damaged_head_is_put_aside(root, caplog):
    async def scenario():
        with SpoolDirectory(root) as directory:
            user = SpoolUser(directory)
            await user.append(b"content")
            await user.roll()
        [head] = (root / "journals").glob("*/head")
        damaged = bytearray(head.read_bytes())
        damaged[-1] ^= 1
        head.write_bytes(damaged)
        found, known = recover(root)
        assert list(found.values()) == [b"content"]
        assert known.end == 7, "the spool's log tells it as well"
        assert "head.damaged" in caplog.text
        assert head.with_suffix(".damaged").read_bytes() == damaged

    asyncio.run(scenario())


def test_with_durability_persisted_the_same_is_recovered(root):
    async def scenario():
        with SpoolDirectory(root, durability=Durability.PERSISTED) as directory:
            user = SpoolUser(directory)
            await user.append(b"one")
            await user.roll()
            await user.append(b"two")
            user.completed[0].file.discard()
        found, head = recover(root)
        assert found == {(JOURNAL, 3): b"two"}
        assert head.end == 6

    asyncio.run(scenario())


def test_with_durability_persisted_what_is_recovered_is_forced_to_disk(root, monkeypatch):
    """A killed process may have been in the middle of that."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            await SpoolUser(directory).append(b"content")

    asyncio.run(scenario())
    forced = set()
    fsync = os.fsync

    def noted(fd):
        forced.add(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    recover(root)
    assert forced == set(), "durability replicated does not ask for it"
    with SpoolDirectory(root, durability=Durability.PERSISTED) as directory:
        [spool] = directory.recover(CLUSTER)
    files = [path.name for path in spool.file.path.parent.iterdir()]
    assert {name for name in files if name != "head"} < forced
    assert {"journals", spool.file.path.parent.name} < forced


# ----------------------------------------------------------------- the log


def log_of(tmp_path, commits, **options):
    log = CommitLog(tmp_path / "x.log", Origin(JOURNAL, 0, pb.GZIP, REVISION, CLUSTER), **options)
    for commit in commits:
        log.append(commit)
    log.close()
    return (tmp_path / "x.log").read_bytes()


def commits_of(count, registers=b""):
    return [Commit(10 * n, bytes([n % 256]) * 20, 1_000_000, registers) for n in range(1, count)]


def test_a_long_log_is_thinned_and_keeps_the_last_commit(tmp_path):
    commits = commits_of(20_000)
    parsed = parse_log(log_of(tmp_path, commits, log_length_bytes_max=20_000))
    assert parsed.damaged == []
    assert parsed.origin == Origin(JOURNAL, 0, pb.GZIP, REVISION, CLUSTER)
    assert (tmp_path / "x.log").stat().st_size < 50_000
    assert parsed.commits[-1] == commits[-1]
    assert parsed.commits == sorted(parsed.commits, key=lambda commit: commit.end)
    assert len(parsed.commits) > 100, "earlier ones serve to cut damaged content"
    assert parsed.commits[0].end < 1000
    assert not (tmp_path / "x.thin").exists()


def test_a_log_that_cannot_be_replaced_grows_on(tmp_path, caplog):
    (tmp_path / "x.thin").mkdir()
    commits = commits_of(1000)
    assert parse_log(log_of(tmp_path, commits, log_length_bytes_max=20_000)).commits == commits
    assert "which grows: " in caplog.text


def test_files_that_cannot_be_made_leave_no_half_of_them(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            user = SpoolUser(directory)
            await user.append(b"x")
            await user.roll()
            [first] = (root / "journals").glob("*/*-00000001.content")
            in_the_way = first.with_name(f"{1:016x}-{2:08x}.content")
            in_the_way.mkdir()
            await user.append(b"y")  # tried again, under the next name
            assert not in_the_way.with_suffix(".log").exists()
            in_the_way.rmdir()
        assert sorted(recover(root)[0].values()) == [b"x", b"y"]

    asyncio.run(scenario())


@pytest.mark.parametrize("registers", [b"", b"r" * 70_000])
def test_a_log_cut_anywhere_has_the_commits_before_the_cut(tmp_path, registers):
    commits = commits_of(4, registers)
    data = log_of(tmp_path, commits)
    assert parse_log(data).commits == commits
    last = -1
    for cut in range(0, len(data) + 1, 1 if not registers else 997):
        found = parse_log(data[:cut]).commits
        assert found == commits[: len(found)]
        assert len(found) >= last
        last = len(found)


def test_a_flipped_bit_costs_no_more_than_its_record(tmp_path):
    commits = commits_of(5, label_set(owner="me").SerializeToString())
    data = log_of(tmp_path, commits)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        parsed = parse_log(bytes(flipped))
        assert parsed.origin is not None, "it is written twice"
        lost = [commit for commit in commits if commit not in parsed.commits]
        assert len(lost) <= 1
        assert all(commit in commits for commit in parsed.commits)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_can_be_read_as_a_log(data):
    parse_log(data)


# ------------------------------------------------------------- the recovery law


@given(
    st.lists(
        st.sampled_from(["append", "big", "write", "rollback", "roll", "jump", "release"]),
        min_size=1, max_size=14,
    )
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_crash_at_any_point_loses_nothing_that_was_committed(steps):
    async def scenario(base):
        root = base / "spools"
        with SpoolDirectory(root) as directory:
            user = SpoolUser(directory)
            expect: dict[int, bytes] = {}
            released = 0
            for number, step in enumerate(steps):
                spool = user.spool
                if step in ("append", "big"):
                    data = bytes([number]) * (3 if step == "append" else 5000)
                    await spool.roll_back()
                    await user.append(data, label_set(step=str(number)))
                    begin = spool.fragment.begin
                    expect[begin] = expect.get(begin, b"") + data
                elif step == "write":
                    await spool.write(b"uncommitted", spool.uncommitted_bytes)
                elif step == "rollback":
                    await spool.roll_back()
                elif step == "roll":
                    await user.roll()
                elif step == "jump":
                    await user.roll(spool.fragment.end + spool.uncommitted_bytes + 9)
                elif len(user.completed) > released:
                    done = user.completed[released]
                    released += 1
                    done.file.discard()
                    await until(lambda file=done.file: not file.path.exists())
                    del expect[done.fragment.begin]
                crashed = as_after_a_crash(root, base / f"crashed-{number}")
                found, head = recover(crashed)
                assert {begin: data for (_, begin), data in found.items()} == expect
                end = user.spool.fragment.end
                assert (head.end if head else 0) == end
                if head is not None:
                    assert pb.LabelSet.FromString(head.registers) == user.spool.registers
                shutil.rmtree(crashed)

    with tempfile.TemporaryDirectory() as base:
        asyncio.run(scenario(Path(base)))


@pytest.fixture(scope="module")
def left_over(tmp_path_factory):
    """A directory that a broker left, with one spool of several commits, and their ends."""
    root = tmp_path_factory.mktemp("left") / "spools"
    ends, content = [], b""

    async def scenario():
        nonlocal content
        with SpoolDirectory(root) as directory:
            user = SpoolUser(directory)
            for number in range(3):
                data = bytes([65 + number]) * (number + 2)
                await user.append(data, label_set(step=str(number)))
                content += data
                ends.append(len(content))
            await user.spool.write(b"uncommitted", 0)

    asyncio.run(scenario())
    return root, content, ends


def test_a_commit_log_cut_at_any_byte_recovers_a_committed_beginning(left_over, tmp_path):
    root, content, ends = left_over
    [log] = root.glob("journals/*/*.log")
    size = log.stat().st_size
    seen = set()
    for cut in range(size + 1):
        crashed = as_after_a_crash(root, tmp_path / f"cut-{cut}")
        [path] = crashed.glob("journals/*/*.log")
        os.truncate(path, cut)
        whole = [c.end for c in parse_log(path.read_bytes()).commits]
        found, head = recover(crashed)
        end = max(whole, default=0)
        assert list(found.values()) == ([content[:end]] if end else [])
        assert (head.end if head else 0) == end
        seen.add(end)
        shutil.rmtree(crashed)
    assert seen == {0, *ends}


def test_a_flipped_byte_anywhere_never_gives_wrong_bytes_and_deletes_nothing(left_over, tmp_path):
    root, content, ends = left_over
    files = sorted(root.glob("journals/*/*"))
    for path in files:
        data = path.read_bytes()
        for at in range(len(data)):
            crashed = as_after_a_crash(root, tmp_path / "flipped")
            target = crashed / path.relative_to(root)
            flipped = bytearray(data)
            flipped[at] ^= 0x40
            target.write_bytes(flipped)
            found, head = recover(crashed)
            if path.suffix == ".content":
                good = max((end for end in ends if end <= at), default=0)
                if at >= ends[-1]:
                    good = ends[-1]
                assert list(found.values()) == ([content[:good]] if good else [])
                assert head.end == ends[-1], "offsets once acknowledged are not used again"
                if at < ends[-1]:
                    assert target.with_suffix(".content.damaged").read_bytes() == flipped
            else:
                [recovered] = found.values()
                assert recovered in (content, content[: ends[-2]])
                assert head.end == len(recovered)
                if recovered != content:
                    kept = target.with_suffix(".content.damaged").read_bytes()
                    assert kept.startswith(content)
            again, _ = recover(crashed)
            assert again == found, "a second start finds the same"
            shutil.rmtree(crashed)


# ------------------------------------------------------------------ real kills

APPENDS_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, "tests")
from gazette_sdk.broker.spool.directory import SpoolDirectory
from support.spools import SpoolUser
async def main():
    directory = SpoolDirectory(Path(sys.argv[1]))
    user = SpoolUser(directory)
    number = 0
    while True:
        await user.append(b"%08d" % number * (1 + number % 700))
        sys.stdout.write(f"{user.spool.fragment.end}\\n")
        sys.stdout.flush()
        number += 1
        if number % 50 == 0:
            await user.roll()
            for done in user.completed[:-2]:
                done.file.discard()
asyncio.run(main())
"""


def test_kill_9_loses_nothing_that_was_acknowledged(root):
    process = subprocess.Popen(
        [sys.executable, "-c", APPENDS_UNTIL_KILLED, str(root)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(333)]
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    process.wait(timeout=10)
    process.stdout.close()
    acknowledged = (b"".join(lines) + rest).rstrip(b"\n").splitlines()
    found, head = recover(root)
    assert head.end >= int(acknowledged[-1]) > 0
    (_, begin), last = max(found.items())
    assert begin + len(last) == head.end
    # Behind the fiftieth append of a spool, the kill may have come before or after the next one's.
    count = len(acknowledged)
    firsts = {count // 50 * 50, (count - 1) // 50 * 50}
    assert last.startswith(tuple(b"%08d" % first for first in firsts))


# -------------------------------------------------------------------- figures


def test_a_commit_costs_microseconds_and_an_idle_journal_little_memory(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            user = SpoolUser(directory)
            data = b"x" * 200
            began = time.perf_counter()
            for _ in range(2000):
                await user.append(data)
            each_us = (time.perf_counter() - began) / 2000 * 1e6
            print(f"{each_us:.1f} us per append of 200 bytes to a spool")
            assert each_us < 500

            tracemalloc.start()
            kept = [SpoolUser(directory, f"a/journal-{number}").spool for number in range(200)]
            each = tracemalloc.get_traced_memory()[0] / len(kept)
            tracemalloc.stop()
            assert each < 20_000

    asyncio.run(scenario())


def test_a_head_reads_back(tmp_path):
    head = Head("a/jörnal", 1 << 40, b"registers", 12, 1 << 63)
    assert decode_head(encode_head(head)) == head
    assert decode_head(b"") is None
