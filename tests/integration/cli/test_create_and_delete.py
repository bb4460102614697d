"""``gazctl journals create`` and ``delete``, against a real cluster."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import uuid

import pytest

from gazette_sdk import Journals, connect
from gazette_sdk.transport import loop as sdk_loop
from integration.failures.journals import wait_until


@pytest.fixture
def topic():
    return f"topic-{uuid.uuid4().hex[:8]}"


def objects(outcome):
    return [json.loads(line) for line in outcome.text.splitlines()]


def listed(tool, selector):
    text = tool.ok("journals", "list", "-l", selector, "-o", "json").text
    return [each["spec"] for each in json.loads(text)["journals"]]


def test_a_topic_is_created_and_created_again(tool, topic):
    command = ("journals", "create", topic, "--partitions", "2", "-o", "json")
    for outcome in ("created", "unchanged"):
        assert objects(tool.ok(*command)) == [
            {
                "journal": f"{topic}/part-00{index}",
                "outcome": outcome,
                "replication": 1,
                "stores": ["file:///"],
            }
            for index in range(2)
        ]
    table = tool.ok("journals", "create", topic, "--partitions", "3").text
    assert table.count("unchanged") == 2
    assert table.count("created") == 1
    piped = json.dumps({"minutes": 12}).encode() + b"\n"
    tool.ok("journals", "append", "-l", f"topic={topic}", "-f", "lines", stdin=piped)
    assert tool.ok("journals", "read", "-l", f"topic={topic}").stdout == piped


def test_all_values_can_be_given(tool, topic):
    tool.ok(
        *("journals", "create", topic, "--replication", "1", "--store", "file:///elsewhere/"),
        *("--codec", "zstandard", "--length", "65536", "--content-type", ""),
        *("--label", "region=eu", "--label", "region=us"),
    )
    (spec,) = listed(tool, f"topic={topic}")
    assert spec["fragment"]["stores"] == ["file:///elsewhere/"]
    assert spec["fragment"]["compression_codec"] == "ZSTANDARD"
    assert spec["fragment"]["length"] == "65536"
    assert [label["value"] for label in spec["labels"]["labels"]] == ["eu", "us", topic]
    tool.ok("journals", "delete", "-l", f"topic={topic}")  # or the default store is ambiguous


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--codec", "zip"), "codec 'zip' is not one of none, gzip"),
        (("--label", "bad"), "--label: 'bad' is not NAME=VALUE"),
        (("--partitions", "1001"), "use 1 to 1000"),
        (("--replication", "9"), "invalid replication (9; expected 1 <= replication <= 5)"),
        (("--replication", "5"), "replication=5, and 1 broker takes journals: appends would be"),
        (("--store", "nope"), "nope"),
    ],
)
def test_wrong_values_create_nothing(tool, topic, arguments, text):
    outcome = tool("journals", "create", topic, *arguments)
    assert outcome.status == 1
    assert text in outcome.stderr
    assert listed(tool, f"topic={topic}") == []


def test_a_create_with_other_values_fails(tool, topic):
    tool.ok("journals", "create", topic)
    outcome = tool("journals", "create", topic, "--codec", "none")
    assert outcome.status == 1
    assert f"{topic}/part-000 exists, and its codec is gzip, not none" in outcome.stderr
    assert "gazctl journals edit" in outcome.stderr


def test_journals_are_deleted_by_name_and_by_selector(tool, topic):
    tool.ok("journals", "create", topic, "--partitions", "4")
    one = tool.ok("journals", "delete", f"{topic}/part-003", "-o", "json")
    assert [each["outcome"] for each in objects(one)] == ["deleted"]
    assert "Fragments that are stored stay in their stores" in one.stderr
    rest = tool.ok("journals", "delete", "-l", f"topic={topic}").text
    assert rest.count("deleted") == 3
    assert listed(tool, f"topic={topic}") == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "needs either names of journals, or a label selector (-l)"),
        (("TOPIC/part-000", "-l", "topic=TOPIC"), "needs either names"),
        (("TOPIC/part-000", "no/such"), "no/such: JOURNAL_NOT_FOUND (nothing was deleted)"),
        (("-l", "topic=none-of-this-name"), "no journals match the selector"),
    ],
)
def test_a_delete_that_cannot_be_done_deletes_nothing(tool, topic, arguments, text):
    tool.ok("journals", "create", topic)
    given = [argument.replace("TOPIC", topic) for argument in arguments]
    outcome = tool("journals", "delete", *given)
    assert outcome.status == 1
    assert text in outcome.stderr
    assert len(listed(tool, f"topic={topic}")) == 1


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b"n\n", 1), (b"\n", 1), (b"y\n", 0), (None, 0)],
    ids=["no", "nothing", "yes", "not asked with --yes"],
)
def test_a_terminal_is_asked_before_journals_are_deleted(tool, cluster, topic, answer, status):
    tool.ok("journals", "create", topic)
    command = [sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", "delete"]
    command += [f"{topic}/part-000", *(["--yes"] if answer is None else [])]
    terminal, end = pty.openpty()
    try:
        if answer is not None:
            os.write(terminal, answer)
        done = subprocess.run(
            command,
            stdin=end,
            capture_output=True,
            env={**os.environ, "BROKER_ADDRESS": cluster.address},
            timeout=60,
            check=False,
        )
    finally:
        os.close(terminal)
        os.close(end)
    assert done.returncode == status, done.stderr
    assert (b"Delete this journal? [y/N]" in done.stderr) == (answer is not None)
    assert (b"nothing was deleted" in done.stderr) == (status == 1)
    assert len(listed(tool, f"topic={topic}")) == status


def test_more_journals_than_one_transaction_takes_are_deleted(tool, topic):
    tool.ok("journals", "create", topic, "--partitions", "150", "--replication", "1")
    outcome = tool.ok("journals", "delete", "-l", f"topic={topic}", "-o", "json")
    assert {each["outcome"] for each in objects(outcome)} == {"deleted"}
    assert len(objects(outcome)) == 150


def test_more_replicas_than_brokers_are_created_by_force(tool, topic):
    outcome = tool.ok("journals", "create", topic, "--replication", "5", "--force")
    assert "leaves no broker to spare" in outcome.stderr
    tool.ok("journals", "delete", "-l", f"topic={topic}")


@pytest.fixture
def deleted(tool, topic, cluster):
    """Write a topic of one journal, 2,000 bytes of which are stored, and delete it."""
    create = ("journals", "create", topic, "--length", "1024")
    append = ("journals", "append", "-l", f"topic={topic}")
    tool.ok(*create)
    # Else the last append is stored, too, if the clock passes a multiple of that interval.
    transport = connect(cluster.address)
    Journals(transport).update(f"topic={topic}", flush_interval_s=0)
    sdk_loop.run(transport.aclose())
    tool.ok(*append, stdin=b"x" * 2000)
    tool.ok(*append, stdin=b"y")  # closes the fragment before
    stored = cluster.file_root / topic
    wait_until(lambda: list(stored.rglob("*.gz")), "the fragment is stored")
    tool.ok("journals", "delete", "-l", f"topic={topic}")
    return create


def test_a_new_journal_goes_on_behind_fragments_of_a_deleted_one_where_asked(tool, topic, deleted):
    append = ("journals", "append", "-l", f"topic={topic}")
    refused = tool(*deleted)
    assert refused.status == 1
    assert f"{topic}/part-000: an earlier journal of this name" in refused.stderr
    assert "--continue" in refused.stderr
    assert "--with-fragments" in refused.stderr
    assert "INDEX_HAS_GREATER_OFFSET" in tool(*append, stdin=b"z").stderr
    for _ in range(2):  # it can be repeated, and moves nothing then
        tool.ok(*deleted, "--continue")
        tool.ok(*append, stdin=b"z")
    assert tool.ok("journals", "read", "-l", f"topic={topic}").stdout == b"x" * 2000 + b"zz"


def test_a_journal_that_was_deleted_with_its_fragments_begins_anew(tool, topic, deleted, cluster):
    directory = cluster.file_root / topic
    assert list(directory.rglob("*.gz"))
    tool.ok(*deleted, "--continue")
    delete = ("journals", "delete", "-l", f"topic={topic}", "--with-fragments")
    rootless = tool(*delete)
    assert rootless.status == 1
    assert "--file-root" in rootless.stderr
    assert len(listed(tool, f"topic={topic}")) == 1, "nothing was deleted"
    outcome = tool.ok(*delete, "--file-root", str(cluster.file_root))
    assert "Removed 1 fragment from the stores" in outcome.stderr
    assert not list(directory.rglob("*.gz"))
    tool.ok(*deleted)
    tool.ok("journals", "append", "-l", f"topic={topic}", stdin=b"new")
    assert tool.ok("journals", "read", "-l", f"topic={topic}").stdout == b"new"
