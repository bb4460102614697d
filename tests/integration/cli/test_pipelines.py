"""Lines of a shell, as messages that committed readers see once."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest
import yaml

from gazette_sdk.message import Reader
from gazette_sdk.transport import connect
from gazette_sdk.transport.loop import run

TIMEOUT_S = 60.0
COUNT = 500
STAMP = r"""gazctl attach-uuids --template=$'{{.UUID}}\n{"UUID":"{{.UUID}}",{{.Line}}}\n'"""
APPEND = "gazctl journals append -l topic=$TOPIC --framing=lines --mapping=modulo"


@pytest.fixture
def topic(gazctl, cluster):
    """A topic with four journals of JSON lines."""
    name = f"t{uuid.uuid4().hex[:8]}"
    fragment = {"length": 65536, "compression_codec": "SNAPPY", "refresh_interval": "1m"}
    labels = {"topic": name, "content-type": "application/x-ndjson"}
    specs = {
        "replication": 1,
        "labels": [{"name": key, "value": labels[key]} for key in sorted(labels)],
        "fragment": {**fragment, "stores": ["file:///"]},
        "children": [{"name": f"{name}/part-{index}"} for index in range(4)],
    }
    address = ["--broker.address", cluster.address]
    gazctl.ok("journals", "apply", *address, stdin=yaml.safe_dump(specs).encode())
    return name


@pytest.fixture
def shell(cluster, topic, tmp_path):
    """Runs a script in a shell which finds the tools."""

    def call(script):
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "GAZETTE_ADDRESS": cluster.address,
                "TOPIC": topic,
                "HOME": str(tmp_path),
            },
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    return call


def read(cluster, topic):
    """What a committed reader delivers: numbers, and the journals they stand in."""
    transport = connect(cluster.address)
    try:
        with Reader(dict, f"topic={topic}", transport=transport) as reader:
            return [(envelope.message["n"], envelope.journal) for envelope in reader]
    finally:
        run(transport.aclose())


def test_stamped_lines_of_a_pipeline_are_read_once_each(shell, cluster, topic):
    done = shell(f"""printf '"n": %d\\n' $(seq {COUNT}) | {STAMP} | {APPEND}""")
    assert (done.returncode, done.stderr) == (0, b"")
    found = read(cluster, topic)
    assert sorted(number for number, _ in found) == list(range(1, COUNT + 1))
    assert len({journal for _, journal in found}) == 4


def test_a_file_that_is_appended_twice_is_read_once(shell, cluster, topic):
    done = shell(f"""
        printf '"n": %d\\n' $(seq {COUNT}) | {STAMP} > stamped
        {APPEND} -i stamped
        {APPEND} < stamped
    """)
    assert (done.returncode, done.stderr) == (0, b"")
    found = read(cluster, topic)
    assert Counter(number for number, _ in found) == Counter(range(1, COUNT + 1))
    raw = shell("gazctl journals read -l topic=$TOPIC").stdout
    assert raw.count(b"\n") == 2 * COUNT


def test_an_append_that_was_cut_off_is_made_good_by_appending_again(shell, cluster, topic):
    done = shell(f"""
        printf '"n": %d\\n' $(seq {COUNT}) | {STAMP} > stamped
        head -c 5000 stamped > torn
        {APPEND} -i torn && exit 1
        {APPEND} -i stamped
    """)
    assert done.returncode == 0, done.stderr
    assert b"no whole" in done.stderr
    found = read(cluster, topic)
    assert sorted(number for number, _ in found) == list(range(1, COUNT + 1))
