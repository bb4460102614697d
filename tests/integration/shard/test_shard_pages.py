"""Pages of shards, and the wish of an autoscaler, of two processes on a real Etcd."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest

from gazette_sdk.cluster.items import member_key
from gazette_sdk.errors import CallError, DeadlineExceededError
from gazette_sdk.message.uuid import build_uuid, clock_of_time
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Capability, FixedToken, authority_for
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.protocol.shard_spec import status_name
from gazette_sdk.server.authorization import Call
from gazette_sdk.shard.consumer import lag
from gazette_sdk.shard.consumer.client import ShardClient
from support.etcd import run
from support.memory_transport import MemoryTransport
from support.shard_services import ROOT, assign, consumer_spec, put_shard, served_shards, shard_spec

KEYS = base64.b64encode(b"a secret key of consumers, 32 by").decode()
PRIMARY, STANDBY, FAILED = 300, 200, 400
AGE_S = 100.0


def scenario(test):
    def run_it(etcd):
        run(test(etcd))

    run_it.__name__ = test.__name__
    return run_it


def message(age_s=0.0):
    clock = clock_of_time(datetime.now(UTC) - timedelta(seconds=age_s))
    return json.dumps({"UUID": str(build_uuid(b"\x01bcdef", clock, 0))}).encode() + b"\n"


@asynccontextmanager
async def two_processes(etcd, *, auth_keys=""):
    """Two processes over journals in memory."""
    transport = MemoryTransport()
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(
                served_shards(etcd.client, suffix, auth_keys=auth_keys, transport=transport)
            )
            for suffix in ("aaaa", "bbbb")
        ]
        for process in processes:
            await process.settle()
        yield transport, *processes


async def a_shard(process, transport, name, *, read=1, unread=0, code=PRIMARY, age_s=AGE_S, **spec):
    """A shard of a process that has read some messages of its source, and not the next ones."""
    await put_shard(process.etcd, shard_spec(name, **spec))
    journal = f"source/{name}"
    content = [message() for _ in range(read)] + [message(age_s) for _ in range(unread)]
    transport.create(journal)
    transport.journals[journal].content += b"".join(content)
    errors = ("it\nbroke",) if code == FAILED else ()
    await assign(process.etcd, name, process.suffix, 0, code=code, errors=errors)
    await process.settle()
    local = process.resolver.local.get(name)
    await local.change(
        is_ready=True,
        read_through={journal: sum(map(len, content[:read]))},
        write_heads={journal: sum(map(len, content))},
    )
    return local


def led_of(local):
    async def led():
        return {"shard-A": local}

    return led


def ids(response):
    return [row.id for row in response.rows]


def token(*capabilities, selector=""):
    mask = sum(capabilities)
    return authority_for(KEYS).sign(mask, parse_selector(selector), 60, time.time())


# ---------------------------------------------------------------- rows


@scenario
async def test_rows_of_all_processes_have_their_state_their_members_and_their_lag(etcd):
    async with two_processes(etcd) as (transport, a, b):
        await a_shard(a, transport, "shard-A", unread=2, labels={"team": "red"})
        watching = await a_shard(b, transport, "shard-B")
        await watching.change(watermark_us=7)
        await assign(a.etcd, "shard-B", "aaaa", 1, code=STANDBY)
        await put_shard(a.etcd, shard_spec("shard-C", disable=True))
        await put_shard(a.etcd, shard_spec("shard-D"))
        await a_shard(b, transport, "shard-E", code=FAILED)
        recovering = await a_shard(a, transport, "shard-F", code=0)
        await recovering.change(read_through={}, recovery=(10, 30))
        for process in (a, b):
            await process.settle()
        for process in (a, b):
            page = await process.client.page(clpb.ShardsPageRequest())
            assert page.application == "app"
            assert page.revision == process.keyspace.header.revision
            assert (page.total, page.next) == (6, "")
            assert dict(page.states) == {"PRIMARY": 2, "FAILED": 1, "IDLE": 2, "DISABLED": 1}
            first, second, third, fourth, fifth, sixth = page.rows
            assert ids(page) == [f"shard-{each}" for each in "ABCDEF"]
            size = len(message())
            assert (first.state, first.lag_bytes) == ("PRIMARY", 2 * size)
            assert AGE_S <= first.lag_s < AGE_S + 60
            assert first.recovery_log == "recovery/logs/shard-A"
            assert [label.value for label in first.labels.labels] == ["red"]
            assert not first.HasField("watermark_us")
            assert dict(second.read_through) == {"source/shard-B": size}
            assert (second.lag_bytes, second.lag_s, second.watermark_us) == (0, 0.0, 7)
            assert [page.members[index].suffix for index in second.members] == ["aaaa", "bbbb"]
            assert page.members[second.primary].suffix == "bbbb"
            assert (third.state, third.HasField("primary"), list(third.members)) == (
                "DISABLED",
                False,
                [],
            )
            assert (fourth.state, fourth.HasField("lag_bytes")) == ("IDLE", False)
            assert (fifth.state, fifth.error, fifth.lag_bytes) == ("FAILED", "it broke", 0)
            assert (sixth.state, sixth.recovered_bytes, sixth.recovery_bytes) == ("IDLE", 10, 30)
            assert not sixth.HasField("lag_bytes")


@scenario
async def test_rows_are_searched_filtered_sorted_and_cut_into_pages(etcd):
    async with two_processes(etcd) as (transport, a, b):
        await a_shard(a, transport, "shard-A", unread=1, labels={"team": "red"})
        await a_shard(b, transport, "shard-B", unread=3, age_s=50, labels={"team": "Blue"})
        await a_shard(a, transport, "shard-C", unread=2, age_s=75, labels={"team": "red"})
        await put_shard(a.etcd, shard_spec("shard-D"))
        for process in (a, b):
            await process.settle()

        async def listed(**request):
            return ids(await b.client.page(clpb.ShardsPageRequest(**request)))

        assert await listed(search="BLUE") == ["shard-B"]
        assert await listed(search="team=red") == ["shard-A", "shard-C"]
        assert await listed(search="d-c") == ["shard-C"]
        assert await listed(selector=parse_selector("team=red")) == ["shard-A", "shard-C"]
        assert await listed(states=["IDLE"]) == ["shard-D"]
        assert await listed(states=["FAILED"]) == []
        assert await listed(source="source/shard-B") == ["shard-B"]
        assert await listed(source="source/shard", states=["PRIMARY"]) == []
        a_to_d = [f"shard-{each}" for each in "ABCD"]
        assert await listed(descending=True) == a_to_d[::-1]
        orders = {
            clpb.BY_ID: a_to_d,
            clpb.BY_SHARD_STATE: ["shard-D", "shard-A", "shard-B", "shard-C"],
            clpb.BY_LAG_BYTES: ["shard-A", "shard-C", "shard-B", "shard-D"],
            clpb.BY_LAG_SECONDS: ["shard-B", "shard-C", "shard-A", "shard-D"],
        }
        for sort, order in orders.items():
            assert await listed(sort=sort) == order
            assert await listed(sort=sort, skip=1, limit=2) == order[1:3]
            for descending in (False, True):
                # Pages of one row each, by their cursors: all rows once, in the order of one page.
                whole = await listed(sort=sort, descending=descending)
                found, after = [], ""
                for index in range(4):
                    request = clpb.ShardsPageRequest(
                        sort=sort, descending=descending, limit=1, after=after
                    )
                    page = await b.client.page(request)
                    assert page.total == 4
                    assert bool(page.next) == (index < 3)
                    found += ids(page)
                    after = page.next
                assert found == whole
        # What is not known is last in both directions.
        by_lag = await listed(sort=clpb.BY_LAG_BYTES, descending=True)
        assert by_lag == ["shard-B", "shard-C", "shard-A", "shard-D"]


@pytest.mark.parametrize(
    ("request_", "remedy"),
    [
        (clpb.ShardsPageRequest(limit=501), "ask for 1 to 500 rows"),
        (clpb.ShardsPageRequest(limit=-1), "ask for 1 to 500 rows"),
        (clpb.ShardsPageRequest(skip=-1), "must not be negative"),
        (clpb.ShardsPageRequest(sort=9), "there is no such order"),
        (clpb.ShardsPageRequest(after="shard-A"), "not the `next` of an earlier page"),
        (clpb.ShardsPageRequest(after="[1]"), "not the `next` of an earlier page"),
    ],
)
def test_malformed_requests_say_what_to_change(etcd, request_, remedy):
    async def scenario():
        async with two_processes(etcd) as (_, a, _):
            with pytest.raises(CallError, match=remedy) as caught:
                await a.client.page(request_)
            assert caught.value.code == "INVALID_ARGUMENT"

    run(scenario())


# ---------------------------------------------------------------- rights


@scenario
async def test_a_token_shows_what_its_selector_and_its_capabilities_allow(etcd):
    async with two_processes(etcd, auth_keys=KEYS) as (transport, a, b):
        await a_shard(a, transport, "shard-A", unread=1, labels={"team": "red"})
        await a_shard(b, transport, "shard-B", unread=1, labels={"team": "blue"})
        await a.settle()
        both = Capability.LIST, Capability.READ

        async def page(*capabilities, selector="", **request):
            authorizer = FixedToken(token(*capabilities, selector=selector))
            async with ShardClient(a.endpoint, authorizer=authorizer) as client:
                return await client.page(clpb.ShardsPageRequest(**request))

        whole = await page(*both)
        assert [row.HasField("lag_bytes") for row in whole.rows] == [True, True]
        listed = await page(Capability.LIST)
        assert ids(listed) == ["shard-A", "shard-B"]
        for row in listed.rows:
            assert row.state == "PRIMARY"
            assert not row.read_through
            assert not row.HasField("lag_bytes")
            assert not row.HasField("lag_s")
        blue = await page(*both, selector="team=blue")
        assert (ids(blue), blue.total, dict(blue.states)) == (["shard-B"], 1, {"PRIMARY": 1})
        assert blue.rows[0].HasField("lag_bytes")
        local = await page(*both, selector="team=blue", local=True)
        assert ids(local) == []
        for capabilities, local_only in (((Capability.READ,), False), ((Capability.LIST,), True)):
            with pytest.raises(CallError, match="lacks the required capability"):
                await page(*capabilities, local=local_only)
        async with ShardClient(
            a.endpoint, authorizer=FixedToken(token(Capability.LIST, selector="team=blue"))
        ) as client:
            assert (await client.scale()).shards_with_lag == 1


# ---------------------------------------------------------------- other processes


@scenario
async def test_a_process_that_does_not_answer_costs_its_figures_and_a_second(etcd):
    async with two_processes(etcd) as (transport, a, _):
        await a_shard(a, transport, "shard-A", unread=1)
        await etcd_member(a, "gone", "http://127.0.0.1:9")
        await put_shard(a.etcd, shard_spec("shard-B"))
        await assign(a.etcd, "shard-B", "gone", 0, code=PRIMARY)
        await a.settle()
        began = time.monotonic()
        page = await a.client.page(clpb.ShardsPageRequest())
        assert time.monotonic() - began < 30
        first, second = page.rows
        assert (first.state, first.HasField("lag_bytes")) == ("PRIMARY", True)
        assert (second.state, second.HasField("lag_bytes")) == ("PRIMARY", False)
        scale = await a.client.scale()  # it may have too much to do
        assert (scale.shards_with_lag, scale.processes) == (2, 2)


async def etcd_member(process, suffix, endpoint):
    value = consumer_spec(suffix, endpoint).SerializeToString()
    await process.etcd.put(member_key(ROOT, "zone", suffix), value)


@scenario
async def test_answers_are_used_again_for_two_seconds(etcd):
    async with two_processes(etcd) as (transport, a, b):
        await a_shard(a, transport, "shard-A", unread=1)
        local = await a_shard(b, transport, "shard-B", unread=1)
        await a.settle()
        first = await a.client.page(clpb.ShardsPageRequest())
        reads = transport.reads
        assert reads == 4  # of two sources: the write head, and the first unread message
        journal, offset = next(iter(local.read_through.items()))
        await local.change(read_through={journal: offset + len(message())})
        second = await a.client.page(clpb.ShardsPageRequest())
        assert [row.lag_bytes for row in second.rows] == [row.lag_bytes for row in first.rows]
        assert transport.reads == reads
        for process in (a, b):  # as after two seconds
            process.pages._asked.clear()
            process.pages._lags._measured_at -= lag.PERIOD_S
        third = await a.client.page(clpb.ShardsPageRequest())
        assert [row.lag_bytes > 0 for row in third.rows] == [True, False]
        assert transport.reads == reads + 2  # a source that is read through costs no call


# ---------------------------------------------------------------- scale


@scenario
async def test_an_autoscaler_gets_a_process_for_each_shard_that_lags_over_a_minute(etcd):
    async with two_processes(etcd) as (transport, a, b):
        assert (await b.client.scale()).processes == 1  # without any shard
        for process, name in ((a, "shard-A"), (b, "shard-B"), (b, "shard-C")):
            await a_shard(process, transport, name, unread=1)
        await a_shard(a, transport, "shard-D", unread=1, age_s=1, hot_standbys=1)
        await a_shard(b, transport, "shard-E", unread=1, code=FAILED)
        await a.settle()
        scale = await a.client.scale()
        assert (scale.processes, scale.shards_with_lag) == (3, 3)
        assert scale.lag_bytes == 4 * len(message())
        assert AGE_S <= scale.lag_seconds < AGE_S + 60


@scenario
async def test_hot_standbys_need_processes_even_without_lag(etcd):
    async with two_processes(etcd) as (transport, a, _):
        await a_shard(a, transport, "shard-A", hot_standbys=2)
        scale = await a.client.scale()
        assert (scale.processes, scale.shards_with_lag, scale.lag_bytes) == (3, 0, 0)


# ---------------------------------------------------------------- JSON


@scenario
async def test_json_leaves_out_what_is_not_known_and_scales_by_get(etcd):
    async with two_processes(etcd) as (transport, a, _), aiohttp.ClientSession(a.endpoint) as http:
        await a_shard(a, transport, "shard-A", unread=1)
        await put_shard(a.etcd, shard_spec("shard-B"))
        await a.settle()

        async def post(path, body):
            async with http.post(path, json=body) as answer:
                return answer.status, await answer.json()

        status, page = await post("/v1/shards/page", {"limit": 2})
        assert status == 200
        first, second = page["rows"]
        assert (first["id"], first["lagBytes"]) == ("shard-A", str(len(message())))
        assert (second["id"], "lagBytes" in second, "primary" in second) == (
            "shard-B",
            False,
            False,
        )
        status, refused = await post("/v1/shards/page", {"limit": 501})
        assert (status, refused["code"]) == (400, 3)
        async with http.get("/v1/shards/scale") as answer:
            scale = await answer.json()
        assert (scale["processes"], scale["shardsWithLag"]) == (1, "1")


@scenario
async def test_json_has_hints_changes_and_unassignments_of_shards(etcd):
    async with (
        two_processes(etcd, auth_keys=KEYS) as (transport, a, _),
        aiohttp.ClientSession(a.endpoint) as http,
    ):
        await a_shard(a, transport, "shard-A")

        async def post(path, body, *capabilities):
            headers = {"Authorization": f"Bearer {token(*capabilities)}"}
            async with http.post(path, json=body, headers=headers) as answer:
                return answer.status, await answer.json()

        status, hints = await post("/v1/shards/hints", {"shard": "shard-A"}, Capability.READ)
        assert (status, hints["status"], len(hints["backupHints"])) == (200, "OK", 2)
        spec = {"id": "shard-N", "sources": [{"journal": "any/source"}], "maxTxnDuration": "1s"}
        change = {"changes": [{"upsert": spec}]}
        status, applied = await post("/v1/shards/apply", change, Capability.APPLY)
        assert (status, applied.get("status")) == (200, "OK"), applied
        await a.settle()
        assert a.keyspace.item("shard-N") is not None
        status, removed = await post(
            "/v1/shards/unassign", {"shards": ["shard-A"]}, Capability.APPLY
        )
        assert (status, removed["shards"]) == (200, ["shard-A"])
        for path, body in (
            ("/v1/shards/hints", {"shard": "shard-A"}),
            ("/v1/shards/apply", change),
            ("/v1/shards/unassign", {"shards": ["shard-A"]}),
        ):
            assert (await post(path, body, Capability.LIST))[0] == 401


# ---------------------------------------------------------------- many shards


@scenario
async def test_ten_thousand_shards_are_cut_in_slices_between_which_others_run(etcd):
    async with two_processes(etcd) as (_, a, _):
        entry = a.keyspace.items
        specs = [shard_spec(f"shard-{number:05}") for number in range(10_000)]
        items = [type("Item", (), {"value": spec}) for spec in specs]
        a.keyspace.items = lambda: items
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        page = await a.pages.page(clpb.ShardsPageRequest(descending=True, limit=3), Call())
        counting.cancel()
        a.keyspace.items = entry
        assert (page.total, ids(page)) == (
            10_000,
            ["shard-09999", "shard-09998", "shard-09997"],
        )
        assert turns >= 10


# ---------------------------------------------------------------- lag


def test_lag_in_time_is_bounded_by_an_earlier_look_while_a_shard_reads_on(etcd, monkeypatch):
    async def scenario():
        async with two_processes(etcd) as (transport, a, _):
            local = await a_shard(a, transport, "shard-A", unread=3)
            journal, offset = next(iter(local.read_through.items()))
            lags = lag.ShardLags(transport, led_of(local))
            assert (await lags.measured())["shard-A"].bytes == 3 * len(message())
            await local.change(read_through={journal: offset + len(message())})
            monkeypatch.setattr(lag, "SOURCES_MAX", 0)  # it is not looked at again
            lags._measured_at -= lag.PERIOD_S
            found = (await lags.measured())["shard-A"]
            assert found.bytes == 2 * len(message())
            assert AGE_S <= found.seconds < AGE_S + 60
            monkeypatch.setattr(lag, "SOURCES_MAX", 1)
            transport.delete(journal)  # brokers have no answer any more
            lags._measured_at -= lag.PERIOD_S
            found = (await lags.measured())["shard-A"]
            assert (found.bytes, found.seconds) == (None, None)

    run(scenario())


@scenario
async def test_brokers_are_asked_about_shards_that_do_not_read(etcd):
    async with two_processes(etcd) as (transport, a, _):
        local = await a_shard(a, transport, "shard-A", unread=1)
        await local.change(write_heads=None)
        lags = lag.ShardLags(transport, led_of(local))
        assert (await lags.measured())["shard-A"].bytes == len(message())
        # One that has read nothing yet is asked for once, as long as nothing arrives.
        journal = "source/shard-A"
        end = transport.journals[journal].end
        await local.change(write_heads={}, read_through={journal: end})
        for expected in (1, 1):
            before = transport.reads if expected else 0
            lags._measured_at -= lag.PERIOD_S
            assert (await lags.measured())["shard-A"].bytes == 0
        assert transport.reads == before


@scenario
async def test_head_and_age_without_an_answer_fail_in_time(etcd):
    class Silent(MemoryTransport):
        async def read(self, request, target=None):
            await asyncio.Event().wait()
            yield

        async def list(self, request):
            await asyncio.Event().wait()
            yield

    patience_s, lag.ANSWER_TIMEOUT_S = lag.ANSWER_TIMEOUT_S, 0.05
    try:
        with pytest.raises(DeadlineExceededError, match="check the brokers"):
            await lag.head_of(Silent(), "a/journal")
        with pytest.raises(DeadlineExceededError, match="check the brokers"):
            await lag.published_at(Silent(), "a/journal", 0)
    finally:
        lag.ANSWER_TIMEOUT_S = patience_s


def test_status_of_a_number_that_is_not_known_is_the_number():
    assert status_name(cpb.ReplicaStatus(code=77)) == "77"
