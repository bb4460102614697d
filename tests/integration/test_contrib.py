"""Journals as data of Dask and Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pyarrow as pa
import pytest

from gazette_sdk import Journals, JsonMessage, Publisher, contrib, mapping
from gazette_sdk.contrib import dask_from_journals, plan, ray_datasource
from gazette_sdk.errors import ConfigurationError, JournalNotFoundError, MissingPackageError
from gazette_sdk.fragment.stores.base import Store

TIMEOUT_S = 200.0
SCHEMA = pa.schema([("n", pa.int64()), ("name", pa.string())])
SPECS = """
name: numbers/
replication: 1
labels: [{name: topic, value: numbers}, {name: content-type, value: application/x-ndjson}]
fragment: {length: 2000, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 10s}
children: [{name: numbers/part-000}, {name: numbers/part-001}, {name: numbers/part-002}]
"""


def require(package):
    """Skip a test of a package that is not installed here, except where all are installed."""
    if importlib.util.find_spec(package) is None:
        text = f"{package} is not installed: run scripts/setup dev"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)


@pytest.fixture
def dask():
    require("dask")


@pytest.fixture
def cluster(gazette_cluster):
    """A cluster with 600 numbers in three journals, each in several fragments."""
    cluster = gazette_cluster(1)
    cluster.apply(SPECS)
    for begin in range(0, 600, 20):
        publish(cluster, range(begin, begin + 20))
    return cluster


def publish(cluster, numbers):
    to = mapping.modulo("topic=numbers", key=lambda number: str(number["n"]))
    with Publisher(mapping=to, transport=cluster.transport) as publisher:
        publisher.publish_batch([{"n": number, "name": f"name-{number}"} for number in numbers])


def numbers_of(frame):
    return sorted(frame.n.compute().tolist())


def test_a_partition_is_a_journal_with_its_committed_messages(dask, cluster):
    with Publisher(mapping=mapping.direct("numbers/part-000"), transport=cluster.transport) as to:
        with to.transaction() as transaction:
            transaction.publish({"n": 600, "name": None})
        with to.transaction() as transaction:
            transaction.publish({"n": -1}).result(TIMEOUT_S)
            frame = dask_from_journals(dict, "topic=numbers", SCHEMA, url=cluster.address)
        assert frame.npartitions == 3
        assert numbers_of(frame) == list(range(601))
        assert {str(kind) for kind in frame.dtypes} == {"int64[pyarrow]", "string[pyarrow]"}


def test_uncommitted_ranges_hold_each_message_once(dask, cluster):
    frames = [
        dask_from_journals(
            dict,
            "topic=numbers",
            SCHEMA,
            url=cluster.address,
            isolation="uncommitted",
            range_bytes=range_bytes,
        )
        for range_bytes in (1, 5000, contrib.RANGE_BYTES)
    ]
    counts = [frame.npartitions for frame in frames]
    assert counts[0] > counts[1] > counts[2] == 3
    for frame in frames:
        assert numbers_of(frame) == list(range(600))


def test_messages_of_after_the_call_are_not_read(dask, cluster):
    frame = dask_from_journals(dict, "topic=numbers", SCHEMA, url=cluster.address)
    publish(cluster, range(600, 700))
    assert numbers_of(frame) == list(range(600))


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_stored_fragments_are_read_without_a_broker_and_not_listed_again(
    dask, cluster, isolation, monkeypatch
):
    cluster.stop()
    frame = dask_from_journals(
        dict,
        "prefix=numbers/",
        SCHEMA,
        url=cluster.fragments.as_uri(),
        content_type="application/x-ndjson",
        isolation=isolation,
        range_bytes=5000,
    )
    assert frame.npartitions == (3 if isolation == "committed" else 12)
    monkeypatch.setattr(Store, "list", lambda *_: pytest.fail("the store is listed again"))
    assert numbers_of(frame) == list(range(600))


@dataclass
class Number(JsonMessage):
    n: int
    name: str | None
    factor: float | None = None


def test_a_class_has_the_columns_and_partitions_without_values_their_types(dask, cluster):
    frame = dask_from_journals(Number, "topic=numbers", url=cluster.address)
    kinds = {str(kind) for part in frame.partitions for kind in [part.factor.compute().dtype]}
    assert kinds == {"double[pyarrow]"}
    assert list(frame.columns) == ["n", "name", "factor"]
    assert frame.factor.count().compute() == 0


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_journals_without_content_are_a_frame_without_rows(dask, gazette_cluster, isolation):
    cluster = gazette_cluster(1)
    Journals(transport=cluster.transport).create("numbers", partitions=2, replication=1)
    frame = dask_from_journals(
        dict, "topic=numbers", SCHEMA, url=cluster.address, isolation=isolation
    ).compute()
    assert list(frame.columns) == ["n", "name"]
    assert len(frame) == 0


def test_mistakes_are_found_before_any_task(gazette_cluster):
    cluster = gazette_cluster(1)
    with pytest.raises(JournalNotFoundError, match="no journal matches 'topic=missing'"):
        plan(dict, "topic=missing", SCHEMA, url=cluster.address)
    with pytest.raises(ConfigurationError, match="dict names no fields"):
        plan(dict, "topic=numbers", url=cluster.address)
    with pytest.raises(ConfigurationError, match="give the address of its broker"):
        plan(dict, "topic=numbers", SCHEMA, url="embedded:///data")
    with pytest.raises(ConfigurationError, match="range_bytes"):
        plan(dict, "topic=numbers", SCHEMA, url=cluster.address, range_bytes=0)
    with pytest.raises(ConfigurationError, match="isolation"):
        plan(dict, "topic=numbers", SCHEMA, url=cluster.address, isolation="serializable")


def test_the_address_is_that_of_the_environment_and_travels_with_the_tasks(
    gazette_cluster, monkeypatch
):
    cluster = gazette_cluster(1)
    Journals(transport=cluster.transport).create("numbers", partitions=1, replication=1)
    monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
    table, _ = plan(dict, "topic=numbers", SCHEMA)
    assert table.url == cluster.address
    table, _ = plan(dict, "topic=numbers", SCHEMA, auth_token="secret-token")
    assert "secret-token" not in repr(table)


@pytest.mark.parametrize(
    ("function", "package"), [(ray_datasource, "ray"), (dask_from_journals, "dask")]
)
def test_a_missing_package_is_named(function, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"gazette-sdk\[{package}\]"):
        function(dict, "topic=numbers", SCHEMA)


RAY = """
import json, sys
from dataclasses import dataclass

