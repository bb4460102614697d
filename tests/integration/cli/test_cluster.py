"""``gazctl brokers list`` and ``gazctl report`` against brokers that run."""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager

import pytest

from gazette_sdk import Journals, connect
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run

TIMEOUT_S = 60
KEY = "c29tZSBzZWNyZXQgb2YgdGhlIGNsdXN0ZXI="


def columns(text):
    """The rows of a table by the names of its columns."""
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@pytest.fixture
def cluster(gazette_cluster, gazctl):
    running = gazette_cluster(2, lease_ttl_s=20)
    running.wait_until_ready()
    gazctl.environ["GAZETTE_ADDRESS"] = running.address
    ends_at = time.monotonic() + TIMEOUT_S
    while len(json.loads(gazctl.ok("brokers", "list", "-o", "json").text)["brokers"]) < 2:
        assert time.monotonic() < ends_at, "the first broker does not see the second"
    return running


def test_brokers_are_listed_for_people_and_for_programs(gazctl, cluster):
    Journals().create("rides", partitions=4, replication=2)
    rows = columns(gazctl.ok("brokers", "list").text)
    assert [row["ENDPOINT"] for row in rows] == cluster.addresses
    assert [row["ZONE"] for row in rows] == ["local", "local"]
    assert sum(int(row["PRIMARIES"]) for row in rows) == 4
    for row in rows:
        assert row["REPLICAS"] == "4/1024"
        assert re.fullmatch(r"[0-9.]+", row["VERSION"])
        assert re.fullmatch(r"\d+s", row["LEASE"])
        assert re.fullmatch(r"\d+ms", row["LAG"])
        assert row["STATE"] == "ok"
    listed = json.loads(gazctl.ok("brokers", "list", "-o", "json").text)["brokers"]
    assert [each["endpoint"] for each in listed] == cluster.addresses
    for each in listed:
        assert (each["limit"], each["replicas"], each["key_ids"]) == (1024, 4, [])
        assert 0 < each["lease_left_s"] <= 20
        assert each["append_bytes"] >= 0
        assert each["disk_free"] > 0
        assert each["error"] == ""


def test_a_report_of_a_cluster_that_is_fine_has_status_0(gazctl, cluster):
    Journals().create("rides", partitions=2, replication=2)
    ends_at = time.monotonic() + TIMEOUT_S
    while "nothing needs attention" not in (shown := gazctl("report")).text:
        assert time.monotonic() < ends_at, shown
        assert shown.status in {0, 1, 2}
    assert shown.status == 0
    lines = shown.text.splitlines()
    assert lines[0].startswith("/gazette/cluster at ")
    assert lines[1] == (
        "2 brokers in 1 zone, 2 journals with 4 replicas, 1 store, 0 applications with 0 shards"
    )
    assert re.match(r"append \S+ ?\S*, read .*, in no store \d+ B", lines[2])
    assert lines[3] == "journals: 2 ok"
    report = json.loads(gazctl.ok("report", "-o", "json").text)
    assert (report["journals"], report["problems"]) == ("2", [])


def test_the_status_of_a_report_says_how_grave_its_problems_are(gazctl, cluster):
    """One journal asks for more replicas than there are brokers, and then a store fails."""
    journals = Journals()
    journals.create("rides", partitions=1, replication=3, force=True)
    warned = gazctl("report")
    assert warned.status == 1
    assert "WARNING  journals-short: rides/part-000 has fewer replicas" in warned.text
    assert "(it has 2 of 3)" in warned.text
    assert "    $ gazette allocator simulate" in warned.text
    assert warned.stderr == "gazctl: the report has 1 warning\n"
    as_json = gazctl("report", "-o", "json")
    assert as_json.status == 1
    assert json.loads(as_json.text)["problems"][0]["check"] == "journals-short"


def test_no_report_has_status_2(gazctl):
    silent = gazctl("report", "--broker.address", "http://127.0.0.1:1")
    assert silent.status == 2
    assert silent.text == ""
    assert "127.0.0.1:1" in silent.stderr
    assert gazctl("brokers", "list", "--broker.address", "http://127.0.0.1:1").status == 1


