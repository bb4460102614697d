"""``gazette dev`` and ``gazette serve`` as processes."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from gazette_sdk.cli.program import explain
from gazette_sdk.cluster.etcd_server import SAFE_VERSION
from support.etcd import run
from support.tools import read_until, start_tool

GAZETTE = "gazette_sdk.cli.gazette"
GAZCTL = "gazette_sdk.cli.gazctl"
TIMEOUT_S = 60.0
SPEC = b"""
name: an/example
replication: 1
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 65536, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1m}
"""


def dev(directory, *arguments):
    process = start_tool(GAZETTE, ["dev", *arguments], directory)
    text = read_until(process, b"print(envelope.message)").decode()
    address = re.search(r"running at (http://\S+)", text)
    assert address is not None
    return process, address[1], text


def stop(process, number=signal.SIGTERM):
    process.send_signal(number)
    out, errors = process.communicate(timeout=TIMEOUT_S)
    assert b"Traceback" not in out + errors
    return process.returncode, errors.decode()


def call(address, *arguments, stdin=b""):
    """``gazctl`` as users call it."""
    return subprocess.run(
        [sys.executable, "-m", GAZCTL, *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, "GAZETTE_ADDRESS": address},
        timeout=TIMEOUT_S,
        check=True,
    ).stdout


def put(address, journal, content):
    request = urllib.request.Request(f"{address}/{journal}", data=content, method="PUT")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert answer.status == 204


def test_a_cluster_goes_on_where_it_stopped_also_after_a_kill(tmp_path):
    process, address, text = dev(tmp_path, "--data", "data", "--port", "0")
    assert str(tmp_path / "data") in text
    call(address, "journals", "apply", stdin=SPEC)
    put(address, "an/example", b'{"n": 1}\n')
    assert stop(process, signal.SIGINT)[0] == 0

    process, address, _ = dev(tmp_path, "--data", "data", "--port", "0")
    put(address, "an/example", b'{"n": 2}\n')
    process.kill()
    process.communicate(timeout=TIMEOUT_S)

    process, address, _ = dev(tmp_path, "--data", "data", "--port", "0", "--brokers", "2")
    assert call(address, "journals", "read", "-l", "name=an/example") == b'{"n": 1}\n{"n": 2}\n'
    assert stop(process) == (0, "")


def test_a_journal_can_be_used_over_http_the_moment_it_exists(gazette_cluster):
    cluster = gazette_cluster(1)
    for number in range(10):
        name = f"an/example-{number}"
        cluster.apply(SPEC.decode().replace("an/example", name))
        put(cluster.address, name, b"at once")


def test_what_it_prints_works(tmp_path):
    process, address, text = dev(tmp_path, "--port", "0")
    bin_directory = Path(sys.executable).parent
    environ = {
        **os.environ,
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "GAZETTE_ADDRESS": address,
    }
    shell = text[text.index("gazctl journals create") : text.index("  From Python")]
    shell = "set -e\n" + shell.replace("Append to it and read it:", "")
    found = subprocess.run(
        ["sh", "-c", shell], env=environ, capture_output=True, timeout=TIMEOUT_S, check=True
    )
    created, content = found.stdout.split(b'{"', 1)
    assert b"examples/hello" in created
    assert b"created" in created
    assert b'{"' + content == b'{"hello": "world"}\n' * 2
    python = "\n".join(line[4:] for line in text[text.index("    from gaz") :].splitlines())
    found = subprocess.run(
        [sys.executable, "-c", python],
        env=environ,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert b"'hello': 'world'" in found.stdout
    assert stop(process)[0] == 0


def test_a_port_or_directory_in_use_is_told_of(tmp_path):
    process, address, _ = dev(tmp_path, "--port", "0")
    port = address.rsplit(":", 1)[1]
    for arguments, problem in (
        (["--port", "0"], "use another data directory"),
        (["--data", "other", "--port", port], f"port {port} of localhost is already in use"),
        (["--data", "/dev/null"], "the data directory /dev/null cannot be used"),
        (["--brokers", "0"], "--brokers"),
    ):
        with start_tool(GAZETTE, ["dev", *arguments], tmp_path) as second:
            _, errors = second.communicate(timeout=TIMEOUT_S)
        assert second.returncode == 1
        assert problem in errors.decode()
        assert errors.count(b"\n") == 1
    assert stop(process)[0] == 0


def test_a_signal_during_the_start_ends_it(tmp_path):
    process = start_tool(GAZETTE, ["dev", "--port", "0", "--log.level=info"], tmp_path)
    while not (tmp_path / "gazette-data" / "etcd").exists():
        assert process.poll() is None
    assert stop(process)[0] == 0


# --------------------------------------------------------------------------- serve


def serve(directory, *arguments, environ=None):
    return start_tool(
        GAZETTE, ["serve", "--log.level=info", *arguments], directory, environ, stdin=None
    )


def served_at(process):
    """The endpoint that a broker logs once it serves."""
    found = ""
    while (line := process.stderr.readline().decode()) and "msg=serving" not in line:
        found += line
    endpoint = re.search(r"endpoint=(\S+)", line)
    assert endpoint is not None, found
    return endpoint[1], found


def test_a_broker_is_configured_by_its_environment_and_drains(etcd, tmp_path):
    environ = {
        "ETCD_ADDRESS": etcd.address,
        "ETCD_PREFIX": "/a/cluster",
        "BROKER_ID": "broker-7",
        "BROKER_FILE_ROOT": str(tmp_path),
        "BROKER_SPOOL_DIR": str(tmp_path / "spools"),
        "BROKER_AUTH_KEYS": "c2VjcmV0LWtleQ==,AA==",
    }
    with serve(tmp_path, environ=environ) as process:
        endpoint, logged = served_at(process)
        assert endpoint.startswith("http://localhost:")
        assert "c2VjcmV0" not in logged
        assert "broker configuration" in logged
        listed = call(endpoint, "journals", "list", "-o", "json")
        assert b"broker-7" in listed
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert b"goodbye" in errors


def test_a_named_host_is_advertised_and_all_interfaces_are_bound(etcd, tmp_path):
    arguments = ["--etcd.address", etcd.address, "--broker.host", "h.example"]
    with serve(tmp_path, *arguments, "--broker.spool-dir=s") as process:
        endpoint, _ = served_at(process)
        assert endpoint.startswith("http://h.example:")
        port = endpoint.rsplit(":", 1)[1]
        url = f"http://127.0.0.1:{port}/debug/ready"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0


def test_a_broker_for_other_machines_is_refused_without_a_spool_directory(tmp_path):
    arguments = ["--etcd.address=http://localhost:1", "--broker.host", "h.example"]
    with serve(tmp_path, *arguments) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert b"set --broker.spool-dir to a directory of its own" in errors


def test_the_default_spool_directory_is_private_and_of_this_cluster(etcd, tmp_path):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    arguments = ["--etcd.address", etcd.address, "--broker.id", "broker-7"]
    root = shared / f"gazette-spools-{os.geteuid()}"
    for prefix in ("/one", "/two"):
        environ = {"TMPDIR": str(shared), "ETCD_PREFIX": prefix}
        with serve(tmp_path, *arguments, environ=environ) as process:
            served_at(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
    assert root.stat().st_mode & 0o777 == 0o700
    assert len({lock.parent for lock in root.glob("*/local,broker-7/lock")}) == 2


def test_a_default_spool_directory_that_was_prepared_by_another_is_refused(etcd, tmp_path):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "prepared").mkdir()
    (shared / f"gazette-spools-{os.geteuid()}").symlink_to(shared / "prepared")
    with serve(
        tmp_path, "--etcd.address", etcd.address, environ={"TMPDIR": str(shared)}
    ) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert b"cannot be used for spools: it is no directory" in errors
    assert not list((shared / "prepared").iterdir())


def test_a_broker_that_still_waits_for_etcd_ends_at_the_first_signal(tmp_path):
    with serve(tmp_path, "--etcd.address=http://localhost:1", "--broker.spool-dir=s") as process:
        logged = b""
        while b"connection to Etcd failed" not in logged:
            logged += process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_a_lost_lease_ends_a_broker_with_status_1(etcd, tmp_path):
    arguments = ["--etcd.address", etcd.address, "--broker.spool-dir=s"]
    with serve(tmp_path, *arguments) as process:
        served_at(process)
        revoke_leases(etcd)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert b"level=fatal" in errors
    assert b"is no member of its cluster any more" in errors
    assert b"start it again" in errors
    assert b"Traceback" not in errors


def test_a_paused_broker_does_not_join_again_but_ends_with_status_1(etcd, tmp_path):
    arguments = ["--etcd.address", etcd.address, "--broker.spool-dir=s", "--etcd.lease=1s"]
    with serve(tmp_path, *arguments) as process:
        served_at(process)
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)  # the lease has to run out
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert b"start it again" in errors


def test_an_etcd_that_can_lose_data_is_warned_of(etcd, tmp_path):
    arguments = ["--etcd.address", etcd.address, "--broker.spool-dir=s", "--log.level=info"]
    with serve(tmp_path, *arguments) as process:
        _, log = served_at(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0

    async def version():
        async with etcd.client() as client:
            return client.version

    assert ("upgrade it to 3.5.6" in log) == (run(version()) < SAFE_VERSION)


def revoke_leases(etcd):
    async def revoke():
        async with etcd.client() as client:
            for lease in await client.leases():
                await client.revoke(lease)

    run(revoke())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--broker.file-only"], "set --broker.file-root"),
        (["--broker.file-root=/no/such"], "/no/such"),
        (["--broker.port=http"], "is no port"),
        (["--broker.port=unix://"], "names no socket"),
        (["--broker.auth-keys=?"], "key"),
        (["--broker.auth-keys= "], "--broker.auth-keys: at least one"),
        (["--broker.auth-keys=AQ=="], "--broker.auth-keys: authorization key 1 has 1 bytes"),
        (["--broker.server-ca-file=ca.pem"], "set that, too"),
        (["--etcd.trusted-ca-file=ca.pem"], "write an https:// address"),
        (["--broker.server-cert-file=/no/such"], "/no/such"),
        (["--broker.limit=200000"], "--broker.limit"),
        (["--etcd.lease=0s"], "--etcd.lease"),
        (["--etcd.address=nonsense"], "nonsense"),
    ],
)
def test_what_cannot_work_is_told_of_before_anything_starts(tmp_path, arguments, problem):
    with serve(tmp_path, *arguments, "--broker.spool-dir=s") as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert problem in errors.decode().splitlines()[-1]
    assert b"Traceback" not in errors


# --------------------------------------------------------------------------- tools


def test_help_is_there_at_once():
    took = []
    for _ in range(3):
        begin = processor_s()
        subprocess.run(
            [sys.executable, "-m", GAZCTL, "journals", "list", "--help"],
            check=True,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
        took.append(processor_s() - begin)
    # A third of a second; a machine that is busy with other tests has slower processors.
    assert min(took) < 1.0


def processor_s():
    """Processor time of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_loads_neither_grpc_nor_the_web_server():
    program = (
        "import sys\n"
        "from gazette_sdk.cli.gazctl import GAZCTL\n"
        "assert GAZCTL.main(['journals', 'list', '--help']) == 0\n"
        "heavy = {'grpc', 'aiohttp', 'numpy', 'rich', 'fsspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, timeout=TIMEOUT_S
    )


def test_a_broker_does_not_load_what_only_clients_need():
    program = (
        "import sys\n"
        "import gazette_sdk.cli.serve\n"
        "heavy = {'numpy', 'pyarrow', 'pandas', 'rich', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, timeout=TIMEOUT_S
    )


def test_errors_of_several_lines_are_told_in_one():
    assert explain(ValueError("one\n  two\n")) == "one; two"
    assert explain(ExceptionGroup("several", [ValueError("first"), ValueError("x")])) == "first"
    assert explain(FileNotFoundError(2, "No such file", "x")) == "x: No such file"
