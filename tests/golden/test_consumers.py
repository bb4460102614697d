"""Lives of two shards and three processes, as recorded of another consumer: calls, keys, commands.

Real processes do what was done to the recorded ones. Where ours differ on purpose, it says why.
"""

from __future__ import annotations

import json
import re

import pytest

from support.golden_consumers import running, transactions
from support.golden_gazctl import our_output, plain_cells, recorded_output
from support.golden_lifecycle import CALLS, COMMANDS, SPECS, play, recorded_phases
from support.vectors import golden

RECORDED = recorded_phases()

OTHER_METRICS = (
    *("grpc_client_", "promhttp_"),
    *("process_network_", "process_virtual_memory_max_bytes"),
)
"""Begins of names of metrics of libraries that ours do not use."""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    with running(tmp_path_factory.mktemp("consumers"), SPECS) as consumers:
        play(consumers)
    return consumers


# ------------------------------------------------------------------ calls

MENDED_CALLS = {
    33: "code UNKNOWN (Changes[0].PrimaryHints.Log: expected hints of the shard's recovery log",
    60: "code OK (SHARD_STOPPED) where DEADLINE_EXCEEDED was recorded",
}
"""Hints without a log would fail the next recovery, and are refused. A shard that failed before its
store was ready says so at once."""


@pytest.mark.parametrize(
    "number", range(len(CALLS)), ids=[f"{n} {call['name']}" for n, call in enumerate(CALLS)]
)
def test_a_call_is_answered_as_recorded(played, number):
    problems = played.problems[number]
    if number in MENDED_CALLS:
        assert [each[: len(MENDED_CALLS[number])] for each in problems] == [MENDED_CALLS[number]]
    else:
        assert not problems, "\n".join(problems)


# ------------------------------------------------------------------ Etcd

STARTED = "shards applied: j-030 without, j-031 with one hot standby; json-a is the only member"
KILLED = "json-a (primary of both) is killed; its lease of 5 s runs out"
EXITING = "json-b gets SIGTERM: two members and an item of R 2, so nothing can move"
JOINED = "json-b still running: True; json-c starts"
EXITED = "json-b exited with status 0"
LEFT = "j-031 gets hot_standbys 0, then json-c gets SIGTERM"
GONE = "json-c exited with status 0"
UNASSIGNED = (
    "the source gets a min_offset past the bad message; then the failed assignment is removed"
)
BROKEN = "j-030 unassigned while its primary hints are broken"
HELD = "assign/hint-000#local#json-a#0"
MENDED = "primary hints deleted, failed assignment removed"

EQUAL = [
    ("json-a starts", [""], ["members/"]),
    (
        "shards are applied",
        [STARTED],
        ["items/", "assign/j-030", "assign/j-031", "j-030.backup", "j-031.backup"],
    ),
    ("json-b starts", ["json-b starts"], ["members/"]),
    ("json-b starts", [KILLED], ["j-031.backup"]),  # its standby is promoted then
    ("json-a is killed", [KILLED], ["assign/j-030", "j-030.backup"]),
    ("json-a starts again", ["json-a starts again"], ["members/"]),
    ("json-c starts", [JOINED, EXITED], ["assign/j-030", "j-030.backup"]),
    ("json-c drains", [LEFT, GONE], ["items/", "members/", "assign/j-030", "assign/j-031"]),
    ("json-c drains", [LEFT, GONE], ["j-030.backup", "j-031.backup"]),
    ("j-031 fails", ["j-031 is told to fail"], ["assign/"]),
    ("j-031 is unassigned", [UNASSIGNED], ["items/", "assign/", "j-031.backup"]),
    ("j-030 is disabled", ["j-030 disabled"], ["items/", "assign/"]),
    ("j-030 is enabled", ["j-030 enabled"], ["items/", "assign/", "j-030.backup"]),
    ("j-030 has broken hints", [BROKEN], ["assign/", "j-030.backup"]),
    ("broken hints are deleted", [MENDED], ["assign/", "j-030"]),
    ("j-030 is deleted", ["j-030 deleted"], ["items/j-030", "assign/j-030"]),
]
"""Phases of ours and recorded ones, and the begins of keys whose transactions are the same."""

