"""``gazctl shards`` against a broker, and a consumer process over scripted shards."""

from __future__ import annotations

import base64
import hashlib
import json
import time
import uuid

import pytest

from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from support.shard_services import consumer_spec, process_id
from support.vectors import GOLDEN, golden

PRIMARY, STANDBY, FAILED = 300, 200, 400
LOG = "application/x-gazette-recoverylog"


@pytest.fixture
def prefix():
    return f"shards-{uuid.uuid4().hex[:8]}"


def create(tool, name, content_type="application/x-ndjson", *, length=65536):
    spec = (
        f"name: {name}\nreplication: 1\nlabels: [{{name: content-type, value: {content_type}}}]\n"
        f"fragment: {{length: {length}, compression_codec: NONE, "
        'stores: ["file:///"], refresh_interval: 1s}\n'
    )
    outcome = tool("journals", "apply", stdin=spec.encode())
    assert outcome.status == 0, outcome.stderr


def spec_of(shard, prefix, **values):
    return cpb.ShardSpec(
        id=shard,
        sources=[cpb.ShardSpec.Source(journal=f"{prefix}/in")],
        recovery_log_prefix=f"{prefix}/logs",
        hint_prefix="/hints",
        hint_backups=1,
        max_txn_duration={"seconds": 1},
        **values,
    )


def document(prefix, *shards):
    lines = [
        "common:",
        f"  sources: [{{journal: {prefix}/in}}]",
        f"  recovery_log_prefix: {prefix}/logs",
        "  hint_prefix: /hints",
        "  hint_backups: 1",
        "  max_txn_duration: 1s",
        "shards:",
        *(f"- {shard}" for shard in shards),
    ]
    return "\n".join([*lines, ""]).encode()


def outcomes(outcome):
    assert outcome.status == 0, outcome.stderr
    found = map(json.loads, outcome.text.splitlines())
    return {each["shard"]: each["outcome"] for each in found}


# ---------------------------------------------------------------- list


def test_nothing_is_listed_in_every_format(shards):
    assert shards("list").text == "ID  STATUS\n"
    assert shards("list", "-o", "yaml").text == "common: {}\nshards: []\n"
    listed = json.loads(shards("list", "-o", "json").text)
    assert list(listed) == ["status", "header", "shards", "extension"]
    assert (listed["status"], listed["shards"], listed["extension"]) == ("OK", [], None)
    assert 'suffix: "aaaa"' in shards("list", "-o", "proto").text


def test_shards_are_listed_with_their_processes_labels_and_lag(shards, consumer, prefix):
    for name in ("in", "other"):
        create(shards.tool, f"{prefix}/{name}")
    appended = shards.tool("journals", "append", f"{prefix}/in", stdin=b"x" * 100)
    assert appended.status == 0, appended.stderr
    spec = spec_of("shard-a", prefix, hot_standbys=1)
    spec.labels.labels.add(name="a-label", value="one")
    spec.labels.labels.add(name="a-label", value="two")
    consumer.put(spec)
    consumer.put(spec_of("shard-b", prefix, disable=True))
    consumer.assign("shard-a", 0, code=FAILED, errors=("it failed\nbadly",))
    local = consumer.process.resolver.local.get("shard-a")
    consumer.do(
        local.change(is_ready=True, read_through={f"{prefix}/other": 0, f"{prefix}/in": 22})
    )
    checked = shards("list", "--fail-on", "failed")
    assert checked.status == 1
    assert "1 of 2 shards have failed, such as shard-a" in checked.stderr
    assert len(checked.text.splitlines()) == 3
    assert shards("list", "-l", "id=shard-b", "--fail-on", "failed").status == 0
    listed = shards("list", "--rf", "-p", "-r", "-L", "a-label", "--lag", "--errors")
    assert listed.status == 0, listed.stderr
    header, first, second = (line.split("  ") for line in listed.text.splitlines())
    assert [cell.strip() for cell in header if cell] == [
        "ID",
        "STATUS",
        "RF",
        "PRIMARY",
        "REPLICAS",
        "A-LABEL",
        "LAG",
        "ERRORS",
    ]
    assert [cell.strip() for cell in first if cell.strip()] == [
        "shard-a",
        "FAILED",
        "2",
        "aaaa:FAILED",
        "one,two",
        f"{prefix}/in:78, {prefix}/other:0",
        "it failed badly",
    ]
    assert [cell.strip() for cell in second if cell.strip()] == [
        "shard-b",
        "IDLE",
        "0",
        "<none>",
        "<none>",
        "<none>",
    ]
    assert "NO_SHARD_PRIMARY" in listed.stderr
    text = shards("list", "-l", "a-label=two", "-o", "yaml").text
    assert "- id: shard-a\n" in text
    assert "hot_standbys: 1" in text
    assert shards("list", "-l", "a in (").status == 1
    assert "--lag needs -o table" in shards("list", "--lag", "-o", "json").stderr


