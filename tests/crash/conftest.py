"""Summary of the stalls which faults of clusters caused."""

from __future__ import annotations

import pytest

from crash.cluster_faults import STALLS, summary


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    outcomes = config.stash.get(STALLS, [])
    if outcomes:
        terminalreporter.section("longest stalls of appends")
        for line in summary(outcomes):
            terminalreporter.write_line(line)
