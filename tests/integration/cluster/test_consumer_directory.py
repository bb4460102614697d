"""Processes of applications, found by their keys in Etcd."""

import asyncio

from gazette_sdk.cluster import consumer_keys
from gazette_sdk.cluster.consumer_keys import ConsumerDirectory, read_consumers
from gazette_sdk.errors import EtcdError
from support.shard_services import consumer_spec

ROOT = "/gazette/consumers"


def member(application, suffix):
    return f"{ROOT}/{application}/members/zone#{suffix}".encode()


def names(found):
    return {name: [spec.process_spec.id.suffix for spec in specs] for name, specs in found.items()}


async def put_all(etcd, application, shards):
    for number in range(shards):
        await etcd.put(f"{ROOT}/{application}/items/shard-{number}".encode(), b"spec")
        await etcd.put(f"{ROOT}/{application}/assign/shard-{number}#a#b#0".encode(), b"status")


def test_members_of_all_applications_are_found_and_their_shards_are_not_read(etcd):
    async def scenario():
        async with etcd.client() as client:
            await put_all(client, "rides", 5)
            await put_all(client, "team/totals", 5)
            await put_all(client, "idle", 1)
            await put_all(client, "team", 2)
            await client.put(f"{ROOT}/rides/items/shop/items/part-000".encode(), b"spec")
            for application, suffix in (
                ("rides", "one-1"),
                ("rides", "two-2"),
                ("rides-2", "six-6"),
                ("team/totals", "ten-10"),
                ("one/members", "four-4"),
            ):
                await client.put(
                    member(application, suffix), consumer_spec(suffix).SerializeToString()
                )
            await client.put(member("rides", "bad-1"), b"no spec")
            await client.put(f"{ROOT}/stray".encode(), b"")
            await client.put(b"/gazette/consumers-2/x/members/a#b", b"")
            read = []
            found_range = client.range

            async def noted(*args, **options):
                found = await found_range(*args, **options)
                read.extend(entry.key for entry in found.entries)
                return found

            client.range = noted
            return await read_consumers(client, ROOT), read

    found, read = asyncio.run(scenario())
    assert names(found) == {
        "idle": [],
        "one/members": ["four-4"],
        "rides": ["one-1", "two-2"],
        "rides-2": ["six-6"],
        "team": [],
        "team/totals": ["ten-10"],
    }
    assert len([key for key in read if b"#" not in key or b"/assign/" in key]) <= 10


def test_etcd_is_read_again_after_a_while_and_errors_keep_what_is_known(etcd):
    async def scenario():
        now_s = 0.0
        seen = []
        async with etcd.client() as client:
            directory = ConsumerDirectory(client, ROOT, now=lambda: now_s)
            seen.append(names(await directory.applications()))
            await client.put(member("rides", "one-1"), consumer_spec("one-1").SerializeToString())
            now_s = consumer_keys.DIRECTORY_PERIOD_S - 0.1
            seen.append(names(await directory.applications()))
            now_s = consumer_keys.DIRECTORY_PERIOD_S
            seen.append(names(await directory.applications()))

            async def refused(*_args, **_options):
                raise EtcdError("etcdserver: permission denied")

            client.range = refused
            now_s = 2 * consumer_keys.DIRECTORY_PERIOD_S
            seen.append(names(await directory.applications()))
            return seen, directory.error

    seen, error = asyncio.run(scenario())
    assert seen == [{}, {}, {"rides": ["one-1"]}, {"rides": ["one-1"]}]
    assert "permission denied" in str(error)
