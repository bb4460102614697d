from __future__ import annotations

import asyncio
import io
import threading
import time

import pytest
from prometheus_client import REGISTRY

from gazette_sdk.errors import StoreError
from gazette_sdk.fragment import StoreHealth, check_delete, check_store, open_store
from gazette_sdk.fragment import registry as registry_module
from gazette_sdk.fragment.registry import CHECK_PENDING, next_delay
from gazette_sdk.fragment.stores import MemoryStore, StoredContent
from gazette_sdk.protocol.names import parse_store_url
from support.stores import put_bytes
from support.vectors import cases


class FaultyStore(MemoryStore):
    """A store in memory, some operations of which fail."""

    def __init__(self, **faults):
        super().__init__(parse_store_url("memory://health/"))
        self.faults = faults
        self.performed = []

    def _meet(self, name, key):
        self.performed.append((name, key))
        if name in self.faults:
            raise OSError(self.faults[name])

    def _put(self, key, content, length, content_encoding, overwrite):
        self._meet("put", key)
        super()._put(key, content, length, content_encoding, overwrite)

    def _open(self, key):
        self._meet("get", key)
        if "body" in self.faults:
            return StoredContent(BrokenBody(), 13)
        if "content" in self.faults:
            return StoredContent(io.BytesIO(self.faults["content"]), 13)
        return super()._open(key)

    def _list(self, prefix):
        self._meet("list", prefix)
        yield from () if "unlisted" in self.faults else super()._list(prefix)

    def _sign_get(self, key, ttl_s):
        self._meet("sign", key)
        return self.faults.get("url") or super()._sign_get(key, ttl_s)

    def _remove(self, key):
        self._meet("remove", key)
        super()._remove(key)


class BrokenBody(io.RawIOBase):
    def readable(self):
        return True

    def readinto(self, _):
        raise OSError("connection reset")


@pytest.mark.parametrize("case", cases("broker", "health_check"))
def test_checks_follow_the_vectors(case):
    faults = {
        "all operations succeed, signed URL returns the content": {},
        "GET fails": {"get": "no get"},
        "GET returns no reader": {"content": b""},
        "reading the body fails": {"body": ""},
        "signed URL is not http(s)": {},
    }[case["case"]]
    store = FaultyStore(**faults)
    if case["expect"].startswith("healthy"):
        check_store(store)
        assert [name for name, _ in store.performed] == ["put", "get", "list", "sign"]
        assert {key for _, key in store.performed} == {".test/health-check", ".test/"}
        return
    with pytest.raises(StoreError) as caught:
        check_store(store)
    step = case["expect"].partition(": ")[2].lower()
    assert str(caught.value).startswith(step or "read")


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        ({"put": "disk full"}, "put failed: .*disk full"),
        ({"content": b"something else"}, "read failed: .*something else"),
        ({"list": "no list"}, "list failed: .*no list"),
        ({"unlisted": ""}, "list failed: .*not listed"),
        ({"sign": "no key"}, "sign failed: .*no key"),
        ({"url": "http://127.0.0.1:1/x"}, "fetch of the signed URL failed: .*refused"),
    ],
)
def test_every_step_that_fails_is_named(faults, match):
    with pytest.raises(StoreError, match=match):
        check_store(FaultyStore(**faults))


@pytest.mark.parametrize(
    "case", [case for case in cases("broker", "delete_probe") if "rpc" not in case.values[0]]
)
def test_the_delete_probe_follows_the_vectors(case):
    if case.get("store_construction_failed"):

        def fails():
            raise StoreError("whoops")

        async def scenario():
            health = StoreHealth("memory://x/", fails)
            with pytest.raises(StoreError, match="whoops"):
                await health.check_delete("")
            await health.aclose()

        asyncio.run(scenario())
        return
    store = FaultyStore(**({"put": case["put_error"]} if "put_error" in case else {}))
    path = case["prefix"] + ".gazette-delete-probe"
    if "put_error" in case:
        with pytest.raises(StoreError, match=r"put of the delete probe failed: .*no write"):
            check_delete(store, case["prefix"])
        assert store.performed == [("put", path)]
        return
    assert case["put_path"] == path
    check_delete(store, case["prefix"])
    assert store.performed == [("put", path), ("remove", path)]


