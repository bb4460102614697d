"""Consumer processes that end at each step of a commit: each window is closed once, in each store.

``GAZETTE_WINDOW_KILLS`` is the number of kills of each store.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest

from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.testing.shards import run_shards
from support import zone_windows
from support.postgres import running_postgres
from support.window_model import Event, S
from support.zone_windows import DATABASE

CRASHED = 137
KILLS = int(os.environ.get("GAZETTE_WINDOW_KILLS", "2"))
STEPS = list(CommitStep)
BEGIN = 1_700_000_000 * S
ZONES = "abcdefgh"


@pytest.fixture(scope="module")
def database():
    with running_postgres() as url:
        yield url


def rides(rng, begin_us, prefix):
    """Rides within ten seconds, some of them late."""
    for number in range(20):
        at_us = begin_us + number * S // 2 - rng.choice((0, 0, 1, 2, 3, 8)) * S
        yield Event(f"{prefix}/{number:02}", rng.choice(ZONES), at_us, at_us)


def has_crashed(process):
    try:
        assert process.wait_until_ended(0.3) == CRASHED
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("number", range(4), ids=["rocks", "sqlite", "json", "sql"])
def test_each_window_closes_once_whatever_step_a_process_ends_at(
    gazette, number, database, monkeypatch
):
    """Each store begins at other steps, so that few kills of all of them meet every step."""
    monkeypatch.setenv(DATABASE, database)
    kind = (
        zone_windows.InRocks, zone_windows.InSqlite, zone_windows.InJson, zone_windows.InSql,
    )[number]  # fmt: skip
    rng = random.Random(number)
    zone_windows.create_journals(gazette.transport)
    steps = itertools.islice(itertools.cycle(STEPS), 2 * number, 2 * number + KILLS)
    begin_us = BEGIN
    with run_shards(kind(), cluster=gazette, lease_ttl_s=2) as shards:
        for kill, step in enumerate(steps):
            shards.crash_at(step, nth=1 + kill % 3)
            for part in itertools.count():
                assert part < 200, f"it has not ended at {step}"
                given = rides(rng, begin_us, f"{kill}/{part}")
                zone_windows.publish(gazette.transport, list(given))
                begin_us += 10 * S
                if has_crashed(shards.processes[0]):
                    break
            shards.start(0)
        last = [Event(f"last/{zone}", zone, 0, begin_us + 100 * S) for zone in ZONES]
        zone_windows.publish(gazette.transport, last)
        shards.wait_caught_up()
        expected = zone_windows.expected_output(gazette.transport, kind.windows)
        assert {what for what, *_ in expected} == {"closed", "late"}
        zone_windows.until_output(gazette.transport, expected)
