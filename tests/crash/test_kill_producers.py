"""Producers killed at random points of transactions: committed readers see all that was decided.

Processes publish transactions over several journals. They store the intents of each before these
are written, are killed by `kill -9`, and begin again by writing the stored intents once more.
"""

import os
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from crash.dev_cluster import DevCluster
from crash.followers import Follower, read_all
from crash.killing import Victim, phases_of, warm_processes
from crash.producer_program import Assignment, Entry, message_of
from crash.transactions import History, check_uninterrupted
from support.threads import in_parallel

KILLS = int(os.environ.get("PRODUCER_KILLS", "60"))
KILLS_FOR_EVERY_PHASE = 60
"""Number of kills from which on each phase has to be hit."""

SHARE_MAX = 200
"""Limit of the kills of one producer, in search of a phase that was not hit."""

SEED = int(os.environ.get("PRODUCER_KILLS_SEED", "4"))
PRODUCERS = ("ada", "bob", "cyd", "dan")
MORE_KILLS = 5
CHECKPOINTS_CHECKED = 8
TIMEOUT_S = 600.0

SELECTOR = "topic=kills"
NAMES = tuple(f"kills/part-{part:03d}" for part in range(4))
JOURNALS = """
name: kills/
replication: 1
labels:
  - {name: topic, value: kills}
  - {name: content-type, value: application/x-ndjson}
fragment:
  length: 4194304
  compression_codec: SNAPPY
  stores: ["file:///"]
  refresh_interval: 1s
children:
""" + "".join(f"  - name: {name}\n" for name in NAMES)

EVERY_PHASE = [
    "recovering",
    "publishing",
    "waiting for what was published",
    "saving",
    "acknowledging, nowhere yet",
    "acknowledging, in some journals",
    "acknowledging, everywhere",
]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with DevCluster(tmp_path / "data") as cluster:
        cluster.apply(JOURNALS)
        monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
        yield cluster


def phases_hit(victims: list[Victim], cluster: DevCluster) -> Counter[str]:
    """Return how many kills fell into each phase."""
    return sum((phases_of(victim.kills, cluster.address) for victim in victims), Counter())


def spared(phases: Counter[str]) -> list[str]:
    """Return the phases into which no kill fell."""
    return [phase for phase in EVERY_PHASE if not phases[phase]]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("kills", [KILLS, pytest.param(200, marks=pytest.mark.long)])
def test_what_was_decided_is_seen_once_and_whole_and_nothing_else(
    kills: int, cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    print(f"seed {SEED}: PRODUCER_KILLS_SEED={SEED}")
    begun_at = time.monotonic()
    follower = Follower(
        Entry,
        SELECTOR,
        lambda entry: message_of(SEED, entry),
        chance=random.Random(f"follower {SEED}"),
        ring_size=64,
    )
    with warm_processes(monkeypatch.setenv) as context, follower:
        victims = [
            Victim(
                context,
                Assignment(cluster.address, NAMES, SEED, name, 0, tmp_path / f"{name}.json", 0),
                random.Random(f"victim {SEED} {name}"),
            )
            for name in PRODUCERS
        ]
        share = -(-kills // len(victims))
        in_parallel([partial(victim.kill_often, share) for victim in victims], TIMEOUT_S)
        # A phase is short beside a kill's inaccuracy: how many it takes to hit all is chance.
        wants_all = kills >= KILLS_FOR_EVERY_PHASE
        while wants_all and share < SHARE_MAX and spared(phases_hit(victims, cluster)):
            share += MORE_KILLS
            in_parallel([partial(victim.kill_often, share) for victim in victims], TIMEOUT_S)
        killed_s = time.monotonic() - begun_at
        in_parallel([partial(victim.finish, 3) for victim in victims])

    history = History()
    for victim in victims:
        history.decided |= victim.history.decided
        history.acknowledged |= victim.history.acknowledged
    seen = {
        f"a reader from the begin, ring of {ring_size}": read_all(
            Entry, SELECTOR, lambda entry: message_of(SEED, entry), ring_size=ring_size
        )
        for ring_size in (8192, 16)
    } | {"the reader that followed": follower.delivered}
    phases = phases_hit(victims, cluster)
    print(
        f"{phases.total()} kills in {killed_s:.0f} s, {history.decided_count} transactions decided,"
        f" {len(history.acknowledged)} of them acknowledged,"
        f" {sum(victim.rolled_back for victim in victims)} rolled back;"
        f" {sum(map(len, follower.delivered.values()))} messages;"
        f" {follower.restarts} restarts of the reader, {follower.relapses} from earlier checkpoints"
    )
    for phase, count in phases.most_common():
        print(f"{count:6} kills while {phase}")
    for who, delivered in seen.items():
        try:
            history.check(delivered)
            check_uninterrupted(delivered)
        except AssertionError as error:
            error.add_note(f"This is what {who} was given.")
            raise
    follower.check_checkpoints(CHECKPOINTS_CHECKED)
    assert phases.total() >= kills
    if wants_all:
        assert not spared(phases), "a phase was spared"
