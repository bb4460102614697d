"""``gazette dev`` with several brokers, which are controlled by name."""

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request

import orjson
import pytest

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.local_cluster.cluster import ControlServer, call
from support.tools import read_until, start_tool

GAZETTE = "gazette_sdk.cli.gazette"
TIMEOUT_S = 60.0
SPEC = b"""
name: an/example
replication: 2
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 65536, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1m}
"""


def start_dev(directory, *arguments):
    process = start_tool(
        GAZETTE, ["dev", "--data", "data", "--port", "0", "--lease", "20s", *arguments], directory
    )
    text = read_until(process, b"print(envelope.message)").decode()
    return process, re.search(r"running at (http://\S+)", text)[1], text


def control(directory, *arguments):
    """The exit status of ``gazette dev CONTROL``, the brokers it shows, and its errors."""
    done = subprocess.run(
        [sys.executable, "-m", GAZETTE, "dev", *arguments, "--data", "data", "-o", "json"],
        capture_output=True,
        timeout=TIMEOUT_S,
        cwd=directory,
        check=False,
    )
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, shown, done.stderr.decode()


def put(address, content):
    """Append, again if nothing was appended because the journal had no primary."""
    request = urllib.request.Request(f"{address}/an/example", data=content, method="PUT")
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        head = len(read(address))
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                assert answer.status == 204
        except urllib.error.HTTPError:
            assert time.monotonic() < deadline, "no append is accepted"
            assert len(read(address)) == head
            time.sleep(0.1)
        else:
            return


def read(address):
    url = f"{address}/an/example?offset=0"
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 416:  # nothing has been appended
                return b""
            assert time.monotonic() < deadline, "no read is accepted"
            time.sleep(0.1)


@pytest.mark.slow
def test_brokers_are_processes_that_are_controlled_by_name(tmp_path):
    process, address, text = start_dev(tmp_path, "--brokers", "3", "--zones", "a,b")
    try:
        assert f"gazette dev kill broker-1 --data {tmp_path / 'data'}" in text
        subprocess.run(
            [sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", "apply"],
            input=SPEC,
            env={**os.environ, "GAZETTE_ADDRESS": address},
            timeout=TIMEOUT_S,
            check=True,
        )
        put(address, b"1")
        _, brokers, _ = control(tmp_path, "status")
        assert [(each["name"], each["zone"], each["state"]) for each in brokers] == [
            ("broker-0", "a", "running"),
            ("broker-1", "b", "running"),
            ("broker-2", "a", "running"),
        ]
        assert stat.S_IMODE((tmp_path / "data" / "control.json").stat().st_mode) == 0o600

        status, [killed], _ = control(tmp_path, "kill", "broker-1")
        assert (status, killed["state"], killed["pid"]) == (0, "ended", None)
        with pytest.raises(ProcessLookupError):
            os.kill(brokers[1]["pid"], 0)
        put(address, b"2")
        status, _, errors = control(tmp_path, "kill", "broker-1")
        assert (status, "broker-1 does not run; start it first" in errors) == (1, True)
        _, [started], _ = control(tmp_path, "start", "broker-1")
        assert (started["state"], started["starts"]) == ("running", 2)
        assert started["address"] == killed["address"]

        _, [paused], _ = control(tmp_path, "pause", "broker-2")
        assert paused["state"] == "paused"
        _, [resumed], _ = control(tmp_path, "resume", "broker-2")
        assert resumed["state"] == "running"
        _, [drained], _ = control(tmp_path, "drain", "broker-2")
        assert drained["state"] == "ended"
        put(address, b"3")
        _, _, errors = control(tmp_path, "kill", "broker-7")
        assert "there is no broker 'broker-7'" in errors

        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, errors) == (0, b"")
        status, _, errors = control(tmp_path, "status")
        assert (status, "no cluster of several brokers runs over" in errors) == (1, True)
    finally:
        process.kill()
        process.communicate()

    process, address, _ = start_dev(tmp_path)
    try:
        # It is one broker of the two that the journal wants: the start does not wait for it.
        deadline = time.monotonic() + TIMEOUT_S
        while (found := read(address)) != b"123":
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_brokers_die_with_a_killed_cluster_and_its_data_is_continued(tmp_path):
    process, address, _ = start_dev(tmp_path, "--brokers", "2")
    _, brokers, _ = control(tmp_path, "status")
    subprocess.run(
        [sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", "apply"],
        input=SPEC,
        env={**os.environ, "GAZETTE_ADDRESS": address},
        timeout=TIMEOUT_S,
        check=True,
    )
    put(address, b"kept")
    process.kill()
    process.communicate()
    process, address, _ = start_dev(tmp_path, "--brokers", "2")
    try:
        _, again, _ = control(tmp_path, "status")
        assert not {each["pid"] for each in again} & {each["pid"] for each in brokers}
        assert read(address) == b"kept"
        # A broker that dies by itself is started again.
        os.kill(again[1]["pid"], signal.SIGKILL)
        while (now := control(tmp_path, "status")[1][1])["state"] != "running" or (
            now["pid"] == again[1]["pid"]
        ):
            assert process.poll() is None
        assert now["starts"] == 2
    finally:
        process.kill()
        process.communicate()


def test_controls_are_for_those_who_can_read_the_file(tmp_path):
    async def scenario():
        server = ControlServer(LocalCluster(tmp_path))
        await server.start()
        try:
            [first, *_] = await call(tmp_path, "status")
            assert (first.name, first.state) == ("broker-0", "ended")
            with pytest.raises(GazetteError, match="broker-0 does not run"):
                await call(tmp_path, "kill", ["broker-0"])
            file = tmp_path / "control.json"
            found = orjson.loads(file.read_bytes())
            file.write_bytes(orjson.dumps({**found, "secret": "guessed"}))
            with pytest.raises(GazetteError, match="the secret of the control file"):
                await call(tmp_path, "status")
            reader, writer = await asyncio.open_connection("127.0.0.1", found["port"])
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await reader.read() == b""
            writer.close()
        finally:
            await server.stop()
        with pytest.raises(ConfigurationError, match="no cluster of several brokers"):
            await call(tmp_path, "status")

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
