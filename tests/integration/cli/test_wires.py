"""``gazctl`` over each wire to a broker, and by itself over the one which the broker speaks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid

import pytest
import yaml

from gazette_sdk.protocol import broker_pb2 as pb
from support.scripted_broker import ScriptedBroker, header, in_loop, route_to

WIRES = ["", "?wire=auto", "?wire=stream", "?wire=grpc"]


def specs(name):
    fragment = {"length": 65536, "compression_codec": "SNAPPY", "stores": ["file:///"]}
    spec = {"replication": 1, "fragment": {**fragment, "refresh_interval": "1s"}}
    return yaml.safe_dump({"name": name, **spec}).encode()


@pytest.mark.parametrize("wire", WIRES)
def test_commands_do_the_same_over_every_wire(wire, gazctl, cluster):
    gazctl.environ["GAZETTE_ADDRESS"] = cluster.address + wire
    name = f"wires/{uuid.uuid4().hex[:8]}"
    gazctl.ok("journals", "apply", stdin=specs(name))
    listed = gazctl.ok("journals", "list", "-l", f"name={name}", "-o", "yaml")
    assert yaml.safe_load(listed.text)["name"] == name
    content = os.urandom(3 << 20)
    gazctl.ok("journals", "append", "-l", f"name={name}", stdin=content)
    gazctl.ok("journals", "append", "-l", f"name={name}", stdin=b"more")
    assert gazctl.ok("journals", "read", "-l", f"name={name}").stdout == content + b"more"
    assert "wires/" in gazctl.ok("journals", "fragments", "-l", f"name={name}").text
    gazctl.ok("journals", "store-health", "file:///")
    direct = ["--broker.cache.size=256", "--zone=somewhere"]
    root = ["--file-root", str(cluster.file_root)]  # the broker may have stored it meanwhile
    read = gazctl.ok("journals", *direct, "read", "-l", f"name={name}", *root).stdout
    assert read == content + b"more"


@pytest.mark.parametrize("wire", WIRES)
def test_a_broker_that_is_not_there_is_told_of_alike(wire, gazctl, monkeypatch):
    monkeypatch.setattr("gazette_sdk.cli.client.CONNECT_TIMEOUT_S", 0.3)
    outcome = gazctl("journals", "list", "--broker.address", f"http://localhost:1{wire}")
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert "http://localhost:1" in outcome.stderr
    assert "Connection refused" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("wire", "problem"),
    [("", None), ("?wire=grpc", None), ("?wire=stream", "does not speak the stream transport")],
)
@in_loop
async def test_a_broker_of_grpc_only_is_used_unless_another_wire_is_asked_for(wire, problem):
    spec = pb.JournalSpec(
        name="a/journal",
        replication=1,
        fragment=pb.JournalSpec.Fragment(
            length=1 << 20, compression_codec=pb.NONE, refresh_interval={"seconds": 60}
        ),
    )
    listed = pb.ListResponse.Journal(
        spec=spec, mod_revision=3, create_revision=3, route=route_to("http://localhost:1")
    )
    async with ScriptedBroker() as broker:
        broker.on_list = lambda _: [pb.ListResponse(header=header(), journals=[listed])]
        address = ["--broker.address", broker.address + wire]
        tool = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gazette_sdk.cli.gazctl", "journals", "list", *address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        found, told = await tool.communicate()
        if problem is None:
            assert (tool.returncode, told) == (0, b"")
            assert b"a/journal" in found
        else:
            assert (tool.returncode, found) == (1, b"")
            assert problem.encode() in told


@pytest.mark.parametrize("wire", ["?wire=stream", "?wire=grpc"])
def test_a_benchmark_runs_over_the_wire_that_it_is_told(wire, gazette, cluster):
    arguments = ["--messages=100", "--journals=2", "--rate=100", "--duration=200ms", "--json"]
    outcome = gazette.ok("bench", "--address", cluster.address + wire, *arguments)
    report = json.loads(outcome.stdout)
    assert report["address"] == cluster.address + wire
    assert report["verification"]["ok"] is True