# ---------------------------------------------------------------- apply, edit


def test_specs_are_applied_and_listed_for_the_next_apply(shards, prefix):
    create(shards.tool, f"{prefix}/in")
    for shard in ("shard-a", "shard-b"):
        create(shards.tool, f"{prefix}/logs/{shard}", LOG)
    text = document(prefix, "{id: shard-b}", "{id: shard-a, hot_standbys: 1}")
    dry = shards("apply", "--dry-run", stdin=text)
    assert dry.status == 0, dry.stderr
    assert dry.text.count("upsert {") == 2
    assert json.loads(shards("list", "-o", "json").text)["shards"] == []
    assert outcomes(shards("apply", "-o", "json", stdin=text)) == {
        "shard-b": "created",
        "shard-a": "created",
    }
    assert outcomes(shards("apply", "-o", "json", stdin=text)) == {
        "shard-b": "unchanged",
        "shard-a": "unchanged",
    }
    listed = shards("list", "-o", "yaml").text
    assert set(outcomes(shards("apply", "-o", "json", stdin=listed.encode())).values()) == {
        "unchanged"
    }
    changed = listed.replace("hot_standbys: 1", "hot_standbys: 2").replace(
        "- id: shard-b", "- delete: true\n  id: shard-b"
    )
    table = shards("apply", stdin=changed.encode())
    assert [line.split() for line in table.text.splitlines()] == [
        ["SHARD", "OUTCOME"],
        ["shard-a", "updated"],
        ["shard-b", "deleted"],
    ]


def test_changes_that_cannot_be_applied_say_why(shards, prefix):
    create(shards.tool, f"{prefix}/in")
    create(shards.tool, f"{prefix}/plain", "text/plain")
    for shard in ("shard-a", "shard-b"):
        create(shards.tool, f"{prefix}/logs/{shard}", LOG)
    good = document(prefix, "{id: shard-a}")
    for text, words in (
        (good.replace(b"hint_backups", b"hint_backupz"), "line 5: unknown key 'hint_backupz'"),
        (good.replace(b"/in}", b"/none}"), f"named journal does not exist ({prefix}/none)"),
        (good.replace(b"/in}", b"/plain}"), "message framing: unrecognized content-type"),
        (good.replace(b"/logs", b"/nologs"), f"does not exist ({prefix}/nologs/shard-a)"),
        (good.replace(b"1s", b"0s"), "invalid max_txn_duration"),
        (document(prefix, "{id: shard-a, delete: true}"), "invalid expect_mod_revision"),
    ):
        outcome = shards("apply", stdin=text)
        assert outcome.status == 1, text
        assert words in outcome.stderr
        assert outcome.stderr.count("\n") == 1
        assert shards("apply", "--dry-run", stdin=text).status == 1
    log_is_plain = good.replace(b"recovery_log_prefix: " + f"{prefix}/logs".encode(), b"x")
    assert shards("apply", stdin=log_is_plain).status == 1
    assert shards("apply", "--specs", "/does/not/exist").status == 1
    for nothing in (b"", b"common: {}\n", b"common: {}\nshards: []\n"):
        outcome = shards("apply", stdin=nothing)
        assert (outcome.status, outcome.text) == (0, "")


