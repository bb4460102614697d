"""``gazctl journals read`` and ``append`` over a real broker, beyond what was recorded."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
import uuid

import pytest
import yaml

from gazette_sdk import Journals, connect
from gazette_sdk.cli.journals.specs import blocks
from gazette_sdk.message.mapping import fnv1a32
from support.tools import on_a_terminal, read_until, start_tool

GAZCTL = "gazette_sdk.cli.gazctl"
TIMEOUT_S = 30.0


@pytest.fixture
def topic(tool):
    """A topic of its own, with four journals."""
    name = f"t{uuid.uuid4().hex[:8]}"
    make(tool, [f"{name}/{part}" for part in ("a", "b", "c", "d")], name)
    return name


def make(tool, names, topic, **changes):
    fragment = {"length": 65536, "compression_codec": "SNAPPY", "stores": ["file:///"]}
    spec = {
        "replication": 1,
        "labels": [{"name": "topic", "value": topic}],
        "fragment": {**fragment, "refresh_interval": "1s"},
        **changes,
    }
    specs = {**spec, "children": [{"name": name} for name in names]}
    tool.ok("journals", "apply", stdin=yaml.safe_dump(specs).encode())


def content_of(tool, journal):
    return tool.ok("journals", "read", "-l", f"name={journal}").stdout


def spawn(cluster, directory, *arguments, **options):
    return start_tool(GAZCTL, arguments, directory, {"GAZETTE_ADDRESS": cluster.address}, **options)


def test_several_journals_are_read_append_by_append(tool, topic):
    blocks = {part: [part.encode() * 70_000] * 5 for part in "abcd"}
    for part, appends in blocks.items():
        for block in appends:
            tool.ok("journals", "append", "-l", f"name={topic}/{part}", stdin=block)
    found = tool.ok("journals", "read", "-l", f"topic={topic}").stdout
    runs = [match[0] for match in re.finditer(rb"a+|b+|c+|d+", found)]
    assert b"".join(sorted(runs)) == b"".join(block for part in blocks.values() for block in part)
    assert all(len(run) % 70_000 == 0 for run in runs)


def test_reads_resume_exactly_where_the_last_one_ended(tool, topic):
    offsets, parts = tool.directory / "o.json", b""
    offsets.write_text('{"not/read": 7}')
    arguments = ["journals", "read", "-l", f"topic={topic}", "-o", "out"]
    arguments += ["--offsets", "o.json", "--offsets-out", "o.json"]
    for number in range(3):
        line = b"line %d\n" % number
        tool.ok("journals", "append", "-l", f"name={topic}/a", stdin=line)
        tool.ok(*arguments)
        parts += (tool.directory / "out").read_bytes()
    assert parts == b"line 0\nline 1\nline 2\n"
    assert json.loads(offsets.read_text()) == {
        "not/read": 7,
        f"{topic}/a": 21,
        **{f"{topic}/{part}": 0 for part in "bcd"},
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_blocked_read_cleanly(tool, topic, cluster, tmp_path, number):
    tool.ok("journals", "append", "-l", f"name={topic}/a", stdin=b"first\n")
    with spawn(
        cluster,
        tmp_path,
        *("journals", "read", "-l", f"topic={topic}", "--block", "--offsets-out", "o.json"),
    ) as process:
        read_until(process, b"first\n")
        tool.ok("journals", "append", "-l", f"name={topic}/b", stdin=b"second\n")
        read_until(process, b"second\n")
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    offsets = json.loads((tmp_path / "o.json").read_text())
    assert offsets == {f"{topic}/a": 6, f"{topic}/b": 7, f"{topic}/c": 0, f"{topic}/d": 0}


def test_a_tail_that_is_interrupted_notes_the_heads_it_waited_at(tool, topic, cluster, tmp_path):
    tool.ok("journals", "append", "-l", f"name={topic}/a", stdin=b"old\n")
    arguments = ["journals", "read", "-l", f"topic={topic}", "--block", "--tail"]
    with spawn(cluster, tmp_path, *arguments, "--offsets-out", "o.json") as process:
        while True:  # until one arrives, the tail may not have begun
            tool.ok("journals", "append", "-l", f"name={topic}/b", stdin=b"new\n")
            if select.select([process.stdout], [], [], 0.2)[0]:
                break
        assert b"old" not in os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    offsets = json.loads((tmp_path / "o.json").read_text())
    assert offsets[f"{topic}/a"] == 4


def test_a_blocked_read_follows_the_listing(tool, topic, cluster, tmp_path):
    arguments = ["journals", "read", "-l", f"topic={topic}", "--block", "--offsets-out", "o.json"]
    tool.ok("journals", "append", "-l", f"name={topic}/a", stdin=b"there\n")
    with spawn(cluster, tmp_path, *arguments, "--log.level=info") as process:
        read_until(process, b"there\n")
        make(tool, [f"{topic}/new"], topic)
        tool.ok("journals", "append", "-l", f"name={topic}/new", stdin=b"made later\n")
        read_until(process, b"made later\n")
        specs = {"name": f"{topic}/a", "delete": True, "revision": -1}
        tool.ok("journals", "apply", stdin=yaml.safe_dump(specs).encode())
        found = b""
        while b"read finished" not in found:
            found += os.read(process.stderr.fileno(), 1 << 16)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    offsets = json.loads((tmp_path / "o.json").read_text())
    assert (offsets[f"{topic}/a"], offsets[f"{topic}/new"]) == (6, 11)


def test_output_that_nobody_reads_any_more_ends_the_read_quietly(tool, topic, cluster, tmp_path):
    tool.ok("journals", "append", "-l", f"name={topic}/a", stdin=b"x" * (4 << 20))
    with spawn(cluster, tmp_path, "journals", "read", "-l", f"topic={topic}") as process:
        os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(TIMEOUT_S) == 1
    assert b"Traceback" not in errors


def test_output_is_untouched_where_offsets_are_wrong(tool, topic):
    (tool.directory / "out").write_text("kept")
    outcome = tool("journals", "read", "-l", f"topic={topic}", "-o", "out", "--offsets", "absent")
    assert outcome.status == 1
    assert (tool.directory / "out").read_text() == "kept"


def test_nothing_matched_ends_also_a_blocked_read_with_a_warning(tool):
    outcome = tool("journals", "read", "-l", "topic=nobodys", "--block", "--offsets-out", "o.json")
    assert (outcome.status, outcome.stdout) == (0, b"")
    assert "no journals were matched by the selector" in outcome.stderr
    assert (tool.directory / "o.json").read_text() == "{}\n"


def test_a_read_that_failed_writes_no_offsets_and_leaves_the_previous_ones(tool, topic, cluster):
    tool.ok("journals", "append", "-l", f"name={topic}/a", stdin=b"x" * 100_000)
    wait_until_stored(tool, f"{topic}/a")
    offsets = tool.directory / "o.json"
    offsets.write_text("{}")
    arguments = ["journals", "read", "-l", f"topic={topic}", "--broker.cache.size=10"]
    # Another way to write the same path makes no other file of it.
    arguments += ["--offsets", "o.json", "--offsets-out", "../" + tool.directory.name + "/o.json"]
    outcome = tool(*arguments)
    assert outcome.status == 1
    assert "--file-root" in outcome.stderr
    assert not offsets.exists()
    assert (tool.directory / "o.json.previous").read_text() == "{}"
    (tool.directory / "o.json.previous").rename(offsets)
    outcome = tool.ok(*arguments, "--file-root", str(cluster.file_root))
    assert outcome.stdout == b"x" * 100_000
    assert json.loads(offsets.read_text())[f"{topic}/a"] == 100_000


@pytest.mark.parametrize("block", [[], ["--block"]])
def test_an_offset_that_the_journal_does_not_have_is_an_error(tool, topic, block):
    tool.ok("journals", "append", "-l", f"name={topic}/a", stdin=b"12345")
    offsets = tool.directory / "o.json"
    offsets.write_text(json.dumps({f"{topic}/a": 700}))
    arguments = ["journals", "read", "-l", f"name={topic}/a", *block]
    outcome = tool(*arguments, "--offsets", "o.json", "--offsets-out", "o.json")
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert f"offset 700 of --offsets is after the write head of {topic}/a, which is 5" in (
        outcome.stderr
    )
    assert not offsets.exists()
    assert json.loads((tool.directory / "o.json.previous").read_text()) == {f"{topic}/a": 700}


def wait_until_stored(tool, journal):
    """Until a fragment of the journal is in its store."""
    stored = False
    while not stored:
        tool.ok("journals", "append", "-l", f"name={journal}", stdin=b"")
        listed = tool.ok("journals", "fragments", "-l", f"name={journal}", "-o", "json").text
        stored = any("backing_store" in json.loads(line)["spec"] for line in listed.splitlines())


# -------------------------------------------------------------------------- append


def partition(key, names, kind):
    if kind == "modulo":
        return names[fnv1a32(key) % len(names)]
    return max(names, key=lambda name: fnv1a32(key) ^ fnv1a32(name.encode()))


@pytest.mark.parametrize("kind", ["modulo", "rendezvous"])
def test_keys_find_the_same_journal_as_everywhere(tool, topic, kind):
    names = [f"{topic}/{part}" for part in "abcd"]
    pairs = [(b"key-%d" % (index % 37), b"value %d\n" % index) for index in range(2000)]
    stdin = b"".join(key + b"\n" + value for key, value in pairs)
    tool.ok("journals", "append", "-l", f"topic={topic}", "-f", "lines", "-m", kind, stdin=stdin)
    for name in names:
        wanted = b"".join(value for key, value in pairs if partition(key, names, kind) == name)
        assert content_of(tool, name) == wanted


def test_random_lines_are_spread_and_whole(tool, topic):
    lines = [b"line %d\n" % index for index in range(1000)]
    tool.ok("journals", "append", "-l", f"topic={topic}", "-f", "lines", stdin=b"".join(lines))
    parts = [content_of(tool, f"{topic}/{part}").splitlines(keepends=True) for part in "abcd"]
    assert all(parts)
    assert sorted(line for part in parts for line in part) == sorted(lines)


def test_a_key_which_names_no_listed_journal_ends_it_after_the_records_before(tool, topic):
    stdin = f"{topic}/a\none\nother/journal\ntwo\n{topic}/a\nthree\n".encode()
    outcome = tool(
        "journals", "append", "-l", f"topic={topic}", "-f", "lines", "-m", "direct", stdin=stdin
    )
    assert outcome.status == 1
    assert "other/journal" in outcome.stderr
    assert content_of(tool, f"{topic}/a") == b"one\n"


@pytest.mark.parametrize("framing", ["none", "lines", "fixed"])
def test_nothing_to_append_needs_journals_nevertheless(tool, topic, framing):
    tool.ok("journals", "append", "-l", f"topic={topic}", "-f", framing, stdin=b"")
    outcome = tool("journals", "append", "-l", "topic=nobodys", "-f", framing, stdin=b"")
    assert outcome.status == 1
    assert "no journals match the selector 'topic=nobodys'" in outcome.stderr


def test_records_before_an_input_that_cannot_be_read_on_are_appended(tool, topic, monkeypatch):
    async def until_it_fails(file):
        async for block in blocks(file):
            yield block
        raise OSError(5, "Input/output error", "the disk")

    monkeypatch.setattr("gazette_sdk.cli.journals.append.blocks", until_it_fails)
    arguments = ["journals", "append", "-l", f"name={topic}/a", "-f", "lines"]
    outcome = tool(*arguments, stdin=b"one\ntwo\n")
    assert outcome.status == 1
    assert "the disk: Input/output error" in outcome.stderr
    assert content_of(tool, f"{topic}/a") == b"one\ntwo\n"


def test_a_whole_pipe_is_one_append(tool, topic, cluster, tmp_path):
    content = os.urandom(3 << 20)
    arguments = ["journals", "append", "-l", f"name={topic}/a", "--log.level=debug"]
    with spawn(cluster, tmp_path, *arguments, stdin=subprocess.PIPE) as process:
        _, errors = process.communicate(content, timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert f"end={len(content)}".encode() in errors
    assert content_of(tool, f"{topic}/a") == content


def test_lines_of_a_pipe_are_appended_as_they_come(tool, topic, cluster, tmp_path):
    arguments = ["journals", "append", "-l", f"name={topic}/a", "-f", "lines"]
    with spawn(cluster, tmp_path, *arguments, stdin=subprocess.PIPE) as process:
        for line in (b"one\n", b"two\n"):
            process.stdin.write(line)
            while not content_of(tool, f"{topic}/a").endswith(line):
                pass
        process.send_signal(signal.SIGINT)  # while it waits for more
        process.wait(TIMEOUT_S)
    assert process.returncode == 130
    assert content_of(tool, f"{topic}/a") == b"one\ntwo\n"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("framing", ["none", "lines"])
def test_an_append_that_no_broker_takes_ends_after_the_delivery_timeout(tmp_path, framing, how):
    arguments = ["dev", "--data", "data", "--port", "0"]
    dev = start_tool("gazette_sdk.cli.gazette", arguments, tmp_path, {})
    try:
        text = read_until(dev, b"print(envelope.message)").decode()
        address = re.search(r"running at (http://\S+)", text)[1]
        Journals(connect(address)).create("a/journal", partitions=0)
        arguments = ["journals", "append", "a/journal", "-f", framing, "--delivery-timeout", "2s"]
        arguments.append("--log.level=debug")
        options = {"GAZETTE_ADDRESS": address}
        with start_tool(GAZCTL, arguments, tmp_path, options, stdin=subprocess.PIPE) as process:
            process.stdin.write(b"one\n")
            errors = b""
            while b"mapped partition key" not in errors:
                assert select.select([process.stderr], [], [], TIMEOUT_S)[0], errors
                errors += os.read(process.stderr.fileno(), 1 << 16)
            dev.send_signal(how)
            begun = time.monotonic()
            _, more = process.communicate(b"two\n", timeout=TIMEOUT_S)
            assert time.monotonic() - begun < 10
    finally:
        dev.kill()
        dev.communicate()
    assert process.returncode == 1, more
    assert b"Traceback" not in more
    assert re.search(rb"gazctl: a/journal: .* check", more), more


def test_a_file_is_appended_with_a_bar_where_somebody_looks(tool, topic, cluster, tmp_path):
    (tmp_path / "input").write_bytes(b"x" * (8 << 20))
    arguments = ["journals", "append", "-l", f"name={topic}/a", "-i", "input"]
    shown = on_a_terminal(
        GAZCTL, arguments, tmp_path, {"GAZETTE_ADDRESS": cluster.address}, "stderr"
    )
    assert "Appending" in shown
    assert len(content_of(tool, f"{topic}/a")) == 8 << 20


# --------------------------------------------------------------------- apply, list


def test_list_then_apply_changes_nothing_and_keeps_suspension(tool, topic):
    make(tool, [f"{topic}/s"], topic, suspend={"level": "PARTIAL", "offset": 0})
    listed = tool.ok("journals", "list", "-l", f"topic={topic}", "-o", "yaml").text
    (tool.directory / "specs.yaml").write_text(listed)
    tool.ok("journals", "apply", "--specs", "specs.yaml", "--max-txn-size", "2")
    again = tool.ok("journals", "list", "-l", f"topic={topic}", "-o", "yaml").text
    drop = re.compile(r"revision: \d+")
    assert drop.sub("", again) == drop.sub("", listed)


def test_a_conflict_in_a_later_batch_applies_none_of_them(tool, topic):
    names = [f"{topic}/x{index}" for index in range(3)]
    make(tool, names[2:], topic)
    specs = {
        "replication": 1,
        "fragment": {"length": 65536, "compression_codec": "NONE", "refresh_interval": "1s"},
        "children": [{"name": name} for name in names],
    }
    (tool.directory / "specs.yaml").write_text(yaml.safe_dump(specs))
    outcome = tool("journals", "apply", "--specs", "specs.yaml", "--max-txn-size", "1")
    assert outcome.status == 1
    assert f"{names[2]}: ETCD_TRANSACTION_FAILED" in outcome.stderr
    listed = tool.ok("journals", "list", "-l", f"prefix={topic}/", "-o", "json").text
    exist = {each["spec"]["name"] for each in json.loads(listed)["journals"]}
    assert exist & set(names) == {names[2]}


def test_more_changes_than_etcd_takes_are_told_of_with_the_remedy(tool, topic):
    names = [f"{topic}/many-{index:03}" for index in range(200)]
    specs = {
        "replication": 1,
        "fragment": {"length": 65536, "compression_codec": "NONE", "refresh_interval": "1s"},
        "children": [{"name": name} for name in names],
    }
    text = yaml.safe_dump(specs).encode()
    outcome = tool("journals", "apply", stdin=text)
    assert outcome.status == 1
    assert "--max-txn-size=100" in outcome.stderr


def test_a_watched_list_shows_every_change(tool, topic, cluster, tmp_path):
    arguments = ["journals", "list", "-l", f"topic={topic}", "--watch", "-o", "json"]
    with spawn(cluster, tmp_path, *arguments) as process:
        first = json.loads(read_until(process, b"\n"))
        assert len(first["journals"]) == 4
        make(tool, [f"{topic}/e"], topic)
        assert len(json.loads(read_until(process, b"\n").splitlines()[-1])["journals"]) == 5
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert b"Traceback" not in errors
