import pytest

from support.open_files import leaves_no_file_open
from support.wires import certifier, wire

__all__ = ["certifier", "no_descriptor_leaks", "wire"]


@pytest.fixture
def no_descriptor_leaks():
    with leaves_no_file_open():
        yield
