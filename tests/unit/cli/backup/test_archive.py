from __future__ import annotations

import dataclasses
import gzip
import io
import tarfile

import pytest

from gazette_sdk.cli.backup import archive
from gazette_sdk.cli.backup.archive import (
    Backup,
    BackupError,
    SavedJournal,
    SavedMember,
    SavedShard,
    decode,
    encode,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb

UNKNOWN_FIELD = b"\xfa\x06\x02hi"
"""Field 111 of another implementation."""

JOURNAL = pb.JournalSpec(name="a/b", replication=3)
SHARD = cpb.ShardSpec(id="shard-1", recovery_log_prefix="logs", hint_prefix="/hints")
BACKUP = Backup(
    prefix="/gazette/cluster",
    cluster_id=0xFEDCBA9876543210,
    revision=17,
    journals=[
        SavedJournal(
            name="a/b",
            spec_bytes=JOURNAL.SerializeToString() + UNKNOWN_FIELD,
            head=1 << 60,
            begin=5,
            create_revision=3,
            registers=(("author", "1a"), ("author", "2b")),
            brokers=("zone/broker",),
        ),
        SavedJournal(name="c/d", spec_bytes=pb.JournalSpec(name="c/d").SerializeToString()),
    ],
    shards=[
        SavedShard(
            application="/gazette/consumers/app",
            id="shard-1",
            spec_bytes=SHARD.SerializeToString(),
            hints={"/hints/shard-1.primary": b'{"log":"logs/shard-1"}'},
        )
    ],
    members=[
        SavedMember(prefix="/gazette/cluster", id="zone/broker", endpoint="http://b:1"),
        SavedMember(prefix="/gazette/consumers/app", id="zone/x", endpoint="http://x:1"),
    ],
)


def without_id(backup):
    return dataclasses.replace(backup, id="")


def test_a_file_has_all_of_a_backup_and_fields_of_others_too():
    found = decode(encode(BACKUP), "b")
    assert without_id(found) == BACKUP
    assert found.journals[0].spec_bytes.endswith(UNKNOWN_FIELD)
    assert found.shards[0].log == "logs/shard-1"
    assert [each.id for each in found.brokers] == ["zone/broker"]
    assert [each.id for each in found.consumers] == ["zone/x"]


def test_the_id_is_of_the_content():
    other = dataclasses.replace(BACKUP, revision=18)
    assert decode(encode(BACKUP), "b").id == decode(encode(BACKUP), "c").id
    assert decode(encode(BACKUP), "b").id != decode(encode(other), "b").id


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_part_of_a_file_is_no_backup(part):
    content = encode(BACKUP)
    with pytest.raises(BackupError, match="whole"):
        decode(content[: int(len(content) * part)], "half")


def _members(content):
    with tarfile.open(fileobj=io.BytesIO(content)) as found:
        return [(entry, found.extractfile(entry).read()) for entry in found]


def _tar(members):
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as made:
        for entry, text in members:
            entry.size = len(text)
            made.addfile(entry, io.BytesIO(text))
    return gzip.compress(written.getvalue())


def test_a_file_without_its_manifest_is_no_backup():
    with pytest.raises(BackupError, match="its manifest, which is written last, is missing"):
        decode(_tar(_members(encode(BACKUP))[:-1]), "b")


def test_a_part_that_was_changed_is_found():
    members = [(entry, text.replace(b"a/b", b"a/c")) for entry, text in _members(encode(BACKUP))]
    with pytest.raises(BackupError, match=r"journals.jsonl does not have the SHA-256"):
        decode(_tar(members), "b")


def test_a_later_format_is_refused(monkeypatch):
    monkeypatch.setattr(archive, "FORMAT", 2)
    content = encode(BACKUP)
    monkeypatch.setattr(archive, "FORMAT", 1)
    with pytest.raises(BackupError, match="format 2"):
        decode(content, "b")


def test_a_file_is_written_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "below" / "b.tar.gz"
    assert archive.write(str(path), BACKUP) == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(BackupError, match="exists"):
        archive.write(str(path), BACKUP)
    assert without_id(archive.read(str(path))) == BACKUP


def test_any_file_system_of_fsspec_will_do():
    url = "memory://backups/archive-test.tar.gz"
    archive.write(url, BACKUP)
    assert without_id(archive.read(url)) == BACKUP
    with pytest.raises(BackupError, match="exists"):
        archive.write(url, BACKUP)


def test_a_missing_file_and_a_wrong_scheme_are_named(tmp_path):
    with pytest.raises(BackupError, match=r"missing\.tar\.gz"):
        archive.read(str(tmp_path / "missing.tar.gz"))
    with pytest.raises(archive.ConfigurationError, match="nonsense://"):
        archive.read("nonsense://b")
