"""``gazctl journals read`` by messages: ``-n`` and ``--since``."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from gazette_sdk.message.uuid import OUTSIDE_TXN, build_uuid, clock_of_time
from support.tools import read_until, start_tool

GAZCTL = "gazette_sdk.cli.gazctl"
TIMEOUT_S = 30.0
NOW = datetime.now(UTC)


def make(tool, *journals):
    """Journals with names that end in these, by the content types in pairs with them."""
    name = f"t{uuid.uuid4().hex[:8]}"
    children = [
        {
            "name": f"{name}/{part}",
            "labels": [{"name": "content-type", "value": content_type}] if content_type else [],
        }
        for part, content_type in journals
    ]
    specs = {
        "replication": 1,
        "fragment": {"length": 65536, "compression_codec": "NONE", "refresh_interval": "1s"},
        "children": children,
    }
    tool.ok("journals", "apply", stdin=yaml.safe_dump(specs).encode())
    return [f"{name}/{part}" for part, _ in journals]


def append(tool, journal, content):
    tool.ok("journals", "append", journal, stdin=content)


def uuid_at(age):
    return str(build_uuid(b"\x01bcdef", clock_of_time(NOW - age), OUTSIDE_TXN))


def line(number, age):
    return b'{"UUID":"%b","n":%d}\n' % (uuid_at(age).encode(), number)


def test_a_number_of_lines_is_read_and_the_offset_is_behind_the_last_one(tool):
    (journal,) = make(tool, ("a", ""))
    lines = [b"line %d\n" % number for number in range(30_000)]  # several chunks
    append(tool, journal, b"".join(lines))
    offsets = tool.directory / "o.json"
    offsets.write_text("{}")
    arguments = ["journals", "read", journal, "--offsets", "o.json", "--offsets-out", "o.json"]
    done = 0
    for count in (1, 3, 20_000, 5):
        found = tool.ok(*arguments, "-n", str(count)).stdout
        assert found == b"".join(lines[done : done + count])
        done += count
        assert json.loads(offsets.read_text()) == {journal: len(b"".join(lines[:done]))}
    assert tool.ok(*arguments, "-n", "20000").stdout == b"".join(lines[done:])
    assert tool.ok(*arguments, "-n", "20000").stdout == b""


def test_the_number_counts_messages_of_all_journals_together(tool):
    names = make(tool, ("a", "application/x-ndjson"), ("b", "text/csv"))
    append(tool, names[0], b'{"n":1}\n' * 4)
    append(tool, names[1], b'1,"two\nlines"\n' * 4)
    found = tool.ok("journals", "read", *names, "-n", "6").text
    in_json = found.count('{"n":1}\n')
    assert found.replace('{"n":1}\n', "") == '1,"two\nlines"\n' * (6 - in_json)
    assert len(tool.ok("journals", "read", *names, "-n", "100").stdout) == 4 * 8 + 4 * 14


def test_messages_behind_a_fixed_header_are_counted_as_such(tool):
    (journal,) = make(tool, ("a", "application/x-protobuf-fixed"))
    frames = [
        b"\x66\x33\x93\x36" + length.to_bytes(4, "little") + b"\n" * length for length in (5, 0, 9)
    ]
    append(tool, journal, b"".join(frames))
    assert tool.ok("journals", "read", journal, "-n", "2").stdout == b"".join(frames[:2])
    append(tool, journal, b"no frame")
    outcome = tool("journals", "read", journal, "-n", "9")
    assert (outcome.status, outcome.stdout) == (1, b"".join(frames))
    assert journal in outcome.stderr
    assert tool.ok("journals", "read", journal).stdout == b"".join(frames) + b"no frame"


def test_a_line_without_end_is_read_only_where_no_rest_is_waited_for(tool):
    (journal,) = make(tool, ("a", ""))
    append(tool, journal, b"one\ntw")
    assert tool.ok("journals", "read", journal, "-n", "2").stdout == b"one\ntw"
    arguments = ["journals", "read", journal, "--block", "--timeout=1s", "--offsets-out=o.json"]
    outcome = tool(*arguments, "-n", "2")
    assert (outcome.status, outcome.stdout) == (124, b"one\n")
    assert json.loads((tool.directory / "o.json").read_text()) == {journal: 4}
    append(tool, journal, b"o\n")
    assert tool.ok(*arguments, "-n", "2").stdout == b"one\ntwo\n"


def test_a_follower_ends_with_the_first_new_message(tool, cluster, tmp_path):
    (journal,) = make(tool, ("a", ""))
    append(tool, journal, b"old\n")
    arguments = ["journals", "read", journal, "--tail", "--block", "-n", "1"]
    environ = {"GAZETTE_ADDRESS": cluster.address}
    with start_tool(GAZCTL, arguments, tmp_path, environ) as process:
        while process.poll() is None:  # until one arrives, the tail may not have begun
            append(tool, journal, b"new\n")
        found, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, found) == (0, b"new\n"), errors


@pytest.mark.parametrize("form", ["duration", "utc", "zone"])
def test_messages_since_a_time_are_read(tool, form):
    names = make(
        tool, ("a", "application/x-ndjson"), ("b", "text/csv"), ("c", ""), ("d", "application/x")
    )
    ages = [timedelta(hours=3), timedelta(hours=1), timedelta(hours=2, seconds=1), timedelta()]
    for number, age in enumerate(ages):
        append(tool, names[0], line(number, age))
        append(tool, names[1], f"{uuid_at(age)},{number}\n".encode())
    append(tool, names[0], b'{"n":"without UUID"}\nno JSON\n')
    for name in names[2:]:
        append(tool, name, line(0, ages[0]))
    since = NOW - timedelta(hours=2)
    text = {
        "duration": "2h",
        "utc": since.isoformat().replace("+00:00", "Z"),
        "zone": since.astimezone().isoformat(),
    }[form]
    read = ["journals", "read", "--since", text]
    assert tool.ok(*read, names[0]).stdout == (
        line(1, ages[1]) + line(3, ages[3]) + b'{"n":"without UUID"}\nno JSON\n'
    )
    assert tool.ok(*read, names[0], "-n", "1").stdout == line(1, ages[1])
    assert [row.split(",")[1] for row in tool.ok(*read, names[1]).text.splitlines()] == ["1", "3"]
    for name in names[2:]:  # nothing says where a UUID is
        assert tool.ok(*read, name).stdout == line(0, ages[0])


def test_a_journal_with_an_offset_begins_there_in_spite_of_since(tool):
    first, second = make(tool, ("a", "application/x-ndjson"), ("b", "application/x-ndjson"))
    for name in (first, second):
        append(tool, name, line(1, timedelta(hours=3)) + line(2, timedelta()))
    (tool.directory / "o.json").write_text(json.dumps({first: 0}))
    arguments = ["--since=1h", "--offsets=o.json", "--offsets-out=o.json"]
    found = tool.ok("journals", "read", first, second, *arguments).stdout.splitlines(keepends=True)
    assert sorted(found) == sorted([line(1, timedelta(hours=3)), *[line(2, timedelta())] * 2])
    assert tool.ok("journals", "read", first, second, *arguments).stdout == b""


def test_a_follower_since_a_time_goes_on_behind_it(tool, cluster, tmp_path):
    (journal,) = make(tool, ("a", "application/x-ndjson"))
    append(tool, journal, line(1, timedelta(hours=3)) + line(2, timedelta()))
    arguments = ["journals", "read", journal, "--since=1h", "--block"]
    environ = {"GAZETTE_ADDRESS": cluster.address}
    with start_tool(GAZCTL, [*arguments, "-n2"], tmp_path, environ) as process:
        assert read_until(process, b"\n") == line(2, timedelta())
        append(tool, journal, line(3, timedelta(days=1)) + line(4, timedelta()))
        rest, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, rest) == (0, line(4, timedelta()))