def test_a_conflict_names_the_shard_and_what_was_applied_before(shards, prefix):
    create(shards.tool, f"{prefix}/in")
    for shard in ("shard-a", "shard-b"):
        create(shards.tool, f"{prefix}/logs/{shard}", LOG)
    assert shards("apply", stdin=document(prefix, "{id: shard-b}")).status == 0
    text = document(prefix, "{id: shard-a}", "{id: shard-b, hot_standbys: 1}")
    both = shards("apply", "-o", "json", stdin=text)
    assert (both.status, both.text) == (1, "")
    assert "ETCD_TRANSACTION_FAILED" in both.stderr
    assert "shard-b has revision" in both.stderr
    batches = shards("apply", "-o", "json", "--max-txn-size", "1", stdin=text)
    assert batches.status == 1
    assert json.loads(batches.text) == {"shard": "shard-a", "outcome": "created"}
    assert "the first 1 of 2 changes were applied before" in batches.stderr


def test_specs_are_edited(shards, consumer, prefix):
    create(shards.tool, f"{prefix}/in")
    create(shards.tool, f"{prefix}/logs/shard-a", LOG)
    consumer.put(spec_of("shard-a", prefix))

    def edited(script):
        return shards("edit", "-l", "id=shard-a", environ={"GAZ_EDITOR": script})

    assert "nothing to do" in edited("true").stderr
    assert "nothing was applied" in edited("false").stderr
    outcome = edited("sed -i 's/max_txn_duration: 1s/max_txn_duration: 3s/'")
    assert outcome.status == 0, outcome.stderr
    assert "updated" in outcome.stderr
    assert "max_txn_duration: 3s" in shards("list", "-o", "yaml").text
    twice = edited("sed -i -e 's/_duration: 0s/_duration: 4s/' -e 's/_duration: 3s/_duration: 0s/'")
    assert twice.status == 0, twice.stderr
    assert "max_txn_duration: 4s" in shards("list", "-o", "yaml").text
    nothing = shards("edit", "-l", "id=nope")
    assert nothing.status == 1
    assert "no shards match the selector 'id=nope'" in nothing.stderr
    assert "--selector was not given" in shards("edit").stderr


# ---------------------------------------------------------------- unassign


def test_shards_are_unassigned(shards, consumer, prefix):
    for shard, code in (("shard-a", PRIMARY), ("shard-b", FAILED), ("shard-c", STANDBY)):
        consumer.put(spec_of(shard, prefix))
        consumer.assign(
            shard,
            int(code == STANDBY),
            code=code,
            errors=("why",) if code == FAILED else (),
        )

    def rows(*arguments):
        outcome = shards("unassign", *arguments)
        assert outcome.status == 0, outcome.stderr
        return [line.split("  ") for line in outcome.text.splitlines()[1:]]

    assert rows("-l", "id", "--failed", "--dry-run") == [["shard-b", "to unassign", "aaaa:FAILED"]]
    assert rows("-l", "id", "--failed") == [["shard-b", "unassigned", "aaaa:FAILED"]]
    assert rows("-l", "id", "--failed") == []
    assert rows("-l", "id") == [["shard-a", "unassigned", "aaaa:PRIMARY"]]
    assert "no shard is to be unassigned" in shards("unassign", "-l", "id=nope").stderr
    missing = shards("unassign")
    assert (missing.status, "--selector was not given" in missing.stderr) == (1, True)


# ---------------------------------------------------------------- recover


