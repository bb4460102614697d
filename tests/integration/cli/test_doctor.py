"""`gazette doctor` against real clusters: healthy ones, and those with planted faults."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import ssl
import tarfile
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.cli.doctor import command, gather
from gazette_sdk.cli.doctor.facts import Facts, Source
from gazette_sdk.cli.doctor.gather import Place, spools_of
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.items import item_key
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.server.settings import EtcdSettings
from gazette_sdk.testing import run_shards
from integration.cli.test_processes import serve, served_at
from integration.failures.disks import small_disk
from support.certificates import Authority as CertificateAuthority
from support.zone_counts import Ride, zones

TIMEOUT_S = 90
OF_LOAD = {"etcd-latency", "lease-short", "loop-lag"}
"""Findings that a machine with too much to do has by right."""

SECRET = base64.b64encode(b"the secret of a cluster, 32 byte").decode()
PASSWORD = "hidden-in-a-url"
TO_RIDES = mapping.modulo("topic=rides", key=attrgetter("zone"))
SPECS = f"""
name: planted/
replication: 1
fragment: {{length: 1048576, compression_codec: NONE, stores: ["file:///"], refresh_interval: 10s}}
children:
  - name: planted/log
    labels: [{{name: content-type, value: application/x-gazette-recoverylog}}]
    fragment: {{retention: 1h}}
  - name: planted/refused
    labels: [{{name: content-type, value: application/x-ndjson}}]
    fragment: {{stores: ["s3://b/?endpoint=http://user:{PASSWORD}@127.0.0.1:9&region=here"]}}
  - name: planted/without-type
