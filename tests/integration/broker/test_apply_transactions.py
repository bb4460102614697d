"""Size of Apply requests: one operation of Etcd for each change."""

from __future__ import annotations

from pathlib import Path

import pytest

from gazette_sdk.errors import EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import a_broker, journal_spec
from support.etcd import EtcdFixture, run

ETCD_LIMIT = 128
"""Operations of a transaction, by Etcd's default."""

NAMES = [f"many/journal-{number:03}" for number in range(ETCD_LIMIT + 1)]


def creations(names):
    changes = [pb.ApplyRequest.Change(upsert=journal_spec(name)) for name in names]
    return pb.ApplyRequest(changes=changes)


def test_as_many_journals_are_created_updated_and_deleted_as_etcd_takes(
    etcd: EtcdFixture, tmp_path: Path
):
    async def scenario() -> None:
        async with a_broker(etcd, tmp_path) as (broker, client):
            request = creations(NAMES[:ETCD_LIMIT])
            made = await client.transport.apply(request)
            assert made.status == pb.OK
            for change in request.changes:
                change.expect_mod_revision = made.header.etcd.revision
                change.upsert.max_append_rate = 1 << 20
            updated = await client.transport.apply(request)
            assert updated.status == pb.OK
            deletions = pb.ApplyRequest(
                changes=[
                    pb.ApplyRequest.Change(
                        delete=name, expect_mod_revision=updated.header.etcd.revision
                    )
                    for name in NAMES[:ETCD_LIMIT]
                ]
            )
            deleted = await client.transport.apply(deletions)
            assert deleted.status == pb.OK
            assert not list(broker.keyspace.items())  # the broker answers behind its own mirror
            # A deletion of missing journals changes nothing, and is answered at once.
            for change in deletions.changes:
                change.expect_mod_revision = -1
            assert (await client.transport.apply(deletions)).status == pb.OK

    run(scenario())


def test_more_changes_than_etcd_takes_are_an_error_with_its_remedy(
    etcd: EtcdFixture, tmp_path: Path
):
    async def scenario() -> None:
        async with a_broker(etcd, tmp_path) as (broker, client):
            with pytest.raises(EtcdError, match=r"129 changes.*128 in one.*several requests"):
                await client.transport.apply(creations(NAMES))
            assert not list(broker.keyspace.items())

    run(scenario())
