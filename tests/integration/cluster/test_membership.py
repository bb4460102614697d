from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import aclosing
from urllib.parse import urlsplit

import pytest

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.items import member_key
from gazette_sdk.cluster.lease import boot_s
from gazette_sdk.cluster.membership import Membership
from gazette_sdk.errors import EtcdError, EtcdUnavailableError, LeaseLostError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.tcp_proxy import TcpProxy
from support.etcd import run, within

ZONE, SUFFIX = "a", "member"
KEY = member_key("/root", ZONE, SUFFIX)


def spec(limit=10):
    return pb.BrokerSpec(
        process_spec={"id": {"zone": ZONE, "suffix": SUFFIX}, "endpoint": "http://host:1"},
        journal_limit=limit,
    )


async def announced(client):
    found = (await client.range(KEY)).entries
    return [(pb.BrokerSpec.FromString(kv.value), kv.lease, kv.mod_revision) for kv in found]


def test_announce_update_and_expire(etcd):
    async def scenario():
        async with etcd.client() as client:
            membership = Membership(client, KEY, ttl_s=60)
            await membership.start()
            first = await membership.announce(spec(1))
            assert await announced(client) == [(spec(1), membership.lease, first)]
            for limit in (2, 3):
                revision = await membership.update(spec(limit))
                assert await announced(client) == [(spec(limit), membership.lease, revision)]
            await client.revoke(membership.lease)
            assert await announced(client) == []
            with pytest.raises(
                EtcdError, match=rf"modified or deleted externally \(expected revision {revision}\)"
            ):
                await membership.update(spec(4))
            await membership.revoke()

    run(scenario())


def test_a_key_that_somebody_else_changed_is_not_overwritten(etcd):
    async def scenario():
        async with etcd.client() as client, Membership(client, KEY, ttl_s=60) as membership:
            await membership.announce(spec(1))
            await client.put(KEY, spec(9).SerializeToString(), lease=membership.lease)
            with pytest.raises(EtcdError, match="modified or deleted externally"):
                await membership.set_exiting()
            assert (await announced(client))[0][0] == spec(9)

    run(scenario())


def test_a_conflicting_announcement_waits_until_the_old_lease_goes(etcd, caplog):
    async def scenario():
        async with etcd.client() as client:
            old = Membership(client, KEY, ttl_s=60)
            await old.start()
            await old.announce(spec(1))
            # The pause is longer than the test may take: the deletion of the key ends it.
            async with Membership(client, KEY, ttl_s=60, retry_s=1000) as new:
                announcing = asyncio.create_task(new.announce(spec(2)))
                with pytest.raises(TimeoutError):
                    await within(asyncio.shield(announcing), timeout_s=0.1)
                # A key that begins with ours is another member's.
                await client.put(KEY + b"2", b"")
                await client.delete(KEY + b"2")
                with pytest.raises(TimeoutError):
                    await within(asyncio.shield(announcing), timeout_s=0.1)
                assert [s for s, _, _ in await announced(client)] == [spec(1)]
                await old.revoke()
                revision = await within(announcing)
                assert await announced(client) == [(spec(2), new.lease, revision)]

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "is held by another process" in caplog.text


def test_an_announcement_is_tried_again_after_any_error(etcd, monkeypatch, caplog):
    async def scenario():
        async with (
            etcd.client() as client,
            Membership(client, KEY, ttl_s=60, retry_s=0.01) as membership,
        ):
            failures = [EtcdUnavailableError("away"), EtcdError("refused")]
            txn = client.txn

            async def failing_txn(*args):
                if failures:
                    raise failures.pop()
                return await txn(*args)

            monkeypatch.setattr(client, "txn", failing_txn)
            assert await within(membership.announce(spec())) == membership.revision
            assert not failures

    run(scenario())
    assert caplog.text.count("tried again until it succeeds") == 1
    assert "works again after an outage of" in caplog.text
    assert "(2 failures)" in caplog.text


def test_an_announcement_of_our_own_lease_is_found_again(etcd):
    async def scenario():
        async with etcd.client() as client, Membership(client, KEY, ttl_s=60) as membership:
            first = await membership.announce(spec())
            assert await membership.announce(spec()) == first
            # The same for the update that makes it exiting, whose answer was lost.
            exiting = spec()
            exiting.exiting = True
            revision = await membership.update(exiting)
            membership._revision = first
            assert await membership.update(exiting) == revision

    run(scenario())


def test_an_update_without_an_answer_is_repeated_whether_it_was_done_or_not(etcd, monkeypatch):
    async def scenario():
        async with etcd.client() as client, Membership(client, KEY, ttl_s=60) as membership:
            await membership.announce(spec(1))
            txn, failures = client.txn, ["before", "after", "before"]

            async def failing_txn(*args):
                failure = failures.pop() if failures else ""
                result = await txn(*args) if failure != "before" else None
                if failure:
                    raise EtcdUnavailableError("away")
                return result

            monkeypatch.setattr(client, "txn", failing_txn)
            revision = await membership.set_exiting()
            assert not failures
            ((value, _, found),) = await announced(client)
            assert value.exiting
            assert found == revision == membership.revision

            monkeypatch.setattr("gazette_sdk.cluster.membership.UPDATE_TIMEOUT_S", 0)
            failures.append("before")
            with pytest.raises(EtcdUnavailableError):
                await membership.update(spec(2))

    run(scenario())


