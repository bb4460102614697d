from __future__ import annotations

import asyncio
import logging

import pytest

from gazette_sdk.cluster.items import LocalIdentity, LocalItems
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import Mirror, journal_spec
from support.etcd import run

LOCAL = pb.ProcessSpec.ID(zone="zone", suffix="local")
MISSING = pb.ProcessSpec.ID(zone="missing", suffix="missing")


class Local:
    """Object of an item that notes what is done to it."""

    def __init__(self, item, predecessor):
        self.create_revision = item.create_revision
        self.predecessor = predecessor
        self.is_primary = False
        self.log = []
        self.end = asyncio.Event()

    def continues(self, item, assignment, *, is_primary):
        return self.create_revision == item.create_revision and (is_primary or not self.is_primary)

    def update(self, item, assignments, *, is_primary):
        self.is_primary = is_primary
        self.log.append(f"update {len(assignments)}")

    def start(self):
        self.log.append("start")

    def stopping(self):
        self.log.append("stopping")

    async def shut_down(self):
        self.log.append("shut down")
        await self.end.wait()


class Setup:
    def __init__(self):
        self.mirror = Mirror()
        self.removed = []
        self.items = LocalItems(
            self.mirror.keyspace,
            LOCAL,
            make=Local,
            shut_down=lambda _, local: local.shut_down(),
            removed=self.removed.append,
            kind="thing",
        )
        self.mirror.keyspace.observers.append(self.items.refresh)

    def assign(self, slot, *, journal="a/journal"):
        key, value = self.mirror.assignment(journal, "local", slot, zone="zone")
        self.mirror.put({key: value})
        return key

    def create(self, journal="a/journal"):
        self.mirror.put(dict([self.mirror.item(journal_spec(journal))]))


def test_an_item_is_local_while_it_is_assigned():
    async def scenario():
        made = Setup()
        made.create()
        assert made.items.get("a/journal") is None
        key = made.assign(1)
        local = made.items.get("a/journal")
        assert local.log == ["update 1", "start"]
        assert not local.is_primary
        assert made.items.all() == [local]
        made.mirror.put({}, delete=[key])
        assert made.items.get("a/journal") is None
        assert made.removed == ["a/journal"]
        assert local.log[2:] == ["stopping"]
        ending = asyncio.ensure_future(made.items.shutdowns())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert local.log[2:] == ["stopping", "shut down"]
        assert not ending.done()
        local.end.set()
        await ending

    run(scenario())


def test_a_replaced_object_is_the_predecessor_of_the_next_one():
    async def scenario():
        made = Setup()
        made.create()
        key = made.assign(0)
        first = made.items.get("a/journal")
        new_key, value = made.mirror.assignment("a/journal", "local", 1, zone="zone")
        made.mirror.put({new_key: value}, delete=[key])
        second = made.items.get("a/journal")
        assert second is not first
        assert second.predecessor is first
        assert second.log == ["update 1", "start"]
        # The one that shuts down is still the predecessor when the item comes back.
        made.mirror.put({}, delete=[new_key])
        made.assign(0)
        assert made.items.get("a/journal").predecessor is second
        made.items.stop()
        assert made.items.is_stopped
        for local in (first, second):
            local.end.set()
        await asyncio.sleep(0)

    run(scenario())


def test_an_item_that_was_created_again_has_no_predecessor():
    async def scenario():
        made = Setup()
        made.create()
        made.assign(0)
        first = made.items.get("a/journal")
        item_key, item = made.mirror.item(journal_spec("a/journal"))
        made.mirror.batch([(item_key, None), (item_key, item)])
        second = made.items.get("a/journal")
        assert second is not first
        assert second.predecessor is None

    run(scenario())


def test_shutdowns_of_primaries_are_awaited_first_and_errors_are_logged(caplog):
    async def scenario():
        made = Setup()
        for journal in ("a/journal", "b/journal"):
            made.create(journal)
        made.assign(0, journal="a/journal")
        made.assign(1, journal="b/journal")
        primary, standby = made.items.all()

        async def fail():
            raise GazetteError("the disk is full")

        primary.shut_down = fail
        made.items.stop()
        assert made.items.all() == []
        made.assign(0, journal="a/journal")
        assert made.items.get("a/journal") is None  # it is stopped
        await made.items.shutdowns(primaries=True)
        assert not standby.end.is_set()
        standby.end.set()
        await made.items.shutdowns()

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "shut down a/journal failed" in caplog.text


def test_an_identity_has_a_placeholder_while_its_key_is_missing():
    mirror = Mirror()
    identity = LocalIdentity(mirror.keyspace, LOCAL, missing_id=MISSING, kind="thing")
    assert identity.local_id == MISSING
    mirror.put(dict([mirror.member("local", "zone")]))
    assert identity.local_id == LOCAL
    header = pb.Header(etcd=mirror.keyspace.header)
    identity.check_header(header)
    header.process_id.CopyFrom(LOCAL)
    identity.check_header(header)
    header.process_id.suffix = "other"
    with pytest.raises(GazetteError, match="is for thing zone/other, and this is zone/local"):
        identity.check_header(header)
    header.etcd.cluster_id += 1
    with pytest.raises(GazetteError, match="check the things' --etcd"):
        identity.check_header(header)