OF_MEMBERS = [
    ("json-b", "json-b starts", ["json-b starts", KILLED], "assign/j-031"),
    ("json-a", "json-a starts again", ["json-a starts again", JOINED, EXITED], "assign/j-031"),
    ("json-b", "json-b drains", [EXITING, JOINED], "members/"),
    ("json-c", "json-b drains", [JOINED], "assign/j-031"),
]
"""Likewise, of keys of one process: a standby that is promoted, or comes nearer."""


@pytest.mark.parametrize(
    ("ours", "recorded", "about"),
    [(ours, recorded, about) for ours, recorded, abouts in EQUAL for about in abouts],
)
def test_keys_change_as_recorded(played, ours, recorded, about):
    there = [change for phase in recorded for change in RECORDED[phase]]
    assert there
    assert transactions(played.phase(ours), about) == transactions(there, about)


@pytest.mark.parametrize(("name", "ours", "recorded", "about"), OF_MEMBERS)
def test_keys_of_a_process_change_as_recorded(played, name, ours, recorded, about):
    there = [change for phase in recorded for change in RECORDED[phase]]
    here, there = (
        [change for change in changes if f"#{name}" in change.key]
        for changes in (played.phase(ours), there)
    )
    assert there
    assert transactions(here, about) == transactions(there, about)


def test_the_keys_of_a_killed_process_vanish_together(played):
    for changes in (played.phase("json-a is killed"), RECORDED[KILLED]):
        gone = transactions([each for each in changes if "#json-a" in each.key], "")
        (deleted,) = gone
        assert {word for word, _ in deleted} == {"DELETE"}
        assert {key.split("/")[0] for _, key in deleted} == {"assign", "members"}
        assert len(deleted) == 3


def test_given_hints_are_stored_with_the_spec(played):
    for changes in (played.phase("j-030 is enabled"), RECORDED["j-030 enabled"]):
        [keys] = [
            [key for _, key, *_ in made]
            for made in transactions(changes, "")
            if any(key == "items/j-030" for _, key, *_ in made)
        ]
        assert sorted(keys) == ["items/j-030", "j-030.primary"]


def test_the_last_process_ends_at_once_and_its_keys_vanish_together(played):
    """The recorded one waited while a shard was assigned to it, which nobody could take."""
    exiting, deleted = transactions(played.phase("json-a ends"), "")
    assert [exiting] == transactions(RECORDED["json-a, the only member, gets SIGTERM"], "")
    assert deleted == [("DELETE", key) for key in (HELD, "members/local#json-a")]
    there = transactions(RECORDED["j-031 deleted with revision -1"], "")[-1]
    assert [key.partition("/")[0] for _, key in there] == ["assign", "members"]


# ------------------------------------------------------------------ gazctl shards

MENDED_STATUSES = {
    14: 0,  # what is applied again is unchanged
    29: 1,  # it crashed
    42: 0,  # the lag of other shards is shown
    56: 0,  # labels stand in any order
}
OUTCOMES = {
    13: ["j-030 created", "j-031 created"],
    14: ["j-030 unchanged", "j-031 unchanged"],
    30: ["j-030 to unassign"],
    36: ["state.json 387 B"],
    40: ["j-031 to unassign"],
    41: ["j-031 unassigned"],
    42: ["j-030 IDLE", "j-031 PRIMARY"],
    55: ["hint-000 updated"],
}
"""Output of ours, by shard, where the recorded tool wrote nothing or failed."""

CAUSES = {
    5: "hint_backupz",
    6: "Shard[j-030]: named journal does not exist (gold/in/none)",
    7: "message framing: unrecognized content-type (text/plain)",
    8: "Shard[j-030]: named journal does not exist (gold/nologs/j-030)",
    9: "Shard[j-030]: expected gold/in/j-030 to have content-type",
    10: "Changes[0].Upsert",
    11: "Shard[a-031]: named journal does not exist (gold/in/a-031)",
    12: "/does/not/exist",
    23: "to a label selector expression",
    24: "nothing to do",
    25: "empty",
    26: "3",
    27: "successfully applied",
    29: "id=nope",
    33: "--selector",
    34: "no shard exists with the given id",
    35: "--dir",
    37: "",
    48: "Changes[0]",
    49: "delete",
    53: "Labels[1].Name",
    55: "ETCD_TRANSACTION_FAILED",
}
"""Words of both errors."""


