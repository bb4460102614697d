"""Lease of an earlier process over the same spool directory."""

from __future__ import annotations

from dataclasses import replace

from gazette_sdk.broker.spool.directory import NotedLease, revoke_noted
from support.etcd import run

KEY = b"/gazette/cluster/members/local#broker-1"


def test_the_lease_that_still_holds_the_key_is_revoked_and_no_other(etcd):
    async def scenario():
        async with etcd.client() as client:
            lease, other = await client.grant(60), await client.grant(60)
            noted = NotedLease(client.cluster_id, KEY, lease)
            assert not await revoke_noted(client, None)
            assert not await revoke_noted(client, noted)  # it was never announced
            await client.put(KEY, b"", lease=other)
            assert not await revoke_noted(client, noted)  # another process holds the key
            await client.put(KEY, b"", lease=lease)
            assert not await revoke_noted(client, replace(noted, cluster_id=1))
            assert await revoke_noted(client, noted)
            assert (await client.range(KEY)).count == 0
            assert await client.leases() == [other]

    run(scenario())


def test_a_lease_that_cannot_be_revoked_is_left_to_its_end(etcd, caplog):
    async def scenario():
        async with etcd.client() as client:
            # Etcd refuses the read: it has no empty key.
            assert not await revoke_noted(client, NotedLease(client.cluster_id, b"", 1))

    run(scenario())
    assert "the lease of the earlier process was not revoked" in caplog.text
