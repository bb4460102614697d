"""Members of a cluster, its report, and requests at other members, of brokers that run."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from contextlib import aclosing

import pytest

from gazette_sdk import Journals, Publisher, connect, mapping, shard
from gazette_sdk.broker.views import report
from gazette_sdk.cluster import consumer_keys
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.items import member_key
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import CallError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.rules import DRAIN_RPC, MEMBERS_RPC, REPORT_RPC
from gazette_sdk.server.process import Server
from gazette_sdk.shard import EmbeddedConsumer
from gazette_sdk.transport.grpc import GrpcWire
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.wire import (
    MAX_RECEIVE_BYTES,
    SERVICE,
    Destination,
    Tls,
    WireOptions,
)

TIMEOUT_S = 60
KEY = "c29tZSBzZWNyZXQgb2YgdGhlIGNsdXN0ZXI="
OTHER_KEY = "YW5vdGhlciBzZWNyZXQgb2YgYSBjbHVzdGVy"
BROKERS_ROOT = "/gazette/cluster"


QUICKLY_S = 0.2


@pytest.fixture(autouse=True)
def _is_read_again_soon(monkeypatch):
    """Have brokers of this process read Etcd, and make reports, more often than they do."""
    monkeypatch.setattr(report, "PERIOD_S", QUICKLY_S)
    monkeypatch.setattr(consumer_keys, "DIRECTORY_PERIOD_S", QUICKLY_S)


@shard.handler(message=dict, store=shard.JsonStore, sources="topic=rides", name="zones")
def zones(txn, ride):
    if ride.get("bad"):
        raise ValueError("this ride is refused")


def get(url, token=None, body=None):
    request = urllib.request.Request(url, data=body)
    if token is not None:
        request.add_header("Authorization", token)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read())


def status_of(url, token=None):
    try:
        get(url, token)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    return 200, ""


def refused(url, body, token=None):
    try:
        get(url, token, json.dumps(body).encode())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    pytest.fail(f"{url} was answered")


def until(condition):
    ends_at = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    return found


def call(address, rpc, request, token=None):
    """The answer of a broker or a consumer over gRPC."""
    options = WireOptions(
        address=address,
        tls=Tls(),
        max_receive_bytes=MAX_RECEIVE_BYTES,
        reconnect_backoff_max_s=1,
        connect_timeout_s=5,
        read_chunk_bytes=None,
        call_timeout_s=20,
    )

    async def ask():
        async with aclosing(GrpcWire(options)) as wire:
            return await wire.call(Destination(rpc, None, SERVICE, address, token), request)

    return run(ask(), TIMEOUT_S)


def by_component(members):
    found = {}
    for each in members:
        found.setdefault(each["component"], []).append(each)
    return found


def signed(capability, key=KEY, **selector):
    labels = pb.LabelSelector(include=label_set(**selector))
    return Authority(key).header(capability, labels, 600, time.time())


BOTH = Capability.LIST | Capability.READ


def publish(transport, *rides):
    to_rides = mapping.modulo("topic=rides", key=lambda ride: ride["k"])
    with Publisher(mapping=to_rides, transport=transport) as publisher:
        for ride in rides:
            publisher.publish(ride)


def test_brokers_and_consumers_describe_themselves(gazette_cluster):
    cluster = gazette_cluster(2)
    Journals(transport=cluster.transport).create("rides", partitions=2, replication=2)
    options = {"transport": cluster.transport, "etcd": cluster.etcd_endpoint}
    with EmbeddedConsumer(zones, **options) as consumer:
        publish(cluster.transport, *({"k": str(number)} for number in range(20)))
        consumer.wait_caught_up(TIMEOUT_S)
        for address in cluster.addresses:
            members = get(f"{address}/v1/cluster/members")["members"]
            found = by_component(members)
            assert {each["endpoint"] for each in found["broker"]} == set(cluster.addresses)
            assert [each["endpoint"] for each in found["zones"]] == [consumer.address]
            for each in members:
                assert each["error"] == ""
                assert each["version"]
                assert each["python"].startswith("3.")
                assert abs(int(each["clockUs"]) / 1e6 - time.time()) < 5
                assert int(each["startedUs"]) <= int(each["clockUs"])
                assert 0 < each["leaseLeftS"] <= each["leaseS"] == 20
                assert 0 <= each["loopLagS"] < 10
                assert each["etcdVersion"].startswith("3.")
                assert (each["limit"], each["exiting"], each["keyIds"]) == (1024, False, [])
            for each in found["broker"]:
                assert each["replicas"] == 4
                assert int(each["diskFree"]) > 0
                assert "unstored" not in each, "only details have it"
            assert sum(each["primaries"] for each in found["broker"]) == 4
            assert (found["zones"][0]["replicas"], found["zones"][0]["primaries"]) == (2, 2)
            assert "appendBytes" not in found["zones"][0]
            appended = sum(int(each["appendBytes"]) for each in found["broker"])
            assert appended > 400
            # gRPC has the same.
            over_grpc = call(address, MEMBERS_RPC, clpb.MembersRequest())
            assert [each.endpoint for each in over_grpc.members] == [
                each["endpoint"] for each in members
            ]
            # One process alone, by either wire.
            [local] = get(f"{address}/v1/cluster/members?local=true")["members"]
            assert local["endpoint"] == address
        for request in (clpb.MembersRequest(local=True), clpb.MembersRequest()):
            [itself] = call(consumer.address, MEMBERS_RPC, request).members
            assert (itself.component, itself.primaries) == ("zones", 2)
        [itself] = get(f"{consumer.address}/v1/cluster/members?local=true")["members"]
        assert itself["endpoint"] == consumer.address


def test_a_report_counts_and_names_what_needs_attention(gazette_cluster):
    cluster = gazette_cluster(2)
    Journals(transport=cluster.transport).create("rides", partitions=2, replication=2)
    options = {"transport": cluster.transport, "etcd": cluster.etcd_endpoint}
    with EmbeddedConsumer(zones, **options) as consumer:
        publish(cluster.transport, *({"k": str(number)} for number in range(20)))
        consumer.wait_caught_up(TIMEOUT_S)

        def reported():
            return get(f"{cluster.address}/v1/cluster/report")

        fine = until(lambda: (found := reported())["states"] == {"JOURNAL_OK": "4"} and found)
        assert fine["cluster"] == BROKERS_ROOT
        assert (fine["brokers"], fine["zones"]) == (2, ["local"])
        assert (fine["journals"], fine["replicas"]) == ("4", "8")
        assert int(fine["unstored"]) > 400
        assert 0 <= fine["oldestUnstoredS"] < TIMEOUT_S
        assert len(fine["versions"]) == 1
        [store] = fine["stores"]
        assert (store["url"], store["journals"], store["healthy"]) == ("file:///", "4", True)
        assert store["unstored"] == fine["unstored"]
        until(lambda: "appendRate" in reported())
        [application] = until(lambda: (a := reported()["applications"])[0]["shards"] == "2" and a)
        assert application["name"] == "zones"
        assert (application["processes"], application["failed"]) == (1, "0")
        assert application["error"] == ""
        grave = [each for each in fine["problems"] if each["severity"] == "ERROR"]
        assert grave == []

        publish(cluster.transport, {"k": "0", "bad": True})
        [problem] = until(lambda: [p for p in reported()["problems"] if p["kind"] == "shard"])
        assert (problem["check"], problem["severity"]) == ("shards-failed", "ERROR")
        assert problem["subject"].startswith("zones/rides/part-00")
        assert "this ride is refused" in problem["text"]
        assert consumer.address in problem["command"]
        over_grpc = call(cluster.addresses[1], REPORT_RPC, clpb.ReportRequest())
        assert "shards-failed" in {each.check for each in over_grpc.problems}
    gone = until(lambda: [p for p in reported()["problems"] if p["check"] == "application-silent"])
    assert gone[0]["subject"] == "zones"


def test_a_report_is_used_again_for_two_seconds(gazette_cluster, monkeypatch):
    assert report.PERIOD_S == QUICKLY_S
    monkeypatch.setattr(report, "PERIOD_S", TIMEOUT_S)
    cluster = gazette_cluster(1)

    def journals():
        return get(f"{cluster.address}/v1/cluster/report")["journals"]

    assert journals() == "0"
    Journals(transport=cluster.transport).create("rides", partitions=1, replication=1)
    until(lambda: get(f"{cluster.address}/v1/cluster/members")["members"][0]["replicas"])
    assert journals() == "0"
    monkeypatch.setattr(report, "PERIOD_S", QUICKLY_S)
    until(lambda: journals() == "1")


def test_other_members_are_reached_through_one_broker(gazette_cluster):
    cluster = gazette_cluster(2)
    options = {"transport": cluster.transport, "etcd": cluster.etcd_endpoint}
    with EmbeddedConsumer(zones, **options) as consumer:
        members = get(f"{cluster.address}/v1/cluster/members")["members"]
        assert len(members) == 3
        for each in members:
            at = f"{cluster.address}/v1/at/{each['id']['zone']}/{each['id']['suffix']}"
            [itself] = get(f"{at}/cluster/members?local=true")["members"]
            assert itself["endpoint"] == each["endpoint"]
            with urllib.request.urlopen(f"{at}/debug/metrics", timeout=TIMEOUT_S) as answer:
                assert b"process_cpu_seconds_total" in answer.read()
            assert status_of(f"{at}/at/{each['id']['zone']}/x/cluster/members")[0] == 400
        listed = get(f"{at}/shards/list", body=b"{}")  # the consumer is the last one
        assert listed["shards"] == []
        assert consumer.address == each["endpoint"]
        code, text = status_of(f"{cluster.address}/v1/at/local/nobody-1/cluster/members")
        assert code == 404
        assert "no member local/nobody-1" in text


@pytest.fixture
def guarded(tmp_path):
    """A cluster of two brokers whose callers need tokens, and a transport that has the key."""
    with EmbeddedCluster(tmp_path, brokers=2, sync_etcd=False, auth_keys=f"key-1:{KEY}") as cluster:
        transport = connect(cluster.address, auth_keys=f"key-1:{KEY}")
        try:
            yield cluster, transport
        finally:
            run(transport.aclose(), TIMEOUT_S)


def test_members_and_report_need_list_without_a_selector(guarded):
    cluster, transport = guarded
    Journals(transport=transport).create("rides", partitions=1, replication=1)
    publish(transport, {"k": "1"})
    url = f"{cluster.address}/v1/cluster"
    for path, rpc in (("members", MEMBERS_RPC), ("report", REPORT_RPC)):
        for token in (None, signed(Capability.READ), signed(BOTH, topic="rides")):
            code, _ = status_of(f"{url}/{path}", token)
            assert code == 401
            with pytest.raises(UnauthenticatedError):
                call(cluster.address, rpc, rpc.request_type(), token)

    listing, reading = signed(Capability.LIST), signed(BOTH)
    members = get(f"{url}/members", listing)["members"]
    assert [each["error"] for each in members] == ["", ""], "the token is passed on"
    for each in members:
        assert each["keyIds"] == ["key-1"]
        assert not {"appendBytes", "readBytes", "appendRate", "unstored"} & set(each)
    shown = get(f"{url}/report", listing)
    assert not {"unstored", "oldestUnstoredS", "appendRate", "readRate"} & set(shown)
    assert shown["journals"] == "1"
    assert {each["appendBytes"] for each in get(f"{url}/members", reading)["members"]} != {"0"}
    assert "unstored" in get(f"{url}/report", reading)
    until(lambda: "appendRate" in get(f"{url}/report", reading))
    assert KEY not in json.dumps([members, shown])

    [_, other] = members
    at = f"{cluster.address}/v1/at/local/{other['id']['suffix']}/cluster/members"
    assert status_of(at)[0] == 401
    assert status_of(at, signed(Capability.READ))[0] == 401, "the other broker refuses it"
    assert status_of(at, listing)[0] == 200


def test_a_drain_needs_apply_without_a_selector_and_names_its_broker(guarded):
    """Brokers of a program do not end by themselves; they only say so once all else is right."""
    cluster, _ = guarded
    url, apply = f"{cluster.address}/v1/cluster/drain", signed(Capability.APPLY)
    members = get(f"{cluster.address}/v1/cluster/members", signed(BOTH))["members"]
    for token in (None, signed(BOTH), signed(Capability.APPLY, topic="rides")):
        assert refused(url, {}, token)[0] == 401
        for each in members:
            assert refused(url, {"id": each["id"]}, token)[0] == 401
    assert status_of(url, apply)[0] == 501, "a GET changes nothing"
    for each in members:
        code, text = refused(url, {"id": each["id"]}, apply)
        assert code == 400
        assert f"{each['id']['suffix']} is part of another program" in text
        at = f"{cluster.address}/v1/at/local/{each['id']['suffix']}/cluster/drain"
        assert "is part of another program" in refused(at, {}, apply)[1]
        code, text = refused(url, {"id": each["id"], "startedUs": 1}, apply)
        assert code == 409
        assert "has started again since" in text
    code, text = refused(url, {"id": {"zone": "local", "suffix": "nobody-1"}}, apply)
    assert code == 404
    assert "there is no broker local/nobody-1" in text
    with pytest.raises(CallError) as error:
        call(cluster.address, DRAIN_RPC, clpb.DrainRequest(), apply)
    assert error.value.code == "FAILED_PRECONDITION"


def test_a_broker_of_another_implementation_is_drained_by_a_signal_alone(gazette_cluster):
    cluster = gazette_cluster(1)
    server = Server(host="127.0.0.1")
    endpoint = run(server.start(), TIMEOUT_S)
    try:
        put_broker(cluster, "foreign-1", endpoint)
        url = f"{cluster.address}/v1/cluster/drain"
        body = {"id": {"zone": "local", "suffix": "foreign-1"}}
        text = until(lambda: (said := refused(url, body)[1]) and "SIGTERM" in said and said)
        assert "local/foreign-1 cannot be asked to drain" in text
    finally:
        run(server.stop(0), TIMEOUT_S)


def test_consumers_check_the_token_themselves(guarded):
    cluster, transport = guarded
    Journals(transport=transport).create("rides", partitions=1, replication=1)
    options = {"transport": transport, "etcd": cluster.etcd_endpoint}
    with EmbeddedConsumer(zones, **options, auth_keys=OTHER_KEY) as consumer:
        [member] = by_component(
            get(f"{cluster.address}/v1/cluster/members", signed(BOTH))["members"]
        )["zones"]
        assert member["refusesToken"] is True
        assert member["version"] == ""
        shown = get(f"{cluster.address}/v1/cluster/report", signed(BOTH))
        checks = {each["check"] for each in shown["problems"]}
        assert {"token-refused", "application-silent"} <= checks
        assert status_of(f"{consumer.address}/v1/cluster/members", signed(BOTH))[0] == 401
        with pytest.raises(UnauthenticatedError):
            call(consumer.address, MEMBERS_RPC, clpb.MembersRequest(), signed(BOTH))
        assert (
            status_of(f"{consumer.address}/v1/cluster/members", signed(BOTH, OTHER_KEY))[0] == 200
        )
    with EmbeddedConsumer(zones, **options, auth_keys=f"key-1:{KEY}"):

        def errors():
            shown = get(f"{cluster.address}/v1/cluster/report", signed(BOTH))
            return [each["error"] for each in shown["applications"]]

        until(lambda: errors() == [""])


def put_broker(cluster, suffix, endpoint):
    """Announce a broker in Etcd that this test made up."""
    spec = pb.BrokerSpec(journal_limit=0)
    spec.process_spec.id.zone, spec.process_spec.id.suffix = "local", suffix
    spec.process_spec.endpoint = endpoint

    async def put():
        async with aclosing(await Etcd.connect(cluster.etcd_endpoint)) as etcd:
            key = member_key(BROKERS_ROOT, "local", suffix)
            await etcd.put(key, spec.SerializeToString())

    asyncio.run(put())


def test_a_broker_of_another_implementation_is_listed_with_what_etcd_says(gazette_cluster):
    cluster = gazette_cluster(1)
    server = Server(host="127.0.0.1")
    endpoint = run(server.start(), TIMEOUT_S)
    try:
        put_broker(cluster, "foreign-1", endpoint)

        def foreign():
            members = get(f"{cluster.address}/v1/cluster/members")["members"]
            return [each for each in members if each["id"]["suffix"] == "foreign-1"]

        [found] = until(foreign)
        assert (found["endpoint"], found["version"], found["error"]) == (endpoint, "", "")
        assert "leaseLeftS" not in found
        shown = get(f"{cluster.address}/v1/cluster/report")
        assert "member-unreachable" not in {each["check"] for each in shown["problems"]}
        assert len(shown["versions"]) == 1
    finally:
        run(server.stop(0), TIMEOUT_S)


def test_a_killed_broker_is_listed_as_not_answering(gazette_cluster):
    cluster = gazette_cluster(2, lease_ttl_s=60)
    victim = cluster.broker("broker-1")
    endpoint = victim.address
    until(lambda: len(members_of(cluster)) == 2)  # each broker has its own mirror of Etcd
    victim.kill()
    started = time.monotonic()
    found = {each["endpoint"]: each for each in members_of(cluster)}
    took_s = time.monotonic() - started
    assert took_s < 5, "it has a second"
    assert found[endpoint]["error"]
    assert found[endpoint]["version"] == ""
    assert found[cluster.address]["error"] == ""
    shown = get(f"{cluster.address}/v1/cluster/report")
    [problem] = [each for each in shown["problems"] if each["check"] == "member-unreachable"]
    assert problem["subject"].endswith("broker-1")
    assert shown["problems"][0]["severity"] == "ERROR"


def members_of(cluster):
    return get(f"{cluster.address}/v1/cluster/members")["members"]


def test_applications_are_found_by_their_configured_address(tmp_path):
    """A broker that may not read the keys of consumers in Etcd has the address of one."""
    with EmbeddedCluster(tmp_path / "one", sync_etcd=False) as elsewhere:
        options = {"transport": elsewhere.transport, "etcd": elsewhere.etcd_endpoint}
        with EmbeddedConsumer(zones, **options) as consumer:
            applications = (("zones", consumer.address),)
            with EmbeddedCluster(
                tmp_path / "two", sync_etcd=False, applications=applications
            ) as cluster:
                [member] = by_component(members_of(cluster))["zones"]
                assert member["endpoint"] == consumer.address
                assert member["version"]
                [application] = get(f"{cluster.address}/v1/cluster/report")["applications"]
                assert (application["name"], application["error"]) == ("zones", "")
                assert application["processes"] == 1


def test_an_unknown_call_of_a_consumer_is_unimplemented(gazette_cluster):
    cluster = gazette_cluster(1)
    options = {"transport": cluster.transport, "etcd": cluster.etcd_endpoint}
    with EmbeddedConsumer(zones, **options) as consumer:
        with pytest.raises(CallError) as error:
            call(consumer.address, REPORT_RPC, clpb.ReportRequest())
        assert error.value.code == "UNIMPLEMENTED"
