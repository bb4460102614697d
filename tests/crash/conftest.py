"""Summary of the stalls and fail-overs which faults of clusters caused."""

from __future__ import annotations

import pytest

from crash.cluster_faults import STALLS, summary
from crash.shard_faults import fail_over_summary


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    outcomes = config.stash.get(STALLS, [])
    if outcomes:
        terminalreporter.section("longest stalls")
        for line in (*summary(outcomes), *fail_over_summary(outcomes)):
            terminalreporter.write_line(line)
