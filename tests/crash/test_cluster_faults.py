"""Four brokers in two zones lose nothing and serve soon, whatever is killed, stopped or lost.

Real brokers, a real Etcd of three members, continuous appends and tailing reads. After each fault
the content of every broker and of the store is compared with what clients were told. The long form
is `scripts/soak`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from crash.cluster_faults import FAULTS, STALLS, Fault, Outcome, Stage, running_stage, suffer

STORE_FAILS_S = 5.0

SLACK = 2.0
"""Machines of test runs are noisy: a run fails at so many times the bar. Its summary says which
stalls were over the bar itself, and the soak fails at the bar."""

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[Outcome]:
    """Outcomes of the faults, of which the run's summary has a table."""
    return request.config.stash.setdefault(STALLS, [])


class Stages:
    """A cluster for one fault after the other, until one breaks it."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory, opened: ExitStack) -> None:
        self._tmp_path_factory = tmp_path_factory
        self._opened = opened
        self._stage: Stage | None = None

    def take(self, replication: int) -> Stage:
        """The cluster of now, or a new one."""
        stage = self._stage
        if stage is None or stage.is_broken or stage.replication != replication:
            self._opened.close()
            stage = self._stage = self._opened.enter_context(
                running_stage(
                    seed=1,
                    store_fails_s=STORE_FAILS_S,
                    replication=replication,
                    data=self._tmp_path_factory.mktemp("cluster"),
                )
            )
        return stage


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with ExitStack() as opened:
        yield Stages(tmp_path_factory, opened)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_nothing_is_lost_and_appends_go_on_soon(
    fault: Fault, stages: Stages, outcomes: list[Outcome]
):
    outcome = suffer(stages.take(fault.replication), fault, random.Random(fault.name))
    outcomes.append(outcome)
    assert outcome.stall_s <= SLACK * fault.bar_s, (
        f"appends stalled for {outcome.stall_s:.2f} s, and may for {fault.bar_s:.2f} s: "
        f"{outcome.client}"
    )
