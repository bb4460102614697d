from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import REGISTRY

from gazette_sdk.errors import ClosedError, StoreError
from gazette_sdk.fragment import StoreRegistry, open_store
from support.stores import put_bytes
from support.vectors import group


def active():
    return REGISTRY.get_sample_value("gazette_store_active")


def test_every_scenario_of_the_vectors_is_here():
    assert [case["case"] for case in group("broker", "store_registry")["cases"]] == [
        "same URL twice",
        "different URL",
        "construction fails then succeeds",
        "concurrent first use",
        "initial health",
    ]


def test_one_url_is_one_store_and_another_url_another():
    registry = StoreRegistry()
    one = registry.get("memory://x/a/")
    assert registry.get("memory://x/a/") is one
    assert registry.get("memory://x/a/?find=b") is not one
    asyncio.run(registry.aclose())


def test_a_store_that_could_not_be_made_is_made_at_the_next_use():
    made = []

    def opener(url):
        made.append(url)
        if len(made) == 1:
            raise StoreError("whoops")
        return open_store(url)

    registry = StoreRegistry(opener=opener)
    with pytest.raises(StoreError, match="whoops"):
        registry.get("memory://x/")
    assert registry.get("memory://x/") is registry.get("memory://x/")
    assert len(made) == 2
    asyncio.run(registry.aclose())


def test_concurrent_first_uses_make_one_store():
    made, entered, go_on = [], threading.Event(), threading.Event()

    def opener(url):
        made.append(url)
        entered.set()
        assert go_on.wait(5)
        return open_store(url)

    registry = StoreRegistry(opener=opener)
    found = []
    users = [
        threading.Thread(target=lambda: found.append(registry.get("memory://x/"))) for _ in range(8)
    ]
    for user in users:
        user.start()
    assert entered.wait(5)
    go_on.set()
    for user in users:
        user.join(5)
    assert len(made) == 1
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    asyncio.run(registry.aclose())


def test_a_store_in_the_making_does_not_hold_up_others():
    go_on = threading.Event()

    def opener(url):
        if "slow" in url:
            assert go_on.wait(5)
        return open_store(url)

    async def scenario():
        registry = StoreRegistry(opener=opener)
        slow = asyncio.create_task(registry.aget("memory://slow/"))
        await asyncio.wait_for(registry.aget("memory://quick/"), 5)
        assert not slow.done()
        go_on.set()
        assert (await asyncio.wait_for(slow, 5)).url == "memory://slow/"
        await registry.aclose()

    asyncio.run(scenario())


def test_health_is_pending_at_first_then_known_and_one_per_url():
    async def scenario():
        registry = StoreRegistry()
        health = registry.health("memory://x/")
        assert health.error == "first check pending"
        assert registry.health("memory://x/") is health
        await asyncio.wait_for(health.wait_first(), 5)
        assert health.healthy
        broken = registry.health("s3://bucket/?nonsense=1")
        await asyncio.wait_for(broken.wait_first(), 5)
        assert "nonsense" in broken.error
        await registry.aclose()

    asyncio.run(scenario())


def test_a_sweep_drops_what_was_not_used_since_the_last_one():
    async def scenario():
        before = active()
        registry = StoreRegistry()
        idle, busy = registry.get("memory://idle/"), registry.get("memory://busy/")
        watched = registry.health("memory://watched/")
        await asyncio.wait_for(watched.wait_first(), 5)
        assert active() == before + 3
        await registry.sweep()
        assert active() == before + 3  # all were used before the first sweep
        assert await registry.aget("memory://busy/") is busy
        await registry.sweep()
        assert active() == before + 1
        assert registry.get("memory://busy/") is busy
        assert registry.get("memory://idle/") is not idle
        assert registry.health("memory://watched/") is not watched
        await registry.aclose()
        assert active() == before

    asyncio.run(scenario())


def test_bad_urls_are_store_errors_that_name_them():
    registry = StoreRegistry()
    for url in ("nonsense", "ftp://host/", "s3://bucket/no-slash", "file:///"):
        with pytest.raises(StoreError, match=url.partition(":")[0]) as caught:
            registry.get(url)
        assert caught.value.store == url


def test_a_closed_registry_gives_nothing():
    registry = StoreRegistry()
    asyncio.run(registry.aclose())
    with pytest.raises(ClosedError):
        registry.get("memory://x/")
    with pytest.raises(ClosedError):
        registry.health("memory://x/")


def test_file_only_keeps_every_store_below_the_root(tmp_path):
    registry = StoreRegistry(tmp_path, file_only=True)
    for url in ("s3://bucket/some/prefix/?region=x&nonsense=1", "file:///not/there/", "gs://b/"):
        store = registry.get(url)
        assert store.url == url
        put_bytes(store, "a/journal/x", b"content", overwrite=True)
        assert (tmp_path / "a" / "journal" / "x").read_bytes() == b"content"
        assert store.sign_get("a/journal/x", 60) == "file:///a/journal/x"
        assert [found.path for found in store.list("a/journal/")] == ["x"]
    asyncio.run(registry.aclose())


def test_short_calls_of_one_turn_share_a_thread_and_have_their_own_results():
    async def scenario():
        registry, threads = StoreRegistry(), []

        def call(number):
            threads.append(threading.get_ident())
            if number == 2:
                raise StoreError("the second one")
            return number

        made = [registry.in_thread("memory://x/", lambda n=n: call(n)) for n in range(5)]
        found = await asyncio.gather(*made, return_exceptions=True)
        assert [each for each in found if not isinstance(each, StoreError)] == [0, 1, 3, 4]
        assert str(found[2]) == "the second one"
        assert len(set(threads)) == 1
        assert threads[0] != threading.get_ident()
        await registry.aclose()

    asyncio.run(scenario())


def test_calls_do_not_wait_for_one_that_hangs():
    async def scenario():
        registry, goes_on = StoreRegistry(), threading.Event()
        hanging = asyncio.ensure_future(registry.in_thread("memory://x/", goes_on.wait))
        others = [
            asyncio.ensure_future(registry.in_thread("memory://x/", lambda n=n: n))
            for n in range(3)
        ]
        try:
            async with asyncio.timeout(10):
                assert await asyncio.gather(*others) == [0, 1, 2]
            assert not hanging.done()
        finally:
            goes_on.set()
        assert await hanging is True
        await registry.aclose()

    asyncio.run(scenario())


def test_a_call_that_no_one_waits_for_any_more_does_not_stop_the_others():
    async def scenario():
        registry = StoreRegistry()
        calls = [
            asyncio.ensure_future(registry.in_thread("memory://x/", lambda n=n: n))
            for n in range(3)
        ]
        await asyncio.sleep(0)
        calls[0].cancel()
        assert await asyncio.gather(*calls[1:]) == [1, 2]
        await registry.aclose()

    asyncio.run(scenario())
