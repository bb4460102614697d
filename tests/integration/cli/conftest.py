import pytest

from support.consumer_thread import ConsumerThread
from support.tools import cluster, gazctl, gazette

__all__ = ["cluster", "gazctl", "gazette"]


@pytest.fixture
def tool(gazctl, cluster):
    """``gazctl`` with the address of the cluster."""
    gazctl.environ["GAZETTE_ADDRESS"] = cluster.address
    return gazctl


@pytest.fixture
def consumer(etcd):
    with ConsumerThread(etcd) as running:
        yield running


@pytest.fixture
def shards(tool, consumer):
    """``gazctl shards``, with the addresses of both."""
    tool.environ["CONSUMER_ADDRESS"] = consumer.process.endpoint

    def run(*arguments, **options):
        return tool("shards", *arguments, **options)

    run.tool = tool
    return run