def balanced(output):
    """A recorded listing, where the other process leads the shard that has two."""
    if isinstance(output, list) and isinstance(output[0], list):
        swap = {"json-a:PRIMARY": "json-b:PRIMARY", "json-b:STANDBY": "json-a:STANDBY"}
        return [
            [swap.get(cell, cell) for cell in row] if "json-b:STANDBY" in row else row
            for row in output
        ]
    listed = output[0]["shards"] if isinstance(output, list) else getattr(output, "shards", ())
    for shard in listed:
        if isinstance(shard, dict) and len(shard["status"]) == 2:
            shard["route"]["primary"] = 1
            shard["status"].reverse()
        elif not isinstance(shard, dict) and len(shard.status) == 2:
            shard.route.primary = 1
            shard.status.reverse()
    return output


@pytest.mark.parametrize(
    "number", range(len(COMMANDS)), ids=[f"{n} {each['name']}" for n, each in enumerate(COMMANDS)]
)
def test_a_command_ends_as_recorded(played, number):
    case, outcome = COMMANDS[number], played.commands[number]
    assert outcome.status == MENDED_STATUSES.get(number, case["exit"]), outcome.stderr
    if number in CAUSES:
        assert CAUSES[number].lower() in case["stderr"].lower()
        assert CAUSES[number].lower() in outcome.stderr.lower()
    if number in OUTCOMES:
        assert [" ".join(row[:2]) for row in plain_cells(outcome.text)[1:]] == OUTCOMES[number]
    elif number not in MENDED_STATUSES:
        wanted = balanced(recorded_output(case["args"], case["stdout"]))
        assert our_output(case["args"], outcome.text) == wanted


def test_the_editor_shows_what_was_recorded(played):
    """But for the revision, which is the last line, and the words of errors."""
    directory = played.directory / "gazctl"
    recorded = [
        COMMANDS[24]["file_shown_to_the_editor"],
        *COMMANDS[28]["files_shown_to_the_editor"],
    ]
    for name, text in zip(("shown", "shown.0", "shown.1"), recorded, strict=True):
        here, there = (
            ["#⚠" if line.startswith("#⚠") else line for line in each.splitlines()[:-1]]
            for each in ((directory / name).read_text(), text)
        )
        assert here == there


# ------------------------------------------------------------------ debug


def test_debug_pages_answer_as_recorded(played):
    recorded = golden("consumer/rpc/debug_endpoints.json")
    assert {path: played.pages[path][0] for path in recorded} == recorded


def test_the_gateway_answers_beyond_its_calls_as_recorded(played):
    """Its calls are replayed in ``test_shard_service.py``."""
    recorded = {case["name"]: case for case in golden("consumer/rpc/gateway.json")}
    assert played.pages["/nothing/here"][0] == recorded["unknown path"]["status"]
    assert played.pages["/debug/ready"] == (200, recorded["ready"]["body"])
    status, text = played.pages["/v1/shards/stat"]
    proxied = recorded["proxied stat"]
    here, there = json.loads(text), json.loads(proxied["body"])
    assert (status, here["status"]) == (proxied["status"], there["status"])
    assert here["header"]["processId"] == there["header"]["processId"]
    assert here["readThrough"] == {"gold/in/j-030": "192"}
    assert here.keys() == there.keys()


def test_metrics_have_the_recorded_names_types_and_labels(played):
    text = played.pages["/debug/metrics"][1]
    shown = metrics_of(text)
    recorded = golden("consumer/rpc/metrics.json")["metrics"]
    wanted = {
        name: (metric["type"], {tuple(each) for each in metric["labels"]})
        for name, metric in recorded.items()
        if not name.startswith(OTHER_METRICS)
    }
    assert {name: shown.get(name) for name in wanted} == wanted
    series, _ = golden("consumer/rpc/metrics.json")["example_series"]["gazette_shard_up"]
    assert f"\n{series} 1.0\n" in text


def metrics_of(text):
    found = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split()
            found[name] = (kind, set())
        elif not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            names = tuple(sorted(re.findall(r'(\w+)="', labels)))
            for suffix in ("", "_bucket", "_sum", "_count"):
                if name.removesuffix(suffix) in found:
                    found[name.removesuffix(suffix)][1].add(names)
                    break
    return found
