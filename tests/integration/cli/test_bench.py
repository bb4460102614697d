"""``gazette bench`` on real clusters."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from gazette_sdk.cli.bench import phases, site
from gazette_sdk.cli.bench.phases import Failure, Ready, Tailed, TailJob, tail_journal
from gazette_sdk.cli.bench.report import Schedule
from gazette_sdk.cli.bench.site import Messages
from gazette_sdk.cli.settings import PHASES
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import UnavailableError
from gazette_sdk.message import Publisher, Reader
from gazette_sdk.transport import connect
from gazette_sdk.transport.loop import run
from support.tools import start_tool

GAZETTE = "gazette_sdk.cli.gazette"
TIMEOUT_S = 60.0
SETTING = {
    "version",
    "address",
    "embedded",
    "prefix",
    "journals",
    "replication",
    "store",
    "message_bytes",
    "mode",
}
THROUGHPUT = {"messages", "bytes", "seconds", "messages_per_s", "megabytes_per_s"}


@pytest.fixture
def bench(gazette, cluster):
    """``gazette bench`` of the module's cluster."""
    gazette.environ["GAZETTE_ADDRESS"] = cluster.address
    return lambda *arguments: gazette("bench", *arguments)


@pytest.fixture
def left(gazctl, cluster):
    """Journals of benchmarks which are there."""

    def names():
        arguments = ["journals", "list", "-l", "prefix=bench/", "-o", "json"]
        listed = gazctl.ok(*arguments, "--broker.address", cluster.address).text
        return [journal["spec"]["name"] for journal in json.loads(listed)["journals"]]

    return names


def wait_until(holds):
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline


# ----------------------------------------------------------------------- whole runs