import pyarrow as pa
import ray

from gazette_sdk import JsonMessage
from gazette_sdk.contrib import ray_datasource


@dataclass
class Number(JsonMessage):
    n: int
    name: str


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=sys.argv[2])
schema = pa.schema([("n", pa.int64()), ("name", pa.string())])
source = ray_datasource(
    Number, "topic=numbers", url=sys.argv[1], isolation="uncommitted", range_bytes=5000
)
rows = ray.data.read_datasource(source).take_all()
journals = ray_datasource(dict, "topic=numbers", schema, url=sys.argv[1])
tasks = journals.get_read_tasks(2)
print(json.dumps({
    "rows": rows,
    "ranges": len(source.get_read_tasks(2)),
    "committed": [sum(block.num_rows for block in task()) for task in tasks],
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 40)
def test_ray_reads_journals_in_tasks(cluster, tmp_path_factory):
    """In a process of its own: Ray's warnings are not ours."""
    require("ray")
    environ = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", RAY, cluster.address, str(tmp_path_factory.mktemp("ray"))],
        capture_output=True,
        text=True,
        env=environ,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = sorted(found["rows"], key=lambda row: row["n"])
    assert rows == [{"n": n, "name": f"name-{n}"} for n in range(600)]
    assert found["ranges"] > 3
    assert len(found["committed"]) == 3
    assert sum(found["committed"]) == 600
