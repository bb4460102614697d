"""An Etcd with authentication: user and password, and tokens that expire."""

import asyncio
import contextlib
from contextlib import aclosing

import pytest

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import rpc
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.cluster.membership import Membership
from gazette_sdk.errors import ConfigurationError, EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from support.etcd import run, within

USER, PASSWORD = "gazette", "a secret"
TTL_S = 3


@contextlib.asynccontextmanager
async def etcd_with_a_user(directory):
    """An etcd that admits root, and a user who may change /root/ only."""
    server = EtcdServer(directory, sync_writes=False)
    await server.start()
    try:
        await admit_a_user(server.endpoint)
        yield server.endpoint
    finally:
        await server.stop()


async def admit_a_user(address):
    async with aclosing(await Etcd.connect(address)) as admin:
        auth, call = admin._auth, admin._call
        await call(auth.UserAdd, rpc.AuthUserAddRequest(name="root", password="r"))
        await call(auth.UserAdd, rpc.AuthUserAddRequest(name=USER, password=PASSWORD))
        await call(auth.RoleAdd, rpc.AuthRoleAddRequest(name="root"))
        await call(auth.RoleAdd, rpc.AuthRoleAddRequest(name="brokers"))
        grant = rpc.AuthRoleGrantPermissionRequest(name="brokers")
        grant.perm.permType = 2  # read and write
        grant.perm.key, grant.perm.range_end = b"/root/", b"/root0"
        await call(auth.RoleGrantPermission, grant)
        await call(auth.UserGrantRole, rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        await call(auth.UserGrantRole, rpc.AuthUserGrantRoleRequest(user=USER, role="brokers"))
        await call(auth.AuthEnable, rpc.AuthEnableRequest())


def test_a_user_with_a_password_reads_writes_watches_and_holds_a_lease(tmp_path):
    async def scenario():
        async with (
            etcd_with_a_user(tmp_path) as address,
            aclosing(await Etcd.connect(address, user=USER, password=PASSWORD)) as client,
        ):
            spec = pb.BrokerSpec(journal_limit=3)
            async with Membership(client, b"/root/members/a#b", ttl_s=TTL_S) as membership:
                first = await membership.announce(spec)
                async with aclosing(client.watch(b"/root/", first)) as batches:
                    batch = await within(anext(batches))
                    assert batch.events[0].kv.value == spec.SerializeToString()
                await asyncio.sleep(TTL_S + 1)  # it outlives its time because it is renewed
                assert (await client.range(b"/root/members/a#b")).entries
            with pytest.raises(EtcdError, match="permission denied"):
                await client.put(b"/other", b"1")

    run(scenario())


def test_an_expired_token_is_replaced(tmp_path):
    async def scenario():
        async with (
            etcd_with_a_user(tmp_path) as address,
            aclosing(await Etcd.connect(address, user=USER, password=PASSWORD)) as client,
        ):
            client._token = "expired.1"  # as Etcd sees an expired one
            assert await client.put(b"/root/a", b"1")

    run(scenario())


def test_a_user_goes_on_with_another_member(etcd_cluster):
    async def scenario():
        await admit_a_user(etcd_cluster.address)
        address = etcd_cluster.servers[0].endpoint  # the others are learned
        async with (
            aclosing(await Etcd.connect(address, user=USER, password=PASSWORD)) as client,
            Membership(client, b"/root/members/a#b", ttl_s=TTL_S) as membership,
        ):
            await membership.announce(pb.BrokerSpec(journal_limit=3))
            etcd_cluster.servers[0].kill()
            await asyncio.sleep(TTL_S + 1)
            assert not membership.lost.done()
            assert (await client.range(b"/root/members/a#b")).entries

    run(scenario(), timeout_s=60)


@pytest.mark.parametrize(("user", "password"), [(USER, "wrong"), ("nobody", PASSWORD)])
def test_a_wrong_password_is_refused_with_its_options(tmp_path, user, password):
    async def scenario():
        async with etcd_with_a_user(tmp_path) as address:
            with pytest.raises(ConfigurationError, match=r"refuses user .* --etcd\.password"):
                await Etcd.connect(address, user=user, password=password)

    run(scenario())


def test_without_a_user_calls_are_refused(tmp_path):
    async def scenario():
        async with (
            etcd_with_a_user(tmp_path) as address,
            aclosing(await Etcd.connect(address)) as client,
        ):
            with pytest.raises(EtcdError, match="user name is empty"):
                await client.put(b"/root/a", b"1")

    run(scenario())