def test_a_recorded_store_is_recovered(shards, consumer, prefix, tmp_path):
    recording = golden("consumer/recoverylog/json-store.json")
    shard = recording["log"].rpartition("/")[2]
    create(shards.tool, recording["log"], LOG)
    content = (GOLDEN / "consumer/recoverylog/json-store.log.bin").read_bytes()
    assert shards.tool("journals", "append", recording["log"], stdin=content).status == 0
    spec = spec_of(shard, prefix)
    spec.recovery_log_prefix = recording["log"].rpartition("/")[0]
    consumer.put(spec)
    hints = rpb.FSMHints.FromString(base64.b64decode(recording["played"]["none"]["hints_proto"]))
    for key, value in ((None, None), ("backup.0", hints), ("primary", hints)):
        if value is not None:
            consumer.put_hints(shard, key, value)
        directory = tmp_path / f"recovered-{key}"
        directory.mkdir()
        (directory / "left-over").write_bytes(b"from before")
        outcome = shards("recover", "--id", shard, "-d", str(directory))
        assert outcome.status == 0, outcome.stderr
        found = {
            "/" + str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in directory.rglob("*")
            if path.is_file()
        }
        assert found == {each["path"]: each["sha256"] for each in recording["recovered_files"]}
        assert "state.json" in outcome.text
    unknown = shards("recover", "--id", "nope", "-d", str(tmp_path / "x"))
    assert unknown.status == 1
    assert "no shard exists with the given id" in unknown.stderr
    assert "--dir was not given" in shards("recover", "--id", "nope").stderr
    consumer.put(cpb.ShardSpec(id="no-log", max_txn_duration={"seconds": 1}))
    assert "no recovery log" in shards("recover", "--id", "no-log", "-d", "x").stderr


# ---------------------------------------------------------------- prune

PIECE = 2000


def a_log(tool, name, pieces):
    """A log of stored fragments, and the number of them."""
    create(tool, name, LOG, length=1024)
    for _ in range(pieces + 1):  # the last one stays open
        assert tool("journals", "append", name, stdin=b"x" * PIECE).status == 0
    deadline = time.monotonic() + 60
    while len(stored(tool, name)) < pieces:
        assert time.monotonic() < deadline
        time.sleep(0.1)  # until the broker has stored them


def stored(tool, name):
    text = tool("journals", "fragments", name, "-o", "json").text
    found = [json.loads(line)["spec"] for line in text.splitlines()]
    return sorted(each.get("begin", 0) for each in found if each.get("backing_store"))


def hints_at(log, offset, end=0, segment_log=""):
    hints = rpb.FSMHints(log=log)
    segment = {"author": 1, "first_seq_no": 1, "last_seq_no": 2, "first_offset": offset}
    hints.live_nodes.add(fnode=1).segments.add(**segment, last_offset=end, log=segment_log)
    return hints


def forked_hints(prefix):
    """Hints of shard-b: what it needs was made by shard-a, in its log."""
    log = f"{prefix}/logs/shard-a"
    forked = hints_at(f"{prefix}/logs/shard-b", PIECE, 2 * PIECE, segment_log=log)
    segment = forked.live_nodes[0].segments.add()
    segment.CopyFrom(hints_at(log, 0).live_nodes[0].segments[0])
    segment.first_seq_no, segment.last_seq_no, segment.log = 3, 4, ""
    return forked


def test_fragments_that_no_hints_need_are_pruned(shards, consumer, cluster, prefix):
    tool = shards.tool
    logs = [f"{prefix}/logs/shard-{letter}" for letter in "abc"]
    for log in logs:
        a_log(tool, log, 4)
    for letter in "abc":
        consumer.put(spec_of(f"shard-{letter}", prefix))

    put_hints = consumer.put_hints
    put_hints("shard-a", "primary", hints_at(logs[0], 3 * PIECE))
    put_hints("shard-a", "backup.0", hints_at(logs[0], 2 * PIECE))
    put_hints("shard-b", "primary", hints_at(logs[1], 3 * PIECE))  # it has no backup
    # Its hints need everything from the third piece of the log of shard-a, too.
    put_hints("shard-c", "primary", hints_at(logs[2], PIECE))
    put_hints("shard-c", "backup.0", rpb.FSMHints(log=logs[2]))

    dry = shards("prune", "-l", "id", "-o", "json")
    assert dry.status == 0, dry.stderr
    (found,) = map(json.loads, dry.text.splitlines())
    assert (found["log"], found["fragments"], found["pruned_fragments"], found["dry_run"]) == (
        logs[0],
        5,
        2,
        True,
    )
    assert "nothing was removed" in dry.stderr
    for log in logs[1:]:
        assert f"journal={log}" in dry.stderr
    assert [len(stored(tool, log)) for log in logs] == [4, 4, 4]

    refused = shards("prune", "-l", "id", "--yes")
    assert refused.status == 1
    assert "--file-root" in refused.stderr
    assert shards("prune", "-l", "id", "--yes", "--dry-run").status == 1
    done = shards("prune", "-l", "id", "--yes", "--file-root", str(cluster.file_root))
    assert done.status == 0, done.stderr
    assert "TOTAL" in done.text
    files = sorted(path.name[:16] for path in (cluster.file_root / logs[0]).glob("*"))
    assert [int(name, 16) for name in files] == [2 * PIECE, 3 * PIECE]
    assert len(list((cluster.file_root / logs[1]).glob("*"))) == 4


