from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.append.store_health import WAIT_MAX_S, StoreUnhealthyError, await_health
from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.slot import InvalidatedError, Signal
from gazette_sdk.fragment.cover import CoverSet
from gazette_sdk.fragment.registry import StoreRegistry
from support.etcd import run
from support.vectors import cases

STORE = "file:///there/"


class Setup:
    def __init__(self, root):
        self.stores = StoreRegistry(root)
        self.index = Index()
        self.signal = Signal()
        self.root = root

    async def wait(self, url=STORE, waited_s=0.0):
        await await_health(
            self.index,
            self.stores,
            url,
            self.signal,
            started_at=asyncio.get_running_loop().time() - waited_s,
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
