from __future__ import annotations

import asyncio
import time

import pytest

from gazette_sdk.broker.failover import pause_guard
from gazette_sdk.broker.failover.pause_guard import PauseGuard
from gazette_sdk.cluster.lease import LeaseLife, boot_s
from gazette_sdk.errors import EtcdUnavailableError
from support.etcd import run
from support.spools import until


class Leases:
    """Etcd, as far as the guard asks it."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def time_to_live(self, lease):
        assert lease == 7
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(params=["boot", "wall"])
def jump(request, monkeypatch):
    """Move one clock, as a suspended machine does, or one that was moved to another host."""
    moved_s = 0.0

    def move(seconds):
        nonlocal moved_s
        moved_s += seconds

    module, name = (pause_guard, "boot_s") if request.param == "boot" else (time, "time")
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda: real() + moved_s)
    return move


def test_a_process_that_runs_has_its_lease():
    async def scenario():
        guard = PauseGuard(Leases(-1), 7, LeaseLife(), 100)
        assert guard.known.is_alive
        running = asyncio.ensure_future(guard.run())
        await asyncio.sleep(0)
        assert guard.known.is_alive
        running.cancel()
        await asyncio.wait([running])

    run(scenario())


@pytest.mark.parametrize("answers", [[3], [EtcdUnavailableError("away"), 3]])
def test_after_a_pause_the_lease_is_looked_up(jump, answers):
    async def scenario():
        guard = PauseGuard(Leases(*answers), 7, LeaseLife(), 1.0)
        jump(1.0)
        assert not guard.known.is_alive
        assert "stopped for longer" in str(guard.known.error("a/journal"))
        running = asyncio.ensure_future(guard.run())
        await until(lambda: guard.known.is_alive)
        assert guard.known.error("a/journal") is None
        running.cancel()
        await asyncio.wait([running])

    run(scenario())


def test_after_wall_time_went_back_the_lease_is_looked_up(monkeypatch):
    """The time since boot may have stood still meanwhile, as in some suspended machines."""
    moved_s, real = 0.0, time.time

    async def scenario():
        nonlocal moved_s
        monkeypatch.setattr(time, "time", lambda: real() + moved_s)
        guard = PauseGuard(Leases(3), 7, LeaseLife(), 1.0)
        moved_s = -3600.0
        assert not guard.known.is_alive
        running = asyncio.ensure_future(guard.run())
        await until(lambda: guard.known.is_alive)
        running.cancel()
        await asyncio.wait([running])

    run(scenario())


def test_a_lease_that_has_ended_stays_so(jump):
    async def scenario():
        guard = PauseGuard(Leases(-1), 7, LeaseLife(), 0.02)
        jump(1.0)
        running = asyncio.ensure_future(guard.run())
        for _ in range(10):
            await asyncio.sleep(0.005)
            assert not guard.known.is_alive
            assert not await guard.has_lease()
        running.cancel()
        await asyncio.wait([running])

    run(scenario())


def test_a_lease_that_is_renewed_no_more_acknowledges_nothing():
    async def scenario():
        guard = PauseGuard(Leases(3), 7, LeaseLife(), 0.02)
        guard.known.lost()
        running = asyncio.ensure_future(guard.run())
        for _ in range(10):
            await asyncio.sleep(0.005)
            assert not guard.known.is_alive
        assert "has lost its lease" in str(guard.known.error("a/journal"))
        running.cancel()
        await asyncio.wait([running])

    run(scenario())


def test_a_loop_that_runs_does_not_know_its_lease_without_renewals():
    async def scenario():
        life = LeaseLife()
        guard = PauseGuard(Leases(3), 7, life, 100)
        life.alive_until = boot_s() - 0.001  # the thread that renews it is stuck
        assert not guard.known.is_alive
        assert "not renewed its lease" in str(guard.known.error("a/journal"))
        assert await guard.has_lease()
        life.alive_until = boot_s() + 100
        assert guard.known.is_alive

    run(scenario())
