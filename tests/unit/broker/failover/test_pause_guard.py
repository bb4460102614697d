from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.failover.pause_guard import PauseGuard
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


def has_lease(guard):
    return asyncio.get_running_loop().time() <= guard.known.valid_until


def test_a_process_that_runs_has_its_lease():
    async def scenario():
        guard = PauseGuard(Leases(-1), 7, 100)
        assert has_lease(guard)
        running = asyncio.ensure_future(guard.run())
        await asyncio.sleep(0)
        assert has_lease(guard)
        running.cancel()
        await asyncio.wait([running])

    run(scenario())


@pytest.mark.parametrize("answers", [[3], [EtcdUnavailableError("away"), 3]])
def test_behind_a_pause_the_lease_is_looked_up(answers):
    async def scenario():
        guard = PauseGuard(Leases(*answers), 7, 1.0)
        guard.known.valid_until -= 1.0  # as if it had been stopped
        assert not has_lease(guard)
        running = asyncio.ensure_future(guard.run())
        await until(lambda: has_lease(guard))
        running.cancel()
        await asyncio.wait([running])

    run(scenario())


def test_a_lease_that_has_ended_stays_so():
    async def scenario():
        guard = PauseGuard(Leases(-1), 7, 0.02)
        guard.known.valid_until -= 1.0
        running = asyncio.ensure_future(guard.run())
        for _ in range(10):
            await asyncio.sleep(0.005)
            assert not has_lease(guard)
        running.cancel()
        await asyncio.wait([running])

    run(scenario())