"""


@pytest.fixture
def doctor(gazette):
    """Runs the command against a cluster; returns its findings by check, and the outcome."""

    def run(cluster, *arguments):
        outcome = gazette(
            *("doctor", "--json", "--broker.address", cluster.address),
            *("--etcd.address", cluster.etcd_endpoint),
            *arguments,
        )
        shown = json.loads(outcome.text)
        wrong = ("note", "warning", "error")
        return {c["check"]: c for c in shown["checks"] if c["status"] in wrong}, outcome

    return run


def until(condition):
    ends_at = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < ends_at
        time.sleep(0.2)
    return found


def wait_for_brokers(gazctl, cluster, count):
    """Wait until all brokers are in Etcd: journals get as many replicas as there are brokers."""
    gazctl.environ["GAZETTE_ADDRESS"] = cluster.address

    def brokers():
        return json.loads(gazctl.ok("brokers", "list", "-o", "json").text)["brokers"]

    until(lambda: len(brokers()) == count)


def etcd_revision(cluster):
    async def read():
        etcd = await Etcd.connect(cluster.etcd_endpoint)
        try:
            return (await etcd.range(b"x")).header.revision
        finally:
            await etcd.aclose()

    return asyncio.run(read())


def settled_revision(cluster):
    """The revision of Etcd, once nothing is written any more: the journals have their brokers."""
    seen = []

    def settled():
        seen.append(etcd_revision(cluster))
        return len(seen) >= 10 and len(set(seen[-10:])) == 1 and seen[-1]

    return until(settled)


def test_a_healthy_cluster_has_no_finding_and_faults_are_found(gazctl, doctor, gazette_cluster):
    cluster = gazette_cluster(3, zones=3, etcd_members=3)
    wait_for_brokers(gazctl, cluster, 3)
    gazctl.ok("journals", "create", "rides", "--partitions", "2")
    with run_shards(zones, processes=2, cluster=cluster) as running:
        running.wait_caught_up(TIMEOUT_S)
        # Replicas and standbys may be on their way; the fault of this version of Etcd is a note.
        ends_at = time.monotonic() + TIMEOUT_S / 2
        while (found := doctor(cluster)[0]).keys() - {"etcd-versions", "retention", *OF_LOAD}:
            assert time.monotonic() < ends_at, found

        (cluster.data / "specs.yaml").write_text(SPECS)
        gazctl.ok("journals", "apply", "--specs", str(cluster.data / "specs.yaml"))
        with Publisher(mapping=TO_RIDES) as publisher:
            publisher.publish(Ride("bad", 1_700_000_000.0))
        spools = cluster.data / "spools" / "broker-0"
        planted = next((spools / "journals").iterdir())
        (planted / "0-1.content.damaged").write_bytes(b"x")
        (planted / "0-1.content.superseded").write_bytes(b"x")
        old = planted / "00-99.content"
        old.write_bytes(b"x")
        os.utime(old, (0, time.time() - 3 * 86400))
        expected = {
            *("content-type", "one-replica", "log-retention", "store-unhealthy", "shards-failed"),
            *("spool-damaged", "spool-superseded", "spool-old", "etcd-quorum"),
        }
        cluster.kill_etcd(2)

        def diagnosed():
            findings, outcome = doctor(cluster, "--broker.spool-dir", str(spools))
            return expected <= findings.keys() and (findings, outcome)

        findings, outcome = until(diagnosed)
        assert outcome.status == 2
        assert "errors" in outcome.stderr
        evidence = {name: " ".join(each["evidence"]) for name, each in findings.items()}
        assert "planted/without-type" in evidence["content-type"]
        assert "planted/log" in evidence["log-retention"]
        assert "this zone is refused" in evidence["shards-failed"]
        assert "s3://b/" in evidence["store-unhealthy"]
        assert PASSWORD not in outcome.text
        assert "00-99.content" in evidence["spool-old"]


def test_a_broker_that_is_killed_is_found_before_its_lease_ends_and_after(
    gazctl, doctor, gazette_cluster
):
    cluster = gazette_cluster(2, zones=2, lease_ttl_s=20)
    wait_for_brokers(gazctl, cluster, 2)
    gazctl.ok("journals", "create", "rides", "--partitions", "2", "--replication", "2")
    cluster.brokers[1].kill()
    findings, outcome = doctor(cluster)
    assert outcome.status == 2
    assert "does not answer" in findings["member-unreachable"]["evidence"][0]
    findings = until(lambda: (each := doctor(cluster)[0]).get("journals-short") and each)
    assert "rides/part-00" in findings["journals-short"]["evidence"][0]


def test_nothing_is_written_and_no_secret_is_in_the_output_or_the_bundle(
    gazctl, gazette, gazette_cluster, monkeypatch
):
    cluster = gazette_cluster(1, zones=1, arguments=("--broker.auth-keys", f"2026:{SECRET}"))
    monkeypatch.setattr(command, "PROFILE_S", 1)
    monkeypatch.setitem(command._PAGES, "profile", "/debug/pprof/profile?seconds=1")
    specs = cluster.data / "specs.yaml"
    specs.write_text(SPECS)
    gazctl.environ |= {"GAZETTE_ADDRESS": cluster.address, "BROKER_AUTH_KEYS": SECRET}
    gazctl.ok("journals", "apply", "--specs", str(specs))
    token = Authority(f"2026:{SECRET}").sign(
        Capability.LIST | Capability.READ, parse_selector(""), 600, time.time()
    )
    narrow = Authority(SECRET).sign(
        Capability.LIST, parse_selector("topic=orders"), 600, time.time()
    )
    bundle = gazette.directory / "fault.tar.gz"
    revision = settled_revision(cluster)
    address = ("--broker.address", cluster.address, "--etcd.address", cluster.etcd_endpoint)
    texts = []
    for arguments, is_complete in (
        (["--broker.auth-keys", f"2026:{SECRET}", "--bundle", str(bundle)], True),
        (["--broker.auth-token", token, "--json"], True),
        (["--broker.auth-token", narrow], False),
        ([], False),
    ):
        outcome = gazette("doctor", *address, *arguments)
        assert outcome.status == 2 if is_complete else outcome.status in (0, 1, 2)
        texts.append(outcome.text + outcome.stderr)
        assert ("log-retention" in outcome.text) or not is_complete
        if not is_complete:
            assert "UNKNOWN" in outcome.text
            assert "not checked" in outcome.text
    assert etcd_revision(cluster) == revision
    assert bundle.stat().st_mode & 0o777 == 0o600
    assert bundle.stat().st_size < command.BUNDLE_BYTES_MAX
    with tarfile.open(bundle) as archive:
        content = {each.name: archive.extractfile(each).read().decode() for each in archive}
    names = {name.removeprefix("gazette-doctor/").partition("/")[0] for name in content}
    assert names >= {
        *("doctor.json", "report.json", "members.json", "journals.json", "shards.json"),
        *("metrics", "events", "stacks", "requests", "profile"),
    }
    assert any("gazette_" in text for name, text in content.items() if "metrics" in name)
    assert any("Thread" in text or "thread" in text for n, text in content.items() if "stacks" in n)
    assert "planted/without-type" in content["gazette-doctor/journals.json"]
    for text in (*texts, *content.values()):
        assert not any(secret in text for secret in (SECRET, PASSWORD, token, narrow))


def test_without_any_answer_everything_is_unknown_and_the_status_is_that_of_errors(gazette):
    outcome = gazette(
        *("doctor", "--broker.address", "http://127.0.0.1:1"),
        *("--etcd.address", "http://127.0.0.1:1"),
    )
    assert outcome.status == 2
    assert "nothing of the cluster can be asked" in outcome.stderr
    assert "cannot connect to http://127.0.0.1:1" in outcome.text


def test_spools_are_looked_at_where_there_is_neither_broker_nor_etcd(gazette):
    directory = gazette.directory / "spools"
    (directory / "journals").mkdir(parents=True)
    (directory / "journals" / "x.damaged").write_bytes(b"")
    outcome = gazette(
        *("doctor", "--broker.address", "http://127.0.0.1:1"),
        *("--etcd.address", "http://127.0.0.1:1", "--broker.spool-dir", str(directory)),
    )
    assert "journals/x.damaged is damaged" in outcome.text
    missing = gazette("doctor", "--broker.spool-dir", "/nowhere", "--etcd.address", "unix:///no")
    assert "/nowhere: No such file or directory" in missing.text


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no memory disk")
def test_a_memory_disk_is_known_as_one(tmp_path):
    assert spools_of(Path("/dev/shm"), time.time()).filesystem == "tmpfs"
    assert spools_of(tmp_path, time.time()).oldest_s is None


# ---------------------------------------------------------------- sources


@contextmanager
def served(certificate=None, body=b""):
    """A server that answers each GET with a body; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.cert_file, certificate.key_file)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("days", "is_over"), [(-0.5, True), (3, False)])
