"""``gazctl shards generate`` against a broker, and a consumer process over scripted shards."""

from __future__ import annotations

import json
import sys
import uuid

import pytest
import yaml

from support.tools import read_until, start_tool

PROGRAM = """
from gazette_sdk import shard

@shard.handler(message=dict, store=shard.JsonStore[dict], sources="topic=TOPIC", name="TOPIC")
def declared(txn, message):
    pass

@shard.handler(message=dict, store=shard.JsonStore[dict], hot_standbys=2, name="TOPIC")
def plain(txn, message):
    pass
"""


@pytest.fixture
def topic(shards, monkeypatch):
    """A topic of two partitions, and a module of applications beside the tool."""
    name = f"topic-{uuid.uuid4().hex[:8]}"
    (shards.tool.directory / "applications.py").write_text(PROGRAM.replace("TOPIC", name))
    shards.tool.ok("journals", "create", name, "--partitions", "2")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop("applications", None)


def ids(shards):
    return [each["spec"]["id"] for each in json.loads(shards("list", "-o", "json").text)["shards"]]


def test_missing_shards_and_logs_are_created(shards, topic):
    generate = ("generate", "applications:declared")
    dry = shards(*generate, "--dry-run")
    assert dry.status == 0, dry.stderr
    specs = yaml.safe_load(dry.text)["shards"]
    wanted = [f"{topic}/{topic}/part-{part:03}" for part in range(2)]
    assert [spec["id"] for spec in specs] == wanted
    assert ids(shards) == []
    done = shards(*generate, "-o", "json")
    assert done.status == 0, done.stderr
    assert [json.loads(line) for line in done.text.splitlines()] == [
        {"shard": shard, "log": f"recovery/{shard}", "outcome": "created"} for shard in wanted
    ]
    assert ids(shards) == wanted
    for log in wanted:
        assert shards.tool("journals", "list", f"recovery/{log}").status == 0
    again = shards(*generate)
    assert (again.status, again.text) == (0, "")
    # Its specs are what `apply` takes.
    assert shards("apply", stdin=dry.stdout).text.count("unchanged") == 2


def test_sources_are_given_where_none_are_declared(shards, topic):
    refused = shards("generate", "applications:plain")
    assert refused.status == 1
    assert "declares no sources: give them with --sources" in refused.stderr
    done = shards("generate", "applications:plain", "--sources", f"name={topic}/part-001")
    assert done.status == 0, done.stderr
    assert ids(shards) == [f"{topic}/{topic}/part-001"]
    assert "hot_standbys: 2" in shards("list", "-o", "yaml").text
    assert "is no application" in shards("generate", "applications:nothing").stderr
    assert shards("generate").status == 1


def test_a_journal_that_a_shard_of_another_name_reads_gets_no_second_one(shards, topic):
    spec = f"shards: [{{id: by-hand, sources: [{{journal: {topic}/part-000}}]}}]\n"
    document = f"common: {{max_txn_duration: 1s}}\n{spec}"
    applied = shards("apply", stdin=document.encode())
    assert applied.status == 0, applied.stderr
    generate = ("generate", "applications:declared")
    dry = shards(*generate, "--dry-run")
    assert [each["id"] for each in yaml.safe_load(dry.text)["shards"]] == [
        f"{topic}/{topic}/part-001"
    ]
    assert shards(*generate).status == 0
    assert sorted(ids(shards)) == ["by-hand", f"{topic}/{topic}/part-001"]


def test_later_partitions_get_shards_while_it_watches(shards, topic):
    tool = shards.tool
    arguments = ["shards", "generate", "applications:declared", "--watch"]
    process = start_tool("gazette_sdk.cli.gazctl", arguments, tool.directory, tool.environ)
    try:
        read_until(process, b"part-001")
        tool.ok("journals", "create", topic, "--partitions", "3")
        read_until(process, b"part-002")
    finally:
        process.kill()
        process.communicate()
    assert len(ids(shards)) == 3
