"""Consumer processes that end at each step of a commit: each timer fires once, in each store.

``GAZETTE_TIMER_KILLS`` is the number of kills of each store.
"""

from __future__ import annotations

import itertools
import os

import pytest

from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.testing.shards import run_shards
from support import alarms
from support.alarms import DATABASE, Alarm
from support.postgres import running_postgres

CRASHED = 137
KILLS = int(os.environ.get("GAZETTE_TIMER_KILLS", "2"))
STEPS = list(CommitStep)


@pytest.fixture(scope="module")
def database():
    with running_postgres() as url:
        yield url


@pytest.mark.parametrize("number", range(4), ids=["rocks", "sqlite", "json", "sql"])
def test_each_timer_fires_once_whatever_step_a_process_ends_at(
    gazette, number, database, monkeypatch
):
    """Each store begins at other steps, so that few kills of all of them meet every step."""
    monkeypatch.setenv(DATABASE, database)
    kind = (alarms.InRocks, alarms.InSqlite, alarms.InJson, alarms.InSql)[number]
    alarms.create_journals(gazette.transport)
    expected = []
    steps = itertools.islice(itertools.cycle(STEPS), 2 * number, 2 * number + KILLS)
    with run_shards(kind(), cluster=gazette, lease_ttl_s=2) as shards:
        for kill, step in enumerate(steps):
            names = [f"{kill}/{each}" for each in range(12)]
            alarms.publish(gazette.transport, [Alarm(name, 3600) for name in names])
            shards.crash_at(step, nth=1 + kill % 3)
            moved = [Alarm(name, (each % 4) * 0.05) for each, name in enumerate(names[:8])]
            alarms.publish(gazette.transport, moved[:4])
            alarms.publish(gazette.transport, moved[4:])
            alarms.publish(gazette.transport, [Alarm(name, -1) for name in names[8:]])
            expected += names[:8]
            assert shards.processes[0].wait_until_ended() == CRASHED
            shards.start(0)
            alarms.until_rung(gazette.transport, expected)
        shards.wait_caught_up()
    late_s = [each.rang - each.due for each in alarms.rings(gazette.transport)]
    assert min(late_s) >= 0, "none fires before its time"
