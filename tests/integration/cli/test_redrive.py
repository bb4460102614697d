"""``gazctl journals redrive``: each record is published once, also by commands that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter

import pytest

from gazette_sdk import Journals, Publisher, Reader, mapping
from gazette_sdk.cli.journals import redrive
from gazette_sdk.shard.transaction.failure import DeadLetter


class Topic:
    """A topic of two partitions, with dead letters of its records."""

    def __init__(self, tool, cluster):
        self.tool, self.cluster = tool, cluster
        self.name = f"redrive-{uuid.uuid4().hex[:8]}"
        self.letters = f"{self.name}-bad"
        journals = Journals()
        journals.create(self.name, partitions=2, replication=1)
        journals.create(self.letters, partitions=0, replication=1)

    def add(self, records, error="ValueError: no", journal=None):
        letters = [
            DeadLetter(journal or f"{self.name}/part-00{number % 2}", number, error, record)
            for number, record in enumerate(records)
        ]
        with Publisher(mapping=mapping.direct(self.letters)) as publisher:
            publisher.publish_batch(letters).result(timeout=30)

    def redrive(self, *arguments):
        to = f"topic={self.name}"
        return self.tool("journals", "redrive", self.letters, "--to", to, *arguments)

    def published(self):
        """Return what committed readers get, by journal."""
        found = {}
        for each in Reader(dict, f"topic={self.name}"):
            found.setdefault(each.journal, []).append(each.message["n"])
        return found


@pytest.fixture
def topic(tool, cluster, monkeypatch):
    monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
    return Topic(tool, cluster)


def test_records_go_back_to_their_journals_once(topic, monkeypatch):
    monkeypatch.setattr(redrive, "BATCH_LETTERS", 3)
    topic.add([{"n": n} for n in range(10)])
    dry = topic.redrive("--dry-run")
    assert dry.status == 0, dry.stderr
    assert topic.published() == {}
    for _ in range(2):
        outcome = topic.redrive("--state", "state.json")
        assert outcome.status == 0, outcome.stderr
        assert topic.published() == {
            f"{topic.name}/part-000": [0, 2, 4, 6, 8],
            f"{topic.name}/part-001": [1, 3, 5, 7, 9],
        }
    topic.add([{"n": 10}])
    assert topic.redrive("--state", "state.json").text.split("redriven")[1].split()[0] == "1"
    assert sum(map(len, topic.published().values())) == 11


def test_letters_are_chosen_by_their_errors_and_number(topic):
    topic.add([{"n": 1}, {"n": 2}, {"n": 3}], error="KeyError: 'a'")
    topic.add([{"n": 4}], error="ValueError: b")
    topic.add(["bm8gbWVzc2FnZQ==", None, {"n": 5}], error="KeyError: 'c'", journal="other/journal")
    arguments = ("--filter", "KeyError", "--limit", "2")
    assert topic.redrive(*arguments, "--state", "state.json").status == 0
    assert sorted(n for found in topic.published().values() for n in found) == [1, 2]
    outcome = topic.redrive("--filter", "KeyError", "--state", "state.json")
    assert outcome.text.splitlines()[1].split()[1:] == ["redriven", "2", "1", "2"]
    assert sorted(n for found in topic.published().values() for n in found) == [1, 2, 3, 5]


def test_what_cannot_be_redriven_is_said(topic, tmp_path):
    assert "--to was not given" in topic.tool("journals", "redrive", topic.letters).stderr
    assert "--state was not given" in topic.redrive().stderr
    to_letters = topic.tool(
        "journals", "redrive", topic.letters, "--to", f"name={topic.letters}", "--state", "s"
    )
    assert "would get its own letters" in to_letters.stderr
    nothing = topic.tool("journals", "redrive", topic.letters, "--to", "topic=no", "--state", "s")
    assert "no journal matches --to topic=no" in nothing.stderr
    unknown = topic.tool(
        "journals", "redrive", "no/such", "--to", f"topic={topic.name}", "--state", "s"
    )
    assert unknown.status == 1
    other = topic.tool.directory / "other.json"
    for content, text in (
        (b"no JSON", "is no file of `gazctl journals redrive`"),
        (b'{"letters":"a","checkpoint":"","intents":""}', "has the position in a"),
    ):
        other.write_bytes(content)
        outcome = topic.redrive("--state", "other.json")
        assert outcome.status == 1
        assert text in outcome.stderr
        assert "Traceback" not in outcome.stderr


KILLED = """
import os, signal, sys
from gazette_sdk.cli import gazctl
from gazette_sdk.cli.journals import redrive

redrive.BATCH_LETTERS = 7
store, when = redrive._store, sys.argv.pop(1)
moments = []

def killed(path, saved):
    for moment in ("before", "after"):
        moments.append(moment)
        if when == f"{moment} {moments.count(moment)}":
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "before":
            store(path, saved)

redrive._store = killed
sys.exit(gazctl.main())
"""

KILLS = ["before 1", "after 1", "before 2", "after 2", "after 1", "never"]
"""Moments at which commands are killed, around the times at which they save their position."""


@pytest.mark.timeout(240)
def test_commands_that_are_killed_publish_nothing_twice(topic, tmp_path):
    topic.add([{"n": n} for n in range(40)])
    arguments = ["journals", "redrive", topic.letters, "--to", f"topic={topic.name}"]
    kills = 0
    for when in KILLS:
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, when, *arguments, "--state", str(tmp_path / "state")],
            env={**os.environ, "GAZETTE_ADDRESS": topic.cluster.address},
            capture_output=True,
            check=False,
            timeout=60,
        )
        kills += ended.returncode == -signal.SIGKILL
    assert ended.returncode == 0, ended.stderr
    assert kills == len(KILLS) - 1
    counts = Counter(n for found in topic.published().values() for n in found)
    assert counts == Counter(range(40))
    saved = json.loads((tmp_path / "state").read_bytes())
    assert saved["letters"] == topic.letters
