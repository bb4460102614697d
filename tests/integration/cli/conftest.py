import pytest

from support.tools import cluster, gazctl, gazette

__all__ = ["cluster", "gazctl", "gazette"]


@pytest.fixture
def tool(gazctl, cluster):
    """``gazctl`` with the address of the cluster."""
    gazctl.environ["GAZETTE_ADDRESS"] = cluster.address
    return gazctl
