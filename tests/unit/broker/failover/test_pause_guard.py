from __future__ import annotations

import asyncio
import time

import pytest

from gazette_sdk.broker.failover import pause_guard
from gazette_sdk.broker.failover.pause_guard import KnownLease, PauseGuard
from gazette_sdk.cluster import lease
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


class Clocks:
    """Clocks of a machine. The time since boot does not count its suspensions, unless it does."""

    def __init__(self, monkeypatch):
        self.boot, self.wall = 1000.0, 5_000_000.0
        monkeypatch.setattr(pause_guard, "boot_s", lambda: self.boot)
        monkeypatch.setattr(lease, "boot_s", lambda: self.boot)
        monkeypatch.setattr(time, "time", lambda: self.wall)

    def run(self, seconds):
        self.boot += seconds
        self.wall += seconds

    def renewed(self, life, ttl_s=10.0):
        life.alive_until, life.ahead_s = self.boot + ttl_s, self.wall - self.boot


def tick(clocks, known, seconds):
    for _ in range(round(seconds / 0.5)):
        clocks.run(0.5)
        known.ran()


@pytest.mark.parametrize("pauses", [[4.0], [1.0, 1.0, 1.0, 1.0]])
def test_short_pauses_count_after_renewals_that_failed(monkeypatch, pauses):
    """Each is shorter than half of the lease's time to live, and so is each silence of Etcd."""
    clocks, life = Clocks(monkeypatch), LeaseLife()
    clocks.renewed(life)
    known = KnownLease(5.0, life)
    tick(clocks, known, 6.5)
    assert known.is_alive
    for pause_s in pauses:
        clocks.wall += pause_s
        is_alive = known.is_alive
        known.ran()
    assert not is_alive
    assert not known.is_alive
    assert "not renewed its lease" in str(known.error("a/journal"))
    assert known.until_wall_s < clocks.wall
    clocks.renewed(life)
    assert known.is_alive
    known.ran()
    assert known.until_wall_s == clocks.wall + 5.0
    assert known.until_boot_s == clocks.boot + 5.0


def test_a_pause_after_wall_time_went_back_counts_too(monkeypatch):
    clocks, life = Clocks(monkeypatch), LeaseLife()
    clocks.renewed(life)
    known = KnownLease(5.0, life)
    tick(clocks, known, 3.0)
    clocks.wall -= 3600.0
    assert not known.is_alive
    known.found(clocks.boot + 7, clocks.wall - clocks.boot)  # it was looked up
    assert known.is_alive
    tick(clocks, known, 3.5)
    clocks.wall += 4.0
    assert not known.is_alive


def test_a_lease_that_was_looked_up_is_alive_as_long_as_etcd_has_said(monkeypatch):
    """Wall time that is set forward costs one look-up, and no wait for the next renewal."""
    clocks, life = Clocks(monkeypatch), LeaseLife()
    clocks.renewed(life)
    guard = PauseGuard(Leases(8), 7, life, 10.0)
    tick(clocks, guard.known, 1.0)
    clocks.wall += 3600.0
    assert not guard.known.is_alive
    assert run(guard.has_lease())
    assert guard.known.is_alive
    tick(clocks, guard.known, 7.5)
    assert guard.known.is_alive
    tick(clocks, guard.known, 1.0)
    assert not guard.known.is_alive