def test_a_failed_remove_of_the_delete_probe_is_named():
    with pytest.raises(StoreError, match=r"remove of the delete probe failed: .*denied"):
        check_delete(FaultyStore(remove="denied"), "p/")


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [(0, 1800), (1, 0), (2, 0.1), (3, 1), (4, 1), (5, 10), (6, 10), (7, 100), (500, 100)],
)
def test_pauses_between_checks_grow(failures, seconds):
    assert next_delay(failures) == seconds


def test_a_store_is_unhealthy_until_its_first_check_and_then_stays_quiet():
    async def scenario():
        checks = []
        health = StoreHealth("memory://a/", lambda: "store", check=checks.append)
        assert health.error == CHECK_PENDING == "first check pending"
        assert not health.healthy
        await asyncio.wait_for(health.wait_first(), 5)
        assert health.healthy
        assert checks == ["store"]
        assert sample("ok", "memory://a/") == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(health.changed(), 0.2)
        await health.aclose()

    asyncio.run(scenario())


def test_a_store_that_cannot_be_made_is_unhealthy_for_that_reason():
    def fails():
        raise StoreError("whoops")

    async def scenario():
        health = StoreHealth("memory://b/", fails)
        await asyncio.wait_for(health.wait_first(), 5)
        assert health.error == "whoops"
        await health.aclose()

    asyncio.run(scenario())


def test_failures_are_counted_and_checked_again_soon_at_first():
    async def scenario():
        store = FaultyStore(get="down")
        health = StoreHealth("memory://c/", lambda: store)
        await asyncio.wait_for(health.wait_first(), 5)
        began = time.monotonic()
        while health.consecutive_failures < 3:
            await asyncio.wait_for(health.changed(), 5)
        assert 0.07 < time.monotonic() - began < 1
        assert "get failed" in health.error
        store.faults.clear()
        await asyncio.wait_for(health.changed(), 5)
        assert (health.error, health.consecutive_failures) == (None, 0)
        await health.aclose()

    asyncio.run(scenario())


