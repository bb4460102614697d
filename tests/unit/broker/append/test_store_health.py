from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.append.preconditions import (
    FAILING_TOLERATED_S,
    WAIT_MAX_S,
    StoreUnhealthyError,
    await_health,
    continues_without,
)
from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.replication.pipeline import InvalidatedError, Signal
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.registry import CHECK_PENDING, StoreRegistry
from support.etcd import run
from support.vectors import cases

STORE = "file:///there/"


class Setup:
    def __init__(self, root):
        self.stores = StoreRegistry(root)
        self.index = Index()
        self.signal = Signal()
        self.root = root

    async def wait(self, url=STORE, waited_s=0.0, **known):
        await await_health(
            self.index,
            self.stores,
            url,
            self.signal,
            started_at=asyncio.get_running_loop().time() - waited_s,
            **known,
        )


def scenario_of(work, tmp_path):
    async def scenario():
        setup = Setup(tmp_path)
        try:
            await work(setup)
        finally:
            await setup.stores.aclose()

    run(scenario())


@pytest.mark.parametrize(
    "case",
    [
        p
        for p in cases("broker", "append_preconditions")
        if "case" in p.values[0] or "store" in p.values[0]
    ],
)
def test_preconditions_that_wait(case, tmp_path):
    async def work(setup):
        waiting = asyncio.ensure_future(setup.wait())
        await asyncio.sleep(0)
        if case.get("store") == "unhealthy then healthy":
            setup.index.replace_remote(CoverSet())
            (tmp_path / "there").mkdir()
            await waiting
        elif case.get("store") == "permanently failing":
            with pytest.raises(StoreUnhealthyError, match=STORE):
                await waiting
        elif case["case"].startswith("cancelled"):
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            setup.signal.fire()
            with pytest.raises(InvalidatedError):
                await waiting

    scenario_of(work, tmp_path)


def test_a_journal_without_store_waits_only_for_its_first_refresh(tmp_path):
    async def work(setup):
        waiting = asyncio.ensure_future(setup.wait(None))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        setup.index.replace_remote(CoverSet())
        await waiting
        await setup.wait(None)

    scenario_of(work, tmp_path)


def test_a_store_known_to_fail_is_answered_at_once(tmp_path):
    async def work(setup):
        with pytest.raises(StoreUnhealthyError):
            await setup.wait()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(StoreUnhealthyError):
            await setup.wait()
        assert loop.time() - began < 0.1

    scenario_of(work, tmp_path)


def test_patience_counts_from_the_appends_begin(tmp_path):
    async def work(setup):
        with pytest.raises(StoreUnhealthyError):
            await asyncio.wait_for(setup.wait(waited_s=WAIT_MAX_S), 0.5)

    scenario_of(work, tmp_path)


def test_a_fired_signal_comes_first(tmp_path):
    async def work(setup):
        setup.signal.fire()
        with pytest.raises(InvalidatedError):
            await setup.wait(None)

    scenario_of(work, tmp_path)


@pytest.mark.parametrize(
    ("error", "failing_s", "has_peers", "expect"),
    [
        (CHECK_PENDING, None, False, True),
        (CHECK_PENDING, None, True, True),
        ("down", 0.0, False, False),
        ("down", 0.0, True, True),
        ("down", FAILING_TOLERATED_S - 1, True, True),
        ("down", FAILING_TOLERATED_S, True, False),
    ],
)
def test_a_store_without_which_a_primary_continues(error, failing_s, has_peers, expect):
    now = 10_000.0
    since = None if failing_s is None else now - failing_s
    health = SimpleNamespace(error=error, failing_since=since)
    assert continues_without(health, now, has_peers=has_peers) == expect


def test_a_primary_that_knows_the_head_waits_neither_for_a_listing_nor_for_a_first_check(tmp_path):
    async def work(setup):
        for has_peers in (False, True):  # nothing was listed, and no check has ended
            waiting = setup.wait(head_is_known=True, has_peers=has_peers)
            await asyncio.wait_for(waiting, 0.5)
        with pytest.raises(StoreUnhealthyError):
            await setup.wait()
        await asyncio.wait_for(setup.wait(head_is_known=True, has_peers=True), 0.5)
        with pytest.raises(StoreUnhealthyError):
            await setup.wait(head_is_known=True)

    scenario_of(work, tmp_path)