def test_a_session_from_start_to_end(etcd):
    async def scenario():
        async with etcd.client() as client:
            async with Membership(client, KEY, ttl_s=60) as membership:
                with pytest.raises(EtcdError, match="is not announced yet"):
                    await membership.set_exiting()
                await membership.announce(spec())
                ((value, lease, revision),) = await announced(client)
                assert value == spec()
                assert lease == membership.lease != 0
                assert revision == membership.revision

                exiting = await membership.set_exiting()
                assert await membership.set_exiting() == exiting == membership.revision
                ((value, still, _),) = await announced(client)
                assert value.exiting
                assert still == lease
                assert not membership.lost.done()
            assert membership.lost.cancelled()
            assert await client.leases() == []
            assert await announced(client) == []

    run(scenario())


def test_the_loss_of_the_lease_is_told(etcd):
    async def scenario():
        async with etcd.client() as client, Membership(client, KEY, ttl_s=1) as membership:
            await membership.announce(spec())
            await client.revoke(membership.lease)
            with pytest.raises(LeaseLostError, match="unable to keep member lease alive"):
                await within(asyncio.shield(membership.lost), timeout_s=3)
            with pytest.raises(LeaseLostError):
                await membership.announce(spec())

    run(scenario())


def test_a_loop_that_is_blocked_for_longer_than_its_lease_keeps_it(etcd):
    async def scenario():
        async with etcd.client() as client, Membership(client, KEY, ttl_s=2) as membership:
            revision = await membership.announce(spec(1))
            time.sleep(3.7)  # noqa: ASYNC251 - blocks the loop, for less than the bound of 4 s
            assert membership.life.alive_until > boot_s()
            assert await announced(client) == [(spec(1), membership.lease, revision)]
            assert not membership.lost.done()

    run(scenario())
    assert "gazette-lease" not in [thread.name for thread in threading.enumerate()]


def test_a_loop_that_is_stuck_loses_its_lease(etcd):
    async def scenario():
        async with etcd.client() as client, Membership(client, KEY, ttl_s=1) as membership:
            revision = await membership.announce(spec(1))
            time.sleep(3.3)  # noqa: ASYNC251 - twice its time to live, and once more
            assert membership.life.alive_until < boot_s()
            with pytest.raises(LeaseLostError, match="no sign of life"):
                await within(asyncio.shield(membership.lost), timeout_s=3)
            async with aclosing(client.watch(KEY, revision + 1)) as batches:
                assert (await within(anext(batches))).events[0].is_delete

    run(scenario())


def test_a_member_cut_off_from_etcd_is_lost_when_peers_see_it_gone(etcd):
    async def scenario():
        async with TcpProxy(urlsplit(etcd.address).port) as proxy, etcd.client() as observer:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            membership = Membership(client, KEY, ttl_s=1)
            await membership.start()
            await membership.announce(spec())
            proxy.refuse()
            with pytest.raises(LeaseLostError):
                await within(asyncio.shield(membership.lost), timeout_s=3)
            async with asyncio.timeout(5):
                watch = observer.watch(KEY, 1 + membership.revision)
                assert (await anext(watch)).events[0].is_delete
                await watch.aclose()
            # Etcd may still hold the lease, so it is revoked; bounded by its time to live.
            await within(membership.revoke(), timeout_s=3)
            await client.aclose()

    run(scenario())


def test_the_wait_for_a_key_goes_on_over_broken_connections(etcd):
    async def scenario():
        async with TcpProxy(urlsplit(etcd.address).port) as proxy, etcd.client() as observer:
            old = Membership(observer, KEY, ttl_s=60)
            await old.start()
            await old.announce(spec(1))
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            async with Membership(client, KEY, ttl_s=60, retry_s=1000) as new:
                announcing = asyncio.create_task(new.announce(spec(2)))
                for _ in range(3):
                    await asyncio.sleep(0.05)
                    proxy.reset()
                await old.revoke()
                assert await within(announcing) == new.revision
            await client.aclose()

    run(scenario())


def test_a_wait_for_a_key_ends_with_its_own_lease_and_can_be_cancelled(etcd):
    async def scenario():
        async with etcd.client() as client, Membership(client, KEY, ttl_s=60) as old:
            await old.announce(spec(1))
            async with Membership(client, KEY, ttl_s=1, retry_s=1000) as new:
                announcing = asyncio.create_task(new.announce(spec(2)))
                await client.revoke(new.lease)
                with pytest.raises(LeaseLostError):
                    await within(announcing)
            async with Membership(client, KEY, ttl_s=60, retry_s=1000) as new:
                announcing = asyncio.create_task(new.announce(spec(2)))
                await asyncio.sleep(0.1)
                announcing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await within(announcing)

    run(scenario())


def test_a_lease_that_was_lost_without_an_answer_is_revoked_at_the_end(etcd):
    async def scenario():
        async with TcpProxy(urlsplit(etcd.address).port) as proxy, etcd.client() as observer:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            membership = Membership(client, KEY, ttl_s=3)
            await membership.start()
            await membership.announce(spec())
            proxy.cut()
            # Etcd still holds the lease, as after a change of its leader.
            other = asyncio.create_task(observer.keep_alive(membership.lease, 3))
            with pytest.raises(LeaseLostError):
                await within(asyncio.shield(membership.lost), timeout_s=10)
            assert await announced(observer)
            proxy.heal()
            await membership.revoke()
            assert not await announced(observer)
            other.cancel()
            await asyncio.wait([other])
            await client.aclose()

    run(scenario())


def test_the_end_is_not_held_up_by_an_etcd_that_is_away(etcd, monkeypatch, caplog):
    monkeypatch.setattr("gazette_sdk.cluster.membership.REVOKE_TIMEOUT_S", 0.1)

    async def scenario():
        async with TcpProxy(urlsplit(etcd.address).port) as proxy:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            membership = Membership(client, KEY, ttl_s=60)
            await membership.start()
            proxy.cut()
            await within(membership.revoke(), timeout_s=2)
            await client.aclose()

    run(scenario())
    assert "the lease was not revoked" in caplog.text
