"""A spool directory of tests of recovery."""

from __future__ import annotations

import pytest

from support.quarantine import crashed_spools


@pytest.fixture
def root(tmp_path):
    """A spool directory as a crash leaves it, with one spool of three commits."""
    return crashed_spools(tmp_path)
