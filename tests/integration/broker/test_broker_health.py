"""Health and metrics of a cluster's state, over real brokers."""

from __future__ import annotations

import asyncio
import json

from prometheus_client.parser import text_string_to_metric_families

from gazette_sdk.broker.views import members
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.server import health
from support.brokers import journal_spec
from support.certificates import Authority
from support.etcd import run
from support.raw_http import exchange
from support.served import STORE
from support.views import KEY, token, until, viewed_cluster


def replicated(name, replication, stores=(STORE,), **labels):
    return journal_spec(
        name,
        stores=list(stores),
        replication=replication,
        refresh_interval_s=1,
        flush_interval_s=3600,
        labels=labels,
    )


async def scraped(endpoint):
    """Values of the series of a scrape, by name and labels."""
    answer = await exchange(endpoint, "GET", "/debug/metrics")
    assert answer.status == 200
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def checks(endpoint, authorization=""):
    """Status of the health of a process, and its checks by name."""
    headers = (f"Authorization: {authorization}",) if authorization else ()
    answer = await exchange(endpoint, "GET", "/debug/health", headers=headers)
    shown = json.loads(answer.body) if answer.status != 401 else {"checks": []}
    return answer.status, {each["name"]: each for each in shown["checks"]}


def test_a_scrape_shows_the_state_of_all_journals_and_what_is_in_no_store(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path) as cluster:
            await cluster.client.apply(
                replicated("shop/orders", 2, topic="orders"), replicated("shop/three", 4)
            )
            await cluster.client.append_when_ready("shop/orders", b"hello")

            async def appended():
                await exchange(cluster.endpoints[0], "PUT", "/shop/orders", body=b"hello")
                await scraped(cluster.endpoints[1])  # each broker finds its own numbers
                return await scraped(cluster.endpoints[0])

            return await until(
                appended,
                lambda found: (
                    found.get(("gazette_allocator_replicas_missing",)) == 2
                    and found.get(("gazette_spool_pending_bytes",), 0) > 0
                    and found.get(("gazette_store_healthy", STORE)) == 1
                ),
            )

    found = run(scenario(), timeout_s=60)
    assert found["gazette_journals_waiting",] == 0
    assert found["gazette_allocator_journals_single_zone",] == 0
    assert found["gazette_store_unhealthy_seconds", STORE] == 0
    assert found["gazette_spool_oldest_seconds",] > 0
    assert found["gazette_spool_disk_free_bytes",] > 0
    assert 0 < found["gazette_lease_remaining_seconds",] <= 5
    assert found["gazette_etcd_watch_age_seconds",] == 0
    assert found["gazette_topic_append_bytes_total", "orders"] >= 5
    assert found["gazette_append_seconds_count", "total"] >= 1
    assert found["gazette_append_seconds_count", "wait"] >= 1
    assert found["gazette_append_seconds_count", "sync"] >= 1
    assert found["gazette_append_seconds_count", "replicate"] >= 1


def test_the_state_of_all_journals_is_shown_while_a_broker_of_this_process_leads(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path, zones=("a",)) as cluster:
            await cluster.client.apply(replicated("shop/orders", 1))
            await cluster.client.append_when_ready("shop/orders", b"hello")
            led = await scraped(cluster.endpoints[0])
            shown = cluster.brokers[0]._health
            shown._leads = lambda: False
            return led, await scraped(cluster.endpoints[0])

    led, not_led = run(scenario(), timeout_s=60)
    for name in ("replicas_missing", "journals_single_zone"):
        assert (f"gazette_allocator_{name}",) in led
        assert (f"gazette_allocator_{name}",) not in not_led


def test_numbers_of_a_broker_that_has_stopped_are_shown_no_more(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path) as cluster:
            first, second = cluster.brokers
            before = await scraped(second.endpoint)
            await second.stop(grace_s=0.1)
            await first.stop(grace_s=0.1)
            readings = health.LEASE_REMAINING_SECONDS._sources
            return before, dict(readings)

    before, left = run(scenario(), timeout_s=60)
    assert ("gazette_lease_remaining_seconds",) in before
    assert not left


def test_a_healthy_broker_passes_all_checks_and_needs_a_token_for_them(etcd, tmp_path):
    async def scenario():
        async with viewed_cluster(etcd, tmp_path, auth_keys=KEY) as cluster:
            first = cluster.endpoints[0]
            live = await exchange(first, "GET", "/debug/live")
            with_token = await until(
                lambda: checks(first, token(capability=Capability.LIST)),
                lambda found: found[0] == 200,
            )
            refused = await checks(first)
            selected = await checks(first, token("name=a"))
            return live.status, with_token, refused[0], selected[0]

    live, (status, found), refused, selected = run(scenario(), timeout_s=60)
    assert (live, status, refused, selected) == (200, 200, 401, 401)
    assert sorted(found) == ["clock", "etcd", "lease", "replicas", "spool-disk", "watch"]
    assert found["clock"]["detail"].endswith("from b/in-b, and less from others")


def test_a_broker_says_what_is_not_well(etcd, tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    monkeypatch.setattr(health, "CERTIFICATE_LEFT_S", 1e9)

    async def scenario():
        async with viewed_cluster(etcd, tmp_path) as cluster:
            first = cluster.brokers[0]
            pages = first.server.debug_pages
            pages.health._certificates = [str(authority.ca_file), "no/such/file"]
            clock = members.time.time
            monkeypatch.setattr(
                members, "time", type("Ahead", (), {"time": staticmethod(lambda: clock() - 60)})
            )
            await cluster.client.apply(
                replicated(
                    "shop/lost", 1, ["s3://a-bucket/?region=local&endpoint=http://127.0.0.1:1/"]
                )
            )
            with_store = await until(
                lambda: checks(first.endpoint), lambda found: "store" in found[1]
            )
            pages.health._keyspace._lost_at = 1.0
            watch = await checks(first.endpoint)
            membership = first.broker.member.membership
            membership._ttl_s = 10_000
            lease = await checks(first.endpoint)
            return with_store, watch[1], lease[1]

    (status, found), watch, lease = run(scenario(), timeout_s=60)
    assert status == 503
    assert not found["store"]["ok"]
    assert not found["certificate"]["ok"]
    assert not found["clock"]["ok"]
    assert "60.0 s from b/in-b" in found["clock"]["detail"]
    assert found["watch"]["ok"]
    assert not watch["watch"]["ok"]
    assert not lease["lease"]["ok"]


def test_etcd_that_does_not_answer_is_not_well_and_a_lost_lease_ends_the_process(
    etcd, tmp_path, monkeypatch
):
    monkeypatch.setattr(health, "ANSWER_TIMEOUT_S", 0.2)

    async def scenario():
        async with viewed_cluster(etcd, tmp_path, zones=("a",)) as cluster:
            broker = cluster.brokers[0]
            answered = broker.broker.etcd.range

            async def never(*_):
                await asyncio.Event().wait()

            monkeypatch.setattr(broker.broker.etcd, "range", never)
            _, found = await checks(broker.endpoint)
            monkeypatch.setattr(broker.broker.etcd, "range", answered)
            membership = broker.broker.member.membership
            membership._set_lost(TimeoutError("no answer"))
            live = await exchange(broker.endpoint, "GET", "/debug/live")
            return found, live

    found, live = run(scenario(), timeout_s=60)
    assert not found["etcd"]["ok"]
    assert live.status == 503
    assert b"unable to keep member lease alive: no answer" in live.body
