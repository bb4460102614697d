"""Consumers of stream_sum lose no sum, publish none twice, and fail over soon, whatever is killed.

Four real brokers, three consumer processes, chunkers that verify each sum. The long form is
`scripts/soak --load sums`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from crash.cluster_faults import STALLS, Outcome, suffer
from crash.shard_faults import SHARD_FAULTS, ShardStage, running_shard_stage
from crash.sum_load import LATEST_S

SHORT = (
    "kill a consumer",
    "freeze a consumer",
    "kill primary and standby",
    "kill broker and consumer",
)
"""Faults of the short form."""

SLACK = 2.0
"""Machines of test runs are noisy: a run fails at so many times the bar. Its summary says what was
over the bar itself, and the soak fails at the bar."""

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardStage]:
    data = tmp_path_factory.mktemp("cluster")
    with running_shard_stage(timeout_s=SLACK * LATEST_S, data=data) as stage:
        yield stage


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[Outcome]:
    """Outcomes of the faults, of which the run's summary has a table."""
    return request.config.stash.setdefault(STALLS, [])


@pytest.mark.parametrize("name", SHORT)
def test_every_sum_is_verified_once_and_shards_fail_over_soon(
    name: str, stage: ShardStage, outcomes: list[Outcome]
):
    assert not stage.is_broken, "an earlier fault broke the cluster"
    [fault] = [each for each in SHARD_FAULTS if each.name == name]
    outcome = suffer(stage, fault, random.Random(name))
    outcomes.append(outcome)
    assert outcome.stall_s <= SLACK * fault.bar_s, outcome.client
    assert outcome.fail_over_s <= SLACK * outcome.fail_over_bar_s, outcome.client