def test_a_run_on_a_cluster_of_its_own_measures_all_phases(tmp_path):
    arguments = ["--embedded", "--messages=3000", "--size=150", "--journals=3", "--json"]
    arguments += ["--rate=500", "--duration=1s"]
    environ = {"TMPDIR": str(tmp_path)}
    process = start_tool(GAZETTE, ["bench", *arguments], tmp_path, environ)
    out, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors.decode()) == (0, "")
    assert out.count(b"\n") == 1
    report = json.loads(out)
    assert set(report) == SETTING | set(PHASES) | {"verification"}
    assert report["embedded"] is True
    assert (report["journals"], report["message_bytes"]) == (3, 150)
    for phase in PHASES:
        assert set(report[phase]) >= THROUGHPUT
        assert report[phase]["messages_per_s"] > 0
        assert report[phase]["bytes"] > report[phase]["messages"] * 150
    assert report["publish"]["messages"] == 3000
    assert report["tail"]["messages"] == 500
    assert report["tail"]["rate"] == 500
    latency = report["tail"]["latency_ms"]
    assert list(latency) == ["p50", "p90", "p99", "p99_9", "max", "mean"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    # A message to each journal shows that the tail is there.
    assert report["read"]["messages"] == 3000 + 500 + 3
    verification = report["verification"]
    assert verification["ok"] is True
    assert verification["messages"] == 3000 + 2 * (500 + 3)
    assert verification["lost"] == {"count": 0, "named": []}
    assert len(set(verification["chains"].values())) == 3
    assert list(tmp_path.iterdir()) == [], "its directory is gone"


def test_a_run_on_an_existing_cluster_removes_its_journals(bench, left):
    outcome = bench("--messages=2000", "--rate=1000", "--duration=100ms")
    assert (outcome.status, outcome.stderr) == (0, "")
    lines = outcome.text.splitlines()
    rows = [line.split()[0] for line in lines if line and line[0].islower()]
    assert rows == ["publish", "tail", "catch-up"]
    assert "P99.9 MS" in outcome.text
    assert lines[-1] == (
        "Verified 2,208 messages: none was lost, duplicated, reordered or changed."
    )
    assert left() == []


def test_journals_are_kept_when_asked_for_and_not_taken_twice(bench, left, gazctl, cluster):
    arguments = ["--prefix=bench/kept/", "--journals=2", "--phases=publish", "--messages=10"]
    assert bench(*arguments, "--keep").status == 0
    assert left() == ["bench/kept/part-000", "bench/kept/part-001"]
    outcome = bench(*arguments)
    assert outcome.status == 1
    assert outcome.stderr == (
        "gazette: there are journals below bench/kept/ already, such as bench/kept/part-000: "
        "remove them, or name another --prefix\n"
    )
    assert len(left()) == 2
    specs = {
        "name": "bench/kept/",
        "delete": True,
        "children": [{"name": name, "revision": -1} for name in left()],
    }
    address = ["--broker.address", cluster.address]
    gazctl.ok("journals", "apply", *address, stdin=yaml.safe_dump(specs).encode())


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_lists_are_published_and_verified_like_messages(bench, batch):
    outcome = bench(
        "--mode=publish_batch",
        f"--batch={batch}",
        "--messages=1001",
        "--phases=publish,read",
        "--json",
    )
    assert outcome.status == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert (report["mode"], report["batch"]) == ("publish_batch", batch)
    assert report["verification"]["messages"] == 1001
    assert "tail" not in report


def test_a_tail_alone_is_verified_too(bench):
    outcome = bench("--phases=tail", "--rate=300", "--duration=300ms", "--journals=2", "--json")
    assert outcome.status == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["verification"]["messages"] == 92
    assert report["verification"]["chains"] == {}
    assert report["tail"]["messages"] == 90


# --------------------------------------------------------------- the process that tails


@pytest.fixture
def tailing(cluster, gazctl):
    """A tail of one journal in a thread, and how to publish to it."""
    name = f"tails/{uuid.uuid4().hex[:8]}/part-000"
    fragment = {"length": 65536, "compression_codec": "NONE", "refresh_interval": "1m"}
    spec = {"name": name, "replication": 1, "fragment": {**fragment, "stores": ["file:///"]}}
    spec["labels"] = [{"name": "content-type", "value": "application/x-ndjson"}]
    address = ["--broker.address", cluster.address]
    gazctl.ok("journals", "apply", *address, stdin=yaml.safe_dump(spec).encode())
    job = TailJob(
        cluster.address, {}, f"name={name}", (name,), {name: 0}, size=100, begin=0, probes=1
    )
    here, there = multiprocessing.Pipe()

    def work():
        with suppress(BrokenPipeError):  # as its process does
            tail_journal(job, there)

    thread = threading.Thread(target=work)
    thread.start()
    transport = connect(cluster.address)

    def publish(*numbers):
        with Publisher(lambda _: name, transport=transport) as publisher:
            for number in numbers:
                publisher.publish(Messages(100).message(number))

    yield here, publish
    here.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    run(transport.aclose())


def said(pipe):
    assert pipe.poll(TIMEOUT_S)
    return pipe.recv()


def test_a_tail_that_is_told_to_stop_says_what_is_missing(tailing):
    pipe, publish = tailing
    publish(0)
    assert said(pipe) == Ready()
    pipe.send(Schedule(time.monotonic_ns(), 1000.0, 4))
    publish(1, 2, 4)
    pipe.send("stop")
    tailed = said(pipe)
    assert isinstance(tailed, Tailed)
    # It may have been stopped before all were there.
    assert tailed.findings.lost.count == 5 - tailed.findings.count
    assert tailed.latency.count == tailed.findings.count - 1


def test_a_tail_ends_when_nobody_is_there_any_more(tailing):
    pipe, publish = tailing
    publish(0)
    assert said(pipe) == Ready()


def test_a_tail_that_never_began_says_so(tailing):
    pipe, _ = tailing
    pipe.send("stop")
    assert isinstance(said(pipe), Ready | Failure)  # whichever comes first


def test_latencies_count_from_when_messages_were_due(tailing):
    pipe, publish = tailing
    publish(0)
    assert said(pipe) == Ready()
    pipe.send(Schedule(time.monotonic_ns() - 5_000_000_000, 1000.0, 2))
    publish(1, 2)
    tailed = said(pipe)
    assert tailed.findings.is_flawless
    assert all(value > 4_900_000_000 for value in tailed.latency.quantiles([0.5, 1.0]))


def test_a_tail_that_sees_wrong_messages_fails_the_run(bench, monkeypatch):
    before = Messages.message
    monkeypatch.setattr(Messages, "message", lambda own, n: before(own, 14 if n == 18 else n))
    arguments = ["--phases=tail", "--rate=300", "--duration=100ms", "--journals=4"]
    outcome = bench(*arguments)
    assert outcome.status == 1
    assert "1 lost (bench/" in outcome.stderr
    assert "part-002: message 18)" in outcome.stderr
    assert "1 duplicated" in outcome.stderr


# ---------------------------------------------------------------- what can go wrong


def drop(envelopes):
    return envelopes[1:]


def repeat(envelopes):
    return [envelopes[0], *envelopes]


def swap(envelopes):
    return [envelopes[1], envelopes[0], *envelopes[2:]]


def alter(envelopes):
    envelopes[0].message["text"] = "something else"
    return envelopes


@pytest.mark.parametrize(
    ("change", "kind"),
    [(drop, "lost"), (repeat, "duplicated"), (swap, "reordered"), (alter, "changed")],
)
def test_what_is_not_as_acknowledged_is_named_and_status_1(bench, monkeypatch, change, kind):
    class Wrong(Reader):
        """Delivers something else than what stands in the journals."""

        def __iter__(self):
            return iter(change(list(super().__iter__())))

    monkeypatch.setattr(phases, "Reader", Wrong)
    outcome = bench("--phases=publish,read", "--messages=50", "--journals=1", "--json")
    assert outcome.status == 1
    assert "what was read is not what was acknowledged: 1 " + kind in outcome.stderr
    assert "part-000: message 0" in outcome.stderr
    found = json.loads(outcome.stdout)["verification"]
    assert found["ok"] is False
    assert found[kind]["count"] == 1
    assert "message 0" in found[kind]["named"][0]


def test_bytes_that_were_changed_in_the_journal_are_found(bench, monkeypatch, cluster, gazctl):
    before = phases.catch_up

    def after_a_foreign_append(settings, place, ledger, display):
        foreign = b'{"UUID":"00000000-0000-0000-0000-000000000000","n":0,"text":"mine"}\n'
        arguments = ["-l", f"name={place.journals[0]}", "--broker.address", cluster.address]
        gazctl.ok("journals", "append", *arguments, stdin=foreign)
        return before(settings, place, ledger, display)

    monkeypatch.setattr("gazette_sdk.cli.bench.phases.catch_up", after_a_foreign_append)
    outcome = bench("--phases=publish,read", "--messages=50", "--journals=1")
    assert outcome.status == 1
    assert "1 duplicated" in outcome.stderr
    assert "1 changed" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--address=http://localhost:1"], "check that a broker runs at http://localhost:1"),
        (["--address=nonsense"], "'nonsense' is not the address of a broker"),
        (["--address=file:///tmp"], "'file:///tmp' is not the address of a broker"),
        (["--phases=read"], "`read` needs `publish` or `tail`"),
        (["--phases=publish,write"], "'write' is not a phase"),
        (["--prefix=bench"], "--prefix: 'bench' must end in /"),
        (["--prefix=no good/"], "--prefix and --store make no valid journal"),
        (["--store=ftp://somewhere/"], "ftp"),
        (["--store=s3://no-such-bucket/"], "brokers cannot use s3://no-such-bucket/"),
        (["--rate=0"], "--rate"),
        (["--duration=0s"], "--duration"),
        (["--size=10"], "--size"),
        (["--messages=0"], "--messages"),
        (["--mode=quickly"], "publish, publish_batch"),
        (["--auth-keys=???"], "key"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(bench, left, monkeypatch, arguments, problem):
    monkeypatch.setattr(site, "CONNECT_TIMEOUT_S", 0.5)
    outcome = bench(*arguments)
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert problem in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert left() == []


def test_more_replicas_than_brokers_are_told_of_and_nothing_is_left(bench, left, monkeypatch):
    monkeypatch.setattr(site, "SERVED_TIMEOUT_S", 0.5)
    outcome = bench("--replication=3")
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert "the cluster does not serve bench/" in outcome.stderr
    assert "--replication=3 takes as many brokers" in outcome.stderr
    assert left() == []


def test_a_broker_that_goes_away_ends_the_run(gazette, monkeypatch, tmp_path):
    monkeypatch.setattr("gazette_sdk.cli.bench.phases.ACKNOWLEDGED_TIMEOUT_S", 1.0)
    monkeypatch.setattr(site, "DELETION_TIMEOUT_S", 1.0)
    with EmbeddedCluster(tmp_path / "data", sync_etcd=False) as running:
        address = running.address
        before = phases.Messages.message

        def stop_then(messages, number):
            if number == 2000:
                running.stop()
            return before(messages, number)

        monkeypatch.setattr(phases.Messages, "message", stop_then)
        outcome = gazette("bench", "--address", address, "--messages=1000000")
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert "Traceback" not in outcome.stderr
    assert "are left behind" in outcome.stderr
    assert "no acknowledgement within 1 s" in outcome.stderr.splitlines()[-1]


def test_journals_that_cannot_be_removed_are_told_of_behind_the_figures(
    bench, monkeypatch, gazctl, cluster
):
    before = site.apply_journals

    async def refuse_deletions(transport, request):
        if request.changes[0].delete:
            raise UnavailableError("out for lunch")
        return await before(transport, request)

    monkeypatch.setattr(site, "apply_journals", refuse_deletions)
    prefix = "bench/left/"
    outcome = bench("--phases=publish", "--messages=10", "--journals=1", f"--prefix={prefix}")
    assert outcome.status == 1
    assert "publish" in outcome.text
    assert outcome.stderr == (
        f"gazette: the journals below {prefix} are left behind, as removing them failed: out for "
        "lunch; remove them with `gazctl journals apply`\n"
    )
    specs = {"name": f"{prefix}part-000", "delete": True, "revision": -1}
    address = ["--broker.address", cluster.address]
    gazctl.ok("journals", "apply", *address, stdin=yaml.safe_dump(specs).encode())


# ------------------------------------------------------------------------ interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["publish", "tail"])
def test_an_interrupted_run_removes_its_journals(left, cluster, tmp_path, phase, number):
    arguments = ["--phases", phase, "--messages=100000000", "--duration=1h"]
    environ = {"GAZETTE_ADDRESS": cluster.address, "TMPDIR": str(tmp_path)}
    with start_tool(GAZETTE, ["bench", *arguments], tmp_path, environ) as process:
        wait_until(left)
        process.send_signal(number)
        out, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in errors
    assert left() == []


def test_an_interrupted_run_stops_its_own_cluster(tmp_path):
    arguments = ["--embedded", "--phases=tail", "--duration=1h"]
    with start_tool(
        GAZETTE, ["bench", *arguments], tmp_path, {"TMPDIR": str(tmp_path)}, process_group=0
    ) as process:
        wait_until(lambda: list(tmp_path.glob("gazette-bench-*/fragments")))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_where_somebody_looks_and_json_stays_clean(cluster, tmp_path):
    leader, follower = pty.openpty()
    arguments = ["bench", "--phases=publish,read", "--messages=20000", "--json"]
    environ = {**os.environ, "GAZETTE_ADDRESS": cluster.address, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", GAZETTE, *arguments],
        cwd=Path(tmp_path),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=follower,
    ) as process:
        os.close(follower)
        shown = b""
        while select.select([leader], [], [], TIMEOUT_S)[0]:
            try:
                shown += os.read(leader, 1 << 16)
            except OSError:  # the terminal's other side is closed
                break
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
        assert process.wait(TIMEOUT_S) == 0
    os.close(leader)
    assert report["verification"]["ok"] is True
    assert "Publishing" in shown.decode()
    assert "Reading" in shown.decode()
