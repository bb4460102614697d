from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib

import pytest

from gazette_sdk.cli.backup.archive import BackupError
from gazette_sdk.cli.backup.stores import gather
from gazette_sdk.cli.formats import Progress
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of


def put(directory, journal, begin, content, suffix=".raw", *, stored=None):
    name = f"{begin:016x}-{begin + len(content):016x}-{hashlib.sha1(content).hexdigest()}{suffix}"
    path = directory / journal / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if stored is None else stored)


def gathered(directory, brokers=4, **options):
    async def run():
        stores = StoreRegistry(directory)
        try:
            return await gather(
                ["file:///"],
                stores,
                prefix="/gazette/cluster",
                brokers=brokers,
                progress=Progress(),
                **options,
            )
        finally:
            await stores.aclose()

    return asyncio.run(run())


def content_types(backup):
    return {each.name: value_of(each.spec.labels, CONTENT_TYPE) for each in backup.journals}


def test_journals_are_guessed_by_names_and_first_bytes_of_their_fragments(tmp_path):
    lines = b'{"n": 1}\n'
    put(tmp_path, "shop/orders", 0, lines, ".gz", stored=gzip.compress(lines))
    put(tmp_path, "shop/orders", len(lines), b"later: not looked at")
    put(tmp_path, "rides/part-000/date=2026-11-29/hour=07", 9, b"1,2\n")
    put(tmp_path, "logs/recovery/one", 0, b"\x66\x33\x93\x36\x00\x00\x00\x00")
    put(tmp_path, "frames", 0, b"\x66\x33\x93\x36\x00\x00\x00\x00")
    put(tmp_path, "other/bytes", 0, b"\x00\x01")
    put(tmp_path, ".test", 0, b"x")
    (tmp_path / "shop" / "README").write_text("no fragment")
    backup = gathered(tmp_path)
    assert content_types(backup) == {
        "frames": "application/x-protobuf-fixed",
        "logs/recovery/one": "application/x-gazette-recoverylog",
        "other/bytes": "",
        "rides/part-000": "text/csv",
        "shop/orders": "application/x-ndjson",
    }
    by_name = {each.name: each for each in backup.journals}
    orders = by_name["shop/orders"].spec
    assert orders.fragment.compression_codec == pb.GZIP
    assert list(orders.fragment.stores) == ["file:///"]
    assert orders.replication == 3
    assert "content-type application/x-ndjson" in by_name["shop/orders"].guessed
    assert "path_postfix_template" in by_name["rides/part-000"].guessed


def test_the_same_stores_give_the_same_identity(tmp_path):
    put(tmp_path, "a/one", 0, b"{}\n")
    first = gathered(tmp_path)
    assert first.id == gathered(tmp_path).id
    put(tmp_path, "a/two", 0, b"{}\n")
    assert first.id != gathered(tmp_path).id


def test_one_broker_gets_one_replica(tmp_path):
    put(tmp_path, "a/one", 0, b"{}\n")
    assert gathered(tmp_path, brokers=1).journals[0].spec.replication == 1


def test_a_store_without_anything_is_an_error(tmp_path):
    with pytest.raises(BackupError, match="neither mirrors of specs nor fragments"):
        gathered(tmp_path)


def mirror(directory, incarnation, name, revision=1, **fields):
    path = directory / ".gazette" / incarnation / "journals" / name / "@spec.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = pb.JournalSpec(name=name, **fields).SerializeToString()
    row = f'"create_revision": 7, "mod_revision": {revision}, "spec": "{encoded(spec)}"'
    path.write_text(f'{{"name": "{name}", {row}}}')


def encoded(content):
    return base64.b64encode(content).decode()


def test_the_latest_mirror_is_used_that_is_not_of_the_present_etcd(tmp_path):
    mirror(tmp_path, "20260101T000000Z-a", "a/one", replication=1)
    mirror(tmp_path, "20260201T000000Z-b", "a/one", replication=2)
    mirror(tmp_path, "20260301T000000Z-c", "a/one", replication=3)
    put(tmp_path, "a/unknown", 0, b"{}\n")
    backup = gathered(tmp_path, without="20260301T000000Z-c")
    [journal] = backup.journals
    assert journal.spec.replication == 2
    assert journal.create_revision == 7
    assert not journal.guessed
    chosen = gathered(tmp_path, incarnation="20260101T000000Z-a")
    assert chosen.journals[0].spec.replication == 1
    with pytest.raises(BackupError, match="no store has the mirror nonsense; there are: 2026"):
        gathered(tmp_path, incarnation="nonsense")


def test_a_damaged_mirror_is_named(tmp_path):
    mirror(tmp_path, "20260101T000000Z-a", "a/one")
    [path] = tmp_path.glob(".gazette/**/@spec.json")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(BackupError, match=r"@spec\.json is damaged"):
        gathered(tmp_path)