def test_a_token_without_read_shows_no_rates(gazctl, tmp_path):
    with EmbeddedCluster(tmp_path / "data", sync_etcd=False, auth_keys=KEY) as cluster:
        transport = connect(cluster.address, auth_keys=KEY)
        Journals(transport=transport).create("rides", partitions=1, replication=1)
        run(transport.aclose(), TIMEOUT_S)
        gazctl.environ["GAZETTE_ADDRESS"] = cluster.address
        assert "missing authorization header" in gazctl("report").stderr
        token = Authority(KEY).sign(Capability.LIST, pb.LabelSelector(), 600, time.time())
        listing = gazctl("report", "--broker.auth-token", token)
        assert "append -, read -, in no store -\n" in listing.text
        [broker] = json.loads(
            gazctl.ok("brokers", "list", "-o", "json", "--broker.auth-token", token).text
        )["brokers"]
        assert broker["append_bytes"] is None
        reading = gazctl("report", "--broker.auth-keys", KEY)
        assert "in no store -" not in reading.text
        [broker] = json.loads(
            gazctl.ok("brokers", "list", "-o", "json", "--broker.auth-keys", KEY).text
        )["brokers"]
        assert broker["append_bytes"] >= 0
        assert broker["key_ids"][0].startswith("unnamed-")


@contextmanager
def foreign_broker():
    """A broker that has the calls of every Gazette, and no others."""
    server = Server(host="127.0.0.1")
    endpoint = run(_started(server), TIMEOUT_S)
    try:
        yield endpoint
    finally:
        run(server.stop(0), TIMEOUT_S)


async def _started(server):
    server.bind()

    async def listed(_request, _call):
        members = [pb.ProcessSpec.ID(zone="a", suffix=f"go-{number}") for number in (1, 2)]
        etcd = pb.Header.Etcd(cluster_id=1, member_id=1, revision=1, raft_term=1)
        header = pb.Header(process_id=pb.ProcessSpec.ID(zone="b", suffix="go-3"), etcd=etcd)
        header.route.primary = -1
        response = pb.ListResponse(header=header)
        for number in range(2):
            route = pb.Route(
                members=members, primary=1, endpoints=["http://one:80", "http://two:80"]
            )
            spec = pb.JournalSpec(name=f"rides/part-00{number}", replication=2)
            spec.fragment.length = 1 << 20
            spec.fragment.compression_codec = pb.NONE
            spec.fragment.refresh_interval.seconds = 60
            response.journals.add(spec=spec, route=route, mod_revision=1)
        yield response

    server.grpc.add([Method(RPCS_BY_NAME["List"], listed)])
    return await server.start()


def test_brokers_of_another_implementation_are_listed_by_their_routes(gazctl):
    with foreign_broker() as endpoint:
        gazctl.environ["GAZETTE_ADDRESS"] = endpoint
        shown = gazctl.ok("brokers", "list")
        assert "is of another implementation" in shown.stderr
        unknown = {"VERSION": "-", "LEASE": "-", "LAG": "-", "STATE": "-"}
        assert columns(shown.text) == [
            {
                "ZONE": zone,
                "ID": suffix,
                "ENDPOINT": url,
                "REPLICAS": replicas,
                "PRIMARIES": primaries,
                **unknown,
            }
            for zone, suffix, url, replicas, primaries in (
                ("a", "go-1", "http://one:80", "2", "0"),
                ("a", "go-2", "http://two:80", "2", "2"),
                ("b", "go-3", "-", "0", "0"),
            )
        ]
        [first, *_] = json.loads(gazctl.ok("brokers", "list", "-o", "json").text)["brokers"]
        assert (first["state"], first["version"], first["limit"]) == ("unknown", None, None)
        refused = gazctl("report")
        assert refused.status == 2
        assert "of this SDK" in refused.stderr
