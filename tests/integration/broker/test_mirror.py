"""The mirror of specs: a real Etcd, and stores in files."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from gazette_sdk.broker.mirror import GONE_MAX, SpecMirror, incarnation_key
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.items import item_key, member_key
from gazette_sdk.errors import StoreError
from gazette_sdk.fragment.listing import list_stored
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import journal_spec
from support.etcd import run

ROOT = "/gazette/cluster"
LOCAL = pb.ProcessSpec.ID(zone="zone", suffix="broker-1")


class Mirrored:
    """A mirror of one broker, whose keys are written by hand."""

    def __init__(self, client, directory):
        self.client = client
        self.directory = directory
        self.stores = StoreRegistry(directory)
        self.keyspace = BrokerKeySpace(ROOT)
        self.mirror = SpecMirror(client, self.keyspace, self.stores, LOCAL, "/gazette/consumers")

    async def put(self, *specs):
        for spec in specs:
            await self.client.put(item_key(ROOT, spec.name), spec.SerializeToString())

    async def write(self):
        revision = (await self.client.range(b"x")).header.revision
        self.keyspace.__init__(ROOT)
        await self.keyspace.load(self.client, revision)
        await self.mirror.write()

    def files(self, name="@spec.json"):
        return sorted(self.directory.glob(f"**/.gazette/*/**/{name}"))


@asynccontextmanager
async def mirrored(etcd, directory):
    async with etcd.client() as client:
        made = Mirrored(client, directory)
        spec = pb.BrokerSpec(
            process_spec=pb.ProcessSpec(id=LOCAL, endpoint="http://localhost:1"), journal_limit=9
        )
        await client.put(member_key(ROOT, LOCAL.zone, LOCAL.suffix), spec.SerializeToString())
        try:
            yield made
        finally:
            await made.stores.aclose()


def a_spec(name, store="file:///", **fields):
    spec = journal_spec(name, **fields)
    del spec.fragment.stores[:]
    spec.fragment.stores.append(store)
    return spec


def test_only_what_has_changed_is_written_again(etcd, tmp_path):
    async def scenario():
        async with mirrored(etcd, tmp_path) as made:
            await made.put(a_spec("a/one"), a_spec("a/two"))
            await made.write()
            first, second = made.files()
            row = json.loads(first.read_bytes())
            assert (row["name"], second.parent.name) == ("a/one", "two")
            [members] = made.files("members.json")
            assert json.loads(members.read_bytes())["members"] == [
                {"id": "zone/broker-1", "endpoint": "http://localhost:1"}
            ]
            first.unlink()
            second.unlink()
            await made.put(a_spec("a/two", replication=2))
            await made.write()
            assert [path.parent.name for path in made.files()] == ["two"]
            assert not list_stored(made.stores.get("file:///"), "a/two")

    run(scenario())


def test_journals_that_are_only_read_here_are_left_out(etcd, tmp_path):
    async def scenario():
        async with mirrored(etcd, tmp_path) as made:
            await made.put(a_spec("a/read", flags=pb.JournalSpec.O_RDONLY))
            await made.write()
            assert not made.files()

    run(scenario())


def test_a_store_that_fails_delays_its_own_journals_alone(etcd, tmp_path):
    async def scenario():
        async with mirrored(etcd, tmp_path) as made:
            (tmp_path / "broken").write_bytes(b"no directory")
            await made.put(a_spec("a/broken", "file:///broken/"), a_spec("a/fine"))
            with pytest.raises((StoreError, OSError)):
                await made.write()
            assert [path.parent.name for path in made.files()] == ["fine"]
            (tmp_path / "broken").unlink()
            (tmp_path / "broken").mkdir()
            await made.write()
            assert [path.parent.name for path in made.files()] == ["fine", "broken"]

    run(scenario())


def test_a_deleted_journal_is_removed_and_many_at_once_are_kept(etcd, tmp_path):
    async def scenario():
        async with mirrored(etcd, tmp_path) as made:
            names = [f"a/{number:02d}" for number in range(3 * GONE_MAX)]
            await made.put(*map(a_spec, names))
            await made.write()
            await made.client.delete(item_key(ROOT, "a/00"))
            await made.write()
            assert len(made.files()) == len(names) - 1
            for name in names[1 : 2 * GONE_MAX]:
                await made.client.delete(item_key(ROOT, name))
            await made.write()
            assert len(made.files()) == len(names) - 1

    run(scenario())


def test_an_etcd_that_begins_anew_never_overwrites_what_is_mirrored(etcd, tmp_path):
    async def scenario():
        async with mirrored(etcd, tmp_path) as made:
            await made.put(a_spec("a/one"))
            await made.write()
            [first] = made.files()
            content = first.read_bytes()
            await etcd.clear()
        async with mirrored(etcd, tmp_path) as made:
            await made.put(a_spec("a/one", replication=2))
            await made.write()
            assert len(made.files()) == 2
            assert first.read_bytes() == content
            name = (await made.client.range(incarnation_key(ROOT))).entries[0].value.decode()
            assert name in {path.relative_to(tmp_path).parts[1] for path in made.files()}

    run(scenario())


def test_keys_that_vanish_with_our_own_remove_nothing(etcd, tmp_path):
    async def scenario():
        async with mirrored(etcd, tmp_path) as made:
            await made.put(a_spec("a/one"))
            await made.write()
            await etcd.clear()
            await made.write()
            assert len(made.files()) == 1

    run(scenario())
