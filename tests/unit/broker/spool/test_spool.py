from __future__ import annotations

import asyncio
import gc
import gzip
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette_sdk.broker.spool import files as commit_log_module
from gazette_sdk.broker.spool import spool as spool_module
from gazette_sdk.broker.spool.directory import Durability, SpoolDirectory
from gazette_sdk.broker.spool.files import SpoolDiskError, SpoolError
from gazette_sdk.fragment.codecs import decompressor
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of
from gazette_sdk.protocol.labels import label_set, matches, parse_selector, subtract, union
from support import vectors
from support.open_files import leaves_no_file_open
from support.spools import (
    CLUSTER,
    SlowDisk,
    SpoolUser,
    content_of,
    sum_of_content,
    until,
)
from support.vectors import cases, normal


@pytest.fixture
def directory(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as made:
        yield made


def stored(spool):
    """Return the decompressed upload of a closed spool."""
    fragment = spool.fragment
    reader, length = spool.file.stored_form(fragment.end - fragment.begin, digest_of(fragment.sum))
    raw = reader.read()
    assert len(raw) == length
    if fragment.compression_codec == pb.NONE:
        return raw
    content = decompressor(fragment.compression_codec, io.BytesIO(raw))
    return b"".join(iter(lambda: content.read(1 << 16), b""))


@pytest.mark.parametrize("case", cases("broker", "spool_sequences"))
def test_sequences_of_content_and_proposals(case, directory):
    async def scenario():
        user = SpoolUser(directory, case["initial"]["journal"])
        spool = user.spool
        for step in case["steps"]:
            if "expect_next" in step:
                assert normal(spool.next()) == normal(vectors.fragment(step["expect_next"]))
                continue
            if "expect_state" in step:
                state = step["expect_state"]
                assert [content_of(done).decode() for done in user.completed] == (
                    state["completes"]
                )
                assert len(user.commits) == state["commits"]
                assert spool.fragment.begin == state["begin"]
                assert spool.fragment.end == state["end"]
                assert spool.uncommitted_bytes == state["delta"]
                continue
            request = pb.ReplicateRequest()
            if "proposal" in step:
                request.proposal.CopyFrom(vectors.fragment(step["proposal"]))
                request.registers.CopyFrom(vectors.label_set(step["registers"]))
            else:
                request.content = step["content"].encode()
                request.content_delta = step["content_delta"]
            expect = step["expect"]
            if "error" in expect:
                with pytest.raises(SpoolError, match=expect["error"]):
                    await spool.apply(request, primary=case["primary"])
                continue
            response = await spool.apply(request, primary=case["primary"])
            assert pb.Status.Name(response.status) == expect["status"]
            if "fragment" in expect:
                assert normal(response.fragment) == normal(vectors.fragment(expect["fragment"]))
                assert response.registers == vectors.label_set(expect["registers"])
        if "compresses_on_demand_to" in case:
            assert stored(user.completed[0]).decode() == case["compresses_on_demand_to"]

    asyncio.run(scenario())


@pytest.mark.parametrize("case", cases("broker", "spool_gzip_members"))
def test_each_batch_is_a_gzip_member(case, directory):
    async def scenario():
        user = SpoolUser(directory, batch_bytes=case["batch_size"])
        await user.roll(codec=pb.GZIP)
        for content in case["writes"]:
            await user.append(content.encode())
        await user.roll(codec=pb.GZIP)
        if "expect_completions" in case:
            assert len(user.completed) == case["expect_completions"]
            return
        [done] = user.completed
        fragment = done.fragment
        reader, _ = done.file.stored_form(fragment.end - fragment.begin, digest_of(fragment.sum))
        raw = reader.read()
        assert gzip.decompress(raw).decode() == "".join(case["writes"])
        if "expect_members" in case:
            members = []
            while raw:
                member = zlib.decompressobj(wbits=31)
                members.append(member.decompress(raw).decode())
                raw = member.unused_data
            assert members == case["expect_members"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "codec", [pb.NONE, pb.GZIP, pb.ZSTANDARD, pb.SNAPPY, pb.GZIP_OFFLOAD_DECOMPRESSION]
)
@pytest.mark.parametrize("primary", [True, False])
def test_the_stored_form_has_the_content_with_and_without_compression_before(
    codec, primary, directory
):
    async def scenario():
        user = SpoolUser(directory, batch_bytes=1000)
        await user.roll(codec=codec)
        content = b""
        for number in range(50):
            piece = f"message {number}\n".encode() * 20
            await user.append(piece, primary=primary)
            content += piece
        await user.roll(codec=codec, primary=primary)
        [done] = user.completed
        assert stored(done) == content
        assert stored(done) == content, "an upload may be tried again"
        assert done.primary is primary

    asyncio.run(scenario())


def test_a_proposal_beyond_the_end_is_refused_and_moves_the_spool_forward(directory):
    async def scenario():
        user = SpoolUser(directory)
        await user.append(b"abc", label_set(a="1"))
        ahead = pb.Fragment(
            journal="a/journal", begin=1, end=9, sum=sum_of_content(b"x"), compression_codec=pb.GZIP
        )
        response = await user.propose(ahead, label_set(b="2"))
        assert response.status == pb.PROPOSAL_MISMATCH
        assert (response.fragment.begin, response.fragment.end) == (9, 9)
        assert response.registers == label_set(b="2"), "the larger offset's registers win"
        assert user.completed[0].registers == label_set(a="1")

    asyncio.run(scenario())


def test_a_rollback_with_other_registers_is_refused(directory):
    async def scenario():
        user = SpoolUser(directory)
        await user.append(b"abc", label_set(a="1"))
        same = pb.Fragment()
        same.CopyFrom(user.spool.fragment)
        assert (await user.propose(same)).status == pb.OK
        refused = await user.propose(same, label_set(a="2"))
        assert refused.status == pb.PROPOSAL_MISMATCH
        assert refused.registers == label_set(a="1")

    asyncio.run(scenario())


def test_an_absent_sum_equals_the_sum_of_nothing(directory):
    async def scenario():
        user = SpoolUser(directory)
        bare = pb.Fragment(journal="a/journal", compression_codec=pb.NONE)
        assert not bare.HasField("sum")
        assert (await user.propose(bare)).status == pb.OK

    asyncio.run(scenario())


def test_first_append_time_is_that_of_the_first_commit(directory):
    async def scenario():
        user = SpoolUser(directory)
        await user.spool.write(b"dropped", 0)
        await user.spool.roll_back()
        assert user.spool.first_append_s is None
        await user.append(b"one")
        first = user.spool.first_append_s
        assert first is not None
        await user.append(b"two")
        assert user.spool.first_append_s == first
        await user.roll()
        assert user.spool.first_append_s is None
        assert user.completed[0].first_append_time == datetime.fromtimestamp(first, UTC)

    asyncio.run(scenario())


def test_nothing_stands_on_disk_before_there_is_content(directory):
    async def scenario():
        gc.collect()  # what other tests left
        with leaves_no_file_open():
            users = [SpoolUser(directory, f"a/journal-{number}") for number in range(1000)]
            for user in users[:100]:
                await user.roll(codec=pb.GZIP)  # as each minute's pulse does
        assert not list((directory.root / "journals").iterdir())

    asyncio.run(scenario())


@pytest.mark.parametrize("case", cases("broker", "registers_sequence"))
def test_registers_are_committed_with_content_and_recovered(case, directory, tmp_path):
    async def scenario():
        user = SpoolUser(directory)
        expect = pb.LabelSet()
        for step in case["steps"]:
            request, registers = step["request"], user.spool.registers
            check = parse_selector(request.get("check", ""))
            if registers.labels and not matches(check, registers):
                assert step["expect"]["status"] == "REGISTER_MISMATCH"
            elif step["bytes"]:
                registers = subtract(registers, vectors.label_set(request.get("subtract")))
                registers = union(registers, vectors.label_set(request.get("union")))
                await user.append(b"x" * step["bytes"], registers)
            else:
                # Without bytes nothing is committed, so registers cannot change either.
                changed = union(registers, vectors.label_set(request.get("union")))
                response = await user.propose(user.spool.next(), changed)
                assert (response.status == pb.OK) == (changed == registers)
            if "registers" in step["expect"]:
                expect = vectors.label_set(step["expect"]["registers"])
            assert user.spool.registers == expect
        if user.commits:
            shutil.copytree(directory.root, tmp_path / "crashed")
            with SpoolDirectory(tmp_path / "crashed") as crashed:
                assert [spool.registers for spool in crashed.recover(CLUSTER)] == [expect]

    asyncio.run(scenario())


# ------------------------------------------------------------------- the disk


class FullDisk:
    """Refuses writes of content, or of commits, as a full disk does, for some attempts."""

    def __init__(self, monkeypatch, user, part, failures):
        self.left = failures
        spool = user.spool
        self.fd = {"content": spool.content_file, "log": spool._log}[part].fd
        monkeypatch.setattr(commit_log_module, "os", self)

    def __getattr__(self, name):
        return getattr(os, name)

    def pwrite(self, fd, data, position):
        if self.left and fd == self.fd:
            self.left -= 1
            if len(data) > 1 and self.left % 2:
                return os.pwrite(fd, bytes(data)[: len(data) // 2], position)
            raise OSError(28, "No space left on device")
        return os.pwrite(fd, data, position)


@pytest.mark.parametrize("part", ["content", "log"])
def test_an_append_survives_a_disk_that_is_full_for_a_moment(part, directory, monkeypatch):
    monkeypatch.setattr(spool_module, "DISK_RETRIES_S", (0.001,) * 3)

    async def scenario():
        user = SpoolUser(directory)
        await user.append(b"before")
        FullDisk(monkeypatch, user, part, 3)
        await user.append(b"after")
        await user.roll()
        assert content_of(user.completed[0]) == b"beforeafter"

    asyncio.run(scenario())


@pytest.mark.parametrize("part", ["content", "log"])
def test_an_append_to_a_full_disk_fails_in_time_and_loses_nothing(part, directory, monkeypatch):
    monkeypatch.setattr(spool_module, "DISK_RETRIES_S", (0.001,) * 3)

    async def scenario():
        user = SpoolUser(directory)
        await user.append(b"before")
        held = user.spool.fragment
        disk = FullDisk(monkeypatch, user, part, 1000)
        with pytest.raises(SpoolDiskError) as caught:
            await user.append(b"refused")
        assert str(directory.root) in str(caught.value)
        assert "free some space" in str(caught.value)
        assert user.spool.fragment is held, "nothing is acknowledged"
        assert (await user.propose(held)).status == pb.OK, "it can be rolled back"
        assert user.spool.uncommitted_bytes == 0

        disk.left = 0
        await user.append(b" and after")
        await user.roll()
        assert content_of(user.completed[0]) == b"before and after"

    asyncio.run(scenario())
    assert sum(spool_module.DISK_RETRIES_S) <= 5


def test_with_durability_persisted_a_commit_is_synced_before_it_is_acknowledged(
    tmp_path, monkeypatch
):
    async def scenario():
        with SpoolDirectory(tmp_path, durability=Durability.PERSISTED) as directory:
            user = SpoolUser(directory)
            synced = []
            storage = type(user.spool._storage)
            sync = storage.sync

            def noted(self, file, fd, *, is_new):
                sync(self, file, fd, is_new=is_new)
                synced.append(is_new)

            monkeypatch.setattr(storage, "sync", noted)
            await user.append(b"one")
            await user.append(b"two")
            assert synced == [True, False]

            def fails(self, file, fd, *, is_new):
                raise OSError(5, "Input/output error")

            monkeypatch.setattr(storage, "sync", fails)
            with pytest.raises(SpoolDiskError, match="check that disk"):
                await user.append(b"three")
            monkeypatch.undo()
            with pytest.raises(SpoolDiskError):  # pages which were given up never come back
                await user.append(b"four")
            await user.roll()
            await user.append(b"five")

    asyncio.run(scenario())


async def cancelled_append(user, disk, content):
    """Cancel an append whose sync is under way."""
    began = disk.began
    append = asyncio.ensure_future(user.append(content))
    await until(lambda: disk.began > began)
    append.cancel()
    await asyncio.wait([append])


def test_a_commit_whose_sync_was_given_up_is_synced_by_the_next_proposal(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)

    async def scenario():
        with SpoolDirectory(tmp_path, durability=Durability.PERSISTED) as directory:
            user = SpoolUser(directory)
            await cancelled_append(user, disk, b"content")
            proposing = asyncio.ensure_future(user.propose(user.spool.fragment))
            await asyncio.sleep(0.01)
            assert not proposing.done()
            disk.go_on()
            await proposing
            assert disk.began == 2
            await user.propose(user.spool.fragment)
            assert disk.began == 2, "all is on disk"

    asyncio.run(scenario())


def test_a_fragment_is_closed_though_its_sync_goes_on(tmp_path, monkeypatch):
    """The peers may have closed theirs: what is cancelled in between leaves a gap."""
    disk = SlowDisk(monkeypatch)

    async def scenario():
        with SpoolDirectory(tmp_path, durability=Durability.PERSISTED) as directory:
            user = SpoolUser(directory)
            await cancelled_append(user, disk, b"content")
            rolling = asyncio.ensure_future(user.roll())
            await asyncio.sleep(0)
            assert content_of(user.completed[0]) == b"content"
            disk.go_on()
            await rolling

    asyncio.run(scenario())


def test_a_sync_that_was_given_up_and_fails_is_not_repeated(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)

    async def scenario():
        with SpoolDirectory(tmp_path, durability=Durability.PERSISTED) as directory:
            user = SpoolUser(directory)
            await cancelled_append(user, disk, b"content")
            disk.error = OSError(5, "Input/output error")
            disk.go_on()
            for _ in range(2):
                with pytest.raises(SpoolDiskError, match="check that disk"):
                    await user.propose(user.spool.fragment)
            assert disk.began == 1
            disk.error = None
            await user.roll()
            await user.append(b"more")

    asyncio.run(scenario())


def test_with_durability_persisted_a_head_is_on_disk_before_the_answer(tmp_path, monkeypatch):
    async def scenario():
        with SpoolDirectory(tmp_path, durability=Durability.PERSISTED) as directory:
            user = SpoolUser(directory)
            synced = []
            storage = type(user.spool._storage)
            write_head = storage.write_head

            def noted(self):
                write_head(self)
                synced.append(self.head.end)

            monkeypatch.setattr(storage, "write_head", noted)
            await user.append(b"one")
            await user.roll()
            assert synced == [3]
            await user.roll(100)
            assert synced == [3, 100]
            directory.forget_head(user.spool.journal)
            await user.roll(100)
            assert synced == [3, 100, 100], "the file was removed meanwhile"
            await user.roll(100)
            assert synced == [3, 100, 100]

            def fails(self):
                raise OSError(5, "Input/output error")

            monkeypatch.setattr(storage, "write_head", fails)
            for _ in range(2):  # it is not believed later
                with pytest.raises(SpoolDiskError, match="check that disk"):
                    await user.roll(200)
            monkeypatch.setattr(storage, "write_head", noted)
            await user.roll(200)
            assert synced == [3, 100, 100, 200]

    asyncio.run(scenario())


TMPFS_PROGRAM = """
import asyncio, sys
sys.path.insert(0, "tests")
from pathlib import Path
from gazette_sdk.broker.spool import files as commit_log_module
from gazette_sdk.broker.spool import spool as spool_module
from gazette_sdk.broker.spool.spool import SpoolDiskError
from gazette_sdk.broker.spool.directory import SpoolDirectory
from support.spools import CLUSTER, SpoolUser, content_of
spool_module.DISK_RETRIES_S = (0.01, 0.01)
async def main():
    root = Path(sys.argv[1])
    with SpoolDirectory(root / "spools") as directory:
        user = SpoolUser(directory)
        expect = b""
        ballast = root / "ballast"
        ballast.write_bytes(bytes(512 << 10))
        for number in range(200):
            piece = bytes([number]) * 9001
            try:
                await user.append(piece)
            except SpoolDiskError:
                await user.propose(user.spool.fragment)
                if not ballast.exists():
                    break
                ballast.unlink()
            else:
                expect += piece
        else:
            raise SystemExit("the disk never filled up")
        assert not ballast.exists()
        await user.roll()
        assert content_of(user.completed[0]) == expect
        user.completed[0].file.discard()
        print(len(expect))
asyncio.run(main())
"""


def test_a_disk_that_really_fills_up(tmp_path):
    program = [sys.executable, "-c", TMPFS_PROGRAM, str(tmp_path)]
    mounted = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$@"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    allowed = subprocess.run([*namespace, "true"], capture_output=True, check=False, timeout=60)
    if allowed.returncode == 0:
        ran = subprocess.run(
            [*namespace, *program], capture_output=True, text=True, check=False, timeout=60
        )
    else:  # no mounts here: then files which may not grow have to do
        ran = subprocess.run(
            ["sh", "-c", 'ulimit -f 2048 && exec "$@"', "sh", *program],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert 500_000 < int(ran.stdout) < 1_050_000


# ------------------------------------------------------------------- the oracle

steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("commit"), st.sampled_from(["", "x", "y"])),
        st.tuples(st.just("rollback"), st.none()),
        st.tuples(st.just("mismatch"), st.none()),
        st.tuples(st.just("roll"), st.integers(0, 5)),
    ),
    max_size=30,
)


class Oracle:
    """A journal as plain bytes; bytes that were passed over are ``None``."""

    def __init__(self):
        self.committed = []
        self.written = b""
        self.begin = 0
        self.closed = []
        self.registers = ""

    def close(self, at):
        if len(self.committed) > self.begin:
            self.closed.append((self.begin, bytes(self.committed[self.begin :])))
        self.committed += [None] * (at - len(self.committed))
        self.begin, self.written = at, b""


@given(steps, st.sampled_from([pb.NONE, pb.GZIP, pb.SNAPPY]), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_spool_has_the_content_of_a_plain_string_of_bytes(steps, codec, primary, by_itself):
    """Proposals are copies, as peers get them, or the spool's own objects (``by_itself``)."""

    async def scenario(root):
        with SpoolDirectory(root) as directory:
            user, oracle = SpoolUser(directory, batch_bytes=50), Oracle()
            spool = user.spool

            async def proposed(fragment, registers=None):
                if not by_itself:
                    return (await user.propose(fragment, registers, primary=primary)).status
                registers = spool.registers if registers is None else registers
                return await spool.propose(fragment, registers, primary=primary)

            for verb, value in steps:
                if verb == "write":
                    await spool.write(value, len(oracle.written))
                    oracle.written += value
                elif verb == "commit":
                    registers = label_set(owner=value) if value else pb.LabelSet()
                    status = await proposed(spool.next(), registers)
                    if oracle.written:
                        assert status == pb.OK
                        oracle.committed += oracle.written
                        oracle.written, oracle.registers = b"", value
                    elif len(oracle.committed) == oracle.begin:
                        expect = pb.OK if value == oracle.registers else pb.PROPOSAL_MISMATCH
                        assert status == expect
                elif verb == "rollback":
                    assert await proposed(spool.fragment) == pb.OK
                    oracle.written = b""
                elif verb == "mismatch":
                    wrong = pb.Fragment()
                    wrong.CopyFrom(spool.next())
                    wrong.sum.part1 ^= 1
                    if wrong.end > wrong.begin:
                        assert await proposed(wrong) == pb.PROPOSAL_MISMATCH
                else:
                    at = len(oracle.committed) + value
                    if value and value <= len(oracle.written):
                        continue  # no roll: such a proposal is refused
                    await user.roll(at, codec, primary=primary)
                    oracle.close(at)
                held = bytes(oracle.committed[oracle.begin :])
                assert spool.fragment.begin == oracle.begin
                assert spool.fragment.end == len(oracle.committed)
                assert spool.fragment.sum == sum_of_content(held)
                assert spool.next().sum == sum_of_content(held + oracle.written)
                assert spool.uncommitted_bytes == len(oracle.written)
                if held:
                    assert spool.content_file.read_at(0, len(held)) == held
            await user.roll(primary=primary)
            oracle.close(len(oracle.committed))
            assert [(d.fragment.begin, content_of(d)) for d in user.completed] == oracle.closed
            assert [stored(d) for d in user.completed] == [content for _, content in oracle.closed]

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(scenario(Path(root)))
