"""Replay of recorded calls of other implementations' ``gazctl``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.golden_gazctl import plain_cells
from support.golden_journals import CASES, PATTERN, append, golden_tool, replay, state, store

__all__ = ["golden_tool", "state"]


@pytest.fixture
def tool(golden_tool):
    """``gazctl`` beside the cluster of the recordings."""
    return golden_tool


@pytest.mark.parametrize(
    "name",
    [
        "list table",
        "list table, all columns",
        "list table, primary",
        "list table, multi-valued label",
        "list yaml",
        "list yaml, one journal",
        "list yaml, several directories",
        "list json",
        "list proto",
        "list nothing, table",
        "list nothing, yaml",
        "list nothing, json",
        "list nothing, proto",
        "list bad selector",
        "list selector the broker refuses",
    ],
)
def test_list(tool, cluster, name):
    replay(tool, cluster, name)


def test_list_tells_of_an_unreachable_broker(tool, cluster, monkeypatch):
    monkeypatch.setattr("gazette_sdk.cli.client.CONNECT_TIMEOUT_S", 0.5)
    outcome = replay(tool, cluster, "list, broker unreachable")
    assert "http://127.0.0.1:28099" in outcome.stderr
    assert "check that a broker runs" in outcome.stderr


def test_apply_and_edit(tool, cluster):
    for name in (
        "apply dry run",
        "apply",
        "apply again (revision 0 means create)",
        "list yaml of what was applied",
        "apply, strict decoding error",
        "apply, tree validation error: directory without children",
        "apply, tree validation error: child out of order",
        "apply, tree validation error: child outside",
        "apply, tree validation error: revision on a directory",
        "apply, request validation error",
        "apply, empty input",
        "apply, file missing",
        "apply, revision ignored",
        "apply deletes with max-txn-size",
        "list json after the deletes",
    ):
        replay(tool, cluster, name)

    def script(*lines):
        first = 'n=$(cat count 2>/dev/null || echo 0); echo $((n + 1)) > count; file="$2"'
        (tool.directory / "script").write_text("\n".join([first, *lines]))
        (tool.directory / "count").unlink(missing_ok=True)

    change = 'sed -i "s/^  length: .*/  length: 131072/" "$file"'
    spoil = 'sed -i "s/^replication: .*/replication: 7/" "$file"'
    script('cp "$file" shown')
    shown = replay(tool, cluster, "edit, nothing changed")
    assert "nothing to do" in shown.stderr
    recorded = CASES["edit, nothing changed"]["files"]["shown"].splitlines()
    found = (tool.directory / "shown").read_text().splitlines()
    assert found[:-1] == recorded[:-1]  # the last line is the revision
    script(': > "$file"')
    assert "empty" in replay(tool, cluster, "edit, file emptied").stderr
    script(change)
    replay(tool, cluster, "edit, good change")
    assert b"length: 131072" in tool.ok("journals", "list", "-o", "yaml").stdout

    script(f'cp "$file" shown; if [ $n = 0 ]; then {spoil}; else {spoil.replace("7", "1")}; fi')
    replay(tool, cluster, "edit, bad change, then mended")
    lines = (tool.directory / "shown").read_text().splitlines()
    assert lines[:4] == recorded[:4]
    assert lines[4].startswith("#⚠ There were errors")
    assert "invalid replication (7" in lines[6]
    assert lines[8] == "#⚙ Note: Any line numbers above do not include this header (10 lines)."

    script(f"if [ $n = 0 ]; then {spoil}; fi")
    given_up = replay(tool, cluster, "edit, bad change, then left as it is")
    kept = Path(given_up.stderr.split("saved to ")[1].strip().rstrip("."))
    assert "replication: 7" in kept.read_text()
    kept.unlink()
    script("exit 3")
    replay(tool, cluster, "edit, editor fails")
    # The recorded tool ended here, and lost the edits; ours opens the editor again.
    script(
        'if [ $n = 0 ]; then sed -i "s/^revision: .*/revision: 1/; s/131072/65536/" "$file"; '
        'else : > "$file"; fi'
    )
    replay(tool, cluster, "edit, revision is stale (RPC fails)")
    assert (tool.directory / "count").read_text() == "2\n"
    replay(tool, cluster, "edit, no match")


@pytest.mark.parametrize(
    "name",
    [
        "append lines, modulo",
        "append lines, rendezvous",
        "append lines, direct",
        "append fixed, modulo",
        "append lines, modulo, base64",
    ],
)
def test_append_to_partitions(tool, cluster, name):
    replay(tool, cluster, name)
    encoding = "latin-1" if "fixed" in name else "utf-8"
    for journal, content in CASES[name]["journal_contents"].items():
        found = tool.ok("journals", "read", "-l", f"name={journal}").stdout
        if "direct" in name:  # the recorded tool found no journal
            lines = CASES[name]["stdin"].splitlines(keepends=True)
            pairs = zip(lines[::2], lines[1::2], strict=True)
            wanted = "".join(record for key, record in pairs if key.strip() == journal)
            assert wanted
            assert found == wanted.encode()
        else:
            assert found == content.encode(encoding)


def test_append_of_one_journal_and_read(tool, cluster):
    for name in (
        "append lines, direct, one journal",
        "append none",
        "append lines, random, one journal",
        "append none with modulo",
        "append base64 without lines",
        "append, no match",
        "append lines, modulo, no match",
        "append lines, record without newline",
        "append lines, key without record",
        "append fixed, truncated",
        "append fixed, no header",
        "append base64, bad key",
        "read",
        "read with offsets-out",
    ):
        replay(tool, cluster, name)
    assert sorted((tool.directory / "out").read_bytes().splitlines()) == sorted(
        b"whole input\nas one append\none\ntwo\n".splitlines()
    )
    # Records before a broken one are appended, where the recorded tool dropped them.
    assert tool.ok("journals", "read", "-l", "name=lines/rnd/part-002").stdout == b"one\n"
    assert tool.ok("journals", "read", "-l", "name=lines/rnd/part-003").stdout.endswith(b"good")
    append(tool, "lines/rnd/part-000", b"new\n")
    name = "read resumed, same offsets file"
    case = CASES[name]
    # Ours has a record in one of the journals, see above.
    (tool.directory / "offsets.json").write_text(
        json.dumps({**json.loads(case["files"]["offsets.json.previous"]), "lines/rnd/part-002": 4})
    )
    case["files"]["offsets.json"] = case["files"]["offsets.json"].replace('002":0', '002":4')
    case["files"].pop("offsets.json.previous")
    replay(tool, cluster, name)
    assert (tool.directory / "out2").read_bytes() == b"new\n"
    assert (tool.directory / "offsets.json.previous").exists()
    replay(tool, cluster, "read tail")


def test_read(tool, cluster):
    for name in (
        "read, offset jump",
        "read, no match",
        "read, no match, offsets-out",
        "read, offsets missing",
        "read, with cache, stored fragment without file root",
        "read, with cache and file root",
        "read, fully suspended journal",
        "read --from",
    ):
        replay(tool, cluster, name)
    assert (tool.directory / "holes").read_bytes() == PATTERN[:1100] + PATTERN[4400:5500]
    (tool.directory / "bad.json").write_text("[]")
    replay(tool, cluster, "read, offsets no object")


@pytest.mark.parametrize(
    "name",
    [
        "fragments table",
        "fragments json",
        "fragments proto",
        "fragments table with URL",
        "fragments json with URL",
        "fragments json, a fully suspended journal matches",
        "fragments table, a fully suspended journal matches",
        "fragments of nothing, table",
        "fragments of nothing, json",
        "fragments of nothing, proto",
    ],
)
def test_fragments(tool, cluster, name):
    replay(tool, cluster, name)


def test_prune(tool, cluster):
    before = stored(cluster, "prune")
    for name in (
        "prune dry run",
        "prune dry run, retention 0",
        "prune dry run, a fully suspended journal matches",
        "prune, file store (the tool has no file root)",
        "prune, no match",
    ):
        replay(tool, cluster, name)
    assert stored(cluster, "prune") == before
    selected = ("journals", "prune", "-l", "prefix=prune/")
    aged = {"journal": "prune/aged", "fragments": 2, "bytes": 2200}
    kept = {"journal": "prune/keep", "fragments": 2, "bytes": 2200}
    two, none = ({"pruned_fragments": n, "pruned_bytes": 1100 * n} for n in (2, 0))
    dry = tool.ok(*selected, "-o", "json")
    shown = [json.loads(line) for line in dry.text.splitlines()]
    assert shown == [aged | two | {"dry_run": True}, kept | none | {"dry_run": True}]
    assert "add --yes" in dry.stderr
    assert stored(cluster, "prune") == before
    both = tool(*selected, "--yes", "--dry-run")
    assert both.status == 1
    assert "give one of them" in both.stderr
    root = str(cluster.file_root)
    rootless = tool(*selected, "--yes")
    assert rootless.status == 1
    assert "--file-root" in rootless.stderr
    assert stored(cluster, "prune") == before
    done = tool.ok(*selected, "--yes", "--file-root", root)
    rows = [[*row] for row in plain_cells(done.text)]
    assert rows[1:] == [
        ["prune/aged", "2", "2.1 KiB", "2", "2.1 KiB"],
        ["prune/keep", "2", "2.1 KiB", "0", "0 B"],
        ["TOTAL", "4", "4.3 KiB", "2", "2.1 KiB"],
    ]
    assert stored(cluster, "prune/aged") == set()
    assert stored(cluster, "prune/keep") == {each for each in before if "keep" in str(each)}


def stored(cluster, journal):
    return {path for path in (cluster.file_root / journal).rglob("*") if path.is_file()}


def test_reset_head_and_suspend(tool, cluster):
    append(tool, "reset/ahead", b"ten bytes.")
    append(tool, "reset/fine", b"ten bytes.")
    store(cluster.file_root, "reset/ahead", 0, PATTERN[:100], 1700000000)
    # The brokers' next look at the store finds more than they remember.
    ends = 0
    while ends < 100:
        listed = tool.ok("journals", "fragments", "-l", "name=reset/ahead", "-o", "json").text
        ends = max(json.loads(line)["spec"]["end"] for line in listed.splitlines())
    refused = tool("journals", "append", "-l", "name=reset/ahead", stdin=b"more")
    assert refused.status == 1
    assert "INDEX_HAS_GREATER_OFFSET" in refused.stderr
    assert "reset-head" in refused.stderr
    for name in ("reset-head", "reset-head, fully suspended", "reset-head, no match"):
        replay(tool, cluster, name)
    append(tool, "reset/ahead", b"more")
    for name in (
        "suspend, empty journals",
        "suspend, again",
        "suspend, local content",
        "suspend --force",
        "suspend --force again",
        "list of suspended journals",
        "list yaml of suspended journals",
        "suspend, no match",
    ):
        replay(tool, cluster, name)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("store-health")])
def test_store_health(tool, cluster, name):
    replay(tool, cluster, name)


def test_attach_uuids(tool, cluster):
    replay(tool, cluster, "attach-uuids, template without UUID")


APART = {
    "read several": "the order of journals is open: test_read_and_append.py",
    "read --block, SIGINT after 1 s": "needs a process: test_processes.py",
    "attach-uuids": "UUIDs vary: test_attach_uuids.py",
}
"""Cases whose subject is tested elsewhere, and why."""


def test_every_recorded_case_is_replayed_or_accounted_for():
    source = Path(__file__).read_text()
    missing = [
        name
        for name in CASES
        if f'"{name}"' not in source.replace('": "', "") and not name.startswith("store-health")
    ]
    assert missing == [name for name in CASES if name in APART and name in missing]
