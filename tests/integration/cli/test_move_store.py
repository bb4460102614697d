"""``gazctl journals move-store`` against real clusters."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import threading
import uuid

import pytest

from gazette_sdk import Journals
from gazette_sdk.cli.entry import INTERRUPTED
from gazette_sdk.cli.journals.store_move import StoreMoves
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.fragment.stores import wrap_stores
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.shard.consumer.embedded import EmbeddedConsumer
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.loop import run
from integration.failures.journals import wait_until
from support import order_totals
from support.spools import files_below
from support.tools import start_tool

LINES = [b"%06d of a journal that moves to another store\n" % number for number in range(200)]


READY_S = 60.0
"""Bound of the waits for shards."""

INTERRUPT_S_MAX = 20.0
"""Bound of the end after an interrupt, on a busy machine."""


class Topic:
    """A journal with fragments in a store of its own, and a directory for its new store."""

    def __init__(self, tool, cluster):
        self.tool = tool
        self.root = cluster.file_root
        self.id = uuid.uuid4().hex[:8]
        self.name = f"moved-{self.id}/events"
        self.old, self.new = (f"file:///{kind}-{self.id}/" for kind in ("old", "new"))
        for url in (self.old, self.new):
            self.directory(url).mkdir()
        self.content = b""
        self.rounds = 0
        self.apply(self.name)

    def directory(self, url):
        return self.root / url.removeprefix("file:///")

    def apply(self, name, *, stores=(), revision=0, **fields):
        spec = {
            "name": name,
            "replication": 1,
            "revision": revision,
            "labels": [{"name": "topic", "value": self.id}],
            "fragment": {
                "length": 1024,
                "compression_codec": "GZIP",
                "stores": list(stores or [self.old]),
                "refresh_interval": "1s",
            },
            **fields,
        }
        self.tool.ok("journals", "apply", stdin=json.dumps(spec).encode())

    def fill(self, name=None):
        """Append, so that most of it is stored."""
        name = name or self.name
        self.rounds += 1
        wanted = self.rounds * (len(LINES) // 25 - 2)
        for at in range(0, len(LINES), 25):
            block = b"".join(LINES[at : at + 25])
            self.tool.ok("journals", "append", name, stdin=block)
            self.content += block if name == self.name else b""
        wait_until(lambda: len(self.stored(name)) >= wanted, "fragments are stored")

    def stored(self, name=None):
        text = self.tool.ok("journals", "fragments", name or self.name, "-o", "json").text
        found = [json.loads(line) for line in text.splitlines()]
        return [each["spec"] for each in found if each["spec"].get("backing_store")]

    def spec(self, name=None):
        text = self.tool.ok("journals", "list", name or self.name, "-o", "json").text
        return json.loads(text)["journals"][0]["spec"]

    def stores(self, name=None):
        return self.spec(name)["fragment"]["stores"]

    def move(self, *options, to=None):
        return self.tool(
            *("journals", "move-store", "-l", f"topic={self.id}", "--to", to or self.new),
            *("--file-root", str(self.root), *options),
        )

    def moved(self, *options):
        """Move it; it must succeed. Returns what came of each journal."""
        outcome = self.move("-o", "json", *options)
        assert outcome.status == 0, outcome.stderr
        return [json.loads(line) for line in outcome.text.splitlines()]

    def read(self):
        return self.tool.ok("journals", "read", self.name).stdout


@pytest.fixture
def topic(tool, cluster):
    topic = Topic(tool, cluster)
    topic.fill()
    return topic


def test_a_journal_moves_with_all_of_its_content(topic):
    [planned] = topic.moved("--dry-run")
    assert (planned["outcome"], planned["copied"]) == ("planned", planned["fragments"])
    assert topic.stores() == [topic.old]
    assert files_below(topic.directory(topic.new)) == []

    [kept] = topic.moved("--keep-old")
    assert (kept["outcome"], kept["copied"]) == ("copied", planned["fragments"])
    assert topic.stores() == [topic.new, topic.old]
    topic.fill()

    [moved] = topic.moved()
    assert (moved["outcome"], moved["copied"]) == ("moved", 0), "new fragments are there already"
    assert topic.stores() == [topic.new]
    assert {each["backing_store"] for each in topic.stored()} == {topic.new}
    old, new = (files_below(topic.directory(url)) for url in (topic.old, topic.new))
    assert set(old) < set(new)
    assert topic.read() == topic.content

    [command] = moved["remove"]
    assert shlex.split(command)[:2] == ["rm", "-r"]
    subprocess.run(shlex.split(command), check=True)
    assert files_below(topic.directory(topic.old)) == [".test/health-check"]
    assert topic.read() == topic.content
    topic.fill()
    assert topic.read() == topic.content
    [again] = topic.moved()
    assert (again["outcome"], again["remove"]) == ("unchanged", [])


def test_the_table_ends_with_the_commands_that_remove_old_content(topic):
    outcome = topic.move("--rate", "1MB/s")
    assert outcome.status == 0, outcome.stderr
    [row] = [line for line in outcome.text.splitlines() if line.startswith(topic.name)]
    assert " moved " in row
    assert row.endswith(topic.old)
    directory = topic.directory(topic.old) / topic.name
    assert outcome.text.endswith(f"To remove it:\n\n  rm -r -- {directory}\n")


@pytest.mark.parametrize("level", ["PARTIAL", "FULL"])
def test_a_suspended_journal_moves_and_stays_suspended(topic, level):
    def is_suspended():
        topic.tool.ok("journals", "suspend", topic.name, "--force")
        found = topic.spec()["suspend"]
        return found and found["level"] == "PARTIAL"

    wait_until(is_suspended, "all is stored and it is suspended")
    if level == "FULL":
        suspend = {"level": "FULL", "offset": len(topic.content)}
        topic.apply(topic.name, revision=-1, suspend=suspend)
    [moved] = topic.moved()
    assert moved["outcome"] == "moved"
    assert (topic.stores(), topic.spec()["suspend"]["level"]) == ([topic.new], level)
    topic.fill()
    assert topic.read() == topic.content


def test_what_cannot_be_moved_is_named_and_the_rest_moves(topic):
    topic.apply(f"{topic.name}-mount", flags="O_RDONLY")
    outcome = topic.move("-o", "json")
    assert outcome.status == 1
    assert f"not confirmed: {topic.name}-mount: it is read-only" in outcome.stderr
    found = [json.loads(line)["outcome"] for line in outcome.text.splitlines()]
    assert found == ["moved", "refused"]
    assert topic.stores(f"{topic.name}-mount") == [topic.old]


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ("ftp://host/path/", "invalid scheme (ftp"),
        ("s3://bucket/${ENV}/", "no templates"),
        ("file:///missing-directory/", "create it"),
        ("memory://elsewhere/?x=1", "no argument x"),
    ],
)
def test_a_new_store_that_cannot_be_used_changes_nothing(topic, to, text):
    outcome = topic.move(to=to)
    assert outcome.status == 1
    assert text in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert topic.stores() == [topic.old]


def test_files_need_the_directory_of_the_brokers(topic):
    outcome = topic.tool("journals", "move-store", topic.name, "--to", topic.new)
    assert outcome.status == 1
    assert "--file-root" in outcome.stderr
    assert topic.stores() == [topic.old]


def test_a_damaged_fragment_keeps_its_journal_in_the_old_store(topic):
    damaged = topic.directory(topic.old) / next(
        name for name in files_below(topic.directory(topic.old)) if name.endswith(".gz")
    )
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-9] + bytes(9))
    outcome = topic.move("-o", "json")
    assert outcome.status == 1
    assert f"fragment {damaged.name}" in outcome.stderr
    assert topic.stores() == [topic.new, topic.old]
    assert damaged.name not in str(files_below(topic.directory(topic.new)))
    assert "Traceback" not in outcome.stderr
    damaged.write_bytes(good)
    [moved] = topic.moved()
    assert (moved["outcome"], topic.stores()) == ("moved", [topic.new])
    assert topic.read() == topic.content


def test_an_interrupted_move_ends_at_once_and_continues(topic, tmp_path):
    arguments = ["journals", "move-store", topic.name, "--to", topic.new, "--rate", "1kB/s"]
    with start_tool(
        "gazette_sdk.cli.gazctl",
        [*arguments, "--file-root", str(topic.root)],
        tmp_path,
        {"GAZETTE_ADDRESS": topic.tool.environ["GAZETTE_ADDRESS"]},
    ) as process:
        wait_until(lambda: copied_of(topic), "a fragment is copied")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=INTERRUPT_S_MAX)
    assert process.returncode == INTERRUPTED, errors
    assert b"Traceback" not in errors
    assert b" unfinished " in output
    assert topic.stores() == [topic.new, topic.old]
    copied = len(copied_of(topic))
    [moved] = topic.moved()
    assert (moved["outcome"], moved["copied"]) == ("moved", moved["fragments"] - copied)
    assert topic.read() == topic.content


@pytest.mark.parametrize("other", ["label", "stores"])
def test_changes_of_others_meanwhile_are_kept(topic, monkeypatch, other):
    leave = StoreMoves._leave

    async def changed_before(self, move):
        spec = await journal(self._transport, topic.name)
        if other == "label":
            spec.spec.labels.labels.add(name="zone", value="eu")
        else:
            spec.spec.fragment.stores[:] = [topic.old]
        change = pb.ApplyRequest.Change(upsert=spec.spec, expect_mod_revision=spec.mod_revision)
        assert (await self._transport.apply(pb.ApplyRequest(changes=[change]))).status == pb.OK
        await leave(self, move)

    monkeypatch.setattr(StoreMoves, "_leave", changed_before)
    outcome = topic.move()
    if other == "label":
        assert outcome.status == 0, outcome.stderr
        assert topic.stores() == [topic.new]
        assert "zone" in json.dumps(topic.spec()["labels"])
    else:
        assert f"its stores were changed meanwhile, to {topic.old}" in outcome.stderr
        assert topic.stores() == [topic.old]
        monkeypatch.undo()
    assert topic.read() == topic.content


def test_an_upload_that_began_before_is_awaited_and_copied(gazctl, tmp_path, monkeypatch):
    """A fragment that reaches the old store late is in the new one, too."""
    hanging, release = threading.Event(), threading.Event()

    def hang(store):
        if store.url.endswith("/old/"):
            put = store._put

            def late(*arguments):
                if not arguments[0].endswith("health-check"):
                    hanging.set()
                    assert release.wait(60), "it was never released"
                put(*arguments)

            store._put = late
        return store

    ask, answers = StoreMoves._uploads_problem, []

    async def asked(self, *arguments):
        answers.append(await ask(self, *arguments))
        release.set()
        return answers[-1]

    monkeypatch.setattr(StoreMoves, "_uploads_problem", asked)
    with wrap_stores(hang), EmbeddedCluster(tmp_path / "data") as cluster:
        for name in ("old", "new"):
            (cluster.fragments / name).mkdir()
        cluster.apply(SPECS)
        content = b"".join(LINES)
        run(append(cluster.transport, pb.AppendRequest(journal="a/journal"), [content]))
        run(append(cluster.transport, pb.AppendRequest(journal="a/journal"), [content]))
        assert hanging.wait(30)
        gazctl.environ["GAZETTE_ADDRESS"] = cluster.address
        moved = gazctl.ok(
            *("journals", "move-store", "a/journal", "--to", "file:///new/", "-o", "json"),
            *("--file-root", str(cluster.fragments)),
        )
        assert [each for each in answers if each] == ["still uploads 1 fragments to file:///old/"]
        assert json.loads(moved.text)["copied"] == 1
        late = fragments_below(cluster.fragments / "old")
        assert len(late) == 1
        assert set(late) <= set(fragments_below(cluster.fragments / "new"))
        assert gazctl.ok("journals", "read", "a/journal").stdout == content * 2


def test_shards_recover_from_logs_that_moved_while_they_ran(gazctl, tmp_path):
    with EmbeddedCluster(tmp_path / "data", sync_etcd=False) as cluster:
        transport, journals = cluster.transport, Journals(transport=cluster.transport)
        gazctl.environ["GAZETTE_ADDRESS"] = cluster.address
        (cluster.fragments / "new").mkdir()
        order_totals.create_journals(transport)
        with EmbeddedConsumer(
            order_totals.totals, transport=transport, etcd=cluster.etcd_endpoint
        ) as consumer:
            consumer.wait_caught_up(READY_S)
            names = [each.name for each in journals.list()]
            journals.update(names, length=1024)
            for rounds in range(1, 4):
                order_totals.publish(transport, 50)
                consumer.wait_caught_up(READY_S)
                if rounds == 2:
                    moved = gazctl.ok(
                        *("journals", "move-store", *names, "--to", "file:///new/"),
                        *("-o", "json", "--file-root", str(cluster.fragments)),
                    )
        rows = [json.loads(line) for line in moved.text.splitlines()]
        assert {row["outcome"] for row in rows} == {"moved"}
        assert any("recovery" in row["journal"] and row["copied"] for row in rows)
        for command in (command for row in rows for command in row["remove"]):
            subprocess.run(shlex.split(command), check=True)
        with EmbeddedConsumer(
            order_totals.totals, transport=transport, etcd=cluster.etcd_endpoint
        ) as consumer:
            order_totals.publish(transport, 50)
            consumer.wait_caught_up(READY_S)
            order_totals.wait_for_totals(transport, 200)


SPECS = """
name: a/journal
replication: 1
fragment: {length: 1024, compression_codec: NONE, stores: ["file:///old/"], refresh_interval: 1s}
"""


def copied_of(topic):
    """The fragments that both stores have."""
    old, new = (fragments_below(topic.directory(url)) for url in (topic.old, topic.new))
    return set(old) & set(new)


def fragments_below(directory):
    return [name for name in files_below(directory) if not name.startswith(".test/")]


async def journal(transport, name):
    selector = pb.LabelSelector()
    selector.include.labels.add(name="name", value=name)
    async for response in transport.list(pb.ListRequest(selector=selector)):
        return response.journals[0]
    raise AssertionError(f"{name} is not listed")