def test_a_log_of_a_shard_that_is_not_selected_is_kept(shards, consumer, prefix):
    log = f"{prefix}/logs/shard-a"
    a_log(shards.tool, log, 2)
    for shard in ("shard-a", "shard-b"):
        consumer.put(spec_of(shard, prefix))
    forked = forked_hints(prefix)
    for key in ("primary", "backup.0"):
        consumer.put_hints("shard-a", key, hints_at(log, PIECE))
        consumer.put_hints("shard-b", key, forked)
    fork = shards("prune", "-l", "id=shard-b", "-o", "json")
    assert f"journal={log}" in fork.stderr
    assert "it is the log of shard shard-a, not selected" in fork.stderr
    alone = shards("prune", "-l", "id=shard-a", "-o", "json")
    assert json.loads(alone.text)["pruned_fragments"] == 1
    nothing = shards("prune", "-l", "id=nope")
    assert (nothing.status, nothing.text) == (0, "")
    assert "--selector was not given" in shards("prune").stderr


def test_a_log_that_another_shard_needs_is_not_deleted(shards, consumer, prefix):
    log = f"{prefix}/logs/shard-a"
    a_log(shards.tool, log, 2)
    for shard in ("shard-a", "shard-b"):
        consumer.put(spec_of(shard, prefix))
    consumer.put_hints("shard-b", "backup.0", forked_hints(prefix))
    refused = shards("delete", "-l", "id=shard-a", "--with-log", "--yes")
    assert refused.status == 1
    assert f"shard-b needs {log}, the log of shard-a" in refused.stderr
    assert outcomes(shards("delete", "-l", "id=shard-a", "--yes", "-o", "json")) == {
        "shard-a": "deleted"
    }
    assert len(stored(shards.tool, log)) == 2


def test_shards_that_cannot_be_reset_say_why(shards, consumer, prefix, monkeypatch):
    create(shards.tool, f"{prefix}/in")
    spec = spec_of("shard-a", prefix)
    consumer.put(spec)
    reset = ("reset", "-l", "id=shard-a", "--to", "end")
    without_log = shards(*reset)
    assert without_log.status == 1
    assert f"{prefix}/logs/shard-a, the log of shard-a, does not exist" in without_log.stderr
    spec.recovery_log_prefix = spec.hint_prefix = ""
    consumer.put(spec)
    in_sql = shards(*reset)
    assert in_sql.status == 1
    assert "empty its tables there, and reset it with --keep-state" in in_sql.stderr

    monkeypatch.setattr("gazette_sdk.cli.shards.reset.RELEASE_TIMEOUT_S", 0.3)
    consumer.assign("shard-a", 0, code=PRIMARY)  # and nothing takes it back
    held = shards(*reset, "--keep-state")
    assert held.status == 1
    assert "shard-a is still held by aaaa after 0 s; the shards are disabled" in held.stderr


def test_help_has_examples(shards):
    for command in ("list", "apply", "delete", "edit", "unassign", "reset", "recover", "prune"):
        text = shards(command, "--help").text
        assert f"gazctl shards {command}" in text
        assert "--consumer.address" in text
    assert process_id("aaaa") == consumer_spec("aaaa").process_spec.id