def test_ends_of_certificates_are_read_also_of_expired_ones(tmp_path, days, is_over):
    certificate = CertificateAuthority(tmp_path).issue(days=days)
    facts = Facts(now=time.time())
    with served(certificate) as port:
        place = Place(
            address=f"https://127.0.0.1:{port}", cert_files=[str(certificate.cert_file), "missing"]
        )
        asyncio.run(gather._certificates(place, facts))
    assert [each.place for each in facts.certificates] == [
        f"https://127.0.0.1:{port}",
        str(certificate.cert_file),
    ]
    for each in facts.certificates:
        assert (each.ends_at < facts.now) == is_over
        assert abs(each.ends_at - facts.now - days * 86400) < 3600


def test_journals_of_another_cluster_in_the_same_store_are_found(etcd):
    spec = pb.JournalSpec(name="a/journal", fragment={"stores": ["s3://both/"]})
    other = pb.JournalSpec(name="b/journal", fragment={"stores": ["s3://both/"]})

    async def scenario():
        async with etcd.client() as client:
            await client.put(item_key("/gazette/one", "a/journal"), spec.SerializeToString())
            await client.put(item_key("/gazette/two", "b/journal"), other.SerializeToString())
            await client.put(item_key("/gazette/consumers/app", "a/journal"), b"\x0a\x01")
            assert await gather._shared_stores(client, "/gazette/one") == {}
            await client.put(item_key("/gazette/two", "a/journal"), spec.SerializeToString())
            found = await gather._shared_stores(client, "/gazette/one")
            assert found == {"s3://both/": "/gazette/two"}

    asyncio.run(scenario())


def test_members_of_etcd_that_do_not_answer_are_named(etcd):
    async def scenario():
        async with etcd.client() as client:
            (status,) = await client.statuses()
            assert status.error == ""
            assert status.version.startswith("3.")
            assert status.leader == status.member_id != 0
            assert status.size_bytes > 0
            assert status.size_in_use_bytes > 0
            gone = await client._status("http://127.0.0.1:1", 2.0)
            assert gone.error
            assert (await client._status("nonsense", 2.0)).error

    asyncio.run(scenario())


def test_quotas_are_those_of_the_metrics_of_etcd(etcd):
    facts = Facts(now=time.time())
    place = Place(address="http://127.0.0.1:1", etcd=EtcdSettings(address=etcd.server.endpoint))

    async def scenario():
        await gather._etcd(place, facts)
        await gather._quotas(place, facts)

    asyncio.run(scenario())
    (quota,) = facts.quotas
    assert 0 < quota.in_use_bytes <= quota.size_bytes < quota.quota_bytes


def test_sources_that_wait_for_others_say_why_they_are_missing():
    facts = Facts(now=time.time(), missing=dict.fromkeys(Source, "no"))
    place = Place(address="http://127.0.0.1:1")
    for source, text in {
        Source.METRICS: "the members are not known",
        Source.SHARDS: "name them by --consumer",
        Source.QUOTA: "Etcd does not answer",
        Source.LIFECYCLE: "the journals are not known",
    }.items():
        with pytest.raises(gather.NotThereError, match=text):
            asyncio.run(gather._NEXT[source](place, facts))


def test_samples_are_read_from_a_page_of_metrics():
    text = '# HELP x\nprocess_open_fds 12\nother{a="b"} 1e3\nnone NaN\nbad x\n'
    found = gather.samples_of(text)
    assert (found["process_open_fds"], found["other"]) == (12, 1000)
    assert "bad" not in found