def test_somebody_who_wants_the_store_hastens_its_checks(monkeypatch):
    monkeypatch.setattr(
        registry_module, "next_delay", lambda failures: 100.0 if failures else 1800.0
    )
    monkeypatch.setattr(registry_module, "URGENT_INTERVAL_S", 0.2)

    async def scenario():
        store = FaultyStore(get="down")
        health = StoreHealth("memory://d/", lambda: store)
        await asyncio.wait_for(health.wait_first(), 5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(health.changed(), 0.5)
        health.request_soon()
        for _ in range(3):
            await asyncio.wait_for(health.changed(), 1)
        store.faults.clear()
        while not health.healthy:
            await asyncio.wait_for(health.changed(), 1)
        health.request_soon()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(health.changed(), 0.5)
        await health.aclose()

    asyncio.run(scenario())


def test_a_check_that_hangs_counts_as_failed_and_later_ones_find_out_that_it_is_back(monkeypatch):
    monkeypatch.setattr(registry_module, "FAILING_TIMEOUT_S", 0.2)
    hang = threading.Event()
    release = threading.Event()
    hang.set()

    def check(_):
        if hang.is_set():
            release.wait(10)
            raise StoreError("hung until now")

    async def scenario():
        health = StoreHealth("memory://e/", lambda: None, check=check)
        await asyncio.wait_for(health.wait_first(), 5)
        assert "has not ended" in health.error
        hang.clear()
        while not health.healthy:
            await asyncio.wait_for(health.changed(), 5)
        release.set()  # the one that hung fails late: the later one knows better
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(health.changed(), 0.3)
        assert health.healthy
        await health.aclose()

    asyncio.run(scenario())


def test_checks_that_all_hang_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(registry_module, "FAILING_TIMEOUT_S", 0.02)
    monkeypatch.setattr(registry_module, "next_delay", lambda _: 0.02)
    release = threading.Event()
    begun = []

    def check(_):
        begun.append(1)
        release.wait(10)

    async def scenario():
        health = StoreHealth("memory://f/", lambda: None, check=check)
        while health.consecutive_failures < 4:
            await asyncio.wait_for(health.changed(), 5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(health.changed(), 0.3)
        assert len(begun) == 4
        release.set()
        await asyncio.wait_for(health.changed(), 5)
        assert health.healthy  # slow, but it works
        await health.aclose()

    asyncio.run(scenario())


def test_a_check_that_breaks_is_a_failure_with_a_traceback(caplog):
    def check(_):
        raise ZeroDivisionError("oops")

    async def scenario():
        health = StoreHealth("memory://g/", lambda: None, check=check)
        await asyncio.wait_for(health.wait_first(), 5)
        assert health.error == "ZeroDivisionError: oops"
        await health.aclose()

    asyncio.run(scenario())
    assert any(record.exc_info for record in caplog.records)


def test_the_probe_replaces_its_object_and_says_what_it_found():
    store = open_store("memory://probe/")
    put_bytes(store, ".test/health-check", b"old")
    check_store(store)
    with store.open(".test/health-check").raw as raw:
        assert raw.read() == b"health-check\n"


def sample(status, url):
    return REGISTRY.get_sample_value(
        "gazette_store_health_check_total", {"store": url, "status": status}
    )


def test_a_healthy_store_that_is_wanted_is_glanced_at_and_its_loss_is_found(monkeypatch):
    monkeypatch.setattr(registry_module, "QUICK_CHECK_INTERVAL_S", 0.01)

    async def scenario():
        store = FaultyStore()
        checks = []

        def check(checked):
            checks.append(len(store.performed))
            check_store(checked)

        health = StoreHealth("memory://health/", lambda: store, check=check)
        async with asyncio.timeout(10):
            await health.wait_first()
            assert health.healthy
            health.request_soon()
            await asyncio.sleep(0.05)
            assert len(checks) == 1, "glances need no check"
            monkeypatch.setattr(store, "_status_of", failing)
            store.faults["put"] = "the store is gone"
            while health.healthy:
                await health.changed()
            assert "the store is gone" in health.error
        await health.aclose()

    def failing(_key):
        raise OSError("the store is gone")

    asyncio.run(scenario())


def test_a_healthy_store_that_nobody_wants_is_left_alone(monkeypatch):
    monkeypatch.setattr(registry_module, "QUICK_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(registry_module, "URGENT_FOR_S", 0.03)

    async def scenario():
        store = FaultyStore()
        looks = []
        exists = store._status_of
        monkeypatch.setattr(store, "_status_of", lambda key: (looks.append(key), exists(key))[1])
        health = StoreHealth("memory://health/", lambda: store)
        async with asyncio.timeout(10):
            await health.wait_first()
            await asyncio.sleep(0.05)
            assert not looks
            health.request_soon()
            await asyncio.sleep(0.1)
            count = len(looks)
            assert count > 0
            await asyncio.sleep(0.05)
            assert len(looks) == count
        await health.aclose()

    asyncio.run(scenario())


def test_a_glance_that_hangs_is_followed_by_a_check_which_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(registry_module, "QUICK_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(registry_module, "FAILING_TIMEOUT_S", 0.05)

    async def scenario():
        store = FaultyStore()
        release = threading.Event()
        hangs = False

        def check(checked):
            if hangs:
                release.wait(10)
            check_store(checked)

        def hanging(_key):
            release.wait(10)
            return True

        health = StoreHealth("memory://health/", lambda: store, check=check)
        try:
            async with asyncio.timeout(10):
                await health.wait_first()
                hangs = True
                monkeypatch.setattr(store, "_status_of", hanging)
                health.request_soon()
                while health.healthy:
                    await health.changed()
        finally:
            release.set()
            await health.aclose()

    asyncio.run(scenario())
