"""Journals named by arguments, missing ones, write heads in listings, and ``--timeout``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import uuid

import pytest
import yaml

from support.tools import on_a_terminal, read_until, start_tool

GAZCTL = "gazette_sdk.cli.gazctl"
TIMEOUT_S = 30.0


@pytest.fixture
def topic(tool):
    """A topic of its own: two journals of JSON lines, with a message and none."""
    name = f"t{uuid.uuid4().hex[:8]}"
    specs = {
        "replication": 1,
        "labels": [
            {"name": "content-type", "value": "application/x-ndjson"},
            {"name": "topic", "value": name},
        ],
        "fragment": {
            "length": 65536,
            "compression_codec": "SNAPPY",
            "stores": ["file:///"],
            "refresh_interval": "1s",
        },
        "children": [{"name": f"{name}/{part}"} for part in "ab"],
    }
    tool.ok("journals", "apply", stdin=yaml.safe_dump(specs).encode())
    tool.ok("journals", "append", f"{name}/a", stdin=b'{"n":1}\n')
    return name


def rows(text):
    return [re.split(r"  +", line) for line in text.splitlines()]


def test_journals_are_named_by_arguments_or_options(tool, topic):
    first, second = f"{topic}/a", f"{topic}/b"
    tool.ok("journals", "append", "--name", second, stdin=b'{"n":2}\n')
    for names in ([first, second], ["--name", first, second], ["--name", first, "--name", second]):
        assert rows(tool.ok("journals", "list", *names).text) == [["NAME"], [first], [second]]
        listed = tool.ok("journals", "list", *names, "-o", "json").text
        assert len(json.loads(listed)["journals"]) == 2
    assert tool.ok("journals", "read", second).text == '{"n":2}\n'
    assert sorted(tool.ok("journals", "read", first, second).text.split()) == [
        '{"n":1}',
        '{"n":2}',
    ]
    assert len(tool.ok("journals", "fragments", first, "-o", "json").text.splitlines()) == 1
    for command in ("reset-head", "suspend", "prune"):
        tool.ok("journals", command, first)
    # Names on the command line precede a selector of the INI file.
    (tool.directory / "gazctl.ini").write_text("[journals.read]\nSelector = topic=none\n")
    assert tool.ok("journals", "read", second).text == '{"n":2}\n'


@pytest.mark.parametrize(
    "command", ["list", "read", "append", "fragments", "prune", "reset-head", "suspend"]
)
def test_a_missing_journal_is_no_success(tool, topic, command):
    outcome = tool("journals", command, f"{topic}/a", f"{topic}/absent", stdin=b"")
    assert outcome.status == 1
    assert f"no such journal: {topic}/absent" in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    outcome = tool("journals", command, "--name", f"{topic}/absent", stdin=b"")
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert "topic=" not in outcome.stderr


@pytest.mark.parametrize("label", ["", "topic="])
def test_a_topic_instead_of_a_journal_is_told_how_it_is_selected(tool, topic, label):
    outcome = tool("journals", "read", f"{label}{topic}")
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert f"no such journal: {label}{topic}; `-l topic={topic}` selects" in outcome.stderr


def test_write_heads_and_sizes_are_listed_where_they_are_wanted(tool, topic):
    content = b"x" * 3000
    tool.ok("journals", "append", f"{topic}/b", stdin=content)
    selector = ["-l", f"topic={topic}"]
    assert rows(tool.ok("journals", "list", *selector, "--heads").text) == [
        ["NAME", "HEAD", "SIZE"],
        [f"{topic}/a", "8", "8 B"],
        [f"{topic}/b", "3000", "2.9 KiB"],
    ]
    assert "HEAD" not in tool.ok("journals", "list", *selector, "--rf").text
    tool.ok("journals", "suspend", "--force", f"{topic}/b")  # it keeps one replica
    wide = tool.ok("journals", "list", *selector, "-o", "wide", "-L", "topic").text.splitlines()
    assert wide[0].split() == [
        "NAME",
        "RF",
        "PRIMARY",
        "REPLICAS",
        "STORES",
        "HEAD",
        "SIZE",
        "TOPIC",
    ]
    assert re.search(r"file:/// +8 +8 B +t", wide[1])
    assert re.search(r"<S> .*file:/// +3000 ", wide[2])


def test_what_is_in_no_store_is_listed_with_the_number_of_brokers_that_have_it(tool, topic):
    tool.ok("journals", "append", f"{topic}/b", stdin=b"x" * 3000)
    header, *listed = rows(tool.ok("journals", "list", "-l", f"topic={topic}", "--unstored").text)
    assert header == ["NAME", "UNSTORED", "HOLDERS"]
    # It may have been stored meanwhile.
    assert listed[0] in ([f"{topic}/a", "8", "B", "1"], [f"{topic}/a", "8 B", "1"],
                         [f"{topic}/a", "0 B", "<none>"])  # fmt: skip
    assert listed[1] in ([f"{topic}/b", "2.9 KiB", "1"], [f"{topic}/b", "0 B", "<none>"])


def test_a_journal_without_content_and_one_that_is_suspended_have_heads(tool, topic):
    tool.ok("journals", "suspend", f"{topic}/b")
    assert rows(tool.ok("journals", "list", f"{topic}/b", "--heads").text)[1] == [
        f"{topic}/b",
        "0",
        "<none>",
    ]


def test_a_terminal_gets_borders_and_a_pipe_plain_columns(tool, topic, cluster, tmp_path):
    arguments = ["journals", "list", "-l", f"topic={topic}"]
    environ = {"GAZETTE_ADDRESS": cluster.address}
    shown = on_a_terminal(GAZCTL, arguments, tmp_path, environ, "stdout")
    assert "┌" in shown
    with start_tool(GAZCTL, arguments, tmp_path, environ) as process:
        piped, _ = process.communicate(timeout=TIMEOUT_S)
    assert piped.decode().splitlines() == ["NAME", f"{topic}/a", f"{topic}/b"]


# ------------------------------------------------------------------- --timeout


def test_a_timeout_ends_a_follower_with_its_offsets_saved(tool, topic):
    arguments = ["journals", "read", f"{topic}/a", "--block", "--timeout", "1s"]
    outcome = tool(*arguments, "--offsets-out", "o.json", "-n", "2")
    assert (outcome.status, outcome.text) == (124, '{"n":1}\n')
    assert "did not end within 1s (--timeout); 1 messages were read" in outcome.stderr
    assert json.loads((tool.directory / "o.json").read_text()) == {f"{topic}/a": 8}
    outcome = tool(*arguments, "-n", "1")
    assert outcome.status == 0


def test_a_timeout_of_the_environment_ends_a_watch(tool, topic):
    outcome = tool(
        *("journals", "list", "-l", f"topic={topic}", "--watch"),
        environ={"GAZCTL_TIMEOUT": "500ms"},
    )
    assert (outcome.status, outcome.text.splitlines()[0]) == (124, "NAME")
    assert outcome.stderr == "gazctl: `journals list` did not end within 500ms (--timeout)\n"


def test_a_timeout_of_an_append_says_what_is_in_doubt(topic, cluster, tmp_path):
    environ = {"GAZETTE_ADDRESS": cluster.address}
    arguments = ["journals", "append", f"{topic}/b", "-f", "lines", "--timeout=1s"]
    with start_tool(GAZCTL, arguments, tmp_path, environ, stdin=subprocess.PIPE) as process:
        assert process.wait(TIMEOUT_S) == 124  # it waits for input
        assert b"may have been appended" in process.stderr.read()


def test_a_broker_that_does_not_answer_is_waited_for_no_longer_than_the_timeout(tmp_path):
    """A broker that accepts connections, and then hangs."""
    arguments = ["dev", "--data", "data", "--port=0"]
    with start_tool("gazette_sdk.cli.gazette", arguments, tmp_path) as dev:
        address = re.search(r"http://\S+", read_until(dev, b"stops it").decode())[0]
        dev.send_signal(signal.SIGSTOP)
        try:
            for command in ("list", "read", "append", "fragments", "suspend"):
                arguments = ["journals", command, "an/example", "--timeout", "1s"]
                environ = {"GAZETTE_ADDRESS": address}
                with start_tool(GAZCTL, arguments, tmp_path, environ) as process:
                    _, errors = process.communicate(timeout=TIMEOUT_S)
                assert process.returncode == 124, (command, errors)
                assert b"did not end within 1s" in errors
        finally:
            dev.send_signal(signal.SIGCONT)
            dev.terminate()
            dev.communicate(timeout=TIMEOUT_S)