def test_a_bundle_leaves_out_what_makes_it_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "BUNDLE_BYTES_MAX", command._MARGIN_BYTES + 1000)
    path = tmp_path / "bundle"
    noise = base64.b64encode(os.urandom(300_000)).decode()
    command._archive(path, {"first": noise, "second": noise, "third": "x"})
    with tarfile.open(path) as archive:
        names = [each.name for each in archive]
        left_out = archive.extractfile("gazette-doctor/left-out.txt").read().decode()
    assert names == ["gazette-doctor/first", "gazette-doctor/left-out.txt"]
    assert left_out.split() == ["second", "third"]
    monkeypatch.setattr(command, "TEXT_CHARACTERS_MAX", 10)
    command._archive(path, {"long": "x" * 11})
    with tarfile.open(path) as archive:
        assert b"the rest is left out" in archive.extractfile("gazette-doctor/long").read()


def test_a_bundle_that_cannot_be_written_says_so(gazette):
    outcome = gazette(
        *("doctor", "--broker.address", "http://127.0.0.1:1", "--bundle", "/nowhere/x"),
        *("--etcd.address", "http://127.0.0.1:1"),
    )
    assert "--bundle: /nowhere/x cannot be written: No such file" in outcome.stderr


def test_a_process_that_was_stopped_for_a_moment_is_found(gazctl, doctor, gazette_cluster):
    cluster = gazette_cluster(2, zones=2, lease_ttl_s=60)
    wait_for_brokers(gazctl, cluster, 2)
    stopped = cluster.brokers[1]
    stopped.pause()
    findings = until(lambda: (each := doctor(cluster)[0]).get("member-unreachable") and each)
    assert f"/{stopped.name}" in " ".join(findings["member-unreachable"]["evidence"])
    stopped.resume()
    findings = until(lambda: (each := doctor(cluster)[0]).get("loop-lag") and each)
    assert f"/{stopped.name}" in " ".join(findings["loop-lag"]["evidence"])
    assert "member-unreachable" not in findings


def test_keys_that_differ_are_found_and_a_full_disk(etcd, gazette, tmp_path):
    """The second broker has other keys, and its spools are on a disk of 8 MiB that is full."""
    other = base64.b64encode(b"another secret of it, 32 bytes..").decode()
    keys = [tmp_path / "keys-1", tmp_path / "keys-2"]
    keys[0].write_text(f"first:{SECRET}\n")
    keys[1].write_text(f"second:{other}\n")
    shared = ("--etcd.address", etcd.address, "--broker.zone=z")

    def broker(number, spools):
        name, path = f"broker-{number}", str(keys[number - 1])
        options = (*shared, "--broker.id", name, "--broker.auth-keys-file", path)
        return serve(tmp_path, *options, "--broker.spool-dir", str(spools))

    with (
        small_disk(tmp_path / "small") as disk,
        broker(1, "spools-1") as first,
        broker(2, disk.path / "spools") as second,
    ):
        address = served_at(first)[0]
        served_at(second)

        def findings():
            outcome = gazette(
                *("doctor", "--json", "--broker.address", address, "--etcd.address", etcd.address),
                *("--broker.auth-keys", SECRET),
            )
            assert SECRET not in outcome.text
            assert other not in outcome.text
            checks = json.loads(outcome.text)["checks"]
            return {
                each["check"]: each["evidence"][0]
                for each in checks
                if each["status"] in {"warning", "error"}
            }

        def give_keys(text):
            keys[1].write_text(text)
            second.send_signal(signal.SIGHUP)

        try:
            found = until(lambda: (each := findings()).get("token-refused") and each)
            assert "z/broker-2" in found["token-refused"]
            give_keys(f"second:{other} first:{SECRET}\n")
            found = until(lambda: (each := findings()).get("keys-differ") and each)
            assert "second" in found["keys-differ"]
            assert "token-refused" not in found
            if disk.is_mounted:
                disk.fill()
                assert "z/broker-2 has 0 B free" in findings()["disks"]
                disk.make_room()
            give_keys(f"first:{SECRET}\n")
            until(lambda: "keys-differ" not in findings())
        finally:
            for process in (first, second):
                process.kill()
                process.wait(TIMEOUT_S)


def test_leases_that_are_not_renewed_are_found_before_they_end(gazctl, doctor, gazette_cluster):
    cluster = gazette_cluster(2, zones=2, lease_ttl_s=40)
    wait_for_brokers(gazctl, cluster, 2)
    place = SimpleNamespace(address=cluster.address, etcd_endpoint=cluster.etcd_endpoint)
    cluster.kill_etcd(0)
    findings = until(lambda: (each := doctor(place)[0]).get("lease-short") and each)
    assert "/broker-" in " ".join(findings["lease-short"]["evidence"])
