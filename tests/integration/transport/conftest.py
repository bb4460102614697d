import gc
from pathlib import Path

import pytest

from support.wires import certifier, wire

__all__ = ["certifier", "no_descriptor_leaks", "wire"]

OPEN_FILES = Path("/proc/self/fd")


@pytest.fixture
def no_descriptor_leaks():
    before = len(list(OPEN_FILES.iterdir()))
    yield
    gc.collect()
    assert len(list(OPEN_FILES.iterdir())) <= before
