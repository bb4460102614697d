"""A directory of spools, for each test of pipelines."""

from __future__ import annotations

import pytest

from gazette_sdk.broker.spool.directory import SpoolDirectory


@pytest.fixture
def directory(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as made:
        yield made
