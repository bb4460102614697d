"""Queries whose driver is killed write each row once; for long runs ``crash.spark_kills``."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import spark_kills


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_queries_whose_driver_is_killed_at_random_write_each_row_once(tmp_path: Path):
    outcome = spark_kills.run(tmp_path, kills=3, queries=2, processes=1, seed=11)
    assert outcome.kills == 3
    assert outcome.messages >= outcome.rows > 0
    assert outcome.batches > 0
