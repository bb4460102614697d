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

@shard.handler(
    message=dict,
    store=shard.JsonStore[dict],
    sources=shard.partitions("topic=TOPIC", shard.broadcast("topic=all-TOPIC")),
    name="TOPIC",
)
def broadcast(txn, message):
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


def test_new_partitions_of_a_topic_that_every_shard_reads_change_its_shards(shards, topic):
    generate = ("generate", "applications:broadcast")
    refused = shards(*generate)
    assert refused.status == 1
    assert f"topic=all-{topic}, which every shard reads, has no partitions" in refused.stderr
    shards.tool.ok("journals", "create", f"all-{topic}", "--partitions", "1")
    assert shards(*generate).text.count("created") == 2
    shards.tool.ok("journals", "create", f"all-{topic}", "--partitions", "2")
    dry = shards(*generate, "--dry-run")
    assert dry.text.count(f"journal: all-{topic}/part-001") == 2
    done = shards(*generate, "-o", "json")
    assert [json.loads(line)["outcome"] for line in done.text.splitlines()] == ["updated"] * 2
    assert shards("list", "-o", "yaml").text.count(f"journal: all-{topic}/part-001") == 2
    assert (shards(*generate).status, shards(*generate).text) == (0, "")


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
