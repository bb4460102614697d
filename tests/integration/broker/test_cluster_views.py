"""Calls that show a cluster, over real brokers, by HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json

import aiohttp

from gazette_sdk.cli.journals.list import Extent, Unstored, extents_of, heads_of, unstored_of
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.protocol.rules import EVENTS_RPC, HEADS_RPC, JOURNALS_PAGE_RPC
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import list_journals
from support.brokers import journal_spec
from support.etcd import run
from support.raw_http import exchange
from support.served import STORE
from support.views import KEY, call, post, token, until, viewed_cluster


def replicated(name, replication=2, **labels):
    return journal_spec(
        name, stores=[STORE], replication=replication, refresh_interval_s=1, labels=labels
    )


def test_a_page_shows_routes_states_and_heads_of_all_brokers(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path) as cluster:
            await cluster.client.apply(
                replicated("shop/orders", topic="orders"),
                replicated("shop/three", 3),
                replicated("shop/visits", 1, topic="visits"),
            )
            await cluster.client.append_when_ready("shop/orders", b"hello")
            await cluster.client.append_when_ready("shop/visits", b"hi")

            async def page():
                return await post(cluster.endpoints[1], "/v1/journals/page")

            def is_settled(page):
                rows = {row["name"]: row for row in page["rows"]}
                return page["states"] == {"JOURNAL_OK": "2", "JOURNAL_SHORT": "1"} and all(
                    "head" in row and "rate" in row for row in rows.values()
                )

            shown = await until(page, is_settled)
            by_grpc = await call(
                cluster.endpoints[0], JOURNALS_PAGE_RPC, clpb.JournalsPageRequest(limit=1)
            )
            return shown, by_grpc

    shown, by_grpc = run(scenario(), timeout_s=60)
    orders, three, visits = shown["rows"]
    assert [row["name"] for row in shown["rows"]] == ["shop/orders", "shop/three", "shop/visits"]
    assert shown["total"] == "3"
    assert {member["zone"] for member in shown["members"]} == {"a", "b"}
    assert sorted(orders["members"]) == [0, 1]
    assert orders["primary"] in orders["members"]
    assert (orders["head"], orders["begin"], orders["size"]) == ("5", "0", "5")
    assert orders["unstored"] in {"0", "5"}, "brokers that join close what was written before"
    assert orders["labels"]["labels"] == [{"name": "topic", "value": "orders", "prefix": False}]
    assert orders["stores"] == [STORE]
    assert visits["head"] == "2"
    assert all(row["rate"] >= 0 for row in shown["rows"])
    assert three["state"] == "JOURNAL_SHORT"
    assert three["head"] == "0"
    assert [row.name for row in by_grpc.rows] == ["shop/orders"]
    assert by_grpc.next


def test_heads_come_from_every_broker_with_its_replicas(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path) as cluster:
            names = [f"heads/{number}" for number in range(6)]
            await cluster.client.apply(*(replicated(name) for name in names))
            for number, name in enumerate(names):
                await cluster.client.append_when_ready(name, b"x" * (number + 1))

            async def heads():
                request = clpb.HeadsRequest(journals=["heads/none", *names])
                return await call(cluster.endpoints[0], HEADS_RPC, request)

            def is_settled(found):
                return all(
                    len(head.replicas) == 2 and all(each.synced for each in head.replicas)
                    for head in found.heads
                )

            found = await until(heads, is_settled)
            second = cluster.endpoints[1]
            local = await post(second, "/v1/journals/heads", journals=names, local=True)
            return names, found, local

    names, found, local = run(scenario(), timeout_s=60)
    assert [head.journal for head in found.heads] == names, "an unknown journal is left out"
    assert [head.head for head in found.heads] == [1, 2, 3, 4, 5, 6]
    for head in found.heads:
        assert not head.error
        assert head.unstored in {0, head.head}
        assert [each.member.zone for each in head.replicas] == ["a", "b"]
        assert {each.head for each in head.replicas} == {head.head}
    assert [[each["member"]["zone"] for each in head["replicas"]] for head in local["heads"]] == [
        ["b"]
    ] * 6


def test_events_of_all_brokers_are_one_stream_that_resumes(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path) as cluster:
            url = f"{cluster.endpoints[0]}/v1/cluster/events"
            async with aiohttp.ClientSession() as session, session.get(url) as stream:
                assert stream.status == 200
                await cluster.client.apply(replicated("events/a"))
                seen = []
                async with asyncio.timeout(15):
                    async for line in stream.content:
                        seen.append(json.loads(line)["result"])
                        if seen[-1]["kind"] == "route" and "replicas" in seen[-1]["text"]:
                            break
                # What only the other broker sees comes, too.
                cluster.brokers[1].broker.views.events._ring.record("store", "s3://x/", "broke")
                async with asyncio.timeout(15):
                    async for line in stream.content:
                        seen.append(json.loads(line)["result"])
                        if seen[-1]["kind"] == "store":
                            break
                await cluster.client.delete("events/a")
                request = clpb.EventsRequest(after=seen[-1]["id"], no_wait=True)

                async def rest():
                    return await call(cluster.endpoints[0], EVENTS_RPC, request)

                after = await until(rest, lambda found: any(e.kind == "journal" for e in found))
                return seen, after

    seen, after = run(scenario(), timeout_s=60)
    texts = [(event["kind"], event["subject"], event["text"]) for event in seen]
    assert ("journal", "events/a", "the journal was created") in texts
    assert ("member", "b/in-b") in {text[:2] for text in texts}
    assert any(kind == "route" and text.startswith("the primary is") for kind, _, text in texts)
    assert (seen[-1]["member"], seen[-1]["text"]) == ("b/in-b", "broke")
    times = [int(event["timeUs"]) for event in seen]
    assert times == sorted(times)
    assert ("journal", "events/a", "the journal was deleted") in {
        (event.kind, event.subject, event.text) for event in after
    }
    assert not {event.id for event in after} & {event["id"] for event in seen}


def test_a_broker_without_these_calls_is_read_by_ordinary_ones(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path, ("a", "b"), foreign=("b",)) as cluster:
            names = [f"mixed/{number}" for number in range(8)]
            await cluster.client.apply(*(replicated(name, 1) for name in names))
            for name in names:
                await cluster.client.append_when_ready(name, b"hello")

            async def page():
                return await post(cluster.endpoints[0], "/v1/journals/page")

            shown = await until(
                page, lambda page: all(row.get("head") == "5" for row in page["rows"])
            )
            heads = await post(cluster.endpoints[0], "/v1/journals/heads", journals=names)
            events = await call(cluster.endpoints[0], EVENTS_RPC, clpb.EventsRequest(no_wait=True))
            return shown, heads, events

    shown, heads, events = run(scenario(), timeout_s=60)
    holders = {shown["members"][row["primary"]]["zone"] for row in shown["rows"]}
    assert holders == {"a", "b"}
    assert all(head["head"] == "5" and not head["error"] for head in heads["heads"])
    assert all(row["size"] == "5" for row in shown["rows"])
    assert {event.member for event in events} == {"a/in-a"}


def test_bytes_are_unstored_until_they_are_uploaded(etcd, tmp_path):
    """Also where no listing of the store has shown them yet."""

    async def scenario():
        async with viewed_cluster(etcd, tmp_path) as cluster:
            spec = replicated("unstored/a")
            spec.fragment.length = 4096
            spec.fragment.refresh_interval.FromSeconds(3600)
            await cluster.client.apply(spec)
            await cluster.client.append_when_ready("unstored/a", b"begin")

            async def head():
                request = clpb.HeadsRequest(journals=["unstored/a"])
                return (await call(cluster.endpoints[0], HEADS_RPC, request)).heads[0]

            await until(head, lambda head: len(head.replicas) == 2 and head.unstored == 0)
            await cluster.client.append_when_ready("unstored/a", bytes(5000))
            before = await head()
            await cluster.client.append_when_ready("unstored/a", b"begins a fragment")
            after = await until(head, lambda head: head.unstored < 5000)
            return before, after

    before, after = run(scenario(), timeout_s=60)
    assert before.unstored == 5000
    assert 0 <= before.oldest_unstored_s < 30
    assert after.unstored == len(b"begins a fragment")
    assert after.size == after.head == 5 + 5000 + len(b"begins a fragment")


def test_tools_see_the_same_by_one_call_and_by_a_call_for_each_journal(etcd, tmp_path):
    """Also with keys, and where the called broker has no such call."""

    async def scenario():
        zones = ("a", "b")
        async with viewed_cluster(etcd, tmp_path, zones, foreign=("b",), auth_keys=KEY) as cluster:
            names = [f"tools/{number}" for number in range(4)]
            await cluster.client.apply(*(replicated(name, 1) for name in names))
            for name in names:
                await cluster.client.append_when_ready(name, b"hello")
            found = []
            for endpoint in cluster.endpoints:
                async with connect(endpoint, auth_keys=KEY) as transport:
                    listing = await list_journals(transport)
                    heads = await heads_of(transport, listing)
                    extents = await extents_of(transport, listing, heads)
                    unstored = await unstored_of(transport, listing, heads)
                    found.append((heads is not None, extents, unstored))
            return found

    ours, foreign = run(scenario(), timeout_s=60)
    assert (ours[0], foreign[0]) == (True, False)
    assert ours[1] == foreign[1]
    assert set(ours[1].values()) == {Extent(5, 5)}
    # Brokers upload them meanwhile, which one call shows at once.
    for found in (ours[2], foreign[2]):
        assert set(found.values()) <= {Unstored(0), Unstored(5, 1)}


def test_callers_pass_their_token_on_and_see_what_it_allows(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path, auth_keys=KEY) as cluster:
            names = [f"secret/{number}" for number in range(4)]
            await cluster.client.apply(*(replicated(name, 1, part=name[-1]) for name in names))
            for name in names:
                await cluster.client.append_when_ready(name, b"hello")
            endpoint = cluster.endpoints[0]

            async def page(authorization, **fields):
                return await post(endpoint, "/v1/journals/page", authorization, **fields)

            async def every():
                return await page(token(), sort="BY_HEAD")

            await until(every, lambda page: all("head" in row for row in page["rows"]))
            some = await page(token("part in (1, 2)"))
            listed = await page(token("part=1", Capability.LIST))
            heads = await post(endpoint, "/v1/journals/heads", token("part=3"), journals=names)
            refused = [
                await exchange(endpoint, method, path, body=b"{}", headers=headers)
                for method, path, headers in (
                    ("POST", "/v1/journals/page", ()),
                    ("POST", "/v1/journals/heads", (f"Authorization: {token('', 2)}",)),
                    ("GET", "/v1/cluster/events", (f"Authorization: {token('part=1')}",)),
                )
            ]
            return some, listed, heads, [answer.status for answer in refused]

    some, listed, heads, refused = run(scenario(), timeout_s=60)
    assert [(row["name"], row["head"]) for row in some["rows"]] == [
        ("secret/1", "5"),
        ("secret/2", "5"),
    ]
    assert some["total"] == "2"
    [row] = listed["rows"]
    assert not {"head", "size", "unstored", "rate"} & row.keys()
    assert [(head["journal"], head["head"]) for head in heads["heads"]] == [("secret/3", "5")]
    assert refused == [401, 401, 401]


def test_refused_calls_of_a_cluster_are_audited(etcd, tmp_path, caplog):
    async def scenario():
        async with viewed_cluster(
            etcd, tmp_path, ("a",), auth_keys=KEY, audited="refusals"
        ) as cluster:
            narrow = f"Authorization: {token('part=1')}"
            await exchange(cluster.endpoints[0], "GET", "/v1/cluster/events", headers=(narrow,))

    with caplog.at_level("INFO", logger="gazette.audit"):
        run(scenario(), timeout_s=60)
    assert "Events refused" in caplog.text
